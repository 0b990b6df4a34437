"""checkpoint_model keeps the model's own Python alive: what its forward changes is never taken for a constant."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from profiler.tracing.joint import as_it_was
from rewriter import checkpoint, checkpoint_model, uncheckpoint
from rewriter import model as model_door
from rewriter.ways.blocks.way import BlockWise
from rewriter.ways.common import Kernels, PlannedWay, Way
from rewriter.ways.compiled.dynamo_way import DynamoWay
from rewriter.ways.own_capture.way import OwnCapture

ROWS = torch.randn(64, 8)


class Noting(nn.Module):
    """Blocks, and something that each forward notes in Python."""

    def __init__(self, note=lambda model, x: None):
        super().__init__()
        block = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU()
        self.first, self.second = nn.Sequential(*block), nn.Linear(8, 4)
        self.log, self.latest, self.first.log = [], {}, []
        self.note = note

    def forward(self, x):
        self.note(self, x)
        return self.second(self.first(x))


def trained(model, steps):
    for i in range(steps):
        model(ROWS + i).square().mean().backward()
        model.zero_grad()


STEPS = 5


class Live(PlannedWay):
    """Stands for the ways after own capture: the model as it is."""

    way, promise = Way.BLOCKS, "nothing"
    solution = verification = None

    def __call__(self, *args, **kwargs):
        return as_it_was(self.model, args, kwargs)


@pytest.fixture(autouse=True)
def own_capture_and_then_none(monkeypatch):
    monkeypatch.setitem(model_door.WAYS, Kernels.EAGER, (OwnCapture, Live))


def planned(model):
    checkpoint_model(model, budget="100%", strategy="mutwo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the way that is taken instead
        trained(model, STEPS)
    assert model.planned.refusals or model.planned.solution
    return model


def appends(model, x):
    model.log.append(1)


def appends_to_a_part(model, x):
    model.first.log.append(1)


def keeps_by_name(model, x):
    model.latest["mean"] = x.detach().mean()


def sets_by_a_computed_name(model, x):
    setattr(model, "_".join(("latest", "mean")), x.detach().mean())


@pytest.mark.parametrize("note", [appends, appends_to_a_part, keeps_by_name, sets_by_a_computed_name])
def test_a_forward_that_changes_a_container_or_attribute_is_not_taken_by_own_capture(note):
    model = planned(Noting(note))
    assert model.planned.refusals[0][0] is Way.OWN_CAPTURE
    assert "changes what a graph does not hold" in model.planned.refusals[0][1]
    assert len(model.log) in (0, STEPS)


def test_a_hook_that_appends_to_an_outer_list_is_not_taken_by_own_capture_even_if_it_comes_late():
    model, seen = planned(Noting()), []
    assert model.planned.way is Way.OWN_CAPTURE
    model.first.register_forward_hook(lambda module, given, returned: seen.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(model, 3)
    assert "outer variable seen" in model.planned.refusals[0][1]
    assert len(seen) == 3


def test_a_hooks_log_has_one_entry_per_step_whichever_ways_tried_the_model(monkeypatch):
    monkeypatch.setitem(model_door.WAYS, Kernels.EAGER, (OwnCapture, DynamoWay, BlockWise))
    model, seen = Noting(), []
    model.first = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)))
    model.first.register_forward_hook(lambda module, given, returned: seen.append(1))
    planned(model)
    assert model.planned.way is not Way.OWN_CAPTURE
    assert len(seen) == STEPS


class Picky(Noting):
    def forward(self, x):
        if len(x) % 2:
            raise ValueError("an odd batch")
        return super().forward(x)


@pytest.mark.parametrize("steps_before", [1, STEPS])
def test_a_bad_batch_that_the_loop_catches_leaves_the_model_to_its_way(steps_before):
    model = Picky()
    checkpoint_model(model, budget="100%", strategy="mutwo")
    trained(model, steps_before)
    with pytest.raises(ValueError, match="an odd batch"):
        model(ROWS[:3])
    trained(model, STEPS)
    assert model.planned.way is Way.OWN_CAPTURE
    assert model.planned.refusals == ()
    assert model.planned.solution


# -- let go ------------------------------------------------------------------------------------------------------------


def by_the_model_door(*, undone):
    model = planned(Noting())
    if undone:
        uncheckpoint(model)
    return weakref.ref(model)


def by_the_step_door():
    model = Noting()

    def step(model, optimizer, batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint(step, model, optimizer, ROWS, budget="100%", strategy="mutwo", show_progress=False)(ROWS)
    return weakref.ref(model)


@pytest.mark.parametrize(
    "used",
    [lambda: by_the_model_door(undone=True), lambda: by_the_model_door(undone=False), by_the_step_door],
    ids=["undone", "dropped", "step"],
)
def test_a_planned_model_that_nobody_holds_is_freed(used):
    model = used()
    gc.collect()
    assert model() is None


# -- more than one forward at a time -----------------------------------------------------------------------------------


def twice_before_a_backward(model):
    (model(ROWS) + model(ROWS + 1)).square().mean().backward()


def with_its_graph_kept(model):
    loss = model(ROWS).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (twice_before_a_backward, "1 other forward without a backward yet"),
        (with_its_graph_kept, "a graph that is kept"),
    ],
)
def test_more_than_one_forward_at_a_time_under_a_budget_in_bytes_is_told_once_and_planned_for(use, said):
    model = Noting()
    checkpoint_model(model, budget="1GiB", strategy="mutwo")
    trained(model, STEPS)
    with pytest.warns(UserWarning, match=f"{said}.*planned anew.*may exceed the budget of 1GiB") as told:
        [use(model) for _ in range(2)]
    assert len([one for one in told if "may exceed" in str(one.message)]) == 1


def test_one_forward_at_a_time_is_told_nothing_also_where_a_loss_is_held():
    model, losses = Noting(), []
    checkpoint_model(model, budget="1GiB", strategy="mutwo")
    trained(model, STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            losses.append(model(ROWS).square().mean())
            losses[-1].backward()
            model.zero_grad()
            model(ROWS)  # and no backward
