"""Committed measurements: a file of rows with the command, versions, machine and commit that made them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine.provenance import command_line, provenance
from planner.errors import FileFormatError


def save_rows(path: Path, *, rows: Sequence[dict[str, Any]], settings: dict[str, Any] | None = None) -> None:
    """Write rows, where they came from, and the settings that rows to be added must share; all of it or nothing."""
    shared = {} if settings is None else {"settings": settings}
    document = {"command": command_line(), **shared, **provenance(), "rows": list(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")  # an interrupt must not leave half a file
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def resumed_rows(path: Path, *, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows to go on from, none if there is no file; FileFormatError if they were made in another way."""
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows: list[dict[str, Any]] = document["rows"]
        there, here = _conditions(document), _conditions({**provenance(), "settings": settings})
    except (ValueError, KeyError, TypeError) as error:
        raise FileFormatError(
            f"{path}: not a file of rows to go on from ({error!r}); delete it or use another --out"
        ) from None
    for name in dict.fromkeys((*there, *here)):
        if there.get(name) != here.get(name):
            raise FileFormatError(
                f"{path}: made with {name} {there.get(name)!r}, not {here.get(name)!r}: its rows cannot be mixed with "
                "new ones; delete it or use another --out"
            )
    return rows


def _conditions(document: dict[str, Any]) -> dict[str, Any]:
    """What all rows of a file share, as plain data; the commit may differ."""
    kept = {**document["settings"], **document["versions"], **document["machine"]}
    return dict(json.loads(json.dumps(kept)))
