"""Everything that a step's code can reach, as it was before the code ran.

The walk begins at the step, the model and the optimizer, and follows only what can be read: names that code which
really ran loads. Each function that the step calls is learned just before it runs, so that what it may change has been
noted by then.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_globals
from torch.optim import Optimizer

from profiler.errors import CaptureError
from profiler.tracing.guards import kinds
from profiler.tracing.guards.chance import is_another_each_time
from profiler.tracing.guards.code_reads import CodeReads, reads_of
from profiler.tracing.guards.exact import UNSET, is_plain
from profiler.tracing.guards.holders import Holder
from profiler.tracing.guards.inner_objects import asks_others, innermost, metaclasses_of
from profiler.tracing.guards.kinds import Attributes, own_dict
from profiler.tracing.guards.object_walk import GLOBAL_HOOKS, OF_OPTIMIZERS, Walk, class_path
from profiler.tracing.guards.optimizers import global_step_hooks
from profiler.tracing.guards.putting_back import PuttingBack, cannot_be_put_back
from profiler.tracing.guards.readable import Readable
from profiler.tracing.guards.territory import is_installed, is_library, is_watched_file, module_of

# How code asks whether there are files, and which.
_OF_FILES = frozenset({"exists", "is_file", "is_dir", "isfile", "isdir", "getmtime", "listdir", "scandir", "iterdir"})


class Reach:
    """What a step can reach. `learn` what runs, then ask for what was read and what has changed."""

    def __init__(self, step: Any, model: nn.Module, optimizer: Optimizer, *, whole_optimizer: bool = False) -> None:
        self.readable = Readable()
        own_modules = {id(module) for module in model.modules()}
        self.found = Walk(self.readable, own_modules, self.learn_function, whole_optimizer=whole_optimizer)
        self.trials = PuttingBack(self.all_holders, self.found.beside)
        self._globals: dict[int, Holder] = {}
        self._learned: dict[tuple[int, int], tuple[CodeType, CodeReads | None]] = {}
        self._met: set[tuple[int, type]] = set()
        self._home: Any = None  # the step's own globals, which need no name
        self._begin(step, model, optimizer)
        if whole_optimizer:
            self._follow_whole(optimizer)

    def all_holders(self) -> Iterator[Holder]:
        """Every holder, in the order in which they were found."""
        for found in self.found.holders.values():
            yield from found
        yield from self._globals.values()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is done inside: what this reaches, then or now, holds what it held when it was found.

        CaptureError names what takes nothing back.
        """
        try:
            yield
        finally:
            stubborn = self.trials.put_back()
        if stubborn:
            raise CaptureError(cannot_be_put_back(stubborn))

    # -- where it begins ------------------------------------------------------------------------------------

    def _begin(self, step: Any, model: nn.Module, optimizer: Optimizer) -> None:
        self._home = getattr(innermost(step), "__globals__", None)
        self.found.follow(model, "module model")
        self.found.drain()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.found.hold(tensor, name, kinds.OnTensor())
        self._hooks_of_tensors(model)
        self.found.hold(Tensor, "class Tensor", kinds.Members(), follow=False)
        for name in GLOBAL_HOOKS:
            self.found.follow(getattr(module_globals, name), f"torch.nn.modules.module.{name}")
        private = {
            name for name in own_dict(optimizer) if name.startswith("_") and is_library(module_of(type(optimizer)))
        }
        self.found.hold(optimizer, "optimizer", Attributes(without=OF_OPTIMIZERS | private))
        self.found.follow(type(optimizer), class_path(type(optimizer)))
        self._begin_at(step)
        self.found.drain()

    def _follow_whole(self, optimizer: Optimizer) -> None:
        """State, groups and hooks, too: the optimizer runs as itself."""
        self.found.hold(optimizer, "optimizer", Attributes())
        self.open([optimizer], ())
        for value in (*own_dict(optimizer).values(), *global_step_hooks()):
            self.found.follow(value, "optimizer")
        self.found.drain()

    def _begin_at(self, step: Any) -> None:
        """The step itself, under the names that its author has for it."""
        while isinstance(step, functools.partial):
            self.found.hold(step, "the step", kinds.Arguments())
            step = step.func
        if isinstance(step, MethodType):
            self.found.follow(step.__self__, type(step.__self__).__name__)
            step = step.__func__
        if not isinstance(step, FunctionType):
            self.found.follow(step, type(step).__name__)
            return
        self.found.hold(step, "", kinds.Cells())
        self.found.hold(step, step.__name__, kinds.Defaults())
        self.found.hold(step, step.__name__, Attributes())
        for value in list(own_dict(step).values()):
            self.found.follow(value, step.__name__)
        wrapped = getattr(step, "__wrapped__", None)
        if wrapped is not None:
            self._begin_at(wrapped)

    def _hooks_of_tensors(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
                for hook in list((hooks or {}).values()):
                    self.found.follow(hook, f"a gradient hook of {name}")
                    self.learn_function(hook)

    # -- learning what runs ---------------------------------------------------------------------------------

    def learn(self, code: CodeType, variables: dict[str, Any]) -> CodeReads | None:
        """Note what a code object that is about to run can read, once; None where it is of no interest."""
        key = (id(code), id(variables))
        if key in self._learned:
            return self._learned[key][1]
        self.readable.note_ran(code)
        self.found.wake(code)
        reads = reads_of(code) if is_watched_file(code.co_filename) else None
        self._learned[key] = (code, reads)
        if reads is None:
            return None
        self._learn_globals(reads, variables)
        self._learn_surroundings(code, reads, variables)
        self.readable.note(reads)
        if not is_installed(str(variables.get("__name__", ""))):
            self.readable.note_users_own(code)
        for level, name in reads.imports:
            self._learn_import(level, name, variables)
        self.found.visit(self.readable.note_anywhere(reads.anywhere))
        self.found.visit(reads.counted | reads.written)
        self.found.drain()
        return reads

    def learn_function(self, function: Any) -> None:
        """The same for a function that may run where nobody watches, such as a hook."""
        function = innermost(function)
        if isinstance(function, FunctionType):
            self.learn(function.__code__, function.__globals__)

    def _learn_globals(self, reads: CodeReads, variables: dict[str, Any]) -> None:
        holder = self._globals.get(id(variables)) or self._hold_globals(variables)
        names = reads.global_names | ((reads.counted | reads.written) & holder.before.keys())
        if "globals" in reads.global_names:  # by names that are in no code
            names |= {name for name in holder.before if not name.startswith("__")}
            holder.whole = True
        for name in sorted(names):
            if name in holder.names:
                continue
            holder.names.add(name)
            value = holder.before.get(name)
            if not holder.late or isinstance(value, ModuleType):
                self.found.follow(value, holder.label(name), name, lenient=holder.lenient)

    def _learn_surroundings(self, code: CodeType, reads: CodeReads, variables: dict[str, Any]) -> None:
        """The clock and the environment, where the user's own code asks for them."""
        module = str(variables.get("__name__", ""))
        if is_library(module) or is_installed(module):
            return
        named = [variables[name] for name in reads.global_names if name in variables]
        imported = {*reads.outer_names, *(name for _, name in reads.imports)} & sys.modules.keys()
        named += [sys.modules[name] for name in sorted(imported)]
        attributes = reads.anywhere | reads.own
        if is_another_each_time(named, attributes):
            self.found.once[f"asks for the time or for chance (in {code.co_name})"] = None
        if "__annotations__" in attributes:
            self.found.unseen[
                f"{code.co_name} reads annotations of functions or classes, which are not looked into"
            ] = None
        if attributes & _OF_FILES:
            self.found.once[f"looks for files (in {code.co_name})"] = None
        if attributes & {"modules", "import_module"} and any(one is sys or one is importlib for one in named):
            for text in code.co_consts:
                self.found.follow(sys.modules.get(text) if isinstance(text, str) else None, str(text))
        if any(one is os.environ or one is os.getenv for one in named) or (
            any(one is os for one in named) and attributes & {"environ", "getenv"}
        ):
            self.found.follow(os.environ, "os.environ")

    def _hold_globals(self, variables: dict[str, Any]) -> Holder:
        module = str(variables.get("__name__", "?"))
        suffix = "" if variables is self._home else f" of {module}"
        kind, late, lenient = kinds.Globals(suffix=suffix), is_library(module), is_installed(module)
        holder = Holder(path="", what=variables, kind=kind, late=late, lenient=lenient)
        self._globals[id(variables)] = holder
        return holder

    def _learn_import(self, level: int, name: str, variables: dict[str, Any]) -> None:
        package = variables.get("__package__") or ""
        full = importlib.util.resolve_name("." * int(level or 0) + name, package) if level else name
        if full in sys.modules:
            self.found.follow(sys.modules[full], full)

    def meet(self, code: CodeType, reads: CodeReads, first: Any) -> None:
        """A function runs whose first argument, its `self`, is this object."""
        kind = first if isinstance(first, type) else type(first)
        if (id(code), kind) in self._met:
            return
        self._met.add((id(code), kind))
        if asks_others(kind) or isinstance(first, Tensor):
            self.found.visit(self.readable.note_anywhere(reads.own))
        above = metaclasses_of(kind) if isinstance(first, type) else ()
        for cls in (*kind.__mro__[:-1], *above):
            self.found.visit(self.readable.note_of_class(cls, reads.own))
        self.found.drain()

    def ask(self, one: Any, name: str) -> None:
        """An attribute that this object may not have is asked for; UNSET where it is not known of which."""
        if one is UNSET or isinstance(one, Tensor):
            self.readable.note_asked(name)
            self.found.visit((name,))
        else:
            self.readable.note_of_class(type(one), (name,))

    def open(self, targets: Iterable[Any], names: Iterable[str]) -> None:
        """Attributes of these objects, and of what they have under `names`, are read by names that are in no code."""
        reached = list(targets)
        if not self.readable.any_open:
            self.readable.note_open(())
            self.found.visit_what_waits_on_tensors()
        for _ in range(3):
            reached = [one for one in reached if not self.readable.is_open(one) and not is_plain(one)]
            self.readable.note_open(reached)
            for one in reached:
                for holder in self.found.holders.get(id(one), ()):
                    self.found.visit(map(str, holder.before))
            reached = [own_dict(one)[name] for one in reached for name in names if name in own_dict(one)]
        self.found.drain()
