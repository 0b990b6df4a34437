"""What a step writes to beside model and optimizer: advanced once a step, as eager does, and by nothing else."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from profiler.tracing.whole_step import capture
from rewriter import checkpoint
from tests.rewriter import tiny


class Averaging:
    """A step that keeps an average of the weights and a sum of losses, outside of the model."""

    def __init__(self):
        self.average = torch.zeros(3, 6)
        self.total = torch.zeros(())

    def __call__(self, model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            self.average.mul_(0.9).add_(model[0].weight[:3, 0].flatten(1)[:, :6], alpha=0.1)
            self.total.add_(loss)
        return loss


def scaling_its_batch(model, optimizer, batch):
    images, labels = batch
    images.mul_(0.5)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def made(step):
    torch.manual_seed(0)
    model = tiny.network()
    return step, model, tiny.sgd(model), tiny.images(8)


def prepared(workload):
    return checkpoint(*workload, budget="60%", strategy="mutwo", verify=2, show_progress=False)


def test_tensors_of_the_step_s_own_are_put_back_after_measuring_and_proving():
    own = Averaging()
    step = prepared(made(own))
    assert not own.average.any()
    assert not own.total.any()
    assert ("other tensors", 2) in step.verification.compared


def test_tensors_of_the_step_s_own_advance_as_in_eager():
    own, theirs = Averaging(), Averaging()
    planned, workload, other = None, made(own), made(theirs)
    planned = prepared(workload)
    for seed in range(3):
        torch.manual_seed(seed)
        planned(workload[3])
        torch.manual_seed(seed)
        theirs(*other[1:])
    assert torch.equal(own.average, theirs.average)
    assert torch.equal(own.total, theirs.total)


def test_a_batch_that_the_step_changes_is_changed_by_calls_alone():
    workload = made(scaling_its_batch)
    before = workload[3][0].clone()
    step = prepared(workload)
    assert torch.equal(workload[3][0], before)
    step(workload[3])
    assert torch.equal(workload[3][0], 0.5 * before)


@pytest.mark.parametrize(("step", "count"), [(tiny.models.classify, 0), (scaling_its_batch, 1), (Averaging(), 2)])
def test_what_is_written_outside_is_found(step, count):
    workload = made(step)
    assert len(capture(*workload).written_outside(workload[3])) == count


def test_a_buffer_is_not_outside():
    def counting(model, optimizer, batch):
        return tiny.models.classify(model, optimizer, batch)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(784, 4))
    workload = (counting, model, tiny.sgd(model), tiny.images(8))
    assert capture(*workload).written_outside(workload[3]) == ()
