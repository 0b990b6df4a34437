"""A plan as a policy of selective checkpointing: carried out by torch.utils.checkpoint itself."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import strategies
from planner.errors import PlannerError
from planner.exports.policy import Fate, Policy, Rule, policy_of
from planner.solve import Problem, solve
from profiler.tracing.whole_step import capture
from rewriter import checkpoint
from rewriter.selective import context_fn
from tests.side_by_side import seeded

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(x))))


class Net(nn.Module):
    def __init__(self, policy=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.policy = policy

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if self.policy is None:
                x = block(x)
            else:
                contexts = context_fn(self.policy, self, f"blocks.{i}")
                x = torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def make():
    model = Net()
    return step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, WIDTH)


@pytest.fixture(scope="module")
def policy():
    graph = capture(*seeded(make)).graph
    return policy_of(solve(Problem.of(graph, "70%"), strategies.make("mutwo")))


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def run(policy):
    torch.manual_seed(0)
    model = Net(policy)
    x = torch.randn(16, WIDTH)
    with Counting() as counting:
        loss = model(x).square().mean()
        loss.backward()
    return loss, [p.grad for p in model.parameters()], counting.calls


def policy_with(**fates):
    """The same fate for one op of each name, wherever it is in the two blocks."""
    places = {"addmm": ("up", "down"), "gelu": ("act",)}
    rules = [
        Rule(module=f"blocks.{i}.{place}", op=op, calls=(fate,), saved_bytes=0, dropped_bytes=0)
        for i in range(2)
        for op, fate in fates.items()
        for place in places[op]
    ]
    return Policy(graph_name="net", strategy="by hand", rules=tuple(rules), lost=())


def test_a_policy_of_a_plan_gives_the_numbers_of_eager(policy):
    loss, gradients, _ = run(None)
    same_loss, same_gradients, _ = run(policy)
    assert torch.equal(loss, same_loss)
    assert all(map(torch.equal, gradients, same_gradients))


def test_what_a_policy_saves_is_not_computed_again_and_the_rest_is():
    plain = run(None)[2]
    saved = run(policy_with(addmm=Fate.SAVE, gelu=Fate.RECOMPUTE))[2]
    again = run(policy_with(addmm=Fate.RECOMPUTE, gelu=Fate.RECOMPUTE))[2]
    assert saved["addmm"] == plain["addmm"] == 4
    assert saved["gelu"] == 2 * plain["gelu"] == 4
    assert again["addmm"] > saved["addmm"]


def test_calls_of_an_op_in_one_module_are_told_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x):
            return self.act(self.act(x)).sin()

    model = nn.Sequential(Twice())
    fates = (Fate.SAVE, Fate.RECOMPUTE)
    rule = Rule(module="0.act", op="gelu", calls=fates, saved_bytes=0, dropped_bytes=0)
    contexts = context_fn(Policy(graph_name="n", strategy="s", rules=(rule,), lost=()), model, "0")
    x = torch.randn(4, requires_grad=True)
    with Counting() as counting:
        torch_checkpoint(model[0], x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert counting.calls["gelu"] == 3
    assert not model[0].act._forward_pre_hooks


def test_a_policy_knows_every_op_of_the_blocks(policy):
    modules = {(rule.module, rule.op) for rule in policy.rules}
    assert ("blocks.0.up", "addmm") in modules
    assert ("blocks.1.act", "gelu") in modules or ("blocks.0.act", "gelu") in modules


def test_a_block_that_is_not_there_or_not_in_the_policy_is_named(policy):
    with pytest.raises(PlannerError, match=r"no module 'layers\.3'"):
        context_fn(policy, Net(), "layers.3")
    with pytest.raises(PlannerError, match="no rule for '0'"):
        context_fn(policy, nn.Sequential(nn.Linear(2, 2)), "0")


def test_a_planned_step_exports_itself(tmp_path):
    planned = checkpoint(*seeded(make), budget="80%", strategy="mutwo", verify=False, show_progress=False)
    for name in ("snapshot.pickle", "trace.json", "policy.json"):
        planned.export(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 0
    assert Policy.load(tmp_path / "policy.json").strategy == "mutwo"
