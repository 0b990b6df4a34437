"""An interrupt or an error at any moment of preparing a step leaves every bit as it was, in both doors."""

import gc
import os
import random
import signal
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.tracing.joint import as_it_was
from profiler.tracing.trials.interrupts import interrupts_come_between
from rewriter import checkpoint, checkpoint_model

pytestmark = pytest.mark.filterwarnings("ignore:the step changes Python objects")


class Training:
    """A step with batch norm, dropout, optimizer state, an average outside, hooks that count, and a log."""

    def __init__(self, door):
        torch.manual_seed(0)
        random.seed(0)
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
        names = {id(p): name for name, p in self.model.named_parameters()}
        state = {names.get(id(p)): {k: v.tolist() for k, v in s.items()} for p, s in self.optimizer.state.items()}
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        own = [sorted(vars(one)) for one in (*self.model.modules(), self.optimizer)]
        values = [t.tolist() for t in (*self.model.state_dict().values(), self.average, self.batch[0])]
        grads = [p.grad for p in self.model.parameters()]
        kept = (
            [names.get(id(p)) for g in self.optimizer.param_groups for p in g["params"]],
            len(self.log),
            self.counts["hook"],
        )
        drawn = torch.get_rng_state().tolist()
        modes = len(_python_dispatch._get_current_dispatch_mode_stack()), torch.is_grad_enabled(), sys.gettrace()
        patches = torch.autograd.backward, torch.optim.AdamW.step, signal.getsignal(signal.SIGINT)
        return state, groups, own, values, grads, kept, drawn, random.getstate(), modes, patches


class Copies:
    """At each boundary a copy of the process is interrupted, or gets an error, and looks at what it finds then.

    A boundary is where a function of a file of `interrupted` is called for the first time, or one of `failing` returns;
    of those in `each_time`, any time. Only what runs `within` a function of that name counts. What puts back gets no
    errors: they would be its own. `after` is what is there where an error was none in the end, since there is another
    way: one step, or what was asked for, has been.
    """

    def __init__(self, training, *, interrupted, failing=(), each_time=(), within="", after=None):
        self.training, self.before, self.after = training, training.everything(), after
        self.files = {"call": interrupted, "return": failing}
        self.each_time, self.within = each_time, within
        self.count, self.failures = 0, []
        self._seen, self._report = set(), None

    def prepare(self):
        """Prepare with a copy at each boundary; what went wrong in those, in words."""
        raised = None
        sys.setprofile(self._on_event)
        try:
            self.training.prepare()
        except BaseException as error:
            raised = error
        finally:
            sys.setprofile(None)
            if self._report is not None:
                self._end_copy(raised)
        assert raised is None
        return self.failures

    def _on_event(self, frame, event, _):
        place = frame.f_code.co_filename, frame.f_code.co_name, frame.f_code.co_firstlineno
        file = place[0].rpartition("/")[2]
        if file not in self.files.get(event, ()) or place[1].startswith("<"):
            return
        if ((place, event) in self._seen and place[1] not in self.each_time) or not is_inside(frame, self.within):
            return
        if event == "return" and is_inside(frame, "__enter__", "__exit__", "enter_context", "put_back"):
            return
        self._seen.add((place, event))
        self._copy(f"{event} of {place[1]} in {file}", event)

    def _copy(self, boundary, event):
        self.count += 1
        chance, (reading, writing) = random.getstate(), os.pipe()
        child = os.fork()
        if child:
            os.close(writing)
            told = os.read(reading, 4000).decode()
            os.close(reading)
            if os.waitpid(child, 0)[1] or told:
                self.failures.append(f"{boundary}: {told or 'the process ended'}")
            return
        sys.setprofile(None)
        self._report = writing, event
        signal.alarm(60)
        gc.disable()  # else the memory of the first process is gone through, and thereby copied
        random.setstate(chance)  # Python seeds it in every copy
        torch.set_num_threads(1)  # the others have stayed in the first process
        if event == "return":
            raise ArithmeticError("half-way")
        signal.raise_signal(signal.SIGINT)

    def _end_copy(self, raised):
        (writing, event), told = self._report, []
        try:
            if event == "call" and not isinstance(raised, KeyboardInterrupt):
                told.append(f"the interrupt did not come through, but {raised!r}")
            expected = self.after if raised is None and self.after is not None else self.before
            pairs = zip(expected, self.training.everything(), strict=True)
            told += [f"after {raised!r}, {was!s:.500} became {now!s:.500}" for was, now in pairs if was != now]
        except BaseException as error:
            told.append(repr(error))
        os.write(writing, "; ".join(told)[:4000].encode())
        os._exit(0)


def is_inside(frame, *names):
    """Whether a frame is one of a function of these names, or below it; "" is any."""
    while frame is not None and "" not in names:
        if frame.f_code.co_name in names:
            return True
        frame = frame.f_back
    return frame is not None


# Where the stages of preparing a step are run one after the other; and where things are put in place and put back.
STAGES = {
    "step.py", "pipeline.py", "proof.py", "whole_step.py", "one_trace.py", "passes.py", "restoring.py", "op_times.py",
    "test_interrupted.py",
}  # fmt: skip
INSIDE = {
    "replay.py", "provisional.py", "solve.py", "placed.py", "patches.py", "putting_back.py", "audit.py", "undoing.py",
    "own_changes.py",
}  # fmt: skip
OF_MODELS = {"planning.py", "cutting.py", "passage.py", "trials.py", "joint.py", "common.py", "form.py"}


def test_an_interrupt_or_an_error_at_each_boundary_of_a_step_leaves_every_bit():
    Training("step").prepare()  # what is made once and kept is made now
    copies = Copies(Training("step"), interrupted=STAGES | INSIDE, failing=STAGES, each_time=("step", "follow"))
    assert copies.prepare() == []
    assert copies.count > 200


@pytest.mark.filterwarnings("ignore:this model is planned by")
def test_an_interrupt_or_an_error_at_each_boundary_of_a_model_leaves_every_bit():
    Training("model").prepare()  # what is made once and kept is made now
    eager = Training("model")
    as_it_was(eager.model, eager.batch[:1], {})
    after = eager.everything()  # an error of tracing is a refusal: then the forward has been, once, by the next way
    # Each refusal takes the time of Dynamo: of what runs while tracing, errors in one file are enough.
    failing = (OF_MODELS | STAGES) - {"joint.py", "passes.py"}
    copies = Copies(Training("model"), interrupted=OF_MODELS, failing=failing, within="_new_form", after=after)
    assert copies.prepare() == []
    assert copies.count > 150


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

    with pytest.raises(KeyboardInterrupt):
        interrupted(Putting(), done)
    assert done == ["put back"]


def interrupted(inside, done):
    with interrupts_come_between():
        with inside:
            torch.ones(2) + 1
        len(done)
        done.append("too late")


class Interrupted(TorchDispatchMode):
    def __init__(self, done):
        super().__init__()
        self.done = done

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add.Tensor:
            signal.raise_signal(signal.SIGINT)
            self.done.append("computed")
        return func(*args, **(kwargs or {}))


def test_an_interrupt_below_a_mode_waits_for_what_is_computed():
    done = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(Interrupted(done), done)
    assert done == ["computed"]


def test_where_somebody_measures_an_interrupt_waits_for_the_end():
    done = []
    sys.setprofile(lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted(Interrupted(done), done)
    finally:
        sys.setprofile(None)
    assert done == ["computed", "too late"]


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
