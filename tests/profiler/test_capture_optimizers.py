"""Every optimizer, inside the graph or opaque: the same bits as eager."""

import pytest
import torch
from torch import optim

from planner.ir import Phase, Rerun, Role
from profiler.capture import capture
from profiler.errors import CaptureError
from tests.profiler import small
from tests.profiler.equality import assert_captured_equals_eager

TRACED = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd decay": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd maximize": lambda p: optim.SGD(p, lr=0.001, momentum=0.9, maximize=True),
    "sgd foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd foreach nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "sgd fused plain": lambda p: optim.SGD(p, lr=0.1, fused=True),
    "adam fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "adam fused amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adagrad fused": lambda p: optim.Adagrad(p, lr=0.01, fused=True),
}

OPAQUE = {
    "sgd dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd fused dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "sgd tensor rate": lambda p: optim.SGD(p, lr=torch.tensor(0.1)),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adam foreach": lambda p: optim.Adam(p, lr=0.01, foreach=True),
    "adam fused tensor rate": lambda p: optim.Adam(p, lr=torch.tensor(0.01), fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: optim.Adadelta(p),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "adamax": lambda p: optim.Adamax(p),
    "asgd": lambda p: optim.ASGD(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
}


def _with(optimizer):
    return small.make(optimizer=lambda model: optimizer(model.parameters()))


@pytest.mark.parametrize("name", TRACED)
def test_an_optimizer_inside_the_graph_equals_eager(name):
    traced = assert_captured_equals_eager(_with(TRACED[name]))
    assert traced.opaque_reason == ""


@pytest.mark.parametrize("name", OPAQUE)
def test_an_opaque_optimizer_equals_eager(name):
    traced = assert_captured_equals_eager(_with(OPAQUE[name]))
    assert traced.opaque_reason
    (op,) = [op for op in traced.graph.ops if op.target == "optimizer_step"]
    assert op.phase is Phase.OPTIMIZER
    assert op.rerun is Rerun.NEVER


def test_muon_equals_eager():
    make = small.make(model=small.plain, optimizer=lambda model: optim.Muon(model.parameters(), lr=0.01))
    assert_captured_equals_eager(make)


def test_sparse_adam_equals_eager():
    class Bag(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(10, 4, sparse=True)

        def forward(self, x):
            return self.embedding(x).sum(1)

    make = small.make(
        model=Bag,
        optimizer=lambda model: optim.SparseAdam(model.parameters()),
        batch=lambda: (torch.randint(0, 10, (12, 3)), torch.randint(0, 4, (12,))),
    )
    assert_captured_equals_eager(make)


def test_every_optimizer_of_torch_is_tested():
    tested = {"Muon", "SparseAdam", "LBFGS"} | {
        type(made([torch.nn.Parameter(torch.zeros(2))])).__name__ for made in (TRACED | OPAQUE).values()
    }
    assert {name for name in optim.__all__ if isinstance(getattr(optim, name), type)} - {"Optimizer"} == tested


def test_the_users_own_optimizer_runs_as_itself():
    class Signed(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.01})
            self.calls = 0

        @torch.no_grad()
        def step(self):
            self.calls += 1
            for group in self.param_groups:
                for p in group["params"]:
                    seen = self.state[p].setdefault("seen", torch.zeros_like(p))
                    seen.lerp_(p.grad, 0.1)
                    p.sub_(seen.sign(), alpha=group["lr"])

    traced = assert_captured_equals_eager(_with(Signed))
    assert traced.convention.optimizer.calls == 3


def test_sgd_with_dampening_and_existing_momentum_is_inside_the_graph():
    def make():
        model, batch = small.mlp(), small.data()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        small.step(model, optimizer, batch)
        return small.step, model, optimizer, batch

    assert assert_captured_equals_eager(make).opaque_reason == ""


@pytest.mark.parametrize("made", [TRACED["sgd momentum"], TRACED["adamw fused"], OPAQUE["adam"], OPAQUE["rprop"]])
def test_capture_resumes_an_optimizer_that_has_stepped(made):
    def make():
        model, batch = small.mlp(), small.data()
        optimizer = made(model.parameters())
        small.step(model, optimizer, batch)
        return small.step, model, optimizer, batch

    assert_captured_equals_eager(make)


def test_capture_leaves_lazy_state_to_the_first_step():
    step, model, optimizer, batch = _with(TRACED["adamw fused"])()
    traced = capture(step, model, optimizer, batch)
    assert not optimizer.state
    assert sum(s.role is Role.OPT_STATE for s in traced.graph.storages) == 3 * 6
    traced.run(batch)
    assert set(optimizer.state) == set(model.parameters())


@pytest.mark.filterwarnings("ignore:Detected call of")  # the scheduler is made after the first step
@pytest.mark.parametrize("made", [TRACED["sgd momentum"], TRACED["sgd fused"], TRACED["adamw fused"], OPAQUE["adam"]])
def test_a_scheduler_changes_the_rate_between_steps(made):
    schedulers = {}

    def decay(step, model, optimizer):
        if optimizer not in schedulers:
            schedulers[optimizer] = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        schedulers[optimizer].step()

    assert_captured_equals_eager(_with(made), steps=4, between=decay)


def test_a_scheduler_made_before_capture_sees_its_optimizer_step(recwarn):
    step, model, optimizer, batch = small.make()()
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    traced = capture(step, model, optimizer, batch)
    traced.run(batch)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_groups_keep_their_own_rates(kind):
    def groups(model):
        return kind([{"params": model[:2].parameters(), "lr": 0.01}, {"params": model[4].parameters(), "lr": 0.1}])

    assert_captured_equals_eager(small.make(optimizer=groups))


def test_an_optimizer_with_step_hooks_is_opaque_and_runs_them():
    calls = []

    def hooked(params):
        optimizer = optim.SGD(params, lr=0.1)
        optimizer.register_step_post_hook(lambda *args: calls.append(1))
        return optimizer

    traced = assert_captured_equals_eager(_with(hooked))
    assert "hooks" in traced.opaque_reason
    assert len(calls) == 6


def test_a_changed_hyperparameter_is_noticed():
    step, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)
    assert traced.convention.check(batch) == []
    optimizer.param_groups[0]["weight_decay"] = 0.1
    (said,) = traced.convention.check(batch)
    assert "weight_decay" in said
    with pytest.raises(CaptureError, match="weight_decay"):
        traced.run(batch)


def test_lbfgs_is_refused():
    make = small.make(optimizer=lambda model: optim.LBFGS(model.parameters()))
    with pytest.raises(CaptureError, match="LBFGS"):
        capture(*make())
