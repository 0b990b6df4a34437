"""The doors: your training step in, the same step under a byte budget out."""

from rewriter.api import checkpoint
from rewriter.budgets import OverBudget
from rewriter.proof import Verification, VerificationError, verify
from rewriter.step import CheckpointedStep

__all__ = ["CheckpointedStep", "OverBudget", "Verification", "VerificationError", "checkpoint", "verify"]
