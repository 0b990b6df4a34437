"""Metrics of torchmetrics inside a step: they run as themselves, count as in eager, and capturing leaves them alone."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from bench.workloads.zoo import declare_torchvision_ops
from profiler.errors import CaptureError
from profiler.tracing.whole_step import capture
from rewriter import checkpoint
from tests.profiler import small
from tests.side_by_side import assert_captured_equals_eager, assert_same, snapshot, varied

declare_torchvision_ops()  # torchmetrics probes torchvision
import torchmetrics  # noqa: E402 - after what it probes

functional = torchmetrics.functional
FOUR = {"task": "multiclass", "num_classes": 4}


def measured(metric):
    """A step that returns what `metric` makes of the scores and the labels."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        scores = model(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        loss.backward()
        optimizer.step()
        return loss, metric(scores.detach(), batch[1])

    return step


FUNCTIONS = {
    "accuracy": lambda scores, labels: functional.accuracy(scores, labels, average="macro", **FOUR),
    "without a class": lambda scores, labels: functional.accuracy(scores, labels, ignore_index=1, **FOUR),
    "confusion": lambda scores, labels: functional.confusion_matrix(scores, labels, **FOUR),
    "area": lambda scores, labels: functional.auroc(scores.softmax(-1), labels, **FOUR),
    "ranks": lambda scores, labels: functional.spearman_corrcoef(scores[:, 0], labels.float()),
}


@pytest.mark.parametrize("metric", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_of_values_equals_eager_at_every_step(metric):
    traced = assert_captured_equals_eager(small.make(measured(metric)))
    assert len(traced.metrics) == 1


def test_a_function_that_was_imported_by_its_name_equals_eager():
    from torchmetrics.functional.classification import multiclass_f1_score as score

    traced = assert_captured_equals_eager(small.make(measured(lambda s, y: score(s, y, num_classes=4))))
    assert traced.metrics


def test_a_function_that_is_differentiated_is_part_of_the_graph():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = functional.mean_squared_error(model(batch[0])[:, 0], batch[1].float())
        loss.backward()
        optimizer.step()
        return loss

    assert not assert_captured_equals_eager(small.make(step)).metrics


# -- objects that count -----------------------------------------------------------------------------------------------


def accuracy():
    return torchmetrics.Accuracy(average="macro", **FOUR)


def collection():
    return torchmetrics.MetricCollection({"accuracy": accuracy(), "error": torchmetrics.MeanSquaredError()})


def update(metric, scores, labels):
    metric.update(scores, labels)


def update_and_compute(metric, scores, labels):
    metric.update(scores, labels)
    return metric.compute()


OBJECTS = {
    "forward": (accuracy, lambda metric, scores, labels: metric(scores, labels)),
    "update": (accuracy, update),
    "compute": (accuracy, update_and_compute),
    "reset": (accuracy, lambda metric, scores, labels: metric.reset()),
    "kept scores": (torchmetrics.CatMetric, lambda metric, scores, labels: metric.update(scores)),
    "mean": (torchmetrics.MeanMetric, lambda metric, scores, labels: metric(scores.mean())),
}


def state_of(metric):
    """A copy that knows nothing of the metric, with what it has computed and counted."""
    held = {name: copy.deepcopy(getattr(metric, name)) for name in metric._defaults}
    leaves = torch.utils._pytree.tree_leaves(held)
    return {"counted": metric.update_count, "computed before": metric._computed is None} | dict(enumerate(leaves))


def trained(make_metric, use, *, planned):
    torch.manual_seed(0)
    metric = make_metric()
    workload = small.make(measured(lambda scores, labels: use(metric, scores, labels)), optimizer=small.adam)()
    step, model, optimizer, batch = workload
    if planned:
        call = checkpoint(*workload, budget="100%", strategy="keep_all", show_progress=False)
        assert metric.update_count == 0
    else:
        call = lambda batch: step(model, optimizer, batch)  # noqa: E731
    torch.manual_seed(1)
    return [snapshot(call(one), model, optimizer) | state_of(metric) for one in varied(batch, 3)]


@pytest.mark.parametrize(("make_metric", "use"), OBJECTS.values(), ids=OBJECTS)
def test_an_object_that_counts_has_counted_as_in_eager_after_every_planned_step(make_metric, use):
    assert_same(trained(make_metric, use, planned=False), trained(make_metric, use, planned=True))


def test_what_an_object_holds_on_to_is_not_written_over():
    kept = torchmetrics.CatMetric()

    def step(model, optimizer, batch):
        scores = model(batch)
        kept.update(scores.detach())
        scores.detach().mul_(0)
        return scores

    batch = torch.randn(3, 6)
    model = nn.Linear(6, 4)
    capture(step, model, None, batch).run(batch)
    assert torch.equal(kept.compute(), model(batch))


class Counting(nn.Module):
    """A model that has its metric, as those of Lightning do."""

    def __init__(self):
        super().__init__()
        self.inner, self.accuracy = small.mlp(), accuracy()

    def forward(self, x):
        return self.inner(x)


def test_an_object_that_is_part_of_the_model_counts_as_in_eager():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        scores = model(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        loss.backward()
        optimizer.step()
        return loss, model.accuracy(scores, batch[1]), model.accuracy.compute()

    assert_captured_equals_eager(small.make(step, model=Counting))


def test_labels_out_of_range_are_an_error_as_in_eager():
    metric = accuracy()

    def step(model, optimizer, batch):
        metric.update(model(batch[0]).detach(), batch[1])

    _, model, _, batch = small.make()()
    traced = capture(step, model, None, batch)
    wrong = batch[0], torch.arange(12)
    for run in (lambda: step(model, None, wrong), lambda: traced.run(wrong)):
        with pytest.raises(RuntimeError, match=r"shape '\[4, 4\]' is invalid for input of size"):
            run()


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_loss_through_an_object_is_refused_with_the_function_that_works():
    mean = torchmetrics.MeanMetric()

    def step(model, optimizer, batch):
        mean(model(batch[0]).pow(2)).backward()
        optimizer.step()

    with pytest.raises(CaptureError, match=r"MeanMetric.forward returned.* torchmetrics.functional"):
        capture(*small.make(step)())


def test_a_step_that_decides_by_what_an_object_counted_is_refused():
    metric = accuracy()

    def step(model, optimizer, batch):
        scores = model(batch[0])
        return scores.sum() * (2 if metric(scores.detach(), batch[1]) > 0.5 else 1)

    with pytest.raises(CaptureError, match="decides by what a metric returned"):
        capture(*small.make(step)())
    assert metric.update_count == 0


def test_a_step_that_reads_the_state_of_an_object_is_refused():
    metric = accuracy()

    def step(model, optimizer, batch):
        scores = model(batch[0])
        metric.update(scores.detach(), batch[1])
        return scores.sum() + metric.tp.sum()

    with pytest.raises(CaptureError, match=r"MulticlassAccuracy.tp, the state of a metric"):
        capture(*small.make(step)())
