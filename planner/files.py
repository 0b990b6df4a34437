"""Saving frozen records as JSON and loading them back, all or nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from planner.errors import FileFormatError

T = TypeVar("T")


def encode(value: Any) -> Any:
    """A record, enum, tuple or scalar as plain JSON data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def decode(hint: Any, data: Any, where: str) -> Any:
    """The value of type `hint` that `encode` made `data` from; FileFormatError names the place otherwise."""
    if isinstance(hint, types.UnionType):
        return None if data is None else decode(typing.get_args(hint)[0], data, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(data, list):
            raise FileFormatError(f"{where}: expected a list, found {data!r:.60}")
        item = typing.get_args(hint)[0]
        return tuple(decode(item, entry, f"{where}[{i}]") for i, entry in enumerate(data))
    if dataclasses.is_dataclass(hint):
        return _decode_record(hint, data, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(data)
        except ValueError:
            known = ", ".join(str(member.value) for member in hint)
            raise FileFormatError(f"{where}: {data!r:.60} is not one of {known}") from None
    return _decode_scalar(hint, data, where)


def _decode_scalar(hint: Any, data: Any, where: str) -> Any:
    if hint is float and type(data) in (int, float) and math.isfinite(data):
        return float(data)
    if type(data) is hint and hint is not float:
        return data
    raise FileFormatError(f"{where}: expected {hint.__name__}, found {data!r:.60}")


@functools.cache
def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """Name -> (type, required) of the fields that a file holds."""
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(cls)
        if f.init
    }


def _decode_record(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise FileFormatError(f"{where}: expected an object, found {data!r:.60}")
    fields = _fields(cls)
    if unknown := sorted(set(data) - set(fields)):
        raise FileFormatError(f"{where}: unknown field {unknown[0]!r} for {cls.__name__}")
    if absent := sorted(name for name, (_, required) in fields.items() if required and name not in data):
        raise FileFormatError(f"{where}: {cls.__name__} lacks the field {absent[0]!r}")
    return cls(**{name: decode(fields[name][0], entry, f"{where}.{name}") for name, entry in data.items()})


def save(path: str | Path, *, kind: str, schema: int, record: Any) -> None:
    """Write `record` whole or not at all: a crash half-way leaves the old file as it was."""
    path = Path(path)
    document = {"format": f"recompute-planner {kind}", "schema": schema, kind: encode(record)}
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def load(path: str | Path, *, kind: str, schema: int, cls: type[T]) -> T:
    """The record that `save` wrote; a truncated, foreign, older or newer file is refused by name."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileFormatError(f"{path}: not a whole JSON file ({error}); was it cut off? Save it again") from None
    if not isinstance(document, dict) or document.get("format") != f"recompute-planner {kind}":
        raise FileFormatError(f"{path}: not a {kind} file of this project")
    found = document.get("schema")
    if found != schema:
        hint = "update this program" if isinstance(found, int) and found > schema else "save it again"
        raise FileFormatError(f"{path}: {kind} schema {found!r}, but this program reads {schema}: {hint}")
    if kind not in document:
        raise FileFormatError(f"{path}: the {kind} itself is missing; save it again")
    return typing.cast(T, decode(cls, document[kind], f"{path}: {kind}"))
