"""Putting stand-ins where the user's objects are while a step is traced, and everything back afterwards."""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import _meta_registrations, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _foreach_utils

from profiler.backend import generator_states, restore_generator_states
from profiler.errors import CaptureError

Patch = tuple[Any, str, Any]


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Inside, each (owner, name, value) is an attribute of its owner; afterwards what was there, or nothing."""
    saved: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in patches:
            saved.append((owner, name, _own(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, before in reversed(saved):
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


_ABSENT = object()


def _own(owner: Any, name: str) -> Any:
    """What the owner itself has under a name, not what its class would lend it."""
    if name in vars(owner):
        return vars(owner)[name]
    return getattr(owner, name) if hasattr(getattr(type(owner), name, None), "__set__") else _ABSENT


def with_subclasses(base: type, names: Iterable[str], make: Callable[[Any], Any]) -> list[Patch]:
    """Patches by which these methods of a class and of its subclasses are what `make` makes of them."""
    classes, wanted = [base, *_subclasses(base)], list(names)
    return [(cls, name, make(vars(cls)[name])) for cls in classes for name in wanted if name in vars(cls)]


def _subclasses(cls: type) -> list[Any]:
    direct: list[Any] = cls.__subclasses__()
    return [found for sub in direct for found in (sub, *_subclasses(sub))]


@contextmanager
def preserved(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Whatever happens inside: the modules, the optimizer and every random generator are as before."""
    put_back = python_of([*model.modules(), *with_wrapped(optimizer)])
    with generators_kept():
        try:
            yield
        finally:
            put_back()


def python_of(objects: Iterable[Any]) -> Callable[[], None]:
    """What gives modules and optimizers the attributes back that they have now, and what their containers hold."""
    owners = list(objects)
    saved = [(vars(o), dict(vars(o)), _inner_dicts(o)) for o in owners]
    containers = [one for o in owners if isinstance(o, nn.Module) for one in _containers(o)]

    def put_back() -> None:
        for attributes, before, inner in saved:
            refill(attributes, before)
            for live, contents in inner:
                refill(live, contents)
        for container, held in containers:
            _refill_container(container, held)

    return put_back


def with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those that it wraps and lends its groups and state from."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return [optimizer, *(found for one in inner for found in with_wrapped(one))]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever is drawn or seeded inside: every random generator is as before."""
    generators = generator_states_of_all()
    try:
        yield
    finally:
        restore_generators(generators)


def _inner_dicts(owner: Any) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    # A module's parameters, buffers and hooks live in dicts of its own; an optimizer's are swapped whole.
    values = vars(owner).values() if isinstance(owner, nn.Module) else ()
    return [(value, dict(value)) for value in values if isinstance(value, dict)]


def _containers(module: nn.Module) -> list[tuple[Any, list[Any]]]:
    """Lists, sets and deques that a module has as attributes, also in its dicts, and what they hold."""
    values = [value for value in vars(module).values() if isinstance(value, (list, set, deque, dict))]
    inside = [one for value in values if isinstance(value, dict) for one in value.values()]
    return [(one, list(one)) for one in (*values, *inside) if isinstance(one, (list, set, deque))]


def _refill_container(live: Any, contents: list[Any]) -> None:
    if len(live) == len(contents) and all(map(is_, live, contents)):
        return
    live.clear()
    (live.update if isinstance(live, set) else live.extend)(contents)


def refill(live: dict[Any, Any], contents: dict[Any, Any]) -> None:
    """Make a dict hold these very objects, in their order."""
    if list(live) == list(contents) and all(live[key] is value for key, value in contents.items()):
        return
    live.clear()
    live.update(contents)


def generator_states_of_all() -> tuple[Any, ...]:
    """Where every random generator is: torch's of all devices, Python's and numpy's."""
    return torch.get_rng_state(), generator_states(), python_generators()


def python_generators() -> tuple[Any, Any]:
    """The states of Python's own generator and of numpy's, where numpy is loaded."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state(legacy=False)
    if state is not None:
        state = (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"])
    return random.getstate(), state


def restore_generators(states: tuple[Any, ...]) -> None:
    """Put every generator where `generator_states_of_all` found it."""
    cpu, others, python = states
    torch.set_rng_state(cpu)
    restore_generator_states(others)
    set_python_generators(python)


def set_python_generators(states: tuple[Any, Any]) -> None:
    """Put Python's generator and numpy's where `python_generators` found them."""
    python, numpy_state = states
    random.setstate(python)
    if numpy_state is not None:
        numpy = sys.modules["numpy"]
        key, pos, has_gauss, gauss = numpy_state
        words = numpy.frombuffer(key, dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", words, pos, has_gauss, gauss))


class WatchedGroup(dict[str, Any]):
    """A parameter group that notes which of its numbers the step itself reads, outside `optimizer.step`.

    Its learning rate is what `read_rate` makes of it.
    """

    def __init__(
        self,
        group: dict[str, Any],
        index: int,
        reads: set[tuple[int, str]],
        read_rate: Callable[[int, float], Any],
    ) -> None:
        super().__init__(group)
        self.watching = True
        self._index = index
        self._reads = reads
        self._read_rate = read_rate

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if self.watching and key == "lr" and type(value) is float:
            return self._read_rate(self._index, value)
        self._note(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, noted."""
        if key in self:
            return self[key]
        self._note(key)
        return default

    def items(self) -> Any:
        """All pairs, all noted."""
        for key in self:
            self._note(key)
        return super().items()

    def values(self) -> Any:
        """All values, all noted."""
        for key in self:
            self._note(key)
        return super().values()

    def _note(self, key: str) -> None:
        if self.watching and key not in ("params", "param_names"):
            self._reads.add((self._index, key))


def threads_of_this() -> Callable[[], bool]:
    """What says whether it runs for whoever calls this: in the same thread, or in one of the autograd engine's.

    What is patched is patched for all: another thread of the user's, which loads data or trains something else, must
    find everything as it is.
    """
    owner = threading.current_thread()

    def is_mine() -> bool:
        now = threading.current_thread()
        return now is owner or isinstance(now, threading._DummyThread)  # the engine's were not begun by Python

    return is_mine


@contextmanager
def watched_autograd(around: Callable[..., Any], on_gradients: Callable[[Any, Any], None]) -> Iterator[None]:
    """Run every backward inside `around(accumulates)`; tell `on_gradients` what torch.autograd.grad returned."""
    saved = (torch.autograd.backward, torch.autograd.grad, torch.autograd._engine_run_backward)  # type: ignore[attr-defined]

    mine = threads_of_this()

    def backward(*args: Any, **kwargs: Any) -> None:
        with around(True) if mine() else nullcontext():
            saved[0](*args, **kwargs)

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not mine():
            return saved[1](outputs, inputs, *args, **kwargs)
        with around(False):
            gradients = saved[1](outputs, inputs, *args, **kwargs)
        on_gradients(inputs, gradients)
        return gradients

    def engine(*args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
        # Also what was imported by name before (`from torch.autograd import grad`) comes through here.
        if not mine():
            return saved[2](*args, accumulate_grad=accumulate_grad, **kwargs)
        with around(accumulate_grad):
            return saved[2](*args, accumulate_grad=accumulate_grad, **kwargs)

    ours = {"backward": backward, "grad": grad, "_engine_run_backward": engine}
    with patched((torch.autograd, name, function) for name, function in ours.items()):
        yield


@contextmanager
def only_this_optimizer(optimizer: Optimizer, is_expected: Callable[[], bool]) -> Iterator[None]:
    """Another optimizer that steps inside is refused: its parameters are no inputs of the graph.

    So is this one where nobody expects it: it is stepped by something else than its `step`.
    """

    mine = threads_of_this()

    def refuse(stepping: Optimizer, args: Any, kwargs: Any) -> None:
        if not mine():
            return
        if stepping is optimizer and not is_expected():
            raise CaptureError(
                "the step uses a copy of `optimizer.step` that was made before, or the step of its class: call "
                "optimizer.step() itself"
            )
        if stepping is not optimizer:
            raise CaptureError(
                f"the step also steps another optimizer ({type(stepping).__name__}): give all parameters to "
                "one optimizer, in groups, or make it two steps; or plan forward and backward only, "
                "checkpoint(forward_backward, model, None, batch, ...), and step all optimizers after it"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run ops without recording them, and yet as in training.

    Not `no_grad`: some kernels (mkldnn's recurrent layer) ask for the mode and then leave out what the backward
    needs. Nor under autocast: a captured graph has its casts in it. Graphs are run, timed and rewritten under this.
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


@contextmanager
def autocast_cache() -> Iterator[None]:
    """Cached casts as in eager: a weight used twice is cast once, and its gradient summed in low precision."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def foreach_on_stand_ins() -> Iterator[None]:
    """Optimizers and clipping choose their multi-tensor forms as for real tensors: they ask for exact types."""
    lists = (optimizer_module._foreach_supported_types, _foreach_utils._foreach_supported_types)
    for types in lists:
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in lists:
            types.remove(FakeTensor)


@contextmanager
def shapeless_kernels() -> Iterator[None]:
    """Kernels without a shape function, or with one that refuses what they take, get one here.

    Fused optimizers are not run on made-up data: they only write in place.
    """
    table = fake_impls.op_implementations_dict
    kernels: dict[Any, Callable[..., Any]] = {
        torch.ops.aten._fused_sgd_.default: lambda *args, **kwargs: None,
        torch.ops.aten._fused_adagrad_.default: lambda *args, **kwargs: None,
        torch.ops.aten._grouped_mm.default: _grouped_product,
    }
    added = {kernel: shape for kernel, shape in kernels.items() if kernel not in table}
    table.update(added)
    try:
        yield
    finally:
        for kernel in added:
            del table[kernel]


def _grouped_product(
    mode: Any, op: Any, a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """The shape of a product of groups (a mixture of experts), in all precisions: torch's own knows bfloat16 alone."""
    with mode:
        return _meta_registrations._create_grouped_mm_output_tensor(a, b, offs, out_dtype or a.dtype)  # type: ignore[no-untyped-call]


def refresh_recurrent_layers(model: nn.Module) -> None:
    """Recurrent layers keep a list of their weights beside the parameters: remake it from what is there."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
