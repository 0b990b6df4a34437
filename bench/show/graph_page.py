"""The step before and after rewriting on one page for the browser, which opens without a network."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from bench.show.schedule_table import Executed, Kind, freed_names, plan_title
from planner.ir import Graph
from planner.solve import Solution
from planner.units import human_bytes

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
