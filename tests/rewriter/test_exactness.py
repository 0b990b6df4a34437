"""Steps planned against steps eager: every bit of every result, for every model, strategy and step form."""

import pytest
from torch import nn, optim

import strategies
from planner.ir import Rerun
from tests import step_forms
from tests.rewriter import tiny
from tests.shared import case_of
from tests.side_by_side import assert_planned_equals_eager, demanding

SPECS = [*(name for name in strategies.names() if name not in ("keep_all", "offload_only")), "mutwo:faithful=true"]
# What must be among the recomputed: batch norms or dropouts, where the model has them in its body.
WANTED = {
    "resnet": [Rerun.WITHOUT_SIDE_EFFECT],
    "mobilenet": [Rerun.WITHOUT_SIDE_EFFECT],
    "vit": [Rerun.REPLAY_RNG],
    "bert": [Rerun.REPLAY_RNG],
    "gpt2": [Rerun.REPLAY_RNG],
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", WANTED)
def test_three_steps_under_a_plan_that_drops_a_third_or_more_equal_eager(name, spec):
    case = case_of(tiny.ZOO[name])
    case.assert_exact(demanding(case.graph, spec, wanted=WANTED[name]).schedule)


# -- step forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", step_forms.FORMS, ids=lambda step: step.__name__)
def test_a_planned_step_equals_eager_whatever_its_form(step):
    assert_planned_equals_eager(tiny.with_step(step), "mutwo", "sqrtn")


def adam(model):
    return optim.Adam(model.parameters(), lr=0.01)


def nesterov(model):
    return optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)


def without_momentum(model):
    return optim.SGD(model.parameters(), lr=0.05)


def dampened(model):
    return optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.5)


def fused_adamw(model):
    return optim.AdamW(model.parameters(), lr=0.01, fused=True)


def grouped(model):
    groups = [{"params": model[:4].parameters(), "lr": 0.02}, {"params": model[4:].parameters(), "weight_decay": 0.1}]
    return optim.SGD(groups, lr=0.1, momentum=0.5)


OPTIMIZERS = [adam, nesterov, without_momentum, dampened, fused_adamw, grouped]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_a_planned_step_equals_eager_whatever_its_optimizer(optimizer):
    traced = assert_planned_equals_eager(tiny.with_step(step_forms.plain, optimizer=optimizer), "mutwo")
    assert bool(traced.opaque_reason) == (optimizer in (adam, dampened))


def test_default_adam_with_clipping_and_accumulation_equals_eager():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        for images, labels in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            step_forms.loss_of(model, (images, labels)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return norm

    assert_planned_equals_eager(tiny.with_step(step, optimizer=adam), "mutwo", "sqrtn")


@pytest.mark.parametrize("optimizer", [tiny.sgd, adam, fused_adamw], ids=lambda optimizer: optimizer.__name__)
@pytest.mark.filterwarnings("ignore:Detected call of")  # the scheduler is made after the first step
def test_a_scheduler_between_the_steps_is_honoured(optimizer):
    def scheduled():
        schedulers = []

        def between(i, model, optimizer):
            if not schedulers:
                schedulers.append(optim.lr_scheduler.ExponentialLR(optimizer, 0.7))
            schedulers[0].step()

        return between

    assert_planned_equals_eager(tiny.with_step(step_forms.plain, optimizer=optimizer), "mutwo", between=scheduled)


def test_frozen_layers_stay_frozen():
    def frozen():
        model = tiny.network()
        model[0].requires_grad_(False)
        model[5].requires_grad_(False)
        return model

    traced = assert_planned_equals_eager(tiny.with_step(step_forms.plain, model=frozen), "mutwo", "sqrtn")
    assert not {"0.weight", "5.weight"} & set(traced.gradients)
