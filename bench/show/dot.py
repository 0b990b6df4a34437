"""An executed sequence as a DOT graph, for Graphviz."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from bench.show.schedule_table import Executed, Kind
from planner.ir import Graph
from planner.units import human_bytes

FILLS = {Kind.FORWARD: "#e3f1e6", Kind.BACKWARD: "#fbe6da", Kind.OPTIMIZER: "#e8e4f3", Kind.RECOMPUTE: "#f2a65a"}


def dot_text(graph: Graph, runs: Sequence[Executed]) -> str:
    """The executed sequence as a DOT graph: a node per run, an edge per value read, a cluster per module.

    Runs whose output is dropped, or on the host, for a while have a dashed border.
    """
    lines = [f"digraph {_quoted(graph.name)} {{", '  node [shape=box, style=filled, fontname="sans-serif"];']
    dropped = {storage for run in runs for storage in (*run.dropped, *run.moved)}
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
