"""Saving frozen records as JSON and loading them back, all or nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import reprlib
import secrets
import stat
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from planner.errors import FileFormatError

T = TypeVar("T")

FORMAT = "recompute-planner"
HEAD_BYTES = 1 << 20  # in which a file of ours has named its format
MOST_INT = 2**63
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60
_REPR.maxlevel = 2


def encode(value: Any) -> Any:
    """A record, enum, tuple, table by name or scalar as plain JSON data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {name: encode(item) for name, item in value.items()}
    return value


def decode(hint: Any, data: Any, where: str) -> Any:
    """The value of type `hint` that `encode` made `data` from; FileFormatError names the place otherwise."""
    if isinstance(hint, types.UnionType):
        return None if data is None else decode(typing.get_args(hint)[0], data, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(data, list):
            raise FileFormatError(f"{where}: expected a list, found {_shown(data)}")
        item = typing.get_args(hint)[0]
        return tuple([decode(item, entry, f"{where}[{i}]") for i, entry in enumerate(data)])
    if typing.get_origin(hint) is dict:
        if not isinstance(data, dict):
            raise FileFormatError(f"{where}: expected an object, found {_shown(data)}")
        item = typing.get_args(hint)[1]
        return {name: decode(item, entry, f"{where}.{name}") for name, entry in data.items()}
    if dataclasses.is_dataclass(hint):
        return _decode_record(hint, data, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(data)
        except ValueError:
            known = ", ".join(str(member.value) for member in hint)
            raise FileFormatError(f"{where}: {_shown(data)} is not one of {known}") from None
    return _decode_scalar(hint, data, where)


def _decode_scalar(hint: Any, data: Any, where: str) -> Any:
    if type(data) is int and abs(data) >= MOST_INT:
        raise FileFormatError(f"{where}: a number of {data.bit_length():,} bits is more than anything here can be")
    if hint is float and type(data) in (int, float) and math.isfinite(data):
        return float(data)
    if type(data) is hint and hint is not float:
        return data
    raise FileFormatError(f"{where}: expected {hint.__name__}, found {_shown(data)}")


def _shown(data: Any) -> str:
    """The beginning of what stands in a file, however much there is of it."""
    return f"{_REPR.repr(data):.60}"


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
        raise FileFormatError(f"{where}: expected an object, found {_shown(data)}")
    fields = _fields(cls)
    if unknown := sorted(set(data) - set(fields)):
        raise FileFormatError(f"{where}: unknown field {unknown[0]!r} for {cls.__name__}")
    if absent := sorted(name for name, (_, required) in fields.items() if required and name not in data):
        raise FileFormatError(f"{where}: {cls.__name__} lacks the field {absent[0]!r}")
    return cls(**{name: decode(fields[name][0], entry, f"{where}.{name}") for name, entry in data.items()})


def save(path: str | Path, *, kind: str, schema: int, record: Any) -> None:
    """Write `record` whole or not at all: a crash half-way leaves the old file as it was."""
    document = {"format": f"{FORMAT} {kind}", "schema": schema, kind: encode(record)}
    write_whole(path, json.dumps(document, separators=(",", ":")) + "\n")


def write_whole(path: str | Path, text: str | bytes) -> None:
    """Put `text` into a file at once, through links, keeping its mode; FileFormatError where that cannot be."""
    try:
        target = Path(path).resolve()
        mode = _mode_of(target)
        scratch = target.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            with scratch.open("xb") as file:
                if mode is not None:
                    scratch.chmod(mode)
                file.write(text.encode() if isinstance(text, str) else text)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a name that can be none
        raise FileFormatError(f"{path}: cannot be written: {_why(error)}") from error


def _mode_of(target: Path) -> int | None:
    """The permissions of a regular file; None where there is none yet."""
    try:
        found = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        raise FileFormatError(f"{target}: {_no_file(found)}; nothing was written: name a file")
    return stat.S_IMODE(found)


def _no_file(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return f"it is {next((name for is_a, name in kinds if is_a(mode)), 'a device')}, not a file"


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def load(path: str | Path, *, kind: str, schema: int, cls: type[T]) -> T:
    """The record that `save` wrote; a truncated, foreign, older or newer file is refused by name."""
    try:
        document = json.loads(_text(Path(path)))
        return typing.cast(T, _record(document, path, kind=kind, schema=schema, cls=cls))
    except ValueError as error:
        raise FileFormatError(f"{path}: {_no_json(error)}") from None
    except RecursionError:
        raise FileFormatError(f"{path}: nested deeper than any {kind} file of this project") from None


def _no_json(error: ValueError) -> str:
    if "digits" in str(error):  # which Python says with advice for programmers
        return "a number in it has more digits than anything that is saved here"
    return f"not a whole JSON file ({error}); was it cut off? Save it again"


def _text(path: Path) -> str:
    """What a file or a pipe says; a long one that does not begin as ours do is not read to its end."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
            raise FileFormatError(f"{path}: {_no_file(mode)}")
        with open(path, "rb", opener=_without_waiting) as file:
            head = file.read(HEAD_BYTES)
            if stat.S_ISFIFO(mode) and not head:
                raise FileFormatError(f"{path}: it is a pipe that nobody writes to")
            if len(head) == HEAD_BYTES and FORMAT.encode() not in head:
                raise FileFormatError(f"{path}: not a file of this project")
            return (head + file.read()).decode("utf-8")
    except FileNotFoundError:
        raise FileFormatError(f"{path}: there is no such file") from None
    except (OSError, RuntimeError) as error:
        raise FileFormatError(f"{path}: cannot be read: {_why(error)}") from error


def _without_waiting(path: str, flags: int) -> int:
    """Open a pipe though nobody may ever write to it; what somebody writes is waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def _record(document: Any, path: str | Path, *, kind: str, schema: int, cls: type) -> Any:
    if not isinstance(document, dict) or document.get("format") != f"{FORMAT} {kind}":
        raise FileFormatError(f"{path}: not a {kind} file of this project")
    found = document.get("schema")
    if found != schema:
        hint = "update this program" if isinstance(found, int) and found > schema else "save it again"
        raise FileFormatError(f"{path}: {kind} schema {_shown(found)}, but this program reads {schema}: {hint}")
    if kind not in document:
        raise FileFormatError(f"{path}: the {kind} itself is missing; save it again")
    return decode(cls, document[kind], f"{path}: {kind}")
