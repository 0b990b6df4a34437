"""`python -m bench graph`: the step before and after rewriting as text, DOT, a page and a figure. Needs no torch."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from bench.show import figures
from bench.show.residency import lifelines, plan_text
from bench.show.schedule_table import Executed, Kind, executed, freed_names, sequence_text
from planner.ir import Graph
from planner.schedule import unplanned_schedule
from planner.solve import Solution
from planner.units import human_bytes

MOST_LINES = 40


def write_graph(out: Path, solution: Solution) -> list[Path]:
    """before and after as .txt and .dot, graph.html with both side by side, plan.png and plan.txt."""
    graph, problem = solution.problem.graph, solution.problem
    assert solution.schedule is not None
    before = executed(graph, unplanned_schedule(graph, in_place=problem.in_place))
    after = executed(graph, solution.schedule)
    texts = {
        "before.txt": sequence_text(graph, before, title=f"{graph.name}: the step as it is"),
        "after.txt": sequence_text(graph, after, title=plan_title(solution)),
        "before.dot": dot(graph, before),
        "after.dot": dot(graph, after),
        "graph.html": page(solution, before, after),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return [*(out / name for name in texts), *write_plan(out, solution)]


def write_planned(out: Path, fitting: Sequence[tuple[str, Solution]], *, suffix: str) -> list[Path]:
    """Memory over time of the step as it is and under up to three named plans, and the cheapest plan of all."""
    problem = fitting[0][1].problem
    curves = [figures.unplanned_curve(problem.graph)]
    for name, solution in fitting[:3]:
        assert solution.schedule is not None
        assert solution.timeline is not None
        curves.append(figures.curve(problem.graph, solution.schedule, solution.timeline, label=name))
    path = out / f"memory{suffix}.png"
    title = f"{problem.graph.name}: memory over one step, with and without recomputation (bars below: recomputing)"
    figures.draw_memory(path, curves, title=title, budget_bytes=problem.budget_bytes)
    best = min((solution for _, solution in fitting), key=lambda solution: solution.overhead or 0.0)
    return [path, *write_plan(out, best, suffix=suffix)]


def write_plan(out: Path, solution: Solution, *, suffix: str = "") -> list[Path]:
    """plan.png, the life-lines of the largest activations, and plan.txt, those of all."""
    graph, schedule, timeline = solution.problem.graph, solution.schedule, solution.timeline
    assert schedule is not None
    assert timeline is not None
    runs = executed(graph, schedule)
    picture, text = out / f"plan{suffix}.png", out / f"plan{suffix}.txt"
    lines = lifelines(graph, runs, most=MOST_LINES)
    title = f"{plan_title(solution)}\nthe {len(lines)} largest activations of the forward, over the executed step"
    figures.draw_plan(picture, lines, figures.curve(graph, schedule, timeline, label=""), title=title)
    text.write_text(plan_text(lifelines(graph, runs), title=plan_title(solution)), encoding="utf-8")
    return [picture, text]


def plan_title(solution: Solution) -> str:
    """Model, strategy, peak and cost in one line."""
    timeline, base = solution.timeline, solution.problem.unplanned
    assert timeline is not None
    peaks = f"peak {human_bytes(timeline.peak_bytes)} instead of {human_bytes(base.peak_bytes)}"
    status = "" if timeline.peak_bytes <= solution.problem.budget_bytes else f" ({solution.status.value})"
    return f"{solution.problem.graph.name}, {solution.strategy}: {peaks}{status}, {timeline.overhead:.1%} more time"


# -- DOT ----------------------------------------------------------------------------------------------------------

FILLS = {Kind.FORWARD: "#e3f1e6", Kind.BACKWARD: "#fbe6da", Kind.OPTIMIZER: "#e8e4f3", Kind.RECOMPUTE: "#f2a65a"}


def dot(graph: Graph, runs: Sequence[Executed]) -> str:
    """The executed sequence as a DOT graph: a node per run, an edge per value read, a cluster per module.

    Runs whose output is dropped for a while have a dashed border.
    """
    lines = [f"digraph {_quoted(graph.name)} {{", '  node [shape=box, style=filled, fontname="sans-serif"];']
    dropped = {storage for run in runs for storage in run.dropped}
    by_module = sorted(runs, key=lambda run: (run.op.module_path, run.number))
    for number, (module, members) in enumerate(groupby(by_module, key=lambda run: run.op.module_path)):
        inside = [_dot_node(run, dashed=bool(dropped & set(run.made))) for run in members]
        if module:
            head = [f"  subgraph {_quoted(f'cluster_{number}')} {{", f"    label={_quoted(module)};"]
            inside = [*head, *(f"  {line}" for line in inside), "  }"]
        lines += inside
    lines += [f"  {_quoted(f'run{a}')} -> {_quoted(f'run{b}')};" for a, b in edges(graph, runs)]
    return "\n".join([*lines, "}", ""])


def _dot_node(run: Executed, *, dashed: bool) -> str:
    label = f"{run.number} {run.name}" + (f"\n{human_bytes(run.made_bytes)}" if run.made else "")
    style = ', style="filled,dashed"' if dashed else ""
    fill = _quoted(FILLS[run.kind])
    return f"  {_quoted(f'run{run.number}')} [label={_quoted(label)}, fillcolor={fill}{style}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def edges(graph: Graph, runs: Sequence[Executed]) -> list[tuple[int, int]]:
    """(number of the run that made a value, number of the run that reads it), each once."""
    source: dict[int, int] = {}
    found: dict[tuple[int, int], None] = {}
    for run in runs:
        for v in run.op.inputs:
            if v in source:
                found[source[v], run.number] = None
        for v in run.op.outputs:
            second_copy = graph.values[v].base is None and graph.values[v].storage not in run.made
            if run.kind is not Kind.RECOMPUTE or not second_copy:
                source[v] = run.number
    return list(found)


# -- the page -----------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #4c72b055; --again: #f2a65a66; --drop: #55a86855; }
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5rem; }
table { border-collapse: collapse; font-size: 12px; }
th { position: sticky; top: 0; background: Canvas; text-align: left; border-bottom: 2px solid var(--line); }
td, th { padding: 1px 8px; white-space: nowrap; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
td.m { min-width: 12rem; }
td.m i { display: block; background: var(--bar); white-space: nowrap; font-style: normal; overflow: visible; }
td.f { white-space: normal; max-width: 22rem; }
tr.again td { background: var(--again); }
.drop { background: var(--drop); border-radius: 3px; padding: 0 3px; }
.peak i { outline: 2px solid #b3261e; }
form { margin: 1rem 0; display: flex; gap: 1.2rem; align-items: center; flex-wrap: wrap; }
input[type=search] { width: 22rem; padding: .3rem; }
"""

SCRIPT = """
const rows = [...document.querySelectorAll("tbody tr")];
const texts = rows.map(row => row.textContent.toLowerCase());
const search = document.getElementById("search"), again = document.getElementById("again");
const drop = document.getElementById("drop"), count = document.getElementById("count");
function show() {
  const words = search.value.toLowerCase().split(" ").filter(word => word);
  let shown = 0;
  rows.forEach((row, i) => {
    const kinds = again.checked || drop.checked;
    const wanted = (again.checked ? row.classList.contains("again") : false)
      || (drop.checked ? row.querySelector(".drop") !== null : false);
    const visible = words.every(word => texts[i].includes(word)) ? (kinds ? wanted : true) : false;
    row.hidden = !visible;
    shown += visible ? 1 : 0;
  });
  count.textContent = shown + " of " + rows.length + " rows";
}
[search, again, drop].forEach(input => input.addEventListener("input", show));
document.querySelector("form").addEventListener("submit", event => event.preventDefault());
show();
"""


def page(solution: Solution, before: Sequence[Executed], after: Sequence[Executed]) -> str:
    """Both sequences side by side, one row per run; opens without a network."""
    graph = solution.problem.graph
    again = sum(run.kind is Kind.RECOMPUTE for run in after)
    drops = sum(len(run.dropped) for run in after)
    title = html.escape(plan_title(solution))
    head = "".join(
        f'<th scope="col">{html.escape(name)}</th>'
        for name in ("before", "live after", "frees", "op", "kind", "module", "makes", "after", "live after", "frees")
    )
    body = "\n".join(_page_rows(graph, before, after))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{html.escape(graph.name)}: before and after</h1>
<p>{title}. Left: the step as it is, {len(before):,} ops. Right: the planned step, {len(after):,} ops, {again:,} of them
recomputations (<span style="background:var(--again)">shaded</span>). Memory is what is live once an op and its frees
are done; the highest is outlined. <span class="drop">Marked</span> ({drops:,} times): dropped here and computed again
later.</p>
<form>
<label>search <input type="search" id="search" placeholder="op, module or tensor"></label>
<label><input type="checkbox" id="again"> recomputed</label>
<label><input type="checkbox" id="drop"> dropping</label>
<span id="count"></span>
</form>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _page_rows(graph: Graph, before: Sequence[Executed], after: Sequence[Executed]) -> Iterator[str]:
    """One row per run of the planned step; the plain step has the same runs but for the recomputations."""
    highest = max((run.after_bytes for run in (*before, *after)), default=1) or 1
    peaks = {id(max(runs, key=lambda run: run.after_bytes)) for runs in (before, after) if runs}
    plain = iter(before)
    for run in after:
        again = run.kind is Kind.RECOMPUTE
        left = "<td></td><td></td><td></td>" if again else _side(graph, next(plain), highest, peaks)
        made = human_bytes(run.made_bytes) if run.made else ""
        middle = (
            f"<td>{html.escape(run.name)}</td><td>{run.kind.value}</td><td>{html.escape(run.op.module_path)}</td>"
            f'<td class="n">{made}</td>'
        )
        row = '<tr class="again">' if again else "<tr>"
        yield f"{row}{left}{middle}{_side(graph, run, highest, peaks)}</tr>"


def _side(graph: Graph, run: Executed, highest: int, peaks: set[int]) -> str:
    width = f"{100 * run.after_bytes / highest:.1f}%"
    peak = " peak" if id(run) in peaks else ""
    frees = " ".join(
        f'<span class="drop">{html.escape(name.strip("[]"))}</span>' if name.startswith("[") else html.escape(name)
        for name in freed_names(graph, run)
    )
    return (
        f'<td class="n">{run.number}</td><td class="m{peak}"><i style="width:{width}">'
        f'{human_bytes(run.after_bytes)}</i></td><td class="f">{frees}</td>'
    )
