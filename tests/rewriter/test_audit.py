"""A capture is held against a second one and against eager: what differs is refused, with the op and its line."""

import copy
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from profiler.errors import CaptureError
from profiler.tracing.one_trace import trace_step
from profiler.tracing.trials.audit import check_against_eager, eager_ops, first_difference, ops_of
from rewriter import checkpoint
from tests.rewriter import tiny


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


BATCH = torch.randn(64, 8), torch.randint(0, 4, (64,))


def planned(step, **options):
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return checkpoint(step, model, optimizer, BATCH, budget="90%", strategy="mutwo", show_progress=False, **options)


def trained(model, optimizer, batch, *, scale=1.0):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]) * scale, batch[1])
    loss.backward()
    optimizer.step()
    return loss


class Asking(nn.Module):
    """Library code that does something else where it is traced, and asks in a way that nobody answers for eager."""

    def forward(self, x):
        return x.exp().log() if type(x).__name__ == "FakeTensor" else x


def test_another_path_when_traced_is_refused_with_the_op_and_both_lines():
    asking = Asking()

    def step(model, optimizer, batch):
        return trained(model, optimizer, (asking(batch[0]), batch[1]))

    with pytest.raises(CaptureError) as refusal:
        planned(step)
    message = str(refusal.value)
    assert "op 1 is aten.exp.default -> float32[64, 8] at test_audit.py" in message
    assert "and aten.addmm.default -> float32[64, 16]" in message
    assert "when the step runs" in message


class Annealed:
    def __init__(self):
        self.weight = 1.0

    def __call__(self, model, optimizer, batch):
        self.weight *= 0.5
        return trained(model, optimizer, batch, scale=self.weight)


def counted():
    calls = [0]

    def step(model, optimizer, batch):
        calls[0] += 1
        return trained(model, optimizer, batch, scale=2.0 if calls[0] % 2 else 3.0)

    return step


def timed():
    return lambda model, optimizer, batch: trained(model, optimizer, batch, scale=time.perf_counter())


@pytest.mark.parametrize("make", [Annealed, counted, timed])
def test_a_step_that_does_something_else_each_time_is_refused_with_both_ways_out(make):
    with pytest.raises(CaptureError, match=r"op \d+ was aten.mul.Tensor .* pass what changes in the batch, .*_model"):
        planned(make())


def test_what_the_step_changed_itself_is_named():
    with pytest.raises(CaptureError, match=r"The step itself changed something: .*weight was 1\.0 and is 0\.5"):
        planned(Annealed())


def test_a_counter_that_changes_nothing_is_no_reason():
    seen = []

    def step(model, optimizer, batch):
        seen.append(0)
        return trained(model, optimizer, batch)

    with pytest.warns(UserWarning, match="the number of entries of the outer variable seen"):
        assert planned(step).verification.exact


@pytest.mark.parametrize("optimizer", [tiny.sgd, lambda m: torch.optim.Adam(m.parameters())])
def test_a_trace_and_a_run_of_the_same_step_are_the_same_ops(optimizer):
    torch.manual_seed(0)
    model = tiny.network()
    chosen, batch, step = optimizer(model), tiny.images(4), tiny.models.classify
    trace = trace_step(step, model, chosen, batch)
    trace.convention.make_state()
    eager = eager_ops(lambda: step(model, chosen, batch), with_optimizer=not trace.opaque_reason)
    captured = ops_of(trace.module.graph)
    assert len(captured) > 50
    check_against_eager(captured, eager)
    with pytest.raises(CaptureError, match="is not there"):
        check_against_eager(captured[:-1], eager)


def on_views(model, batch):
    out = model(batch[0]).clone()
    out[:, 0] += 1
    out[:10].mul_(0.5)
    return out


def with_statistics(model, batch):
    with torch.inference_mode():
        model(batch[0]).std()
    return model(batch[0])


def beside_a_copy(model, batch):
    copy.deepcopy(model)
    return model(batch[0])


@pytest.mark.parametrize("scores", [on_views, with_statistics, beside_a_copy])
def test_what_autograd_and_copies_do_otherwise_in_a_trace_is_no_other_path(scores):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(scores(model, batch), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    assert planned(step).verification.exact


def test_the_first_difference_is_found_also_where_one_side_ends():
    assert first_difference("abc", "abc") is None
    assert first_difference("abc", "abd") == 2
    assert first_difference("ab", "abc") == 2
    assert first_difference("", "a") == 0
