"""Putting stand-ins where the user's objects are while a step is traced, and everything back afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _foreach_utils

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
    objects: list[Any] = [*model.modules(), optimizer]
    saved = [(vars(o), dict(vars(o)), _inner_dicts(o)) for o in objects]
    with generators_kept():
        try:
            yield
        finally:
            for attributes, before, inner in saved:
                _refill(attributes, before)
                for live, contents in inner:
                    _refill(live, contents)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever is drawn or seeded inside: every random generator is as before."""
    generators = _generator_states()
    try:
        yield
    finally:
        _restore_generators(generators)


def _inner_dicts(owner: Any) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    # A module's parameters, buffers and hooks live in dicts of its own; an optimizer's are swapped whole.
    values = vars(owner).values() if isinstance(owner, nn.Module) else ()
    return [(value, dict(value)) for value in values if isinstance(value, dict)]


def _refill(live: dict[Any, Any], contents: dict[Any, Any]) -> None:
    if list(live) == list(contents) and all(live[key] is value for key, value in contents.items()):
        return
    live.clear()
    live.update(contents)


def _generator_states() -> tuple[Any, ...]:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if used else None
    return torch.get_rng_state(), cuda, python_generators()


def python_generators() -> tuple[Any, Any]:
    """The states of Python's own generator and of numpy's, where numpy is loaded."""
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state(legacy=False)
    if state is not None:
        state = (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"])
    return random.getstate(), state


def _restore_generators(states: tuple[Any, ...]) -> None:
    cpu, cuda, (python, numpy_state) = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy_state is not None:
        numpy = sys.modules["numpy"]
        key, pos, has_gauss, gauss = numpy_state
        words = numpy.frombuffer(key, dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", words, pos, has_gauss, gauss))


class WatchedGroup(dict[str, Any]):
    """A parameter group that notes which of its numbers the step itself reads, outside `optimizer.step`."""

    def __init__(self, group: dict[str, Any], index: int, reads: set[tuple[int, str]]) -> None:
        super().__init__(group)
        self.watching = True
        self._index = index
        self._reads = reads

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, noted."""
        self._note(key)
        return super().get(key, default)

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


@contextmanager
def watched_autograd(around: Callable[..., Any], on_gradients: Callable[[Any, Any], None]) -> Iterator[None]:
    """Run every backward inside `around(accumulates)`; tell `on_gradients` what torch.autograd.grad returned."""
    saved = (torch.autograd.backward, torch.autograd.grad, torch.autograd._engine_run_backward)  # type: ignore[attr-defined]

    def backward(*args: Any, **kwargs: Any) -> None:
        with around(True):
            saved[0](*args, **kwargs)

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with around(False):
            gradients = saved[1](outputs, inputs, *args, **kwargs)
        on_gradients(inputs, gradients)
        return gradients

    def engine(*args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
        # Also what was imported by name before (`from torch.autograd import grad`) comes through here.
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

    def refuse(stepping: Optimizer, args: Any, kwargs: Any) -> None:
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
def noted_generator_resets(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` whenever the step sets or seeds a default generator: the graph would not do it again."""
    places = [(torch, "set_rng_state"), (torch, "manual_seed"), (torch.random, "set_rng_state")]
    places += [(torch.random, "manual_seed"), (torch.cuda, "set_rng_state"), (torch.cuda, "manual_seed_all")]

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            note()
            return function(*args, **kwargs)

        return call

    with patched((module, name, noting(getattr(module, name))) for module, name in places):
        yield


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
    """Fused optimizer kernels without a shape function are not run on made-up data: they only write in place."""
    table = fake_impls.op_implementations_dict
    kernels = (torch.ops.aten._fused_sgd_.default, torch.ops.aten._fused_adagrad_.default)
    added = [kernel for kernel in kernels if kernel not in table]
    for kernel in added:
        table[kernel] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for kernel in added:
            del table[kernel]


def refresh_recurrent_layers(model: nn.Module) -> None:
    """Recurrent layers keep a list of their weights beside the parameters: remake it from what is there."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
