"""Training on several processes as ops of the graph: what DistributedDataParallel does around a model, traced.

The wrapper's own hooks do not run while a step is traced; in their place stand functional collectives, which are
simulated, planned and replayed like all other ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiler.collectives import operators
from profiler.errors import CaptureError
from profiler.tracing.calling_convention import GradSlot, ParamSlot
from profiler.tracing.fake_tensors.patches import patched
from profiler.tracing.fake_tensors.placed import Placed
from profiler.tracing.guards import Guard
from profiler.tracing.ranks import torch_distributed as private
from profiler.tracing.ranks import torch_shards as fsdp
from profiler.tracing.ranks.averaged import Averages, Averaging, averaging_of, means_left_out
from profiler.tracing.ranks.parallel import Communicating, Flag, OneProcess, Parallel, as_communication
from profiler.tracing.ranks.sharded import Shards
from profiler.tracing.ranks.tensor_parallel import Slices, is_in_parts, is_tensor_parallel, why_not_tensor_parallel
from profiler.workload import TrainStep

Layout = tuple[tuple[ParamSlot, ...], ...]  # of each bucket: its parameters in the order of the memory


class LayoutFoundError(Exception):
    """The step was traced with other buckets than the reducer will have: trace again with these."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(f"{len(layout)} buckets")
        self.layout = layout


def parallel_of(model: nn.Module, placed: Placed, layout: Layout | None, train_step: TrainStep) -> Parallel:
    """How the processes of a model's group train together, as its wrapper or the step says."""
    averaging = averaging_of(train_step)
    if averaging is not None:
        return Averages(averaging, placed)
    if private.is_replicated(model):
        return Replicas(model, placed, layout)
    if fsdp.is_sharded(model):
        return Shards(model)
    return Slices() if is_tensor_parallel(model) else OneProcess()


def refuse_unsupported(model: nn.Module) -> None:
    """CaptureError for what of a wrapped model is not captured, by name."""
    if private.is_replicated(model):
        why = private.why_not_replicated(model)
        if why:
            raise CaptureError(f"DistributedDataParallel with {why} is not captured: wrap the model without it")
    if fsdp.is_sharded(model):
        why = fsdp.why_not_sharded(model)
        if why:
            raise CaptureError(f"fully_shard with {why} is not captured: shard the model without it")
    if is_tensor_parallel(model):
        why = why_not_tensor_parallel(model)
        if why:
            raise CaptureError(f"a tensor-parallel model with {why} is not captured: use one mesh of one dimension")
    for path, module in model.named_modules():
        if path and private.is_replicated(module):
            raise CaptureError(
                f"module {path} is wrapped in DistributedDataParallel and the model around it is not: pass the wrapped "
                "model itself, or wrap the whole one"
            )
        if dist.is_available() and isinstance(module, nn.SyncBatchNorm):
            raise CaptureError(
                f"module {path or 'model'} is a SyncBatchNorm, whose statistics are gathered outside of the graph: use "
                "nn.BatchNorm, or plan the parts of the model around it"
            )


def planned_part(model: nn.Module) -> nn.Module:
    """What of a model is planned where the loop stays live: of a wrapped one the model inside, as the wrapper calls it.

    The wrapper's own hooks then reduce gradients as they always do.
    """
    return private.wrapped(model) if private.is_replicated(model) else model


def refuse_shards(model: nn.Module, *, by: str, because: str = "") -> None:
    """CaptureError for a sharded model by another way than own capture: what one rank gathers again, all must."""
    if is_in_parts(model):
        why = f" Its own capture was refused: {because}." if because else ""
        raise CaptureError(
            f"each rank holds a part of this model, and planned by {by} each rank would choose by itself what it runs "
            f"again, which all must.{why} Leave kernels and dynamic as they are, or plan the whole step: "
            "checkpoint(train_step, model, optimizer, batch, budget=...)"
        )


def averaged(train_step: TrainStep, model: nn.Module, group: Any) -> TrainStep:
    """The step of a plain model with the means of gradients in it; CaptureError for a model that takes its own."""
    if private.is_replicated(model) or is_in_parts(model):
        raise CaptureError(
            "process_group is for a plain model: this one is wrapped, and its wrapper reduces gradients; leave one out"
        )
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise CaptureError("this process is no rank of process_group: call checkpoint() on the ranks of the group only")
    return Averaging(train_step, group)


def warm_up_needed(model: Any) -> bool:
    """Whether the model's first steps add up gradients in another order than all later ones."""
    return private.is_replicated(model) and not private.has_rebuilt_buckets(model)


def wrapper_bytes(model: Any) -> int:
    """What a model's wrapper holds for itself all the time: the buckets of DistributedDataParallel."""
    if not private.is_replicated(model):
        return 0
    _, buckets = private.reducer_buckets(model)
    return sum(p.numel() * p.element_size() for bucket in buckets for p in bucket)


@contextmanager
def unsynchronised(model: Any) -> Iterator[None]:
    """Inside, a model and its step communicate with nobody: what runs then is the step's own ops."""
    if not private.is_replicated(model):
        with means_left_out():
            yield
        return

    def forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = private.moved(ddp, args, kwargs)
        return ddp.module(*args, **kwargs)

    with patched([(nn.parallel.DistributedDataParallel, "forward", forward)]):
        yield


# -- DistributedDataParallel ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGuard:
    """Flags of a wrapped model that decide what a step communicates."""

    ddp: Any
    flags: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(ddp: Any) -> ReplicaGuard:
        """The flags as they are."""
        return ReplicaGuard(ddp=ddp, flags=_flags(ddp))

    def holds(self) -> bool:
        return _flags(self.ddp) == self.flags

    def mismatches(self) -> Iterator[str]:
        for (name, then), (_, now) in zip(self.flags, _flags(self.ddp), strict=True):
            if then != now:
                yield f"{name} of the wrapped model was {then} and is {now}"


def _flags(ddp: Any) -> tuple[tuple[str, Any], ...]:
    return (
        ("require_backward_grad_sync", ddp.require_backward_grad_sync),
        ("the broadcast of buffers", private.syncs_buffers(ddp)),
        ("what is not supported", private.why_not_replicated(ddp)),
    )


@dataclass(kw_only=True)
class _Round:
    """The gradients of one synchronised backward, on their way into the buckets."""

    layout: Layout
    pending: list[int]
    memory: dict[int, Tensor] = field(default_factory=dict)
    ready: list[ParamSlot] = field(default_factory=list)
    launched: int = 0

    @staticmethod
    def of(layout: Layout) -> _Round:
        return _Round(layout=layout, pending=[len(bucket) for bucket in layout])

    @property
    def complete(self) -> bool:
        return self.launched == len(self.layout)


class Replicas(Communicating):
    """DistributedDataParallel: rank 0's buffers before a forward, and the mean of gradients, bucket by bucket.

    The buckets are the reducer's, since which values lie together decides in which order ranks add them up.
    """

    def __init__(self, ddp: Any, placed: Placed, layout: Layout | None) -> None:
        self._ddp = ddp
        self._placed = placed
        self._ops = operators()
        self._world = dist.get_world_size(ddp.process_group)
        self._group = str(ddp.process_group.group_name)
        self._rebuilt, self._buckets = private.reducer_buckets(ddp)
        self._live = {slot: slot.tensor() for slot in placed.stand_ins.params.values()}
        self._layout = layout if layout is not None and not self._rebuilt else self._layout_now()
        self._place = {slot: (b, at) for b, bucket in enumerate(self._layout) for slot, at in _offsets(bucket)}
        self._round: _Round | None = None
        self._reducing = False
        self._before = ddp.require_forward_param_sync
        self.guards: tuple[Guard, ...] = (ReplicaGuard.of(ddp),)
        self.flags_after: tuple[Flag, ...] = ()

    def _layout_now(self) -> Layout:
        slots = self._placed.stand_ins.params
        buckets = tuple(tuple(slots[id(p)] for p in bucket) for bucket in self._buckets)
        return buckets if self._rebuilt else tuple(bucket[::-1] for bucket in buckets)

    # -- while the step is traced -------------------------------------------------------------------------------

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The wrapper's forward is ours, and each parameter that is reduced tells when its gradient is complete."""

        def forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            if ddp is not self._ddp:
                private.refuse_another_wrapped()
            return self._forward(*args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(private.waits_alias())
            stack.enter_context(patched([(nn.parallel.DistributedDataParallel, "forward", forward)]))
            for slot in self._place:
                stand_in = self._placed.args[slot]
                if not stand_in.requires_grad:
                    raise CaptureError(
                        f"parameter {slot.name} was frozen after the model was wrapped, and "
                        "DistributedDataParallel still waits for its gradient: freeze it before wrapping"
                    )
                put_on: Any = stand_in.register_post_accumulate_grad_hook
                stack.callback(put_on(lambda p, s=slot: self._ready(s, p)).remove)
            yield

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        ddp = self._ddp
        if private.syncs_buffers(ddp):
            with self._marked():
                self._broadcast_buffers()
        self._reducing = torch.is_grad_enabled() and bool(ddp.require_backward_grad_sync)
        if self._reducing:
            self._check_closed()
            self._round = _Round.of(self._layout)
        args, kwargs = private.moved(ddp, args, kwargs)
        output = ddp.module(*args, **kwargs)
        ddp.require_forward_param_sync = self._reducing
        return output

    def _broadcast_buffers(self) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._ddp.module.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in by_type.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                flat = self._ops.wait_tensor(self._ops.broadcast_(flat, 0, self._group))
                for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    buffer.copy_(part.view(buffer.shape))

    def _marked(self) -> Any:
        return as_communication(self._placed.tracer.graph)

    def _ready(self, slot: ParamSlot, param: Tensor) -> None:
        """The gradient of a parameter is complete; its bucket is launched once all of it and of those before is."""
        if not self._reducing or self._round is None:
            return
        if slot in self._round.ready:
            raise CaptureError(
                f"the gradient of {slot.name} is complete twice for one forward, which DistributedDataParallel "
                "refuses: accumulate inside no_sync()"
            )
        gradient = param.grad
        if gradient is None or gradient.requires_grad or gradient.layout != torch.strided:
            raise CaptureError(
                f"the gradient of {slot.name} is sparse or itself differentiated (create_graph), which is not reduced "
                "inside a captured step"
            )
        with self._marked(), torch.no_grad():
            self._put(slot, param, gradient)

    def _put(self, slot: ParamSlot, param: Tensor, gradient: Tensor) -> None:
        now = self._round
        assert now is not None
        now.ready.append(slot)
        bucket, offset = self._place[slot]
        if bucket not in now.memory:
            numel = sum(self._placed.args[one].numel() for one in self._layout[bucket])
            now.memory[bucket] = torch.empty(numel, dtype=param.dtype, device=param.device)
        view = _view(now.memory[bucket], param, offset)
        torch.mul(gradient, 1.0 / self._world, out=view)
        now.pending[bucket] -= 1
        while now.launched < len(now.pending) and not now.pending[now.launched]:
            self._ops.all_reduce_(now.memory[now.launched], "sum", self._group)
            now.launched += 1

    # -- after a backward ---------------------------------------------------------------------------------------

    def after_backward(self) -> None:
        """Gradients are the means from here on, where all of them are ready."""
        if self._round is not None and self._round.complete:
            with self._marked(), torch.no_grad():
                self._give_back(self._round)
            self._note_order(self._round.ready)
            self._round, self._reducing = None, False

    def _give_back(self, done: _Round) -> None:
        args = self._placed.args
        means = {bucket: self._ops.wait_tensor(memory) for bucket, memory in sorted(done.memory.items())}
        for slot, (bucket, offset) in self._place.items():
            param = args[slot]
            mean = _view(means[bucket], param, offset)
            if param.grad is not None and param.grad is args.get(GradSlot(param=slot)):
                param.grad.copy_(mean)  # the tensor that was there stays the `.grad`, as in eager
            else:
                param.grad = mean

    def _note_order(self, ready: Sequence[ParamSlot]) -> None:
        """Before its buckets were rebuilt, the reducer does so after the first backward, in the order seen here."""
        if self._rebuilt:
            return
        by_position = private.rebuilt_buckets(self._ddp, [self._live[slot] for slot in ready])
        layout = tuple(tuple(ready[i] for i in bucket) for bucket in by_position)
        if layout != self._layout:
            raise LayoutFoundError(layout)

    def _check_closed(self) -> None:
        if self._round is None or not self._round.ready:
            return
        missing = [slot.name for slot in self._place if slot not in self._round.ready]
        raise CaptureError(
            f"{len(missing)} parameters got no gradient ({', '.join(missing[:3])}), and DistributedDataParallel waits "
            "for all of them; find_unused_parameters is not captured: freeze what is unused before wrapping the model"
        )

    def finish(self) -> None:
        """CaptureError where buckets are left open."""
        self._check_closed()
        after = self._ddp.require_forward_param_sync
        if after != self._before:
            self.flags_after = ((self._ddp, "require_forward_param_sync", after),)


def _offsets(bucket: Sequence[ParamSlot]) -> Iterator[tuple[ParamSlot, int]]:
    """Each parameter of a bucket and where its gradient begins."""
    at = 0
    for slot in bucket:
        yield slot, at
        at += slot.tensor().numel()


def _view(memory: Tensor, param: Tensor, offset: int) -> Tensor:
    """The gradient of a parameter within its bucket's memory, laid out like the parameter."""
    return memory.as_strided(param.shape, param.stride(), offset)
