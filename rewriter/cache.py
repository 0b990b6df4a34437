"""What an earlier run measured and planned, kept in a folder: a second start captures and rewrites, no more.

An entry is found by what it depends on: the captured graph, torch, this project, the device, the CPU and its threads;
a plan also by every op's time, the strategy and the budget. It is written whole or not at all, so that processes may
share a folder. One that is damaged or of another version is a miss, and said once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from planner import files
from planner.errors import FileFormatError, PlanError
from planner.ir import Graph
from planner.plan import Plan, check_plan
from planner.solve import Problem, Solution, Status, Strategy, solve, solve_if_needed
from profiler.measuring.meters import meter_for
from profiler.measuring.op_times import Measured
from profiler.tracing.whole_step import TracedStep
from profiler.workload import device_of
from rewriter.given_plan import GivenPlan
from rewriter.provisional import Ready, fits_as_it_is

log = logging.getLogger("recompute_planner")

ENVIRONMENT = "RECOMPUTE_PLANNER_CACHE"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptGraph:
    checksum: str
    as_it_is: bool  # whether it was measured unplanned, so that it fitted then
    graph: Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptPlan:
    checksum: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of measured graphs and of plans; without a folder, nothing is kept or found."""

    folder: Path | None = None

    @staticmethod
    def at(folder: str | Path | None) -> Cache:
        """The cache in `folder`, or where RECOMPUTE_PLANNER_CACHE says; FileFormatError if that cannot be a folder."""
        named = os.environ.get(ENVIRONMENT) if folder is None else folder
        if not named:
            return Cache()
        path = Path(named)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileFormatError(f"cache_dir={str(path)!r} cannot be a folder: {error.strerror}") from error
        return Cache(path)

    # -- measured graphs --------------------------------------------------------------------------------------

    def measured(self, traced: TracedStep) -> Ready | None:
        """The captured step with the times and sizes that an earlier run measured; None where there are none."""
        path = self._path_of_measured(traced)
        kept = _load(path, _KeptGraph)
        if kept is None or not _is_of(kept.graph, traced.graph):
            return None
        log.info("measured before: %s, %s", traced.graph.name, path)
        measured = Measured(traced=replace(traced, graph=kept.graph.validate()), stats=())
        return Ready(measured=measured, as_it_is=kept.as_it_is and fits_as_it_is(traced))

    def keep_measured(self, captured: TracedStep, found: Ready) -> None:
        """Keep what was measured of a captured step."""
        path = self._path_of_measured(captured)
        if path is not None:
            graph = found.measured.graph
            _save(path, _KeptGraph(checksum=_checksum(graph), as_it_is=found.as_it_is, graph=graph))

    def _path_of_measured(self, captured: TracedStep) -> Path | None:
        if self.folder is None:
            return None
        return self._path("measured", _surroundings(captured), captured.graph.fingerprint)

    # -- plans ------------------------------------------------------------------------------------------------

    def solved(self, problem: Problem, strategy: Strategy, *, label: str) -> Solution:
        """`solve_if_needed`; where this very problem was solved by this strategy before, its plan is judged again."""
        if self.folder is None or problem.fits_unplanned:
            return solve_if_needed(problem, strategy, label=label)
        path = self._path("plan", _asked(problem), repr(strategy))
        kept = _load(path, _KeptPlan)
        if kept is not None and _is_plan_of(kept.plan, problem.graph):
            log.info("planned before: %s, %s", problem.graph.name, path)
            return solve(problem, GivenPlan(kept.plan, bound_holds=True), label=label)
        solution = solve(problem, strategy, label=label)
        if solution.status is Status.FITS and solution.plan is not None:
            _save(path, _KeptPlan(checksum=_checksum(solution.plan), plan=solution.plan))
        return solution

    def _path(self, kind: str, *depends_on: str) -> Path:
        assert self.folder is not None
        key = hashlib.sha256("\n".join([_version(), *depends_on]).encode()).hexdigest()
        return self.folder / f"{kind}-{key[:32]}.json"


NO_CACHE = Cache()


# -- what an entry depends on -------------------------------------------------------------------------------------


@cache
def _version() -> str:
    return f"{importlib.metadata.version('recompute-planner')} {SCHEMA} torch {torch.__version__}"


def _surroundings(traced: TracedStep) -> str:
    device = device_of(traced.convention.model)
    cpu = f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{meter_for(device).device}; {cpu}"


def _asked(problem: Problem) -> str:
    """Everything that a strategy is told."""
    others = {f.name: repr(getattr(problem, f.name)) for f in dataclasses.fields(problem) if f.name != "graph"}
    return f"{_checksum(problem.graph)} {sorted(others.items())}"


def _checksum(record: Any) -> str:
    return hashlib.sha256(json.dumps(files.encode(record), sort_keys=True).encode()).hexdigest()


# -- files --------------------------------------------------------------------------------------------------------


def _load(path: Path | None, kind: type[Any]) -> Any:
    """The entry at a path; None where there is none, or none that can be used."""
    if path is None or not path.exists():
        return None
    try:
        kept = files.load(path, kind="cache", schema=SCHEMA, cls=kind)
    except FileFormatError as error:
        _say_once(f"{error}; it is made anew")
        return None
    inside = kept.graph if kind is _KeptGraph else kept.plan
    if kept.checksum != _checksum(inside):
        _say_once(f"{path}: damaged, and made anew")
        return None
    return kept


def _save(path: Path, record: Any) -> None:
    try:
        files.save(path, kind="cache", schema=SCHEMA, record=record)
    except FileFormatError as error:  # a full disk costs the next start some seconds, and this one nothing
        _say_once(f"nothing is kept for the next start: {error}")


@cache
def _say_once(what: str) -> None:
    warnings.warn(what, UserWarning, stacklevel=4)


def _is_of(measured: Graph, captured: Graph) -> bool:
    """Whether a measured graph is the captured one, but for times, workspaces and sizes that only running shows."""
    bare = tuple(replace(op, time_us=0.0, workspace_bytes=0) for op in measured.ops)
    ours = tuple(replace(op, time_us=0.0, workspace_bytes=0) for op in captured.ops)
    return bare == ours and measured.values == captured.values and len(measured.storages) == len(captured.storages)


def _is_plan_of(plan: Plan, graph: Graph) -> bool:
    try:
        check_plan(graph, plan)
    except PlanError as error:
        _say_once(f"a kept plan does not fit {graph.name} ({error}), and is made anew")
        return False
    return True
