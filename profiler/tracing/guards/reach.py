"""Everything that a step's code can reach, as it was before the code ran.

The walk begins at the step, the model and the optimizer, and follows only what can be read: names that code which
really ran loads. Each function that the step calls is learned just before it runs, so that what it may change has been
noted by then.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import weakref
from collections import UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.modules import module as module_globals
from torch.optim import Optimizer

from profiler.tracing.guards import holders
from profiler.tracing.guards.code_reads import EVERYTHING, CodeReads, Keys, Target, joined, reads_of
from profiler.tracing.guards.exact import UNSET, is_plain
from profiler.tracing.guards.holders import Attributes, Holder, Kind, Selection, has_state, own_dict
from profiler.tracing.guards.territory import is_closed, is_installed, is_library, is_watched_file

MOST_HOLDERS = 50_000
MOST_ENTRIES = 10_000

# What every module has, such as `training`: torch's own, and guarded by the model's guards.
INTERNAL = frozenset(vars(nn.Module()))
_FLAT = frozenset({"_flat_weights", "_flat_weight_refs"})  # a recurrent layer's list of its own parameters
_OF_OPTIMIZERS = frozenset(
    {"param_groups", "state", "defaults", "step", "_opt_called", "_step_count", "grad_scale", "found_inf"}
    | {
        f"_optimizer_{when}_{where}_hooks"
        for when in ("step", "state_dict", "load_state_dict")
        for where in ("pre", "post")
    }
)

MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in MODULE_HOOKS)


class Reach:
    """What a step can reach. `learn` what runs, then ask for what was read and what has changed."""

    def __init__(self, step: Any, model: nn.Module, optimizer: Optimizer) -> None:
        self.holders: dict[int, list[Holder]] = {}  # by the object
        self._globals: dict[int, Holder] = {}
        self.tensors: dict[int, tuple[str, Tensor]] = {}  # that lie outside the model
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        self.beyond = ""  # the first of what was left out because there is too much
        self._anywhere: set[str] = set()
        self._of_class: defaultdict[type, set[str]] = defaultdict(set)
        self._asked: set[str] = set()
        self._outer: set[str] = set()
        self._counted: set[str] = set()
        self._contents: dict[str, Keys] = {}
        self._open: set[int] = set()  # objects whose attributes are read by names that are in no code
        self._pending: defaultdict[str, list[Holder]] = defaultdict(list)
        self._idle: defaultdict[int, list[tuple[FunctionType, str]]] = defaultdict(list)  # methods, by their code
        self._queue: deque[tuple[Any, str, str | None, bool]] = deque()
        self._learned: dict[tuple[int, int], tuple[CodeType, CodeReads | None]] = {}
        self._met: set[tuple[int, type]] = set()
        self._ran: set[int] = set()  # ids of code objects
        self._lenient = False
        self._home: Any = None  # the step's own globals, which need no name
        self._begin(step, model, optimizer)

    # -- where it begins ------------------------------------------------------------------------------------

    def _begin(self, step: Any, model: nn.Module, optimizer: Optimizer) -> None:
        self._home = getattr(_innermost(step), "__globals__", None)
        self._follow(model, "module model")
        self._drain()
        self._hooks_of_tensors(model)
        for name in GLOBAL_HOOKS:
            self._follow(getattr(module_globals, name), f"torch.nn.modules.module.{name}")
        private = {
            name for name in own_dict(optimizer) if name.startswith("_") and is_library(type(optimizer).__module__)
        }
        self._hold(optimizer, "optimizer", Attributes(without=_OF_OPTIMIZERS | private))
        self._follow(type(optimizer), _class_path(type(optimizer)))
        self._begin_at(step)
        self._drain()

    def _begin_at(self, step: Any) -> None:
        """The step itself, under the names that its author has for it."""
        while isinstance(step, functools.partial):
            self._hold(step, "the step", holders.Arguments())
            step = step.func
        if isinstance(step, MethodType):
            self._follow(step.__self__, type(step.__self__).__name__)
            step = step.__func__
        if not isinstance(step, FunctionType):
            self._follow(step, type(step).__name__)
            return
        self._hold(step, "", holders.Cells())
        self._hold(step, step.__name__, holders.Defaults())
        self._hold(step, step.__name__, Attributes())
        for value in list(own_dict(step).values()):
            self._follow(value, step.__name__)
        wrapped = getattr(step, "__wrapped__", None)
        if wrapped is not None:
            self._begin_at(wrapped)

    def _hooks_of_tensors(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
                for hook in list((hooks or {}).values()):
                    self._follow(hook, f"a gradient hook of {name}")
                    self.learn_function(hook)

    # -- learning what runs ---------------------------------------------------------------------------------

    def learn(self, code: CodeType, variables: dict[str, Any]) -> CodeReads | None:
        """Note what a code object that is about to run can read, once; None where it is of no interest."""
        key = (id(code), id(variables))
        if key in self._learned:
            return self._learned[key][1]
        self._ran.add(id(code))
        for function, path in self._idle.pop(id(code), ()):
            self._follow(function, path)
        reads = reads_of(code) if is_watched_file(code.co_filename) else None
        self._learned[key] = (code, reads)
        if reads is None:
            return None
        self._learn_globals(reads, variables)
        self._outer |= reads.outer_names
        self._counted |= reads.counted
        for name, keys in reads.contents.items():
            self._contents[name] = joined(self._contents[name], keys) if name in self._contents else keys
        for level, name in reads.imports:
            self._learn_import(level, name, variables)
        self._read_anywhere(reads.anywhere)
        self._drain()
        return reads

    def learn_function(self, function: Any) -> None:
        """The same for a function that may run where nobody watches, such as a hook."""
        function = _innermost(function)
        if isinstance(function, FunctionType):
            self.learn(function.__code__, function.__globals__)

    def _learn_globals(self, reads: CodeReads, variables: dict[str, Any]) -> None:
        holder = self._globals.get(id(variables)) or self._hold_globals(variables)
        for name in sorted(reads.global_names | (reads.counted & holder.before.keys())):
            if name in holder.names:
                continue
            holder.names.add(name)
            value = holder.before.get(name)
            if not holder.late or isinstance(value, ModuleType):
                self._follow(value, holder.label(name), name, lenient=holder.lenient)

    def _hold_globals(self, variables: dict[str, Any]) -> Holder:
        module = str(variables.get("__name__", "?"))
        suffix = "" if variables is self._home else f" of {module}"
        kind, late, lenient = holders.Globals(suffix=suffix), is_library(module), is_installed(module)
        holder = Holder(path="", what=variables, kind=kind, late=late, lenient=lenient)
        self._globals[id(variables)] = holder
        return holder

    def _learn_import(self, level: int, name: str, variables: dict[str, Any]) -> None:
        package = variables.get("__package__") or ""
        full = importlib.util.resolve_name("." * int(level or 0) + name, package) if level else name
        if full in sys.modules:
            self._follow(sys.modules[full], full)

    def meet(self, code: CodeType, reads: CodeReads, first: Any) -> None:
        """A function runs whose first argument, its `self`, is this object."""
        kind = first if isinstance(first, type) else type(first)
        if (id(code), kind) in self._met:
            return
        self._met.add((id(code), kind))
        if _asks_others(kind):
            self._read_anywhere(reads.own)
        for cls in kind.__mro__[:-1]:
            new = reads.own - self._of_class[cls]
            self._of_class[cls] |= new
            self._visit(new)
        self._drain()

    def ask(self, one: Any, name: str) -> None:
        """An attribute that this object may not have is asked for; UNSET where it is not known of which."""
        if one is UNSET:
            self._asked.add(name)
        else:
            self._of_class[type(one)].add(name)

    def open(self, targets: Iterable[Any], names: Iterable[str]) -> None:
        """Attributes of these objects, and of what they have under `names`, are read by names that are in no code."""
        reached = list(targets)
        for _ in range(3):
            reached = [one for one in reached if id(one) not in self._open and not is_plain(one)]
            self._open.update(map(id, reached))
            for one in reached:
                for holder in self.holders.get(id(one), ()):
                    self._visit(map(str, holder.before))
            reached = [own_dict(one)[name] for one in reached for name in names if name in own_dict(one)]
        self._drain()

    def _read_anywhere(self, names: Iterable[str]) -> None:
        new = set(names) - self._anywhere
        self._anywhere |= new
        self._visit(new)

    def _visit(self, names: Iterable[str]) -> None:
        """Follow what waits under these names, where it can be read now."""
        for name in sorted(names):
            for holder in self._pending.pop(name, ()):
                if self.reads(holder, name):
                    self._follow(holder.before[name], holder.label(name), name, lenient=holder.lenient)
                else:
                    self._pending[name].append(holder)

    # -- what counts ----------------------------------------------------------------------------------------

    def reads(self, holder: Holder, key: Any) -> bool:
        """Whether code that ran can have read this value."""
        match holder.kind.selection:
            case Selection.NAMES:
                return self._reads_attribute(holder, key)
            case Selection.VARIABLES:
                return key in (self._outer if isinstance(holder.kind, holders.Cells) else holder.names)
            case Selection.KEYS:
                keys = self._keys(holder)
                return keys is EVERYTHING or key in keys  # type: ignore[operator]
            case Selection.ALL | Selection.DRAWN:
                return True

    def _reads_attribute(self, holder: Holder, name: str) -> bool:
        what = holder.what
        if isinstance(what, type):
            return self._reads_member(what, name, holder.before.get(name))
        return name in self._anywhere or id(what) in self._open or name in self._of_class.get(type(what), ())

    def _reads_member(self, cls: type, name: str, value: Any) -> bool:
        functions = list(_functions_in(value))
        if functions:  # one that did not run is not called next time either
            return any(id(function.__code__) in self._ran for function in functions)
        if name.startswith("__"):  # `__len__` and the like: called without being named
            return callable(value) and name not in ("__class__", "__base__")
        return name in self._anywhere or id(cls) in self._open or name in self._of_class.get(cls, ())

    def _keys(self, holder: Holder) -> Keys:
        if holder.whole:
            return EVERYTHING
        keys: Keys = frozenset()
        for name in holder.names:
            keys = joined(keys, self._contents.get(name, EVERYTHING))
        return keys

    def ran(self, holder: Holder) -> bool:
        """Whether the holder counts at all: of a function only if it ran."""
        return not isinstance(holder.what, FunctionType) or id(holder.what.__code__) in self._ran

    def counts(self, key: Any) -> bool:
        """Whether code that ran reads a value only to write it back."""
        return key in self._counted

    def may_appear(self, holder: Holder) -> frozenset[str]:
        """Names that an object does not have and that would be read, or would hide what its class has."""
        if isinstance(holder.kind, holders.Globals):
            return frozenset(holder.names - holder.before.keys())
        if isinstance(holder.kind, holders.Entries):
            keys = self._keys(holder)
            return keys - holder.before.keys() if isinstance(keys, frozenset) else frozenset()
        what = holder.what
        if isinstance(what, (type, ModuleType)) or not isinstance(holder.kind, Attributes):
            return frozenset()
        names = self._of_class.get(type(what), set()) | self._asked
        kind: Any = type(what)
        names = names | {n for n in self._members_of(kind) if n in self._anywhere}
        parts = (*what._parameters, *what._buffers, *what._modules) if isinstance(what, nn.Module) else ()
        return frozenset(names - holder.before.keys() - holder.kind.without - {*parts})

    @functools.cache  # noqa: B019 - one reach is made for one capture
    def _members_of(self, kind: type) -> frozenset[str]:
        """Attributes of a class that its objects can hide by one of their own, and that count."""
        members = {name: value for cls in reversed(kind.__mro__[:-1]) for name, value in vars(cls).items()}
        free = {name: value for name, value in members.items() if not hasattr(type(value), "__set__")}
        return frozenset(name for name, value in free.items() if self._reads_member(kind, name, value))

    # -- the walk -------------------------------------------------------------------------------------------

    def _follow(self, value: Any, path: str, name: str | None = None, *, lenient: bool = False) -> None:
        if value is not UNSET and not is_plain(value):
            self._queue.append((value, path, name, lenient))

    def _drain(self) -> None:
        while self._queue:
            value, path, name, self._lenient = self._queue.popleft()
            self._look_at(value, path)
            for holder in self.holders.get(id(value), ()):
                if name is None:
                    holder.whole = True
                else:
                    holder.names.add(name)

    def _look_at(self, value: Any, path: str) -> None:
        if id(value) in self.holders or id(value) in self.modules or id(value) in self.tensors:
            return
        if len(self.holders) >= MOST_HOLDERS:
            self.beyond = self.beyond or path
            return
        if isinstance(value, Tensor):
            self.tensors[id(value)] = (path, value)
        elif isinstance(value, nn.Module):
            self._look_at_module(value, path)
        elif isinstance(value, type):
            self._look_at_class(value)
        elif isinstance(value, ModuleType):
            self._hold(value, path, holders.Variables(), follow=not is_library(value.__name__))
        elif not self._look_into(value, path):
            self._look_at_object(value, path)

    def _look_into(self, value: Any, path: str) -> bool:
        """Containers, functions and whatever else leads on to other values."""
        for kinds, kind in _CONTAINERS:
            if isinstance(value, kinds):
                self._hold_container(value, path, kind)
                return True
        if isinstance(value, FunctionType):
            self._look_at_function(value, path)
        elif isinstance(value, functools.partial):
            self._hold(value, path, holders.Arguments())
        elif isinstance(value, np.ndarray):
            self._look_at_array(value, path)
        elif isinstance(value, ContextVar):
            self._hold(value, f"the context variable {value.name}", holders.Context())
        elif has_state(value):
            self._hold(value, path, holders.State())
        else:
            return self._pass_through(value, path)
        return True

    def _pass_through(self, value: Any, path: str) -> bool:
        inner = list(_inside(value))
        for one in inner:
            self._follow(one, path)
        return bool(inner)

    def _look_at_object(self, value: Any, path: str) -> None:
        kind: Any = type(value)
        if is_closed(kind):
            return
        self._hold(value, path, Attributes())
        self._follow(type(value), _class_path(type(value)))

    def _look_at_module(self, module: nn.Module, path: str) -> None:
        self.modules[id(module)] = (path, module)
        without = INTERNAL | _FLAT if isinstance(module, nn.RNNBase) else INTERNAL
        self._hold(module, path, Attributes(without=without))
        self._follow(type(module), _class_path(type(module)))
        for name, child in module._modules.items():
            self._follow(child, _child_path(path, name))
        for key in MODULE_HOOKS:
            for hook in list(vars(module)[key].values()):
                self._follow(hook, f"a hook of {path}")
                self.learn_function(hook)
        if not path.startswith("module "):
            own = {**module._parameters, **module._buffers}
            self.tensors |= {id(t): (f"{path}.{name}", t) for name, t in own.items() if t is not None}

    def _look_at_class(self, cls: type) -> None:
        for base in cls.__mro__[:-1]:
            if id(base) not in self.holders and (not is_closed(base) or issubclass(base, nn.Module)):
                self._hold(base, _class_path(base), holders.Members(), follow=not is_library(base.__module__))

    def _look_at_function(self, function: FunctionType, path: str) -> None:
        if is_library(function.__module__ or ""):
            return
        self._hold(function, f" of {function.__name__}", holders.Cells())
        self._hold(function, function.__name__, holders.Defaults())
        if own_dict(function):
            self._hold(function, function.__name__, Attributes())
            self._follow(own_dict(function).get("__wrapped__"), path)

    def _look_at_array(self, array: Any, path: str) -> None:
        small = array.nbytes <= holders.LARGEST_ARRAY_BYTES and not array.dtype.hasobject
        self._hold(array, path, holders.Bytes() if small else holders.Huge())

    def _hold_container(self, value: Any, path: str, kind: Kind) -> None:
        self._hold(value, path, kind if len(value) <= MOST_ENTRIES else holders.Huge())
        if own_dict(value):
            self._hold(value, path, Attributes())

    def _hold(self, value: Any, path: str, kind: Kind, *, follow: bool = True) -> None:
        lenient = self._lenient or (isinstance(value, type) and is_installed(value.__module__))
        holder = Holder(path=path, what=value, kind=kind, late=not follow, lenient=lenient)
        self._note(holder)
        if not follow:
            return
        by_name = kind.selection is Selection.NAMES
        for key, one in holder.before.items():
            methods = list(_functions_in(one)) if isinstance(value, type) else []
            for function in methods:
                self._idle[id(function.__code__)].append((function, holder.label(key)))
            if methods:
                continue
            if by_name and not self.reads(holder, key):
                self._pending[key].append(holder)
            else:
                name = key if isinstance(key, str) and (by_name or isinstance(kind, holders.Cells)) else None
                self._follow(one, holder.label(key), name, lenient=lenient)

    def _note(self, holder: Holder) -> None:
        self.holders.setdefault(id(holder.what), []).append(holder)

    def all_holders(self) -> Iterator[Holder]:
        """Every holder, in the order in which they were found."""
        for found in self.holders.values():
            yield from found
        yield from self._globals.values()

    def unwatched(self) -> list[Holder]:
        """What is too large to be watched, and is read."""
        huge = [holder for holder in self.all_holders() if isinstance(holder.kind, holders.Huge)]
        for holder in huge:
            keys = self._keys(holder)
            if isinstance(keys, frozenset) and isinstance(holder.what, dict):  # a few entries of it are no burden
                holder.kind = holders.Entries()
                holder.before = {key: dict.__getitem__(holder.what, key) for key in keys if key in holder.what}
                holder.late = holder.partial = True
        return [holder for holder in huge if isinstance(holder.kind, holders.Huge) and self._keys(holder)]


_CONTAINERS: tuple[tuple[Any, Kind], ...] = (
    ((dict,), holders.Entries()),
    ((list, tuple, deque), holders.Items()),
    ((set, frozenset), holders.Elements()),
    ((MappingProxyType,), holders.View()),
)


def _innermost(step: Any) -> Any:
    """The function at the bottom of partials, methods, decorators and callable objects."""
    while True:
        if isinstance(step, functools.partial):
            step = step.func
        elif isinstance(step, MethodType):
            step = step.__func__
        elif isinstance(step, FunctionType):
            if not hasattr(step, "__wrapped__"):
                return step
            step = step.__wrapped__
        else:
            call = type(step).__call__
            if not isinstance(call, FunctionType):
                return step
            step = call


def _inside(value: Any) -> Iterator[Any]:
    """What an object without values of its own leads to."""
    if isinstance(value, MethodType):
        yield value.__func__
        yield value.__self__
    elif isinstance(value, property):
        yield from (one for one in (value.fget, value.fset) if one is not None)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, (UserDict, UserList)):
        yield value.data
        yield type(value)
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, functools._lru_cache_wrapper):
        yield value.__wrapped__


def _functions_in(member: Any) -> Iterator[FunctionType]:
    """The Python functions that a member of a class is made of."""
    if isinstance(member, FunctionType):
        yield member
    elif isinstance(member, (staticmethod, classmethod, property, functools.cached_property)):
        for inner in _inside(member):
            yield from _functions_in(inner)


def _asks_others(kind: type) -> bool:
    """Whether attributes of such objects are looked up by code of their class, perhaps on other objects."""
    found = [vars(cls) for cls in kind.__mro__[:-1] if cls is not nn.Module]
    return any("__getattr__" in own or "__getattribute__" in own for own in found)


def _class_path(cls: type) -> str:
    return f"class {cls.__name__}"


def _child_path(path: str, name: str) -> str:
    return f"module {name}" if path == "module model" else f"{path}.{name}"


def resolve(target: Target, known: dict[str, Any]) -> Any:
    """The object that an expression of a function means, where that can be told without running it; else UNSET."""
    value = known.get(target.root, UNSET)
    for name in target.chain:
        value = own_dict(value).get(name, UNSET)
    return value
