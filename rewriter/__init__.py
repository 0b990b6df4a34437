"""The doors: your training step in, the same step under a byte budget out."""

from runpy import run_path

run_path(f"{__path__[0]}/../planner/shadowing.py")["check"](__path__[0], "planner", "profiler", "strategies")

from rewriter.agreement import RankError
from rewriter.api import checkpoint
from rewriter.budgets import OverBudget
from rewriter.model import PlannedModel, checkpoint_model, uncheckpoint
from rewriter.proof import Verification, VerificationError, verify
from rewriter.step import CheckpointedStep
from rewriter.ways.compiled import register
from rewriter.ways.rehearsal import BackwardError

__all__ = [
    "BackwardError",
    "CheckpointedStep",
    "OverBudget",
    "PlannedModel",
    "RankError",
    "Verification",
    "VerificationError",
    "checkpoint",
    "checkpoint_model",
    "uncheckpoint",
    "verify",
]

register()  # torch.compile(model, backend="recompute")
