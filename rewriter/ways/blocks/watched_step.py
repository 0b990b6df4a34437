"""A training step that runs as it would have anyway, while hooks note what each module keeps and how long it takes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from profiler.measuring.meters import Meter, Span, Watch
from profiler.tracing.fake_tensors.patches import patched
from profiler.tracing.joint import Template, forward_of
from rewriter.ways.blocks.profile import BlockProfile, ModuleCall, SeenStorage
from rewriter.ways.blocks.recomputation import Arguments
from rewriter.ways.rehearsal import Facts, Rehearsal, begin_watching
from rewriter.ways.trials import digest


@dataclass(kw_only=True, eq=False)
class _Call:
    """A call while it runs."""

    id: int
    path: str
    ordinal: int
    parent: _Call | None
    position: int | None
    enter: int
    leave: int = -1
    given: tuple[int, ...] = ()
    gradient_in: int | None = None
    gradient_out: int | None = None
    why_not: str = ""


@dataclass(kw_only=True)
class _Seen:
    """A storage while the step runs; the weak reference also keeps its number from being given to another."""

    ref: StorageWeakRef
    nbytes: int
    seen: int
    gone: int | None = None
    savers: set[int | None] = field(default_factory=set)

    def is_gone(self) -> bool:
        return bool(self.ref.expired())  # type: ignore[no-untyped-call]


@dataclass(kw_only=True)
class _Notes:
    """What is to be noted when the gradient of a tensor is complete."""

    ref: weakref.ref[Tensor]
    ends: list[Callable[[], None]] = field(default_factory=list)
    begins: list[Callable[[], None]] = field(default_factory=list)

    def __call__(self, _: Tensor) -> None:
        for note in (*self.ends, *self.begins):
            note()


class BlockRehearsal:
    """One forward of the model and its backward; `profile` and `facts` are there once both are over."""

    def __init__(self, model: nn.Module, meter: Meter) -> None:
        self._model = model
        self._meter = meter
        self._facts = Rehearsal(None, call=forward_of, differentiates_twice=True)
        self._watch: Watch | None = None
        self._spans: list[Span] | None = None
        self._marks = 0
        self._turn: int | None = None
        self._end: int | None = None
        self._calls: list[_Call] = []
        self._stack: list[_Call] = []
        self.is_cut = False
        self._ordinals: dict[str, int] = {}
        self._storages: dict[int, _Seen] = {}
        self._handed: dict[int, _Seen] = {}  # those that calls were given, while they live
        self._inputs: list[tuple[weakref.ref[Tensor], int, _Call]] = []  # what calls were given, and its version
        self._notes: dict[tuple[int, int], _Notes] = {}
        self._handles: list[RemovableHandle] = []
        self._before: set[int] = set()  # storages of before the step
        self._digests: dict[tuple[str, str], int] = {}
        self._sizes: dict[str, int] = {}

    # -- the step -------------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns, with an eye on all of its modules."""
        self._digests = _digests(self._model)
        self._note_start((args, kwargs))
        may_begin = begin_watching(self)
        gc.collect()  # what nobody holds any more would go during the step, and count as given back by it
        self._watch = self._meter.watch() if may_begin else None
        with (
            patched(list(self._patches())),
            torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor),
        ):
            returned = self._facts.forward(self._model, args, kwargs)
        self._mark()
        if self.refusal:
            return returned
        _, tensors = Template.of(returned)
        self._hook(tensors, self._turned, is_end=True)
        return returned

    @property
    def refusal(self) -> str:
        """Why nothing can be learned of what the model returns; empty where it can be."""
        return self._facts.refusal

    def _note_start(self, batch: Any) -> None:
        state = [*self._model.parameters(), *self._model.buffers()]
        batch_tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        for kind, tensors in (("state", state), ("batch", batch_tensors), ("gradients", gradients)):
            new = {_address(t): t.untyped_storage().nbytes() for t in tensors if t.layout == torch.strided}
            self._sizes[kind] = sum(nbytes for key, nbytes in new.items() if key not in self._before)
            self._before |= set(new)

    def _mark(self) -> int:
        """A new mark: its position. What was handed around and is gone by now went before it."""
        if self._watch is not None:
            self._watch.mark()
        for key in [key for key, storage in self._handed.items() if storage.is_gone()]:
            self._handed.pop(key).gone = self._marks
        self._check_inputs()
        self._marks += 1
        return self._marks - 1

    def _check_inputs(self) -> None:
        """A second run needs what the first was given: no block whose input is written to, then or later."""
        living = [(tensor, version, call) for ref, version, call in self._inputs if (tensor := ref()) is not None]
        for tensor, version, call in living:
            if tensor._version != version:
                call.why_not = call.why_not or "what it is given is written to"
        self._inputs = [(weakref.ref(t), version, call) for t, version, call in living if t._version == version]

    # -- modules --------------------------------------------------------------------------------------------

    def _patches(self) -> Iterator[tuple[nn.Module, str, Any]]:
        for path, module in callable_modules(self._model):
            yield module, "forward", self._watched(path, module.forward)

    def _watched(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        places = _places(self._model, path)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._called(path, places) as call:
                self._entered(call, args, kwargs)
                returned = forward(*args, **kwargs)
                self._left(call, returned)
            return returned

        return run

    @contextmanager
    def _called(self, path: str, places: dict[str, int]) -> Iterator[_Call]:
        parent = self._stack[-1] if self._stack else None
        ordinal = self._ordinals.get(path, 0)
        self._ordinals[path] = ordinal + 1
        call = _Call(
            id=len(self._calls),
            path=path,
            ordinal=ordinal,
            parent=parent,
            position=places.get("" if parent is None else parent.path),
            enter=self._mark(),
        )
        self._calls.append(call)
        self._stack.append(call)
        try:
            yield call
        finally:
            self._stack.pop()
            if call.leave < 0:
                call.leave, call.why_not = self._mark(), "it raised an error"

    def _entered(self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a call is given."""
        if not torch.is_grad_enabled():
            call.why_not = "it runs without gradients"
        try:
            tensors = Arguments(args, kwargs).tensors()
        except Exception as error:
            call.why_not = f"it is called with what cannot be copied ({type(error).__name__})"
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        numbers = (self._number(tensor, made_before=call.enter) for tensor in tensors)
        call.given = tuple(dict.fromkeys(number for number in numbers if number is not None))
        for number in call.given:
            self._handed.setdefault(number, self._storages[number])
        self._hook(tensors, lambda: self._gradients_out(call), is_end=True)
        self._inputs += [(weakref.ref(t), t._version, call) for t in tensors if not t.is_inference()]

    def _left(self, call: _Call, returned: Any) -> None:
        call.leave = self._mark()
        tensors, _ = _tensors_of((returned,), {})
        for tensor in tensors:
            self._number(tensor, made_before=call.leave)
        self._hook(tensors, lambda: self._gradients_in(call), is_end=False)

    # -- storages -------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor:
        key = self._number(tensor, made_before=self._marks)
        if key is not None:
            self._storages[key].savers.add(self._stack[-1].id if self._stack else None)
        return tensor

    def _number(self, tensor: Tensor, *, made_before: int) -> int | None:
        """The number of a storage that was made in this step, before that mark."""
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return None
        key = _address(tensor)
        if key in self._before:
            return None
        if key not in self._storages:
            storage = tensor.untyped_storage()
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._storages[key] = _Seen(ref=ref, nbytes=storage.nbytes(), seen=made_before)
        return key

    # -- the backward ---------------------------------------------------------------------------------------

    def _hook(self, tensors: Iterable[Tensor], note: Callable[[], None], *, is_end: bool) -> None:
        """Have `note` called when a tensor's gradient is complete: one backward ends there before another begins."""
        for tensor in tensors:
            if not tensor.requires_grad:
                continue
            key = id(tensor), tensor._version  # a tensor that is written to has another place on the tape
            known = self._notes.get(key)
            if known is None or known.ref() is not tensor:
                known = self._notes[key] = _Notes(ref=weakref.ref(tensor))
                self._handles.append(tensor.register_hook(known))  # type: ignore[no-untyped-call]
            (known.ends if is_end else known.begins).append(note)

    def _turned(self) -> None:
        if self._turn is None:
            self._turn = self._mark()
            torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def _gradients_in(self, call: _Call) -> None:
        if self._is_backward and call.gradient_in is None:
            call.gradient_in = self._mark()

    def _gradients_out(self, call: _Call) -> None:
        if self._is_backward and call.gradient_out is None:
            call.gradient_out = self._mark()

    @property
    def _is_backward(self) -> bool:
        return self._turn is not None and self._end is None

    def _over(self) -> None:
        if self._end is None:
            self._end = self._mark()
            for storage in self._storages.values():
                if storage.gone is None and storage.is_gone():
                    storage.gone = self._end

    def stop(self) -> None:
        """End the watch, if there is one."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._spans = watch.spans()
            self.is_cut = watch.is_cut

    # -- what was seen --------------------------------------------------------------------------------------

    def facts(self) -> Facts | None:
        """What the caller does with the outputs; None where no backward has come."""
        return self._facts.facts()

    def written(self) -> set[tuple[str, str]]:
        """The buffers that are not as they were, by module and name."""
        now = _digests(self._model)
        return {key for key, value in now.items() if self._digests.get(key) != value}

    def profile(self) -> BlockProfile | None:
        """All that was seen; None where no backward has come, or somebody else was profiling."""
        for handle in self._handles:
            handle.remove()
        self.stop()
        spans = self._spans
        if spans is None or self._turn is None or self._end is None or len(spans) <= self._end + 1:
            return None
        return BlockProfile(
            calls=tuple(_done(call) for call in self._calls),
            storages={
                key: SeenStorage(nbytes=s.nbytes, seen=s.seen, gone=s.gone, savers=frozenset(s.savers))
                for key, s in self._storages.items()
            },
            spans=tuple(spans),
            turn=self._turn,
            end=self._end,
            parameter_bytes=self._sizes["state"],
            batch_bytes=self._sizes["batch"],
            gradient_bytes=self._sizes["gradients"],
            replay_bytes=torch.get_rng_state().numel(),
            device=self._meter.device,
            name=type(self._model).__name__,
        )


def callable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules below a model whose forward can be watched and wrapped, each once; none inside of compiled ones."""
    sealed = [path for path, module in model.named_modules() if path and _is_compiled(module)]
    for path, module in model.named_modules():
        if path and not any(path == p or path.startswith(f"{p}.") for p in sealed):
            yield path, module


def _is_compiled(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        return True
    return module._compiled_call_impl is not None


def _places(model: nn.Module, path: str) -> dict[str, int]:
    """Where a module stands in the nn.Sequential that it is a child of, by that one's path."""
    above, _, _ = path.rpartition(".")
    parent = model.get_submodule(above)
    if not runs_in_sequence(parent):
        return {}
    children = list(parent.children())
    module = model.get_submodule(path)
    return {above: children.index(module)} if len(children) == len(parent._modules) else {}


def runs_in_sequence(module: nn.Module) -> bool:
    """Whether a module does nothing but call its children one after the other."""
    return type(module).forward is nn.Sequential.forward and "forward" not in vars(module)


def _tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], str]:
    """The tensors in what a call gets or gives, whatever objects they are in; and what forbids a copy of those."""
    try:
        return Arguments(args, kwargs).tensors(), ""
    except Exception as error:
        leaves = pytree.tree_leaves((args, kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)], type(error).__name__


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _digests(model: nn.Module) -> dict[tuple[str, str], int]:
    return {
        (path, name): int(digest(buffer))
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.layout == torch.strided
    }


def _done(call: _Call) -> ModuleCall:
    return ModuleCall(
        id=call.id,
        path=call.path,
        ordinal=call.ordinal,
        parent=None if call.parent is None else call.parent.id,
        position=call.position,
        enter=call.enter,
        leave=call.leave,
        given=call.given,
        gradient_in=call.gradient_in,
        gradient_out=call.gradient_out,
        why_not=call.why_not,
    )
