"""One form per run: an op that is measured again runs as the replayed step runs it."""

import torch

from planner.analysis import candidates
from planner.plan import recompute_once
from planner.schedule import lower
from profiler.measuring.meters import CpuMeter
from profiler.measuring.op_times import _Runner, measure
from profiler.op_forms import Generator, form_of
from profiler.tracing.fake_tensors.patches import below_autograd
from profiler.tracing.whole_step import capture
from rewriter.replay import apply
from tests.profiler import small


def captured():
    torch.manual_seed(0)
    step, model, optimizer, batch = small.make()()
    return capture(step, model, optimizer, batch), batch


def everything_again(traced):
    return lower(traced.graph, recompute_once(traced.graph, candidates(traced.graph)))


def test_a_measured_step_computes_what_the_replayed_one_does_reruns_included():
    traced, batch = captured()
    other, same_batch = captured()
    schedule = everything_again(traced)
    runner = _Runner(traced, schedule, lambda: traced.convention.gather(batch), lambda: None)
    torch.manual_seed(1)
    with below_autograd():
        runner.timed(CpuMeter(), [1] * len(traced.graph.ops))
    measured_draws = torch.get_rng_state()
    torch.manual_seed(1)
    other.convention.call(apply(other, schedule), same_batch)
    assert torch.equal(torch.get_rng_state(), measured_draws), "a rerun drew from the generator"
    tensors, others = traced.convention.model.state_dict(), other.convention.model.state_dict()
    assert "1.running_mean" in tensors
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_reruns_of_a_dropout_and_a_batch_norm_have_their_own_forms():
    traced, _ = captured()
    schedule = everything_again(traced)
    forms = [(run, form_of(run, traced.graph.ops[run.op], traced.nodes[run.op])) for run in schedule.runs]
    assert {form.generator for _, form in forms} == set(Generator)
    norms = [form for _, form in forms if "native_batch_norm.default" in str(form.target)]
    assert [norm.args[3] is None for norm in norms] == [False, True], "running statistics are left out the second time"


def test_a_saved_generator_state_is_no_workspace_of_the_op_that_saves_it():
    traced, batch = captured()
    measured = measure(traced, batch, schedule=everything_again(traced), show_progress=False)
    plain = measure(traced, batch, show_progress=False)
    drawing = [op.id for op in traced.graph.ops if op.rng_state is not None]
    assert drawing
    for op in drawing:
        assert measured.stats[op].workspace_bytes == plain.stats[op].workspace_bytes
