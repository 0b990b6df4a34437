"""An interrupt or an error at any moment of preparing a step leaves every bit as it was, in both doors."""

import random
import signal
import sys
import threading
import unittest.mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _python_dispatch

import rewriter.pipeline
import rewriter.step
from profiler.measuring.op_times import _Runner
from profiler.tracing.trials.interrupts import interrupts_come_between
from rewriter import checkpoint, checkpoint_model

pytestmark = pytest.mark.filterwarnings("ignore:the step changes Python objects")

OUR_ROOMS = ("/profiler/", "/rewriter/", "/planner/", "/strategies/")


class Training:
    """A step with batch norm, dropout, optimizer state, an average outside, hooks that count, and a log."""

    def __init__(self, door):
        torch.manual_seed(0)
        self.door = door
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.average, self.log, self.counts = torch.zeros(8, 6), [], {"hook": 0}
        self.optimizer.register_step_post_hook(self.follow)
        self.batch = torch.randn(12, 6), torch.randint(0, 4, (12,))
        if door == "model":
            checkpoint_model(self.model, budget="1GiB", strategy="mutwo")
        self.step(self.model, self.optimizer, self.batch)
        self.optimizer.zero_grad()

    def follow(self, *_):
        self.counts["hook"] += 1
        self.average.mul_(0.9).add_(self.model[0].weight.data, alpha=0.1)

    def step(self, model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            self.average.add_(loss)
        self.log.append(loss.detach())
        return loss

    def prepare(self, **options):
        if self.door == "model":
            self.model(self.batch[0])
        else:
            options = {"strategy": "mutwo", **options}
            checkpoint(self.step, self.model, self.optimizer, self.batch, budget="1GiB", show_progress=False, **options)

    def everything(self):
        """All that the user has, and what torch and Python are set to."""
        state = {id(p): {k: v.tolist() for k, v in s.items()} for p, s in self.optimizer.state.items()}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        own = [sorted(vars(one)) for one in (*self.model.modules(), self.optimizer)]
        values = [t.tolist() for t in (*self.model.state_dict().values(), self.average, self.batch[0])]
        grads = [p.grad for p in self.model.parameters()]
        kept = [id(p) for g in self.optimizer.param_groups for p in g["params"]], len(self.log), dict(self.counts)
        generators = torch.get_rng_state().tolist(), random.getstate()
        modes = len(_python_dispatch._get_current_dispatch_mode_stack()), torch.is_grad_enabled(), sys.gettrace()
        patches = torch.autograd.backward, torch.optim.AdamW.step, signal.getsignal(signal.SIGINT)
        return state, groups, own, values, grads, kept, generators, modes, patches


def below_a_mode(frame):
    while frame is not None:
        if frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):
            return True
        frame = frame.f_back
    return False


def calls_of(training, at=None):
    """The functions of ours that preparing calls; at the call of that number there is an interrupt.

    But for those below a mode of torch's, where C++ is in between: what is raised there can end the whole process.
    """
    seen = []

    def on_event(frame, event, arg):
        name = frame.f_code.co_name
        if name.startswith("<"):  # a generator that is let go of: Python keeps what is raised there to itself
            return
        is_ours = event == "call" and any(room in frame.f_code.co_filename for room in OUR_ROOMS)
        if is_ours and not below_a_mode(frame):
            seen.append(name)
            if len(seen) == at:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(on_event)
    try:
        training.prepare()
        if at is not None:
            threading.Event().wait(1.0)  # one that came while something was put back is a moment late
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("door", ["model"])
def test_an_interrupt_at_any_moment_leaves_every_bit(door):
    calls_of(Training(door))  # what is made once and kept is made now
    count = len(calls_of(Training(door)))
    points = random.Random(5).sample(range(1, count), 5)
    for at in points:
        training = Training(door)
        before = training.everything()
        with pytest.raises(KeyboardInterrupt):
            calls_of(training, at)
        assert training.everything() == before, f"interrupted at call {at} of {count}"


def failing_at(number, function):
    """The function, which fails when it is called for that time."""
    calls = unittest.mock.Mock()  # which, unlike a list, is not put back after a trial

    def call(*args, **kwargs):
        calls()
        if calls.call_count == number:
            raise ArithmeticError("half-way")
        return function(*args, **kwargs)

    return call


STAGES = {
    "capture": (rewriter.pipeline, "capture", 1),
    "second trace": (rewriter.pipeline, "trace_again", 1),
    "measuring": (rewriter.pipeline, "measure_within", 1),
    "measuring an op": (_Runner, "_bind", 40),
    "comparing ops": (rewriter.pipeline, "check_against_eager", 1),
    "solving": (rewriter.step, "limit_of", 1),
    "replaying": (rewriter.pipeline, "apply", 1),
    "the eager step": (rewriter.pipeline, "observe", 1),
    "the planned step": (rewriter.pipeline, "observe", 2),
    "comparing": (rewriter.pipeline, "compare", 1),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_at_each_stage_comes_through_and_leaves_every_bit(stage, monkeypatch):
    owner, name, number = STAGES[stage]
    training = Training("step")
    before = training.everything()
    monkeypatch.setattr(owner, name, failing_at(number, getattr(owner, name)))
    with pytest.raises(ArithmeticError, match="half-way"):
        training.prepare()
    monkeypatch.undo()
    assert training.everything() == before


@pytest.mark.parametrize("number", range(1, 5))  # two traces, the audit, the proof
def test_an_error_in_the_users_own_forward_leaves_every_bit(number):
    training = Training("step")
    before = training.everything()
    forward = failing_at(number, training.model[3].forward)
    with unittest.mock.patch.object(training.model[3], "forward", forward), pytest.raises(Exception, match="half-way"):
        training.prepare()
    assert training.everything() == before


@pytest.mark.parametrize("number", [1, 3, 6, 7])  # while it is measured, in the audit, in both proofs
def test_an_error_in_the_users_own_optimizer_leaves_every_bit(number):
    training = Training("step")
    before = training.everything()
    hook = training.optimizer.register_step_post_hook(failing_at(number, lambda *_: None))
    with pytest.raises(ArithmeticError, match="half-way"):
        training.prepare()
    hook.remove()
    assert training.everything() == before


class Stumbling:
    name = "stumbling"

    def plan(self, problem):
        raise KeyboardInterrupt


def test_an_interrupt_of_a_strategy_leaves_every_bit():
    training = Training("step")
    before = training.everything()
    with pytest.raises(KeyboardInterrupt):
        checkpoint(training.step, training.model, training.optimizer, training.batch, budget=1, strategy=Stumbling())
    assert training.everything() == before


def test_an_interrupt_waits_for_what_is_being_put_back_and_comes_then():
    done = []

    class Putting:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            signal.raise_signal(signal.SIGINT)
            done.append("put back")

    def interrupted():
        with interrupts_come_between():
            with Putting():
                pass
            threading.Event().wait(2.0)
            done.append("too late")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["put back"]


def test_outside_of_the_main_thread_interrupts_are_nobodys_here():
    handler, failures = signal.getsignal(signal.SIGINT), []

    def other():
        with interrupts_come_between():
            if signal.getsignal(signal.SIGINT) is not handler:
                failures.append("it was changed")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not failures


def test_another_thread_that_trains_meanwhile_finds_everything_as_it_is():
    stop, failures = threading.Event(), []

    def other():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        try:
            while not stop.is_set():
                model(torch.ones(4, 3)).square().mean().backward()
                optimizer.step()
                scheduler.step()
        except Exception as error:
            failures.append(error)

    training, thread = Training("step"), threading.Thread(target=other)
    thread.start()
    try:
        training.prepare()
    finally:
        stop.set()
        thread.join()
    assert not failures
