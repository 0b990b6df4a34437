"""Every kind of results file there is: what an experiment registers here, `python -m bench results` can show again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.experiments.ablation import ABLATION
from bench.experiments.acceptance import ACCEPTANCE
from bench.experiments.accuracy import ACCURACY
from bench.experiments.arena import ARENA
from bench.experiments.arena_execution import ARENA_EXECUTION
from bench.experiments.calibration.run import CALIBRATION
from bench.experiments.comparison.side_by_side import COMPARISON
from bench.experiments.distributed.rows import DISTRIBUTED
from bench.experiments.exactness import EXACTNESS
from bench.experiments.experiment import Experiment, Results
from bench.experiments.goals import GOALS
from bench.experiments.large import LARGE
from bench.experiments.moves import MOVES
from bench.experiments.pareto.budget_for import BUDGET_FOR
from bench.experiments.pareto.run import PARETO
from bench.experiments.plans.rows import PLANS
from bench.experiments.plans.smallest_budgets import SMALLEST_BUDGETS
from bench.experiments.results_file import load_results
from bench.experiments.scaled import SCALED
from bench.experiments.sweep.run import SWEEP
from bench.experiments.zoo.run import ZOO

EXPERIMENTS: tuple[Experiment[Any], ...] = (
    ABLATION,
    ACCEPTANCE,
    ACCURACY,
    ARENA,
    ARENA_EXECUTION,
    BUDGET_FOR,
    CALIBRATION,
    COMPARISON,
    DISTRIBUTED,
    EXACTNESS,
    GOALS,
    LARGE,
    MOVES,
    PARETO,
    PLANS,
    SCALED,
    SMALLEST_BUDGETS,
    SWEEP,
    ZOO,
)


def load(path: Path) -> tuple[Experiment[Any], Results[Any]]:
    """Which experiment a results file is of, and what it holds; FileFormatError for any other file."""
    return load_results(path, EXPERIMENTS)
