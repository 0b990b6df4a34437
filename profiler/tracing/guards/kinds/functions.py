"""What a function has beside its code: outer variables, defaults, the arguments of a partial."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any

from profiler.tracing.guards.exact import UNSET
from profiler.tracing.guards.kinds.kind import Kind, Probe, Selection, alone, named


class Cells(Kind):
    """The variables that a function has closed over."""

    selection = Selection.VARIABLES
    takes_values = True

    def read(self, what: FunctionType) -> dict[Any, Any]:
        cells = zip(what.__code__.co_freevars, what.__closure__ or (), strict=True)
        return {name: contents_of(cell) for name, cell in cells}

    def write(self, what: FunctionType, before: Mapping[Any, Any]) -> None:
        for name, cell in zip(what.__code__.co_freevars, what.__closure__ or (), strict=True):
            if before[name] is UNSET:
                del cell.cell_contents
            else:
                cell.cell_contents = before[name]

    def put(self, what: FunctionType, key: Any, value: Any) -> None:
        (what.__closure__ or ())[what.__code__.co_freevars.index(key)].cell_contents = value

    def label(self, path: str, key: Any) -> str:
        return f"the outer variable {key}{path}"

    def probes(self, what: FunctionType, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        cells = dict(zip(what.__code__.co_freevars, what.__closure__ or (), strict=True))
        return [(alone(contents_of), cells[name], (value,)) for name, value in values.items()]


def contents_of(cell: Any) -> Any:
    """What a variable of an outer function is now; UNSET where it has no value."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable was deleted, or has no value yet
        return UNSET


class Defaults(Kind):
    """A function's code, and the values of the arguments that a call leaves out."""

    def read(self, what: FunctionType) -> dict[Any, Any]:
        code, defaults = what.__code__, what.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
        return {"": code} | dict(zip(positional, defaults, strict=True)) | (what.__kwdefaults__ or {})

    def write(self, what: FunctionType, before: Mapping[Any, Any]) -> None:
        code, by_name = before[""], what.__kwdefaults__ or {}
        what.__code__ = code
        positional = [before[name] for name in code.co_varnames[: code.co_argcount] if name in before]
        what.__defaults__ = tuple(positional) or None
        what.__kwdefaults__ = {name: value for name, value in before.items() if name in by_name} or None

    def label(self, path: str, key: Any) -> str:
        return f"the default {key} of {path}" if key else f"the code of {path}"

    def probes(self, what: FunctionType, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")
        by_name = what.__kwdefaults__ or {}
        own = {name: value for name, value in values.items() if name in by_name}
        return [(parts, what, parts(what)), *named(by_name, own)]


class Arguments(Kind):
    """What a partial gives to its function."""

    def read(self, what: partial[Any]) -> dict[Any, Any]:
        return {"": what.func} | dict(enumerate(what.args)) | what.keywords

    def label(self, path: str, key: Any) -> str:
        return f"{path}'s argument {key}"

    def probes(self, what: partial[Any], values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        parts = attrgetter("func", "args", "keywords")
        by_name = {name: value for name, value in values.items() if name in what.keywords}
        return [(parts, what, parts(what)), *named(what.keywords, by_name)]
