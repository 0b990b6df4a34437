"""Every optimizer, inside the graph or opaque: the same bits as eager."""

import numpy as np
import pytest
import torch
from torch import optim

from planner.ir import Phase, Rerun, Role
from profiler.errors import CaptureError
from profiler.tracing.whole_step import capture
from tests.profiler import small
from tests.side_by_side import assert_captured_equals_eager

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


# -- numbers that change --------------------------------------------------------------------------------------------


def cycled(model):
    """SGD under OneCycleLR as it comes, which also moves the momentum; a scheduler for each optimizer."""
    optimizer = small.sgd(model)
    SCHEDULERS[optimizer] = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    return optimizer


SCHEDULERS = {}


def schedule(i, model, optimizer):
    SCHEDULERS[optimizer].step()


def test_outside_the_graph_an_optimizer_follows_a_schedule_of_momentum_without_a_new_capture():
    momenta = set()

    def between(i, model, optimizer):
        momenta.add(optimizer.param_groups[0]["momentum"])
        schedule(i, model, optimizer)

    traced = assert_captured_equals_eager(
        small.make(optimizer=cycled), steps=6, between=between, optimizer_outside=True
    )
    assert len(momenta) > 3
    assert traced.opaque_reason == "it was asked to stay outside the graph"


def test_inside_the_graph_a_schedule_of_momentum_is_captured_anew_at_every_step():
    assert_captured_equals_eager(small.make(optimizer=cycled), steps=3, between=schedule, recaptures=2)


@pytest.mark.parametrize("made", TRACED.values(), ids=TRACED)
def test_an_optimizer_that_would_trace_equals_eager_outside_the_graph(made):
    traced = assert_captured_equals_eager(_with(made), optimizer_outside=True)
    assert any(op.target == "optimizer_step" for op in traced.graph.ops)


def test_an_optimizer_outside_the_graph_has_no_early_updates():
    with pytest.raises(CaptureError, match="it was asked to stay outside the graph"):
        capture(*small.make()(), optimizer_outside=True, early_updates=True)


def test_changed_numbers_are_told_apart_from_what_else_changed():
    step, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)
    guards = traced.convention.guards
    model[3].p = 0.5
    assert guards.changed_numbers(optimizer) == []
    optimizer.param_groups[0]["momentum"] = 0.5
    optimizer.param_groups[0]["lr"] = 0.5
    said = ["'momentum' of optimizer group 0 was 0.9 and is 0.5"]
    assert guards.changed_numbers(optimizer) == said
    assert len(traced.convention.check(batch)) == 2
    outside = capture(step, model, optimizer, batch, optimizer_outside=True)
    optimizer.param_groups[0]["momentum"] = 0.1
    assert outside.convention.guards.changed_numbers(optimizer) == []
    del optimizer.param_groups[0]
    assert guards.changed_numbers(optimizer) == []


@pytest.mark.parametrize("rate", [np.float32(0.1), np.float64(0.1), np.float16(0.1)], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize(
    "kind",
    [
        lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9),
        lambda p, lr: optim.SGD(p, lr=lr, foreach=False),
        lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9, fused=True),
        lambda p, lr: optim.AdamW(p, lr=lr, fused=True),
        lambda p, lr: optim.Adagrad(p, lr=lr, fused=True),
    ],
    ids=["sgd", "sgd one by one", "sgd fused", "adamw fused", "adagrad fused"],
)
def test_a_rate_that_is_a_number_of_numpy_is_one(kind, rate):
    def warm_up(i, model, optimizer):
        optimizer.param_groups[0]["lr"] = rate / (i + 2)

    traced = assert_captured_equals_eager(_with(lambda p: kind(p, rate)), between=warm_up)
    assert traced.opaque_reason == ""


def test_a_rate_that_becomes_a_number_of_numpy_is_no_reason_to_capture_again():
    def cool_down(i, model, optimizer):
        optimizer.param_groups[0]["lr"] = np.float32(0.1 / (i + 1))

    assert_captured_equals_eager(small.make(), between=cool_down)


def test_an_array_for_a_rate_keeps_the_optimizer_outside_the_graph():
    traced = assert_captured_equals_eager(_with(lambda p: optim.SGD(p, lr=np.array(0.1))))
    assert traced.opaque_reason == "SGD has a ndarray for its learning rate"
