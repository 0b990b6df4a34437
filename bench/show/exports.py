"""A judged plan as files to look at: `python -m bench graph`, and the figures beside a comparison. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.show.activation_spans import lifelines, plan_text
from bench.show.arena_figure import draw_arena, picture
from bench.show.dot import dot_text
from bench.show.graph_page import page
from bench.show.memory_figures import curve, draw_memory, unplanned_curve
from bench.show.plan_figure import draw_plan
from bench.show.schedule_table import executed, plan_title, sequence_text
from planner.plan_table import write_plan_csv
from planner.schedule import unplanned_schedule
from planner.solve import Solution

MOST_LINES = 40


def write_graph(out: Path, solution: Solution) -> list[Path]:
    """before and after as .txt and .dot, graph.html with both side by side, plan.csv, plan.png and plan.txt."""
    graph, problem = solution.problem.graph, solution.problem
    assert solution.schedule is not None
    assert solution.plan is not None
    before = executed(graph, unplanned_schedule(graph, in_place=problem.in_place))
    after = executed(graph, solution.schedule)
    texts = {
        "before.txt": sequence_text(graph, before, title=f"{graph.name}: the step as it is"),
        "after.txt": sequence_text(graph, after, title=plan_title(solution)),
        "before.dot": dot_text(graph, before),
        "after.dot": dot_text(graph, after),
        "graph.html": page(solution, before, after),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    write_plan_csv(out / "plan.csv", graph, solution.plan)
    return [*(out / name for name in texts), out / "plan.csv", *write_plan(out, solution)]


def write_planned(out: Path, fitting: Sequence[tuple[str, Solution]], *, suffix: str) -> list[Path]:
    """Memory over time of the step as it is and under up to three named plans, and the cheapest plan of all."""
    problem = fitting[0][1].problem
    curves = [unplanned_curve(problem.graph)]
    for name, solution in fitting[:3]:
        assert solution.schedule is not None
        assert solution.timeline is not None
        curves.append(curve(problem.graph, solution.schedule, solution.timeline, label=name))
    path = out / f"memory{suffix}.png"
    title = f"{problem.graph.name}: memory over one step, with and without recomputation (bars below: recomputing)"
    draw_memory(path, curves, title=title, budget_bytes=problem.budget_bytes)
    best = min((solution for _, solution in fitting), key=lambda solution: solution.overhead or 0.0)
    return [path, *write_plan(out, best, suffix=suffix)]


def write_arena(path: Path, solution: Solution, *, name: str) -> Path:
    """Where everything that the step makes would lie in one piece of memory, as it is and planned."""
    graph = solution.problem.graph
    assert solution.schedule is not None
    unplanned = unplanned_schedule(graph, in_place=solution.problem.in_place)
    pictures = [picture(graph, unplanned, label="as it is"), picture(graph, solution.schedule, label=name)]
    draw_arena(path, pictures, title=f"{graph.name}: one piece of memory for all that the step makes")
    return path


def write_plan(out: Path, solution: Solution, *, suffix: str = "") -> list[Path]:
    """plan.png, the life-lines of the largest activations, and plan.txt, those of all."""
    graph, schedule, timeline = solution.problem.graph, solution.schedule, solution.timeline
    assert schedule is not None
    assert timeline is not None
    runs = executed(graph, schedule)
    picture, text = out / f"plan{suffix}.png", out / f"plan{suffix}.txt"
    lines = lifelines(graph, runs, most=MOST_LINES)
    title = f"{plan_title(solution)}\nthe {len(lines)} largest activations of the forward, over the executed step"
    draw_plan(picture, lines, curve(graph, schedule, timeline, label=""), title=title)
    text.write_text(plan_text(lifelines(graph, runs), title=plan_title(solution)), encoding="utf-8")
    return [picture, text]
