"""One trace of the user's step, with fake stand-ins for all of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.optim import Optimizer

from profiler.errors import CaptureError, explain
from profiler.tracing.calling_convention import Convention, RateSlot
from profiler.tracing.eager_ways.assumptions import beforehand, insert_checks, is_checked_beforehand
from profiler.tracing.eager_ways.draws import Draws, Redraw
from profiler.tracing.eager_ways.eager_path import as_in_eager
from profiler.tracing.eager_ways.live_calls import LiveCalls
from profiler.tracing.eager_ways.metrics import taken_calls
from profiler.tracing.eager_ways.reads import Reads, ReadsInOps
from profiler.tracing.eager_ways.torch_calls import TorchCalls
from profiler.tracing.fake_tensors.leftovers import refuse_leftovers
from profiler.tracing.fake_tensors.outside_tensors import OutsideTensors
from profiler.tracing.fake_tensors.patches import (
    autocast_cache,
    foreach_on_stand_ins,
    only_this_optimizer,
    patched,
    preserved,
    python_generators,
    shapeless_kernels,
    watched_autograd,
)
from profiler.tracing.fake_tensors.placed import Placed, ProbesReadError
from profiler.tracing.fake_tensors.without_memory import fake_mode_of
from profiler.tracing.fx_graphs.gpu_kernels import GpuKernels
from profiler.tracing.fx_graphs.provenance import Stamper
from profiler.tracing.guards import Held, Noted, Reach, learning
from profiler.tracing.outcome import Outcome, collect, convention_of, keep_used_inputs
from profiler.tracing.passes import Passes, UntraceableOptimizerError
from profiler.tracing.ranks.replicated import Layout, LayoutFoundError, parallel_of
from profiler.tracing.ranks.torch_distributed import distributed, local, refusing_own_communication, spec_of
from profiler.tracing.ranks.torch_shards import refusing_own_gathers
from profiler.tracing.trials.audit import OpSeen, names_of_outputs, ops_of
from profiler.tracing.trials.interrupts import interrupts_come_between
from profiler.tracing.trials.switches import refusing_switches
from profiler.tracing.updates.learning_rates import make_rates_live
from profiler.tracing.updates.optimizers import refusing_scalers, refusing_schedulers, why_opaque
from profiler.workload import TrainStep


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A traced module, as it came from the tracer, and the convention that calls it."""

    module: fx.GraphModule
    convention: Convention
    opaque_reason: str
    ops: tuple[OpSeen, ...]  # in the order in which the step ran them
    outside: tuple[Tensor, ...]  # tensors that it used and that are neither the model's nor the batch's
    redraws: tuple[Redraw, ...]  # draws that repeat earlier ones, which is not in the graph yet
    layout: Layout | None = None  # buckets of replicas, where an attempt before this one found them


def trace_step(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    optimizer_outside: bool = False,
    kernels: GpuKernels | None = None,
    layout: Layout | None = None,
) -> Trace:
    """Trace the step; a second time where the first shows that its assumptions do not hold.

    `layout` is what an earlier trace found of the buckets. Nothing of a trace stays anywhere but in what is returned,
    or CaptureError names the place.
    """
    with interrupts_come_between():
        trace, mode = _attempts(
            train_step, model, optimizer, batch, optimizer_outside=optimizer_outside, kernels=kernels, layout=layout
        )
    if fake_mode_of(model) is None:
        refuse_leftovers(mode, trace.module.graph)
    return trace


def _attempts(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    optimizer_outside: bool,
    kernels: GpuKernels | None,
    layout: Layout | None,
) -> tuple[Trace, FakeTensorMode]:
    reason = "it was asked to stay outside the graph" if optimizer_outside else why_opaque(optimizer)
    probing = noting = on_eagers_path = True
    for _ in range(6):
        session = _Session(
            train_step,
            model,
            optimizer,
            batch,
            opaque_reason=reason,
            probing=probing,
            noting=noting,
            kernels=kernels,
            layout=layout,
        )
        session.on_eagers_path = on_eagers_path
        try:
            # In a context of its own: a context variable that the step sets goes with it.
            trace = copy_context().run(session.trace)
            return replace(trace, layout=layout), session.placed.stand_ins.mode
        except ProbesReadError:
            probing = False
        except LayoutFoundError as found:
            layout = found.layout
        except CaptureError as error:
            if on_eagers_path and _reads_nothing(error, model):
                on_eagers_path = False  # a library that asks for a value has another way where it is traced
                continue
            if not session.batch_is_another:
                raise
            noting = False  # perhaps only because its batch is one that notes what is read of it
        except UntraceableOptimizerError as error:
            reason = f"{type(optimizer).__name__} failed to trace: {error}"
    raise CaptureError("the step traces differently each time: it keeps state that capture cannot see")


def _reads_nothing(error: CaptureError, model: nn.Module) -> bool:
    """Whether a step failed since it reads the value of a tensor that has no memory."""
    return isinstance(error.__cause__, DataDependentOutputException) and fake_mode_of(model) is not None


class _Session:
    """One attempt at tracing: the fake stand-ins of the user's tensors, and what the step did with them."""

    def __init__(
        self,
        train_step: TrainStep,
        model: nn.Module,
        optimizer: Optimizer,
        batch: Any,
        *,
        opaque_reason: str,
        probing: bool,
        noting: bool,
        kernels: GpuKernels | None,
        layout: Layout | None,
    ) -> None:
        self.train_step = train_step
        self.model = model
        self.optimizer = optimizer
        self.opaque_reason = opaque_reason
        self.kernels = kernels
        self.noting = noting
        self.noted: Noted | None = None
        self.on_eagers_path = True
        self.stamper = Stamper(model)
        self.placed = Placed(model, optimizer, batch, probing=probing)
        self.parallel = parallel_of(model, self.placed, layout, train_step)
        self.passes = Passes(self.placed, self.stamper, self.parallel, opaque_reason=opaque_reason)

    @property
    def batch_is_another(self) -> bool:
        """Whether the step got a batch that notes what is read of it."""
        return self.noted is not None and self.noted.is_another

    def trace(self) -> Trace:
        """Trace; the user's objects are as before when this returns or raises."""
        self.reach = Reach(
            self.train_step, self.model, self.optimizer
        )  # before anything is put in the place of another
        self.held = Held(self.reach)
        with interrupts_come_between(), preserved(self.model, self.optimizer), self.reach.kept():
            generators = python_generators()
            module, outcome = self._make_graph()
            if python_generators() != generators:
                raise CaptureError(
                    "the step draws from Python's or numpy's random numbers, which a graph cannot do: draw "
                    "them outside and pass them in the batch, or use torch's generator"
                )
        self.held.close()
        return self._finished(module, outcome)

    def _make_graph(self) -> tuple[fx.GraphModule, Outcome]:
        inputs, outcomes = self.placed.stand_ins.inputs, list[Outcome]()
        layouts = [(spec_of(fake), fake.requires_grad) for fake in inputs.values()]

        def flat(*args: Tensor) -> list[Tensor]:
            proxy_mode = get_proxy_mode()
            assert proxy_mode is not None
            pairs = zip(args, layouts, strict=True)
            whole = [distributed(arg, spec, requires_grad=trained) for arg, (spec, trained) in pairs]
            self.placed.begin(proxy_mode.tracer, dict(zip(inputs, whole, strict=True)))
            outcomes.append(self._run())
            return [local(tensor) for tensor in outcomes[0].tensors]

        try:
            module = make_fx(
                flat, tracing_mode="fake", _allow_non_fake_inputs=True, _disable_torch_fn_metadata_mode=True
            )(*map(local, inputs.values()))
        except (ProbesReadError, UntraceableOptimizerError, LayoutFoundError):
            raise
        except Exception as error:
            raise CaptureError(explain(error)) from error
        return module, outcomes[0]

    # -- while it runs ----------------------------------------------------------------------------------------

    def _run(self) -> Outcome:
        tracer = self.placed.tracer
        self.outside = OutsideTensors(self.placed.stand_ins.mode, tracer, self.stamper.line)
        self.reads = Reads(tracer, self.placed.held, self.placed.varies, self.stamper.line, self.placed.stand_ins.mode)
        with self._surroundings():
            training = [(module, module.training) for module in self.model.modules()]
            draws, batch = Draws(tracer), self.placed.batch()
            self.noted = Noted(batch) if self.noting else None
            batch = batch if self.noted is None else self.noted.batch
            with draws.followed(), learning(self.reach):
                result = self.train_step(self.model, self.optimizer, batch)
            self.placed.hand_back_attributes()
            self.held.settle(self.placed.what_is_computed())
            self.parallel.finish()
            draws.finish()
            self.redraws = tuple(draws.redraws)
            self.outside.check()
            outcome = collect(self.placed, result, training, self.held)
        self.placed.check_memory()
        return outcome

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Stand-ins in the user's objects, and everything that watches or answers what the step does."""
        tracer, passes = self.placed.tracer, self.passes
        with ExitStack() as stack:
            stack.enter_context(self.stamper.attached(tracer))
            self.placed.hook_in(stack)
            self.placed.swap_in(stack, self.reads)
            stack.enter_context(refusing_own_communication())
            stack.enter_context(refusing_own_gathers())
            stack.enter_context(self.parallel.inside())
            stack.enter_context(patched([(self.optimizer, "step", passes.step)]))
            stack.enter_context(watched_autograd(passes.around_backward, passes.note_returned))
            stack.enter_context(only_this_optimizer(self.optimizer, lambda: passes.stepping))
            stack.enter_context(refusing_schedulers())
            stack.enter_context(refusing_scalers())
            stack.enter_context(refusing_switches())
            stack.enter_context(autocast_cache())
            stack.enter_context(foreach_on_stand_ins())
            stack.enter_context(shapeless_kernels())
            if self.kernels is not None:
                stack.enter_context(self.kernels)
            stack.enter_context(ReadsInOps(self.reads))
            calls = TorchCalls(self.placed.by_object(), self.outside, self.reads, tracer.graph)
            stack.enter_context(calls)
            stack.enter_context(taken_calls(LiveCalls(tracer, self.reads, calls.stand_in).call))
            if self.on_eagers_path:
                stack.enter_context(as_in_eager())
            yield

    # -- from the raw graph to one with live inputs ----------------------------------------------------------

    def _finished(self, module: fx.GraphModule, outcome: Outcome) -> Trace:
        inputs = keep_used_inputs(self.placed, module, list(self.placed.stand_ins.inputs))
        inputs += self._make_rates_live(module)
        # Before a check is moved in front of what it must not come after.
        ops, names = ops_of(module.graph), names_of_outputs(module.graph)
        early = [one for one in self.reads.assumptions if is_checked_beforehand(one)]
        before = beforehand(module, early)
        late = [one for one in self.reads.assumptions if one not in early]
        self.parallel.refuse_reads(late)
        insert_checks(module, late)
        convention = convention_of(
            self.placed,
            tuple(inputs),
            outcome,
            self.held,
            self.noted,
            names=names,
            beside=self.parallel.guards,
            opaque_reason=self.opaque_reason,
        )
        return Trace(
            module=module,
            convention=replace(convention, beforehand=before, flags_after=self.parallel.flags_after),
            opaque_reason=self.opaque_reason,
            ops=ops,
            outside=self.outside.live,
            redraws=self.redraws,
        )

    def _make_rates_live(self, module: fx.GraphModule) -> list[RateSlot]:
        rates = make_rates_live(module.graph)
        hidden = self.passes.stepped_groups - {slot.group for slot in rates if not slot.as_it_is}
        if hidden and not self.opaque_reason:
            raise UntraceableOptimizerError(f"the learning rate of groups {sorted(hidden)} is hidden")
        return rates
