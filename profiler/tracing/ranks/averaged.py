"""A plain model on several processes: the mean of each gradient, in the gradient's own memory and without buckets.

`Averaging` is the user's step with the means taken in eager, and so what a planned one is compared with. While it is
traced, `Averages` takes them instead: the same ops, as nodes of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from profiler.collectives import operators
from profiler.errors import CaptureError
from profiler.tracing.calling_convention import GradSlot, ParamSlot
from profiler.tracing.fake_tensors.patches import watched_autograd
from profiler.tracing.fake_tensors.placed import Placed
from profiler.tracing.ranks import torch_distributed as private
from profiler.tracing.ranks.parallel import AfterBackwards, Communicating, as_communication
from profiler.workload import TrainStep

_aside: ContextVar[bool] = ContextVar("somebody else takes the means of gradients", default=False)


@contextmanager
def means_left_out() -> Iterator[None]:
    """Inside, an Averaging step is the user's own."""
    token = _aside.set(True)
    try:
        yield
    finally:
        _aside.reset(token)


class Averaging:
    """A train step after each of whose backwards every gradient is the mean over the ranks of a group.

    The sum of the gradients by the group's all-reduce, each times 1 / ranks before it: of two ranks what
    DistributedDataParallel has, to the bit; of more, its buckets may add them up in another order.
    """

    def __init__(self, train_step: TrainStep, group: Any) -> None:
        self.__wrapped__ = train_step
        self.group = group

    def __call__(self, model: Any, optimizer: Any, batch: Any) -> Any:
        if _aside.get():
            return self.__wrapped__(model, optimizer, batch)
        means = _Means(self.group)
        with ExitStack() as stack:
            for param in model.parameters():
                if param.requires_grad:
                    stack.callback(param.register_post_accumulate_grad_hook(means.launch).remove)
            stack.enter_context(watched_autograd(means.backward, lambda *_: None))
            return self.__wrapped__(model, optimizer, batch)


def averaging_of(train_step: Any) -> Averaging | None:
    """The Averaging step that a step is, or is wrapped around."""
    while train_step is not None:
        if isinstance(train_step, Averaging):
            return train_step
        train_step = getattr(train_step, "__wrapped__", None)
    return None


class _Means(AfterBackwards):
    """The means of the gradients of one backward: launched as each is complete, waited for after it."""

    def __init__(self, group: Any) -> None:
        self._ops = operators()
        self._share = 1.0 / dist.get_world_size(group)
        self._group = str(group.group_name)
        self._open: list[tuple[Tensor, Tensor]] = []  # a parameter, and the memory that is summed

    def launch(self, param: Tensor) -> None:
        """The gradient of a parameter is complete."""
        gradient = param.grad
        if gradient is None or gradient.requires_grad or gradient.layout != torch.strided:
            raise CaptureError(
                f"a gradient of shape {list(param.shape)} is sparse or itself differentiated (create_graph), of which "
                "no mean is taken inside a step with process_group"
            )
        with torch.no_grad():
            memory = gradient.mul_(self._share)
            if not memory.is_contiguous():
                memory = memory.contiguous()
            self._ops.all_reduce_(memory, "sum", self._group)
        self._open.append((param, memory))

    def after_backward(self) -> None:
        """Gradients are the means from here on."""
        self.finish()

    def finish(self) -> None:
        """Wait for all that was launched."""
        with torch.no_grad():
            for param, memory in self._open:
                mean = self._ops.wait_tensor(memory)
                assert param.grad is not None
                if param.grad is not mean:
                    self.hand_over(param, mean)
        self._open.clear()

    def hand_over(self, param: Any, mean: Tensor) -> None:
        """Put a mean where it is not yet: the tensor that was there stays the `.grad`."""
        param.grad.copy_(mean)


class Averages(_Means, Communicating):
    """The same while a step is traced."""

    def __init__(self, step: Averaging, placed: Placed) -> None:
        super().__init__(step.group)
        self._placed = placed
        self._slots: dict[int, ParamSlot] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Each parameter that is trained tells when its gradient is complete."""
        with ExitStack() as stack:
            stack.enter_context(means_left_out())
            stack.enter_context(private.waits_alias())
            for slot in self._placed.stand_ins.params.values():
                stand_in: Any = self._placed.args[slot]
                self._slots[id(stand_in)] = slot
                if stand_in.requires_grad:
                    stack.callback(stand_in.register_post_accumulate_grad_hook(self.launch).remove)
            yield

    def launch(self, param: Tensor) -> None:
        with as_communication(self._placed.tracer.graph):
            super().launch(param)

    def finish(self) -> None:
        with as_communication(self._placed.tracer.graph):
            super().finish()

    def hand_over(self, param: Any, mean: Tensor) -> None:
        """What reads the gradient from here on reads what was waited for."""
        there = self._placed.args.get(GradSlot(param=self._slots[id(param)]))
        if there is not None and param.grad is there:
            there.copy_(mean)
        else:
            param.grad = mean
