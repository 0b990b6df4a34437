"""Files of rows, with the command, versions, machine and commit that made them: written whole, read back as records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.experiments.experiment import Experiment, Results, Row
from bench.machine.provenance import Provenance, provenance
from planner.errors import FileFormatError
from planner.files import decode, encode


def save_rows(path: Path, experiment: Experiment[Row], rows: Sequence[Row], *, settings: Any = None) -> None:
    """Write rows, what they are and where they came from, and the settings they share; all of it or nothing."""
    shared = {} if settings is None else {"settings": encode(settings)}
    document = {"kind": experiment.kind, **shared, **encode(provenance()), "rows": encode(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")  # an interrupt must not leave half a file
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load_results(path: Path, experiments: Sequence[Experiment[Any]]) -> tuple[Experiment[Any], Results[Any]]:
    """Which of the experiments a file is of, and what it holds; FileFormatError for any other file."""
    document = _document(path)
    experiment = next((e for e in experiments if e.kind == document.get("kind")), None)
    if experiment is None:
        known = ", ".join(e.kind for e in experiments)
        raise FileFormatError(f"{path}: rows of kind {document.get('kind')!r}; there are {known}")
    return experiment, _results(path, document, experiment)


def resumed_rows(path: Path, experiment: Experiment[Row], *, settings: Any) -> list[Row]:
    """The rows to go on from, none if there is no file; FileFormatError if they were made in another way."""
    if not path.exists():
        return []
    try:
        document = _document(path)
        found = _results(path, document, experiment)
    except FileFormatError as error:
        raise FileFormatError(f"{error}: not a file of rows to go on from; delete it or use another --out") from None
    there, here = _conditions(found.provenance, found.settings), _conditions(provenance(), settings)
    for name in dict.fromkeys((*there, *here)):
        if there.get(name) != here.get(name):
            raise FileFormatError(
                f"{path}: made with {name} {there.get(name)!r}, not {here.get(name)!r}: its rows cannot be mixed with "
                "new ones; delete it or use another --out"
            )
    return list(found.rows)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileFormatError(f"{path}: not a whole JSON file ({error})") from None
    if not isinstance(document, dict):
        raise FileFormatError(f"{path}: expected an object, found {document!r:.60}")
    return document


def _results(path: Path, document: dict[str, Any], experiment: Experiment[Row]) -> Results[Row]:
    made = {name: document[name] for name in _names(Provenance) if name in document}
    if not isinstance(document.get("rows"), list):
        raise FileFormatError(f"{path}: a results file lacks its rows")
    settings = None
    if experiment.settings is not None:
        settings = decode(experiment.settings, document.get("settings"), f"{path}: settings")
    return Results(
        path=path,
        provenance=decode(Provenance, made, str(path)),
        settings=settings,
        rows=[_row(experiment, row, f"{path}: row {i}") for i, row in enumerate(document["rows"], 1)],
    )


def _row(experiment: Experiment[Row], data: Any, where: str) -> Row:
    """A row as the first of the experiment's types whose fields it has."""
    names = set(data) if isinstance(data, dict) else set()
    fitting = next((form for form in experiment.rows if names <= _names(form)), experiment.rows[0])
    row: Row = decode(fitting, data, where)
    return row


def _names(form: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(form)}


def _conditions(made: Provenance, settings: Any) -> dict[str, Any]:
    """What all rows of a file share, as plain data; command and commit may differ."""
    return {**encode(settings), **made.versions, **encode(made.machine)}
