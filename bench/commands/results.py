"""`python -m bench results`: tables and figures of the results folder, made again from the rows saved beside them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.experiments.experiment import Experiment, Results
from bench.experiments.plans.rows import compare_graph
from bench.experiments.profiling import draw_step
from bench.experiments.registry import load
from bench.show.exports import write_arena, write_planned
from bench.show.file_names import slug
from bench.show.pipeline_figure import draw_pipeline
from bench.show.tables import markdown
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
    """Write NAME.md, and figures where its kind has any, for every results file NAME.json in `folder` or `devices`.

    A folder in it with a graph.json, as `profile` leaves them, gets the figures of that step and of a plan for it.
    """
    written: list[Path] = []
    for source in sorted([*folder.glob("*.json"), *folder.glob("devices/*.json")]):
        experiment, results = load(source)
        page = source.with_suffix(".md")
        page.write_text(page_of(experiment, results), encoding="utf-8")
        written += [page, *experiment.draw(results)]
    return [*written, *_draw_steps(folder)]


def _draw_steps(folder: Path) -> list[Path]:
    written: list[Path] = []
    for file in sorted(folder.glob("*/graph.json")):
        graph = Graph.load(file)
        written += [*draw_step(file.parent, graph), *_draw_planned(file.parent, graph)]
    return written


def _draw_planned(out: Path, graph: Graph, strategy: str = "mutwo", budget: str = "50%") -> list[Path]:
    """Before and after on one axis, the plan, and the arenas of both; none where the budget cannot be met."""
    (row,) = compare_graph(graph, [strategy], [budget], time_limit_s=10.0)
    if row.solution.status is not Status.FITS:
        return []
    name = f"{strategy}, {budget}"
    written = write_planned(out, [(name, row.solution)], suffix=f"_{strategy}_{slug(budget)}")
    return [*written, write_arena(out / "arena.png", row.solution, name=name)]


def page_of(experiment: Experiment[Any], results: Results[Any]) -> str:
    """A results file as Markdown: what made it, its table, and what its kind has to say below."""
    made, machine = results.provenance, results.provenance.machine
    title = results.path.stem.replace("_", " ").capitalize()
    head = (
        f"# {title}\n\nMade by `{made.command}` at commit {made.commit} on {machine.cpu}, {machine.cores} cores, "
        f"{machine.memory_gib} GiB; torch {made.versions.get('torch', '?')}, Python {made.versions['python']}.\n\n"
    )
    return head + markdown(*experiment.table(results.rows)) + "\n" + experiment.below(results)
