"""`python -m bench results`: tables and figures of the results folder, made again from the rows saved beside them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.experiments.plans.rows import compare_graph
from bench.experiments.profiling import draw_step
from bench.experiments.registry import drawers, further, tables
from bench.show.exports import write_planned
from bench.show.file_names import slug
from bench.show.pipeline_figure import draw_pipeline
from bench.show.tables import markdown
from planner.errors import FileFormatError
from planner.ir import Graph
from planner.solve import Status

HELP = (
    "Make the tables and figures of bench/results again from their rows and graphs, and the figure of the pipeline. "
    "Nothing is measured."
)
RESULTS = Path(__file__).parents[1] / "results"


def add_options(parser: argparse.ArgumentParser) -> None:
    """None: everything there is made again."""


def run(options: argparse.Namespace) -> int:
    draw_pipeline(RESULTS / "pipeline.png")
    for path in (*make_tables(), RESULTS / "pipeline.png"):
        print(path)
    return 0


def make_tables(folder: Path = RESULTS) -> list[Path]:
    """Write KIND_NAME.md, and figures where the kind has any, for every KIND_NAME.json in `folder`.

    A folder in it with a graph.json, as `profile` leaves them, gets the figures of that step and of a plan for it.
    """
    written: list[Path] = []
    for source in sorted(folder.glob("*.json")):
        kind = source.stem if source.stem in tables() else source.stem.partition("_")[0]
        maker = tables().get(kind)
        if maker is None:
            raise FileFormatError(f"{source}: no table is known for it; there are {', '.join(tables())}")
        document = json.loads(source.read_text(encoding="utf-8"))
        columns, rows = maker(document["rows"])
        target = source.with_suffix(".md")
        page = _page(source.stem, document, columns, rows) + further(kind, source, document["rows"])
        target.write_text(page, encoding="utf-8")
        written.append(target)
        if kind in drawers():
            written += drawers()[kind](source, document)
    return [*written, *_draw_steps(folder)]


def _draw_steps(folder: Path) -> list[Path]:
    written: list[Path] = []
    for file in sorted(folder.glob("*/graph.json")):
        graph = Graph.load(file)
        written += [*draw_step(file.parent, graph), *_draw_planned(file.parent, graph)]
    return written


def _draw_planned(out: Path, graph: Graph, strategy: str = "mutwo", budget: str = "50%") -> list[Path]:
    """Before and after on one axis, and the plan; none where the budget cannot be met."""
    (row,) = compare_graph(graph, [strategy], [budget], time_limit_s=10.0)
    if row.solution.status is not Status.FITS:
        return []
    return write_planned(out, [(f"{strategy}, {budget}", row.solution)], suffix=f"_{strategy}_{slug(budget)}")


def _page(name: str, document: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    machine, versions = document["machine"], document["versions"]
    torch, title = versions.get("torch", "?"), name.replace("_", " ").capitalize()
    head = (
        f"# {title}\n\nMade by `{document['command']}` at commit {document['commit']} on {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB; torch {torch}, Python {versions['python']}.\n\n"
    )
    return head + markdown(columns, rows) + "\n"
