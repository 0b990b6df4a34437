"""The doors: your training step in, the same step under a byte budget out."""

from runpy import run_path

run_path(f"{__path__[0]}/../planner/shadowing.py")["check"](__path__[0], "planner", "profiler", "strategies")

from rewriter.api import checkpoint
from rewriter.budgets import OverBudget
from rewriter.proof import Verification, VerificationError, verify
from rewriter.step import CheckpointedStep

__all__ = ["CheckpointedStep", "OverBudget", "Verification", "VerificationError", "checkpoint", "verify"]
