"""The last way to plan a model: blocks that hooks have seen, chosen by the planner, recomputed as eager would run."""

import copy
import dataclasses
import gc
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from planner.analysis import candidates
from planner.errors import PlannerError
from planner.simulator import unplanned
from profiler.errors import CaptureError
from profiler.measuring.memory import live_bytes
from profiler.measuring.meters import CpuMeter, peak_above_start
from rewriter import OverBudget, checkpoint_model, uncheckpoint
from rewriter import model as door
from rewriter.proof import same_bits
from rewriter.ways.blocks.coarse_graph import block_graph
from rewriter.ways.blocks.profile import cuts
from rewriter.ways.blocks.watched_step import BlockRehearsal
from rewriter.ways.blocks.way import BlockWise
from rewriter.ways.common import Kernels, Way
from rewriter.ways.own_capture.way import OwnCapture
from tests.rewriter import tiny

ROWS = torch.randn(256, 16)
AS_SHIPPED = door.WAYS[Kernels.EAGER]


class Widened(nn.Module):
    """A residual block that keeps far more than it is given."""

    def __init__(self, *, norm=None):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm = norm or nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.narrow(self.dropout(F.gelu(self.norm(self.wide(x)))))


class Stacked(nn.Module):
    """Blocks in a list, as most models have them."""

    def __init__(self, blocks=None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Widened() for _ in range(4)])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def only_blocks(monkeypatch):
    """Models that own capture could take go this way too."""
    monkeypatch.setitem(door.WAYS, Kernels.EAGER, (BlockWise,))


def trained(model, *, steps=4, inputs=ROWS, loss_of=lambda out: out.pow(2).mean(), accumulate=1):
    optimizer, losses = optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for i in range(steps):
        loss = loss_of(model(inputs + i))
        loss.backward()
        losses.append(loss.item())
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def assert_trains_equally(make, *, budget="60%", prove=True, strategy="mutwo", **options):
    """Train a model as it is and one planned by blocks; the planned one."""
    torch.manual_seed(0)
    eager = make().train()
    planned = copy.deepcopy(eager)
    checkpoint_model(planned, budget=budget, strategy=strategy, prove=prove)
    assert trained(eager, **options) == trained(planned, **options)
    for (name, a), b in zip(eager.state_dict().items(), planned.state_dict().values(), strict=True):
        assert same_bits(a, b), name
    assert planned.planned.taken.recomputed, "nothing was recomputed, so that nothing was shown"
    return planned


@pytest.fixture(scope="module")
def stacked():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(door.WAYS, Kernels.EAGER, (BlockWise,))
        return assert_trains_equally(Stacked)


# -- bits and bytes -------------------------------------------------------------------------------------------------


def test_blocks_are_recomputed_with_batch_norm_and_dropout_and_every_bit_is_eagers(stacked):
    planned = stacked.planned
    assert planned.way is Way.BLOCKS
    assert planned.verification.exact
    assert "proven equal to the bit" in str(planned.solution)
    assert any(name.startswith("blocks.") for name in planned.taken.recomputed)
    assert planned.explain("blocks.0: saved")
    assert "estimated" in planned.promise


def test_the_estimate_is_what_a_step_of_the_users_loop_takes(stacked):
    stacked.zero_grad()
    measured = peak_above_start(CpuMeter(), lambda: stacked(ROWS).pow(2).mean().backward())
    stacked.zero_grad()
    predicted = stacked.planned.timeline().above_start_bytes
    assert abs(measured - predicted) <= 0.03 * predicted
    unplanned = stacked.planned.solution.problem.unplanned.above_start_bytes
    assert measured <= 0.6 * unplanned


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "vit"])
def test_the_graph_of_blocks_holds_what_was_measured_however_the_model_is_taken_apart(name):
    _, model, _, batch = tiny.ZOO[name]()
    rehearsal = BlockRehearsal(model.train(), CpuMeter())
    rehearsal.forward((batch[0],), {}).sum().backward()
    profile = rehearsal.profile()
    measured = max(span.peak_bytes for span in profile.spans[: profile.end + 1])
    taken_apart = cuts(profile)
    assert len(taken_apart) > 2
    for blocks in taken_apart:
        found = block_graph(profile, blocks)
        # More only where a block lets go of what it is given while it runs.
        assert measured <= unplanned(found.graph).above_start_bytes <= 1.06 * measured
        assert candidates(found.graph) == tuple(found.blocks)


@pytest.mark.parametrize("name", ["resnet", "bert", "gpt2"])
def test_library_models_train_equally(name):
    results = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        step, model, optimizer, batch = tiny.ZOO[name]()
        if is_planned:
            checkpoint_model(model.train(), budget="65%", strategy="mutwo")
        torch.manual_seed(1)
        losses = [step(model.train(), optimizer, batch).item() for _ in range(3)]
        results.append((losses, model))
    (losses, eager), (planned_losses, planned) = results
    assert losses == planned_losses
    assert all(map(same_bits, eager.state_dict().values(), planned.state_dict().values()))
    assert planned.planned.taken.recomputed
    assert planned.planned.verification.measured_peak_bytes <= 0.65 * planned.planned.verification.eager_peak_bytes


def test_a_flat_sequence_is_divided_into_blocks():
    def make():
        layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(16, 4))

    planned = assert_trains_equally(make, budget="75%")
    assert all(" to " in name for name in planned.planned.taken.recomputed)


def test_gradients_that_are_there_are_added_to():
    assert_trains_equally(Stacked, steps=8, accumulate=2)


def test_a_retained_graph_can_be_gone_through_twice(stacked):
    eager = copy.deepcopy(stacked)
    for model in (eager, stacked):
        torch.manual_seed(4)
        loss = model(ROWS).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for p, q in zip(eager.parameters(), stacked.parameters(), strict=True):
        assert same_bits(p.grad, q.grad)
    assert all(map(same_bits, eager.buffers(), stacked.buffers()))
    stacked.zero_grad()


def test_autocast_is_as_it_was_when_a_block_runs_again():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stacked([Widened(norm=nn.LayerNorm(64)) for _ in range(3)])

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x).float()

    assert_trains_equally(Cast, budget="80%")


# -- what a second run must not do twice ------------------------------------------------------------------------------


def test_a_running_average_over_all_batches_is_updated_once():
    assert_trains_equally(lambda: Stacked([Widened(norm=nn.BatchNorm1d(64, momentum=None)) for _ in range(3)]))


def test_a_buffer_that_is_read_and_written_is_read_as_it_was():
    class Normed(Widened):
        def __init__(self):
            super().__init__()
            self.wide = nn.utils.parametrizations.spectral_norm(self.wide)

    assert_trains_equally(lambda: Stacked([Normed() for _ in range(3)]), budget="70%")


def test_counters_caches_and_foreign_generators_of_a_block_move_once():
    class Moving(Widened):
        def __init__(self):
            super().__init__(norm=nn.LayerNorm(64))
            self.calls, self.cache, self.generator = 0, None, torch.Generator().manual_seed(3)

        def forward(self, x):
            self.calls += 1
            noise = torch.rand(x.shape, generator=self.generator) * random.random() * np.random.rand() * self.calls
            self.cache = noise.sum()
            return super().forward(x + noise)

        def extra_repr(self):
            return f"{self.calls} {self.cache}"

    torch.manual_seed(0)
    eager, planned = (Stacked([Moving() for _ in range(3)]) for _ in range(2))
    planned.load_state_dict(eager.state_dict())
    checkpoint_model(planned, budget="60%", strategy="mutwo")
    assert trained(eager) == trained(planned)
    assert planned.planned.taken.recomputed
    assert [b.calls for b in eager.blocks] == [b.calls for b in planned.blocks] == [4] * 3
    assert [float(b.cache) for b in eager.blocks] == [float(b.cache) for b in planned.blocks]


def test_what_a_block_is_called_with_may_be_changed_by_it():
    class Cached(Widened):
        def forward(self, x, *, seen, options):
            seen.append(x.detach().mean())
            options["calls"] = options.get("calls", 0) + 1
            out = super().forward(x + len(seen) + options["calls"])
            return {"hidden": out, "count": len(seen)}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Cached(norm=nn.LayerNorm(64)) for _ in range(3)])

        def forward(self, x):
            seen, options = [], {}
            for block in self.blocks:
                x = block(x, seen=seen, options=options)["hidden"]
            assert len(seen) == options["calls"] == 3
            return x

    assert_trains_equally(Model)


def test_a_block_may_return_an_object_of_its_own():
    @dataclasses.dataclass
    class Hidden:
        tensor: torch.Tensor

    class Wrapping(Widened):
        def forward(self, x):
            return Hidden(super().forward(x))

    class Model(Stacked):
        def forward(self, x):
            for block in self.blocks:
                x = block(x).tensor
            return self.head(x)

    assert_trains_equally(lambda: Model([Wrapping() for _ in range(3)]), budget="70%")


def test_a_block_that_is_called_several_times_and_more_often_than_it_was_seen():
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.count = Widened(norm=nn.LayerNorm(64)), 0

        def forward(self, x):
            self.count += 1
            for _ in range(3 + (self.count > 2)):
                x = self.block(x)
            return x

    planned = assert_trains_equally(Repeated, budget="80%")
    assert {name.partition(" ")[0] for name in planned.planned.taken.recomputed} == {"block"}


def test_a_block_whose_input_is_written_to_later_is_left_alone():
    class Forgetting(Widened):
        def forward(self, x):
            return super().forward(x * 0.1)  # whose backward needs no x

    class Overwritten(Stacked):
        def forward(self, x):
            x = x * 1.0
            first = self.blocks[0](x)
            x.mul_(0.5)  # what the first block would have to be given again
            for block in self.blocks[1:]:
                first = block(first + x)
            return self.head(first)

    planned = assert_trains_equally(lambda: Overwritten([Forgetting() for _ in range(4)]))
    assert not any(name.startswith("blocks.0") for name in planned.planned.taken.recomputed)


# -- models that nothing can capture ----------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """A forward through numpy."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() * 2.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2.0


class Selecting(Stacked):
    """Shapes that hang on data, a value that steers, and numpy on the way."""

    def forward(self, x):
        x = x[x[:, 0] > -1.0]
        for i, block in enumerate(self.blocks):
            if i == 0 or float(x.detach().abs().mean()) > 0.01 * i:
                x = block(x)
        return self.head(Doubled.apply(x))


def test_a_model_that_cannot_be_captured_is_planned_by_blocks_and_told_so(monkeypatch):
    monkeypatch.setitem(door.WAYS, Kernels.EAGER, (OwnCapture, BlockWise))
    torch.manual_seed(0)
    eager = Selecting().train()
    planned = copy.deepcopy(eager)
    checkpoint_model(planned, budget="65%", strategy="mutwo")
    with pytest.warns(UserWarning, match=r"(?s)planned by blocks and not by own capture.*Promised now: .*estimated"):
        planned_losses = trained(planned, steps=5)
    assert trained(eager, steps=5) == planned_losses
    assert all(map(same_bits, eager.state_dict().values(), planned.state_dict().values()))
    assert planned.planned.way is Way.BLOCKS
    assert planned.planned.taken.recomputed
    assert planned.planned.refusals[0][0] is Way.OWN_CAPTURE


def test_blocks_are_the_last_of_the_ways_with_eagers_kernels():
    assert AS_SHIPPED[-1] is BlockWise


# -- in and out --------------------------------------------------------------------------------------------------------


def test_the_model_between_its_calls_is_as_it_was(stacked):
    assert all("forward" not in vars(module) for module in stacked.modules())
    for model in (copy.deepcopy(stacked), pickle.loads(pickle.dumps(stacked))):
        assert model.planned is None
        assert same_bits(model.eval()(ROWS), copy.deepcopy(stacked).eval()(ROWS))


def test_evaluation_runs_as_it_was(stacked):
    eager = copy.deepcopy(stacked).eval()
    with torch.no_grad():
        assert same_bits(stacked.eval()(ROWS), eager(ROWS))
    stacked.train()


def test_uncheckpoint_puts_the_model_back():
    planned = assert_trains_equally(Stacked, steps=3)
    uncheckpoint(planned)
    assert planned._compiled_call_impl is None
    assert not hasattr(planned, "planned")


def test_a_smaller_batch_is_served_and_a_larger_one_is_planned_for_at_its_size(stacked):
    before = len(stacked.planned.taken._forms)
    stacked(ROWS[:100]).sum().backward()
    assert len(stacked.planned.taken._forms) == before
    stacked.zero_grad()
    small = stacked.planned.timeline().peak_bytes
    stacked(torch.cat([ROWS, ROWS])).sum().backward()
    stacked.zero_grad()
    assert len(stacked.planned.taken._forms) == before + 1
    assert stacked.planned.timeline().peak_bytes > 1.5 * small
    assert stacked.planned.verification.exact


class Picking(Stacked):
    """Rows that begin with a positive number go through the blocks."""

    def forward(self, x):
        picked = x[:, 0] > 0
        return torch.cat([super().forward(x[picked]), x[~picked, :4]])


def picked(count):
    """Rows of which so many go through the blocks."""
    rows = ROWS.abs().clone()
    rows[count:, 0] *= -1
    return rows


def test_data_that_make_a_step_much_larger_than_the_one_that_was_watched_are_planned_for_at_their_size():
    planned = checkpoint_model(Picking().train(), budget="60%", strategy="mutwo")
    for count in (32, 256):
        planned(picked(count)).sum().backward()
        planned.zero_grad()
    found = planned.planned.verification
    assert found.exact
    assert found.measured_peak_bytes <= found.predicted_peak_bytes < 0.75 * found.eager_peak_bytes


def test_over_budget_says_by_how_much_plans_were_measured_above_what_was_predicted():
    planned = checkpoint_model(Picking().train(), budget="38%", strategy="mutwo")
    planned(picked(220)).sum().backward()
    planned.zero_grad()
    with pytest.raises(OverBudget, match=r"plans before it were measured .* above their predictions"):
        planned(picked(256))


def test_a_plan_of_another_step_is_told_and_blocks_are_chosen_anew(stacked, tmp_path):
    stacked.planned.save(tmp_path / "plan.json")
    other = Stacked([Widened() for _ in range(5)]).train()
    checkpoint_model(other, budget="60%", strategy="mutwo", plan=tmp_path / "plan.json")
    with pytest.warns(UserWarning, match="blocks are chosen anew"):
        trained(other, steps=2)
    assert other.planned.taken.recomputed


def test_a_model_without_blocks_is_refused_in_one_sentence():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 4))

        def forward(self, x):
            return (x @ self.weight).tanh()

    model = checkpoint_model(Plain(), budget="50%")
    with pytest.raises(CaptureError, match=r"blocks: there are no blocks to recompute: .*\. Nothing was changed"):
        trained(model, steps=2)


def test_a_budget_that_no_choice_of_blocks_meets_is_told_with_the_least():
    model = checkpoint_model(Stacked().train(), budget="5%", strategy="mutwo")
    with pytest.raises(OverBudget, match="smallest peak found"):
        trained(model, steps=2)


def test_a_budget_in_bytes_leaves_room_for_the_optimizer_or_says_that_there_is_none():
    gc.collect()
    budget = 2**20 + live_bytes(torch.device("cpu"), without=())  # of other tests, too
    model = checkpoint_model(Stacked().train(), budget=budget, strategy="mutwo")
    trained(model, steps=3)
    assert model.planned.solution.problem.budget_bytes < 2**20 + sum(t.nbytes for t in (ROWS, *model.buffers()))
    tight = checkpoint_model(Stacked().train(), budget="40KiB", strategy="mutwo")
    with pytest.raises(OverBudget):
        trained(tight, steps=3)


def test_two_models_in_one_loop_are_both_planned_and_hooks_on_a_model_run_once():
    def played(models):
        optimizers, seen = [optim.SGD(m.parameters(), lr=0.01) for m in models], []
        models[0].register_forward_hook(lambda module, args, out: seen.append(out.detach().mean().item()))
        torch.manual_seed(2)
        for i in range(6):
            first = models[0](ROWS + i)
            models[1](torch.cat([first] * 4, dim=1)).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return seen

    torch.manual_seed(0)
    eager = [Stacked([Widened() for _ in range(3)]).train() for _ in range(2)]
    planned = copy.deepcopy(eager)
    for model in planned:
        checkpoint_model(model, budget="75%", strategy="mutwo")
    assert played(eager) == played(planned)
    for a, b in zip(eager, planned, strict=True):
        assert all(map(same_bits, a.state_dict().values(), b.state_dict().values()))
        assert b.planned.taken.recomputed


def test_nothing_is_planned_before_a_step_was_watched():
    model = checkpoint_model(Stacked().train(), budget="60%")
    with pytest.raises(PlannerError, match="nothing is planned yet"):
        _ = model.planned.solution
