"""One trace of the user's step, with fake stand-ins for all of its tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from profiler.errors import CaptureError, explain
from profiler.ops import is_random, memory_of
from profiler.tracing.assumptions import beforehand, insert_checks, is_checked_beforehand
from profiler.tracing.calling import (
    BatchSlot,
    BufferSlot,
    Convention,
    GradSlot,
    InputSlot,
    OutputSlot,
    ParamSlot,
    RateSlot,
    Result,
    ReturnOut,
    StateSlot,
)
from profiler.tracing.eager_path import as_in_eager
from profiler.tracing.gpu_kernels import GpuKernels
from profiler.tracing.guards import (
    PLAIN,
    Autocast,
    BatchGuard,
    Fixed,
    Guards,
    Held,
    ModuleGuard,
    Modules,
    Noted,
    OptimizerGuard,
    Reach,
    Switches,
    TensorGuard,
    hooks_of,
    learning,
)
from profiler.tracing.inputs import StandIns
from profiler.tracing.learning_rates import Rate, RatesKept, make_rates_live
from profiler.tracing.live_numbers import LIVE
from profiler.tracing.optimizers import OpaqueStep, first_state, refusing_scalers, refusing_schedulers, why_opaque
from profiler.tracing.outside_tensors import OutsideTensors
from profiler.tracing.patches import (
    WatchedGroup,
    autocast_cache,
    foreach_on_stand_ins,
    noted_generator_resets,
    only_this_optimizer,
    preserved,
    python_generators,
    refresh_recurrent_layers,
    shapeless_kernels,
    watched_autograd,
)
from profiler.tracing.provenance import GRADIENT_OF, Stamper
from profiler.tracing.reads import Reads, ReadsInOps
from profiler.tracing.slices import outside_the_trace
from profiler.tracing.torch_calls import TorchCalls
from profiler.tracing.without_memory import fake_mode_of
from profiler.workload import TrainStep


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A traced module, as it came from the tracer, and the convention that calls it."""

    module: fx.GraphModule
    convention: Convention
    opaque_reason: str


class _ProbesReadError(Exception):
    """The step looks at a `.grad` that is not there in eager: trace again without stand-ins for it."""


class _UntraceableOptimizerError(Exception):
    """The optimizer failed to trace: run it opaquely."""


def trace_step(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    optimizer_outside: bool = False,
    kernels: GpuKernels | None = None,
) -> Trace:
    """Trace the step; a second time where the first shows that its assumptions do not hold."""
    reason = "it was asked to stay outside the graph" if optimizer_outside else why_opaque(optimizer)
    probing = noting = on_eagers_path = True
    for _ in range(5):
        session = _Session(
            model, optimizer, batch, opaque_reason=reason, probing=probing, noting=noting, kernels=kernels
        )
        session.on_eagers_path = on_eagers_path
        try:
            return session.trace(train_step)
        except _ProbesReadError:
            probing = False
        except CaptureError as error:
            if on_eagers_path and _reads_nothing(error, model):
                on_eagers_path = False  # a library that asks for a value has another way where it is traced
                continue
            if not session.batch_is_another:
                raise
            noting = False  # perhaps only because its batch is one that notes what is read of it
        except _UntraceableOptimizerError as error:
            reason = f"{type(optimizer).__name__} failed to trace: {error}"
    raise CaptureError("the step traces differently each time: it keeps state that capture cannot see")


def _reads_nothing(error: CaptureError, model: nn.Module) -> bool:
    """Whether a step failed since it reads the value of a tensor that has no memory."""
    return isinstance(error.__cause__, DataDependentOutputException) and fake_mode_of(model) is not None


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What one traced call of the step left behind."""

    outputs: tuple[OutputSlot, ...]
    tensors: list[Any]  # of live numbers their proxies
    cleared: tuple[ParamSlot, ...]
    overwritten: tuple[ParamSlot, ...]
    result: Result
    training_after: tuple[tuple[nn.Module, bool], ...]


class _Session:
    """One attempt at tracing: the fake stand-ins of the user's tensors, and what the step did with them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batch: Any,
        *,
        opaque_reason: str,
        probing: bool,
        noting: bool,
        kernels: GpuKernels | None,
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.optimizer = optimizer
        self.opaque_reason = opaque_reason
        self.stamper = Stamper(model)
        self.stand_ins = StandIns(model, optimizer, batch, probing=probing)
        self.args: dict[InputSlot, Tensor] = {}  # the stand-ins as the tracer hands them to the step
        self.stepped_groups: set[int] = set()
        self.noting = noting
        self.on_eagers_path = True
        self.noted: Noted | None = None
        self.stepping = False  # whether the optimizer is stepped by its own `step`
        self.outside_reads: set[tuple[int, str]] = set()
        self.live = self.stand_ins.live()  # what the user has in each input
        self.own_groups_and_state = optimizer.param_groups, optimizer.state

    # -- the trace ----------------------------------------------------------------------------------------

    def trace(self, train_step: TrainStep) -> Trace:
        """Trace; the user's objects are as before when this returns or raises."""
        slots = list(self.stand_ins.inputs)
        outcomes: list[_Outcome] = []
        self.reach = Reach(train_step, self.model, self.optimizer)  # before anything is put in the place of another
        self.held = Held(self.reach)

        def flat(*args: Tensor) -> list[Tensor]:
            self.args = dict(zip(slots, args, strict=True))
            outcomes.append(self._run(train_step))
            return outcomes[0].tensors

        with preserved(self.model, self.optimizer):
            generators = python_generators()
            try:
                module = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(
                    *self.stand_ins.inputs.values()
                )
            except (_ProbesReadError, _UntraceableOptimizerError):
                raise
            except Exception as error:
                raise CaptureError(explain(error)) from error
            if python_generators() != generators:
                raise CaptureError(
                    "the step draws from Python's or numpy's random numbers, which a graph cannot do: draw "
                    "them outside and pass them in the batch, or use torch's generator"
                )
        self.held.close()
        kept = self._keep_used_inputs(module, slots)
        kept += self._make_rates_live(module)
        early = [one for one in self.reads.assumptions if is_checked_beforehand(one)]
        before = beforehand(module, early)
        insert_checks(module, [one for one in self.reads.assumptions if one not in early])
        return Trace(
            module=module,
            convention=replace(self._convention(tuple(kept), outcomes[0]), beforehand=before),
            opaque_reason=self.opaque_reason,
        )

    def _run(self, train_step: TrainStep) -> _Outcome:
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        self.tracer: Any = proxy_mode.tracer
        storages = {s: memory_of(t)._cdata for s, t in self.args.items()}
        self.outside = OutsideTensors(self.stand_ins.mode, self.tracer, self.stamper.line)
        self.reads = Reads(self.tracer, self._held, self.stamper.line)
        with ExitStack() as stack:
            stack.enter_context(self.stamper.attached(self.tracer))
            self._hook_in(stack)
            self._swap_in(stack)
            stack.enter_context(watched_autograd(self._around_backward, self._note_returned))
            stack.enter_context(only_this_optimizer(self.optimizer, lambda: self.stepping))
            stack.enter_context(refusing_schedulers())
            stack.enter_context(refusing_scalers())
            stack.enter_context(autocast_cache())
            stack.enter_context(foreach_on_stand_ins())
            stack.enter_context(shapeless_kernels())
            if self.kernels is not None:
                stack.enter_context(self.kernels)
            stack.enter_context(ReadsInOps(self.reads))
            named = self.stand_ins.params | self.stand_ins.buffers
            stand_ins = {key: self.args[slot] for key, slot in named.items()}
            stack.enter_context(TorchCalls(stand_ins, self.outside, self.reads, self.tracer.graph))
            if self.on_eagers_path:
                stack.enter_context(as_in_eager())
            training = [(module, module.training) for module in self.model.modules()]
            resets, batch = list[int](), self._batch()
            self.noted = Noted(batch) if self.noting else None
            batch = batch if self.noted is None else self.noted.batch
            with noted_generator_resets(lambda: resets.append(len(self.tracer.graph.nodes))), learning(self.reach):
                result = train_step(self.model, self.optimizer, batch)
            self.held.settle()
            self._refuse_draws_after(resets)
            self.outside.check()
            outcome = self._collect(result, training)
        for slot, tensor in self.args.items():
            if memory_of(tensor)._cdata != storages[slot]:
                raise CaptureError(f"the step gives {slot.name} other memory (`.data =`): write in place")
        return outcome

    def _refuse_draws_after(self, resets: list[int]) -> None:
        """A step that resets the generator and then draws: the graph would draw other numbers, silently."""
        if not resets or not any(is_random(node) for node in list(self.tracer.graph.nodes)[resets[0] :]):
            return
        raise CaptureError(
            "the step sets the state of the random generator and then draws from it, which a graph cannot repeat. "
            "Activation checkpointing inside the model (torch.utils.checkpoint, gradient_checkpointing_enable()) does "
            "this around dropout: switch it off, the plan does its work; a manual_seed belongs before the step"
        )

    def _held(self, node: fx.Node) -> Any:
        """What the user has in an input or constant of the growing graph."""
        if node.op == "get_attr":
            return getattr(self.tracer.root, str(node.target))
        slot = list(self.stand_ins.inputs)[self.tracer.graph.find_nodes(op="placeholder").index(node)]
        if isinstance(slot, GradSlot) and slot in self.stand_ins.lazy:
            raise _ProbesReadError
        if isinstance(slot, StateSlot) and slot in self.stand_ins.lazy:
            return self._lazy_state[self.live[slot.param]][slot.key]
        return self.live[slot]

    @cached_property
    def _lazy_state(self) -> dict[Tensor, dict[str, Any]]:
        """The state that the optimizer's first step would make, of real tensors; wanted where the step reads it."""
        with outside_the_trace():
            return first_state(self.optimizer, *self.own_groups_and_state)

    @property
    def batch_is_another(self) -> bool:
        """Whether the step got a batch that notes what is read of it."""
        return self.noted is not None and self.noted.is_another

    def _batch(self) -> Any:
        leaves = [self.args.get(BatchSlot(leaf=i), leaf) for i, leaf in enumerate(self.stand_ins.batch_leaves)]
        return pytree.tree_unflatten(leaves, self.stand_ins.batch_tree)

    def _hook_in(self, stack: ExitStack) -> None:
        """The parameters' own hooks onto their stand-ins: what they do to gradients becomes part of the graph."""
        for slot in self.stand_ins.named():
            live, stand_in = slot.tensor(), self.args[slot]
            if not live.requires_grad:
                continue  # hooks from before it was frozen: they never run
            on_gradient, once_accumulated = hooks_of(live)
            register: list[tuple[Any, Any]] = [(stand_in.register_hook, hook) for hook in on_gradient]
            register += [(stand_in.register_post_accumulate_grad_hook, hook) for hook in once_accumulated]
            for put_on, hook in register:
                stack.callback(put_on(hook).remove)

    def _swap_in(self, stack: ExitStack) -> None:
        """Stand-ins into the model, the optimizer and the `.grad`s; `preserved` takes them out again."""
        named = {s.name: t for s, t in self.args.items() if isinstance(s, (ParamSlot, BufferSlot))}
        stack.enter_context(_reparametrize_module(self.model, named, tie_weights=True))
        refresh_recurrent_layers(self.model)
        optimizer, states = self.optimizer, defaultdict[Tensor, dict[str, Any]](dict)
        for p, param in self.stand_ins.grouped():
            numbers = {k: v for k, v in optimizer.state.get(p, {}).items() if not isinstance(v, Tensor)}
            if numbers:
                states[self.args[param]].update(numbers)
        groups = []
        for i, group in enumerate(optimizer.param_groups):
            params = [self.args[self.stand_ins.params[id(p)]] for p in group["params"]]
            groups.append(WatchedGroup({**group, "params": params}, i, self.outside_reads))
        for slot, tensor in self.args.items():
            if isinstance(slot, StateSlot):
                states[self.args[slot.param]][slot.key] = tensor
            if isinstance(slot, GradSlot):
                self.args[slot.param].grad = tensor
        self.group_numbers = [_numbers(group) for group in groups]
        self.by_stand_in = {id(self.args[slot]): slot for slot in self.stand_ins.params.values()}
        optimizer.param_groups, optimizer.state = groups, states  # type: ignore[assignment]
        optimizer.step = self._step  # type: ignore[method-assign, assignment]

    # -- what the step does while it is traced --------------------------------------------------------------

    @contextmanager
    def _around_backward(self, accumulates: bool) -> Iterator[None]:
        if accumulates:
            self._remove_probes()
        with self.stamper.backward():
            yield
        if accumulates:
            self._note_gradients()

    def _remove_probes(self) -> None:
        """The step reaches a `.grad` that it has not cleared: from here on it is what eager has."""
        for slot in self.stand_ins.lazy:
            if isinstance(slot, GradSlot) and self.args[slot.param].grad is self.args[slot]:
                self.args[slot.param].grad = None
                self.stand_ins.absent.add(slot.param)

    def _note_gradients(self) -> None:
        for param in self.stand_ins.params.values():
            grad = self.args[param].grad
            if grad is not None and grad is not self.args.get(GradSlot(param=param)):
                self._note_gradient(param, grad)

    def _note_returned(self, inputs: Any, gradients: Any) -> None:
        inputs = [inputs] if isinstance(inputs, Tensor) else inputs
        for tensor, gradient in zip(inputs, gradients, strict=False):
            slot = self.by_stand_in.get(id(tensor)) or self.stand_ins.params.get(id(tensor))
            if slot is not None and gradient is not None:
                self._note_gradient(slot, gradient)

    def _note_gradient(self, param: ParamSlot, gradient: Tensor) -> None:
        slot = get_proxy_slot(gradient, self.tracer, None)
        if slot is not None:
            slot.proxy.node.meta[GRADIENT_OF] = param.name

    def _step(self, closure: Any = None) -> None:
        if closure is not None:
            raise CaptureError("optimizer.step(closure) evaluates the loss anew: call it without a closure")
        self._remove_probes()
        with self.stamper.optimizer():
            self._note_gradients()
            stepped = [
                [self.by_stand_in[id(p)] for p in dict.__getitem__(group, "params") if p.grad is not None]
                for group in self.optimizer.param_groups
            ]
            self.stepped_groups.update(i for i, slots in enumerate(stepped) if slots)
            if self.opaque_reason:
                self._record_opaque_step([slot for slots in stepped for slot in slots])
            else:
                self._trace_step()

    def _trace_step(self) -> None:
        groups: list[Any] = self.optimizer.param_groups
        saved = [dict.__getitem__(group, "lr") for group in groups]
        self.stepping = True
        try:
            for i, group in enumerate(groups):
                group.watching = False
                group["lr"] = Rate.of(i, saved[i])
            with RatesKept(self.tracer.graph):
                type(self.optimizer).step(self.optimizer)
        except Exception as error:
            raise _UntraceableOptimizerError(f"{type(error).__name__}: {error}") from error
        finally:
            self.stepping = False
            for group, rate in zip(groups, saved, strict=True):
                group["lr"] = rate
                group.watching = True

    def _record_opaque_step(self, slots: list[ParamSlot]) -> None:
        known = set(slots)
        state = [s for s in self.args if isinstance(s, StateSlot) and s.param in known]
        everyone = [self.by_stand_in[id(p)] for g in self.optimizer.param_groups for p in g["params"]]
        autocast = Autocast.now(self.args[slot].device.type for slot in everyone)
        target = OpaqueStep(self.optimizer, receivers=slots, everyone=everyone, autocast=autocast)
        args = (
            [self._node(self.args[slot]) for slot in slots],
            [self._node(self.args[slot].grad) for slot in slots],
            [self._node(self.args[slot]) for slot in state],
        )
        node = self.tracer.create_node("call_function", target, args, {}, name="optimizer_step")
        node.meta["val"] = None

    def _node(self, tensor: Tensor | None) -> fx.Node:
        slot = None if tensor is None else get_proxy_slot(tensor, self.tracer, None)
        if slot is None:
            raise CaptureError("a .grad is set to a tensor from outside the step: pass it in the batch")
        node: fx.Node = slot.proxy.node
        return node

    # -- what the step left behind --------------------------------------------------------------------------

    def _collect(self, result: Any, training: list[tuple[nn.Module, bool]]) -> _Outcome:
        leaves, tree = pytree.tree_flatten(result)
        outputs = self._returned(leaves)
        cleared, overwritten = [], []
        for param in self.stand_ins.params.values():
            grad, incoming = self.args[param].grad, self.args.get(GradSlot(param=param))
            if grad is not None and grad is not incoming:
                outputs[GradSlot(param=param)] = grad
            if grad is None and self.args[param].requires_grad:
                cleared.append(param)
            if grad is not incoming:
                overwritten.append(param)
        outputs |= self._rebound_buffers()
        self._check_left_behind()
        return _Outcome(
            outputs=tuple(outputs),
            tensors=list(outputs.values()),
            cleared=tuple(cleared),
            overwritten=tuple(overwritten),
            result=Result(
                tree=tree,
                leaves=tuple(None if ReturnOut(leaf=i) in outputs else leaf for i, leaf in enumerate(leaves)),
            ),
            training_after=tuple((m, m.training) for m, before in training if m.training != before),
        )

    def _returned(self, leaves: list[Any]) -> dict[OutputSlot, Any]:
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *PLAIN, *LIVE)):
                raise CaptureError(
                    f"the step returns a {type(leaf).__name__}: return tensors and numbers, in tuples or dicts"
                )
        found: dict[OutputSlot, Any] = {}
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, LIVE):
                found[ReturnOut(leaf=i)] = fx.Proxy(leaf.source, self.tracer)
            elif isinstance(leaf, Tensor) and get_proxy_slot(leaf, self.tracer, None) is not None:
                found[ReturnOut(leaf=i)] = leaf
        return found

    def _rebound_buffers(self) -> dict[OutputSlot, Any]:
        """Buffers that the step replaced by new tensors (`self.mean = ...`): outputs, put back at each call."""
        rebound: dict[OutputSlot, Any] = {}
        for buffer in self.stand_ins.buffers.values():
            now = buffer.owner._buffers.get(buffer.key)
            if now is not None and now is not self.args[buffer]:
                rebound[buffer] = now
        return rebound

    def _check_left_behind(self) -> None:
        for param in self.stand_ins.params.values():
            if param.owner._parameters.get(param.key) is not self.args[param]:
                raise CaptureError(f"the step puts another tensor in place of parameter {param.name}")
        for slot, tensor in self.args.items():
            if isinstance(slot, BatchSlot) and tensor.grad is not None:
                raise CaptureError(
                    f"the step leaves a .grad on {slot.name}: clear it before the step ends, or use "
                    "torch.autograd.grad for gradients of the batch"
                )
        for i, (group, before) in enumerate(zip(self.optimizer.param_groups, self.group_numbers, strict=True)):
            if _numbers(group) != before:
                raise CaptureError(f"the step changes optimizer group {i} (its rate, ...): do so outside of it")

    # -- from the raw graph to one with live inputs ----------------------------------------------------------

    def _keep_used_inputs(self, module: fx.GraphModule, slots: list[InputSlot]) -> list[InputSlot]:
        kept: list[InputSlot] = []
        for slot, node in zip(slots, module.graph.find_nodes(op="placeholder"), strict=True):
            if not node.users and (isinstance(slot, GradSlot) or slot in self.stand_ins.lazy):
                module.graph.erase_node(node)
            elif isinstance(slot, GradSlot) and slot in self.stand_ins.lazy:
                raise _ProbesReadError
            else:
                kept.append(slot)
        return kept

    def _make_rates_live(self, module: fx.GraphModule) -> list[RateSlot]:
        if self.opaque_reason:
            return []
        rates = make_rates_live(module.graph)
        hidden = self.stepped_groups - {slot.group for slot in rates}
        if hidden:
            raise _UntraceableOptimizerError(f"the learning rate of groups {sorted(hidden)} is hidden")
        return rates

    def _convention(self, slots: tuple[InputSlot, ...], outcome: _Outcome) -> Convention:
        read = {slot.param for slot in slots if isinstance(slot, GradSlot)}
        return Convention(
            model=self.model,
            optimizer=self.optimizer,
            inputs=slots,
            outputs=outcome.outputs,
            cleared=outcome.cleared,
            dropped=tuple(param for param in outcome.overwritten if param not in read),
            result=outcome.result,
            training_after=outcome.training_after,
            guards=self._guards(read),
        )

    def _guards(self, read: set[ParamSlot]) -> Guards:
        groups = self.optimizer.param_groups
        baked = set(self.outside_reads)
        if not self.opaque_reason:
            baked |= {(i, key) for i, group in enumerate(groups) for key in _numbers(group) if key != "lr"}
        named = [(slot, slot.tensor()) for slot in self.stand_ins.named()]
        beside = self.held.tensors(without=[tensor for _, tensor in named])
        return Guards(
            batch=BatchGuard.of(
                pytree.tree_unflatten(self.stand_ins.batch_leaves, self.stand_ins.batch_tree),
                unread=frozenset() if self.noted is None else self.noted.unread,
            ),
            surroundings=(
                *Autocast.now(tensor.device.type for tensor in self.stand_ins.inputs.values()),
                Switches.now(),
                Modules(
                    [ModuleGuard.of(path, module) for path, module in self.held.modules()],
                    [TensorGuard.of(slot, tensor) for slot, tensor in named]
                    + [TensorGuard.of(Fixed(name=path, held=tensor), tensor) for path, tensor in beside],
                ),
                self.held,
            ),
            optimizer=OptimizerGuard.of(self.optimizer, baked=baked, traced=not self.opaque_reason),
            gradients=tuple(
                (p, p in read) for p in self.stand_ins.params.values() if p in read or p in self.stand_ins.absent
            ),
            changes=self.held.changes,
        )


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in dict.items(group) if key not in ("params", "param_names")}
