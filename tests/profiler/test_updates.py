"""Freed gradients and early updates: less memory, and not one bit that differs."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812

from bench.workloads import zoo as models
from planner.ir import Phase, Role
from planner.plan import Plan
from planner.schedule import lower
from planner.simulator import simulate
from profiler.errors import CaptureError
from profiler.tracing.whole_step import capture
from tests import step_forms
from tests.profiler import small
from tests.rewriter import tiny
from tests.side_by_side import assert_same, eager, history, seeded

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "SGD foreach Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adam fused amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.01, fused=True),
}
BOTH = {"free_gradients": True, "early_updates": True}


def deep():
    """Equal layers: equal gradients."""
    layers = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 4))


def without_gradients(seen):
    return [{name: value for name, value in record.items() if not name.startswith("grad ")} for record in seen]


def assert_equals_eager(make, *, steps=3, **options):
    """Several steps with the options against eager: everything but a freed `.grad` equal to the bit."""
    expected = eager(seeded(make), steps=steps)
    workload = seeded(make)
    traced = capture(*workload, **options)
    actual = history(traced.run, workload, steps=steps)
    if options.get("free_gradients"):
        assert all(p.grad is None for p in workload[1].parameters())
        expected, actual = without_gradients(expected), without_gradients(actual)
    assert_same(expected, actual)
    return traced


def unplanned_bytes(make, **options):
    """What the unplanned step adds to memory, the ops' own workspaces left out."""
    graph = capture(*seeded(make), **options).graph
    return simulate(graph, lower(graph, Plan())).above_start_bytes


def with_optimizer(made, model=deep, train_step=small.step):
    return small.make(train_step, model=model, optimizer=lambda m: made(m.parameters()))


@pytest.mark.parametrize("options", [{"early_updates": True}, BOTH], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_eagers_with_every_optimizer_inside_the_graph(name, options):
    assert_equals_eager(with_optimizer(OPTIMIZERS[name]), **options)


@pytest.mark.parametrize("options", [{"free_gradients": True}, {"early_updates": True}, BOTH], ids=str)
def test_the_bits_are_eagers_on_bert_with_its_tied_weights(options):
    assert_equals_eager(lambda: models.bert(2, seq=8, **tiny.BERT), **options)


@pytest.mark.parametrize("options", [{"early_updates": True}, BOTH], ids=str)
def test_the_bits_are_eagers_with_batch_norm_and_dropout(options):
    assert_equals_eager(with_optimizer(OPTIMIZERS["SGD foreach"], model=small.mlp), **options)


@pytest.mark.parametrize("name", ["SGD", "SGD foreach", "AdamW fused"])
def test_early_updates_with_freed_gradients_lower_the_unplanned_peak(name):
    make = with_optimizer(OPTIMIZERS[name])
    early = unplanned_bytes(make, **BOTH)
    assert early < unplanned_bytes(make, free_gradients=True)
    assert early < unplanned_bytes(make)


def test_on_bert_early_updates_lower_the_unplanned_peak():
    def make():
        return models.bert(1, seq=4, **tiny.BERT)

    assert unplanned_bytes(make, **BOTH) < unplanned_bytes(make)


def test_freed_gradients_do_not_outlive_the_step():
    step, model, optimizer, batch = with_optimizer(OPTIMIZERS["SGD fused"])()
    kept = capture(step, model, optimizer, batch).graph
    freed = capture(step, model, optimizer, batch, free_gradients=True).graph
    for graph, count in ((kept, 8), (freed, 0)):
        held = [graph.storages[s] for s in graph.held_storages]
        assert sum(s.role is Role.GRADIENT for s in held) == count


def test_each_update_stands_right_after_its_gradient():
    step, model, optimizer, batch = with_optimizer(OPTIMIZERS["AdamW fused"])()
    late = capture(step, model, optimizer, batch).graph
    early = capture(step, model, optimizer, batch, early_updates=True).graph
    assert [op.phase for op in late.ops if op.target.startswith("aten._fused")] == [Phase.OPTIMIZER]
    updates = [op.id for op in early.ops if op.target.startswith("aten._fused")]
    backward = [op.id for op in early.ops if op.phase is Phase.BACKWARD]
    assert len(updates) == 8
    assert sum(update < backward[-1] for update in updates) >= 6, "all but those of the first layer"


# -- what holds updates back ------------------------------------------------------------------------------------


def clipped(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss, norm


@pytest.mark.parametrize("name", ["SGD", "SGD foreach", "AdamW fused"])
def test_global_clipping_holds_every_update_back(name):
    traced = assert_equals_eager(with_optimizer(OPTIMIZERS[name], train_step=clipped), early_updates=True)
    last_backward = max(op.id for op in traced.graph.ops if op.phase is Phase.BACKWARD)
    params = {v.id for v in traced.graph.values if traced.graph.storages[v.storage].role is Role.PARAM}
    writes = [op.id for op in traced.graph.ops if params & set(op.mutates)]
    assert writes
    assert min(writes) > last_backward


def test_clipping_by_value_lets_updates_go_early():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        return loss

    traced = assert_equals_eager(with_optimizer(OPTIMIZERS["SGD fused"], train_step=step), **BOTH)
    updates = [op.id for op in traced.graph.ops if op.target.startswith("aten._fused")]
    assert min(updates) < max(op.id for op in traced.graph.ops if op.phase is Phase.BACKWARD)


class Shared(nn.Module):
    """One layer used twice."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.layer(self.layer(x).tanh()).tanh())


class Scaled(nn.Module):
    """The gradient of `scale` is complete one op before the backward reads `scale` for the last time."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.head = nn.Linear(6, 6), nn.Parameter(torch.rand(12, 6)), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.layer(x).tanh() * self.scale)


@pytest.mark.parametrize("model", [Shared, Scaled])
def test_a_parameter_that_the_backward_still_reads_is_updated_only_afterwards(model):
    assert_equals_eager(with_optimizer(OPTIMIZERS["SGD fused"], model=model), **BOTH)


def test_accumulation_over_micro_batches_waits_for_the_last_one():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        for images, labels in zip(batch[0].chunk(3), batch[1].chunk(3), strict=True):
            (F.cross_entropy(model(images), labels) / 3).backward()
        optimizer.step()

    for options in ({"early_updates": True}, BOTH):
        traced = assert_equals_eager(with_optimizer(OPTIMIZERS["AdamW fused"], train_step=step), **options)
        updates = [op for op in traced.graph.ops if op.target.startswith("aten._fused")]
        last_round = min(op.id for op in traced.graph.ops if op.phase is Phase.BACKWARD and op.round == 2)
        assert min(op.id for op in updates) > last_round


def test_what_the_step_does_after_the_optimizer_sees_updated_parameters():
    assert_equals_eager(
        with_optimizer(OPTIMIZERS["SGD foreach"], model=step_forms.Averaged, train_step=step_forms.averaging), **BOTH
    )


# -- refusals ---------------------------------------------------------------------------------------------------


def test_early_updates_refuse_an_optimizer_that_runs_as_itself():
    step, model, optimizer, batch = small.make(optimizer=small.adam)()
    with pytest.raises(CaptureError, match="early updates need the optimizer inside the graph: Adam reads"):
        capture(step, model, optimizer, batch, early_updates=True)


def test_freeing_gradients_refuses_a_step_that_adds_to_the_ones_it_finds():
    def step(model, optimizer, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    _, model, optimizer, batch = small.make()()
    step(model, optimizer, batch)
    with pytest.raises(CaptureError, match=r"adds to the \.grad that .* has when it begins.*zero_grad"):
        capture(step, model, optimizer, batch, free_gradients=True)


def test_freeing_gradients_works_with_an_optimizer_that_runs_as_itself():
    assert_equals_eager(small.make(optimizer=small.adam), free_gradients=True)
