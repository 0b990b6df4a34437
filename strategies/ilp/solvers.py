"""Two ways to solve a `SparseModel`: OR-tools and PuLP's CBC. Either package alone is enough."""

from __future__ import annotations

import math
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import MissingPackage, PlannerError
from planner.extras import needs_extra
from strategies.ilp.linear import Floats, SparseModel
from strategies.ilp.silence import quiet_stdout

# Solvers work within tolerances: a bound is taken down by this much of itself before it is called proven.
TOLERANCE = 1e-6
LONGEST_S = 1e8  # three years: longer limits overflow what solvers take


class SolverName(Enum):
    """Which package solves the program."""

    ORTOOLS = "ortools"
    CBC = "cbc"


class SolverError(PlannerError):
    """A solver that is missing or failed; the message says which package to install, or what it said."""


class Outcome(Enum):
    """What a solver has proven."""

    SOLVED = "solved to the gap asked for"
    INFEASIBLE = "infeasible"
    CUT_OFF = "stopped by the time limit"
    SPENT = "stopped by its limit of nodes"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A solver's best point (None without one) and its proven lower bound on the objective."""

    outcome: Outcome
    point: Floats | None
    objective: float
    bound: float


def solve_model(
    model: SparseModel,
    solver: SolverName,
    *,
    time_limit_s: float,
    gap: float,
    hint: Floats | None = None,
    corner: bool = True,
    nodes: int | None = None,
) -> Answer:
    """Minimise `model` to a relative gap; SolverError if the package is missing or fails.

    `nodes` bounds the work, so that the answer does not depend on the clock unless the time limit cuts it off.
    Without `corner`, a program in which nothing is whole may be answered by any optimum: large ones are, much sooner.
    """
    if model.n_rows == 0 or model.n_variables == 0:
        return _without_rows(model)
    if time_limit_s <= 0:
        return _nothing(Outcome.CUT_OFF)
    backend: Callable[..., Answer] = _BACKENDS[solver]
    return backend(model, time_limit_s=time_limit_s, gap=gap, hint=hint, corner=corner, nodes=nodes)


def _without_rows(model: SparseModel) -> Answer:
    point = np.where(model.cost < 0, model.most, model.least)
    value = model.offset + float(model.cost @ point)
    return Answer(outcome=Outcome.SOLVED, point=point, objective=value, bound=value)


def _nothing(outcome: Outcome) -> Answer:
    bound = math.inf if outcome is Outcome.INFEASIBLE else -math.inf
    return Answer(outcome=outcome, point=None, objective=math.inf, bound=bound)


def _safe(bound: float, objective: float) -> float:
    """A solver's bound, less its tolerances."""
    if not math.isfinite(bound):
        return -math.inf
    return min(bound, objective) - TOLERANCE * max(1.0, abs(bound))


# -- OR-tools -------------------------------------------------------------------------------------------------


def _ortools(
    model: SparseModel, *, time_limit_s: float, gap: float, hint: Floats | None, corner: bool, nodes: int | None
) -> Answer:
    try:
        from ortools.math_opt.python import mathopt
    except ImportError as error:
        raise SolverError(
            f"solver=ortools needs the package ortools ({error}): pip install ortools, or use ilp:solver=cbc"
        ) from error
    program = mathopt.Model.from_model_proto(_model_proto(model))
    # GLOP's optima are corners, which have few fractions to round.
    kind = mathopt.SolverType.GLOP if corner and not model.integer.any() else mathopt.SolverType.HIGHS
    params = mathopt.SolveParameters(
        time_limit=timedelta(seconds=min(time_limit_s, LONGEST_S)),
        relative_gap_tolerance=gap,
        node_limit=nodes if model.integer.any() else None,
    )
    hints = mathopt.ModelSolveParameters()
    if hint is not None:
        values = dict(zip(program.variables(), hint.tolist(), strict=True))
        hints.solution_hints.append(mathopt.SolutionHint(variable_values=values))
    try:
        with quiet_stdout():
            result = mathopt.solve(program, kind, params=params, model_params=hints)
    except Exception as error:
        raise SolverError(
            f"solver=ortools failed: {error}; try ilp:solver=cbc (pip install 'recompute-planner[cbc]')"
        ) from error
    return _from_mathopt(mathopt, program, model, result)


def _from_mathopt(mathopt: Any, program: Any, model: SparseModel, result: Any) -> Answer:
    reasons = mathopt.TerminationReason
    reason, termination = result.termination.reason, result.termination
    if reason in (reasons.INFEASIBLE, reasons.INFEASIBLE_OR_UNBOUNDED):  # every variable is bounded
        return _nothing(Outcome.INFEASIBLE)
    if reason not in (reasons.OPTIMAL, reasons.FEASIBLE, reasons.NO_SOLUTION_FOUND):
        raise SolverError(f"solver=ortools stopped: {reason.name} {termination.detail}; try ilp:solver=cbc")
    outcome = Outcome.SOLVED if reason is reasons.OPTIMAL else _stopped(mathopt, termination)
    dual = termination.objective_bounds.dual_bound
    if not result.has_primal_feasible_solution():
        return Answer(outcome=outcome, point=None, objective=math.inf, bound=_safe(dual, math.inf))
    values = result.variable_values(list(program.variables()))
    point = np.asarray(values, dtype=np.float64)
    objective = model.offset + float(model.cost @ point)
    return Answer(outcome=outcome, point=point, objective=objective, bound=_safe(dual, objective))


def _stopped(mathopt: Any, termination: Any) -> Outcome:
    return Outcome.SPENT if termination.limit is mathopt.Limit.NODE else Outcome.CUT_OFF


def _model_proto(model: SparseModel) -> Any:
    from ortools.math_opt import model_pb2

    proto = model_pb2.ModelProto()
    n, m = model.n_variables, model.n_rows
    proto.variables.ids.extend(range(n))
    proto.variables.lower_bounds.extend(model.least.tolist())
    proto.variables.upper_bounds.extend(model.most.tolist())
    proto.variables.integers.extend(model.integer.tolist())
    costly = np.flatnonzero(model.cost)
    proto.objective.offset = model.offset
    proto.objective.linear_coefficients.ids.extend(costly.tolist())
    proto.objective.linear_coefficients.values.extend(model.cost[costly].tolist())
    proto.linear_constraints.ids.extend(range(m))
    proto.linear_constraints.lower_bounds.extend(model.lower.tolist())
    proto.linear_constraints.upper_bounds.extend([math.inf] * m)
    rows = np.repeat(np.arange(m), np.diff(model.starts))
    order = np.lexsort((model.columns, rows))
    proto.linear_constraint_matrix.row_ids.extend(rows[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(model.columns[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(model.coefficients[order].tolist())
    return proto


# -- PuLP's CBC -----------------------------------------------------------------------------------------------


def _cbc(
    model: SparseModel, *, time_limit_s: float, gap: float, hint: Floats | None, corner: bool, nodes: int | None
) -> Answer:
    try:
        with needs_extra("cbc"):
            import pulp
    except MissingPackage as missing:
        raise SolverError(f"solver=cbc: {missing}, or use ilp:solver=ortools") from missing
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP's, of the names that all its releases know
        problem, variables = _pulp_problem(pulp, model)
        log = Path(folder) / "cbc.log"
        command = pulp.PULP_CBC_CMD(
            msg=False,
            timeLimit=time_limit_s,
            gapRel=gap,
            threads=1,
            logPath=str(log),
            keepFiles=False,
            maxNodes=nodes,
        )
        try:
            problem.solve(command)
        except pulp.PulpSolverError as error:
            raise SolverError(f"solver=cbc failed: {error}; try ilp:solver=ortools (pip install ortools)") from error
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return _from_cbc(pulp, problem, variables, model, text)


def _pulp_problem(pulp: Any, model: SparseModel) -> tuple[Any, list[Any]]:
    problem = pulp.LpProblem("recompute", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(f"x{i}", low, high, pulp.LpInteger if whole else pulp.LpContinuous)
        for i, (low, high, whole) in enumerate(
            zip(model.least.tolist(), model.most.tolist(), model.integer.tolist(), strict=True)
        )
    ]
    costly = np.flatnonzero(model.cost).tolist()
    problem += pulp.LpAffineExpression([(variables[i], float(model.cost[i])) for i in costly])
    columns, coefficients = model.columns.tolist(), model.coefficients.tolist()
    bounds = zip(model.starts[:-1].tolist(), model.starts[1:].tolist(), model.lower.tolist(), strict=True)
    for begin, end, lower in bounds:
        row = [(variables[columns[i]], coefficients[i]) for i in range(begin, end)]
        problem += pulp.LpConstraint(pulp.LpAffineExpression(row), pulp.LpConstraintGE, rhs=lower)
    return problem, variables


def _from_cbc(pulp: Any, problem: Any, variables: list[Any], model: SparseModel, log: str) -> Answer:
    if problem.status in (pulp.LpStatusInfeasible, pulp.LpStatusUndefined):
        return _nothing(Outcome.INFEASIBLE if "nfeasible" in log else Outcome.CUT_OFF)
    if problem.status not in (pulp.LpStatusOptimal, pulp.LpStatusNotSolved):
        raise SolverError(f"solver=cbc stopped: {pulp.LpStatus[problem.status]}; try ilp:solver=ortools")
    spent = "Stopped on node limit" in log
    cut = spent or "Stopped on time limit" in log
    outcome = Outcome.CUT_OFF if cut or problem.status != pulp.LpStatusOptimal else Outcome.SOLVED
    outcome = Outcome.SPENT if spent else outcome
    values = [v.varValue for v in variables]
    if any(v is None for v in values) or problem.sol_status == pulp.LpSolutionNoSolutionFound:
        return _nothing(outcome)
    point = np.array(values, dtype=np.float64)
    objective = model.offset + float(model.cost @ point)
    return Answer(outcome=outcome, point=point, objective=objective, bound=_cbc_bound(model, log, objective, cut))


def _cbc_bound(model: SparseModel, log: str, objective: float, cut: bool) -> float:
    """CBC tells its bound only in its log: as "Lower bound" while a gap is left, otherwise it is the objective."""
    told = re.findall(r"Lower bound:\s+(-?[\d.e+]+)", log)
    if told:
        return _safe(model.offset + float(told[-1]), objective)
    return -math.inf if cut else _safe(objective, objective)


_BACKENDS: dict[SolverName, Callable[..., Answer]] = {SolverName.ORTOOLS: _ortools, SolverName.CBC: _cbc}
