"""A replaced step of the optimizer, and numbers that change in place, are noticed and honoured."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from profiler.errors import CaptureError
from profiler.tracing.whole_step import capture
from tests.profiler import small
from tests.profiler.small import captured
from tests.side_by_side import assert_captured_equals_eager

# -- the optimizer's step ---------------------------------------------------------------------------------------------


def replaced_on_the_object(optimizer):
    own = optimizer.step

    def twice():
        own()
        own()

    optimizer.step = twice


def replaced_on_its_class(optimizer):
    own = type(optimizer).step

    def twice(self, closure=None):
        own(self)
        own(self)

    type(optimizer).step = twice


@pytest.mark.parametrize("replace", [replaced_on_the_object, replaced_on_its_class], ids=lambda f: f.__name__)
@pytest.mark.parametrize("optimizer", [small.sgd, small.adam])
def test_a_replaced_step_of_the_optimizer_is_noticed_and_run(replace, optimizer, monkeypatch):
    def between(i, model, chosen):
        monkeypatch.setattr(type(chosen), "step", type(chosen).step)  # put back in the end
        if i == 0:
            replace(chosen)
        elif i == 2:
            monkeypatch.undo()

    inside = optimizer is small.sgd  # else it runs as itself, whatever that is
    assert_captured_equals_eager(
        small.make(model=small.plain, optimizer=optimizer), between=between, recaptures=int(inside)
    )


def test_a_replaced_step_is_said_and_a_scheduler_that_counts_is_no_replacement():
    traced, _, optimizer, batch = captured()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert traced.convention.check(batch) == []
    replaced_on_the_object(optimizer)
    assert traced.convention.check(batch) == ["the optimizer was given another step"]


def test_a_copy_of_the_optimizers_step_is_refused():
    _, model, optimizer, batch = small.make()()
    update = optimizer.step

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        update()

    with pytest.raises(CaptureError, match=r"call optimizer\.step\(\) itself"):
        capture(step, model, optimizer, batch)


def test_a_list_among_the_optimizers_numbers_that_changes_in_place_is_noticed():
    def adam(model):
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        return optimizer

    traced, _, optimizer, batch = captured(optimizer=adam)
    optimizer.param_groups[0]["betas"][0] = 0.5
    assert traced.convention.check(batch) == ["'betas' of optimizer group 0 was [0.9, 0.99] and is [0.5, 0.99]"]
