"""The registry of strategies: by name, by entry point, or from a file; loaded only when asked for.

A *spec* is what people write: `mutwo`, `sqrtn:segments=12`, `path/to/file.py:MyStrategy`, or the same with
options, `path/to/file.py:MyStrategy:depth=3,fast=true`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import types
import typing
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from planner.errors import StrategyError
from planner.solve import Strategy

ENTRY_POINT_GROUP = "recompute_planner.strategies"

_BUILT_IN = {
    "keep_all": "strategies.keep_all:KeepAll",
    "mutwo": "strategies.mutwo.greedy:MuTwo",
    "sqrtn": "strategies.sqrtn:SqrtN",
    "cheap": "strategies.cheap:Cheap",
    "ilp": "strategies.ilp.search:Ilp",
    "offload_only": "strategies.offload_only:OffloadOnly",
    "auto": "strategies.auto:Auto",
}


def names() -> tuple[str, ...]:
    """Every name that can be asked for: our own first, then those of installed packages."""
    return (*_BUILT_IN, *sorted(_plug_ins()))


def make(spec: str) -> Strategy:
    """The strategy that `spec` describes; StrategyError says what is wrong with it and what there is."""
    if not isinstance(spec, str):
        raise StrategyError(f"{spec!r:.160} names no strategy: give text such as 'mutwo' or 'sqrtn:segments=12'")
    target, options = _split(spec)
    return _construct(spec, _find(target), options)


def split_specs(text: str) -> list[str]:
    """Several specs in one text, separated by commas: 'mutwo,sqrtn:segments=12,snap=false,ilp' holds three."""
    specs: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if specs and "=" in piece and ":" not in piece.partition("=")[0]:
            specs[-1] += f",{piece}"  # a further option of the spec before it
        else:
            specs.append(piece)
    return specs


# -- finding the class ----------------------------------------------------------------------------------------


def _split(spec: str) -> tuple[str, str]:
    """`spec` as the class it names and the text of its options."""
    path, dot_py, rest = spec.partition(".py:")
    if dot_py:
        name, _, options = rest.partition(":")
        return f"{path}.py:{name}", options
    name, _, options = spec.partition(":")
    return name, options


def _find(target: str) -> type[Strategy]:
    if ".py:" in target:
        return _checked(_from_file(target), target)
    if target in _BUILT_IN:
        module, _, name = _BUILT_IN[target].partition(":")
        return _checked(getattr(importlib.import_module(module), name), target)
    plug_ins = _plug_ins()
    if target in plug_ins:
        return _checked(_load(plug_ins[target]), _owner(plug_ins[target]))
    raise StrategyError(
        f"unknown strategy {target!r}: there are {', '.join(names())}; your own goes by 'path/to/file.py:ClassName'"
    )


def _plug_ins() -> dict[str, EntryPoint]:
    """Entry points of other packages by name; a name with two owners is an error that names both."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name in _BUILT_IN:
            raise StrategyError(f"strategy {entry.name!r} of {_owner(entry)} clashes with our own: rename it there")
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise StrategyError(
                f"two packages offer a strategy {entry.name!r}: {_owner(other)} and {_owner(entry)}; remove one"
            )
        found[entry.name] = entry
    return found


def _owner(entry: EntryPoint) -> str:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    return f"{package} ({entry.value})"


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # whatever the plug-in's own module raises
        raise StrategyError(f"strategy {entry.name!r} of {_owner(entry)} does not load: {error}") from error


def _from_file(target: str) -> Any:
    path_text, _, name = target.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise StrategyError(f"strategy {target!r}: there is no file {path_text}")
    module_name = f"_strategy_file_{path.resolve()}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise StrategyError(f"strategy {target!r}: running {path_text} failed: {error!r}") from error
    if not hasattr(module, name):
        offered = ", ".join(sorted(n for n, v in vars(module).items() if _is_strategy(v))) or "none"
        raise StrategyError(f"strategy {target!r}: {path_text} has no {name!r}; its strategies: {offered}")
    return getattr(module, name)


def _is_strategy(value: Any) -> bool:
    return (
        isinstance(value, type)
        and isinstance(getattr(value, "name", None), str)
        and callable(getattr(value, "plan", None))
    )


def _checked(value: Any, origin: str) -> type[Strategy]:
    if not _is_strategy(value):
        raise StrategyError(
            f"{origin}: {value!r} is not a strategy: it needs a class attribute `name` and `plan(self, problem)`"
        )
    return typing.cast(type[Strategy], value)


# -- options --------------------------------------------------------------------------------------------------


def _construct(spec: str, cls: type[Strategy], options: str) -> Strategy:
    fields: dict[str, dataclasses.Field[Any]] = {}
    if dataclasses.is_dataclass(cls):
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    hints = _hints(spec, cls) if fields else {}
    values: dict[str, Any] = {}
    for piece in filter(None, options.split(",")):
        name, equals, text = (part.strip() for part in piece.partition("="))
        if not equals or name not in fields:
            known = ", ".join(f"{n} ({_default(f)})" for n, f in fields.items()) or "none"
            raise StrategyError(f"{spec!r}: no option {piece!r}; the options of {cls.name} are: {known}")
        values[name] = _convert(spec, name, hints[name], text)
    try:
        return cls(**values)
    except Exception as error:  # whatever the class itself finds wrong with them
        raise StrategyError(f"{spec!r:.160}: {error}") from error


def _hints(spec: str, cls: type[Strategy]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except Exception as error:  # an annotation that names what its module does not have
        raise StrategyError(f"{spec!r:.160}: the types of its options cannot be read: {error}") from error


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"default {field.default}"
    return "required" if field.default_factory is dataclasses.MISSING else f"default {field.default_factory()}"


def _convert(spec: str, name: str, hint: Any, text: str) -> Any:
    """The text of an option as the type of its field."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        wanted = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return None if text.lower() == "none" else _convert(spec, name, wanted[0], text)
    if hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        if isinstance(hint, type) and issubclass(hint, Enum):
            return hint(text)
        if hint in (int, float, str):
            return hint(text)
    except ValueError:
        pass  # told below, with what was expected
    expected = [m.value for m in hint] if isinstance(hint, type) and issubclass(hint, Enum) else hint.__name__
    raise StrategyError(f"{spec!r:.160}: option {name}={text!r:.60} is not {expected}")
