"""Will it fit? A step planned for a device that need not be here."""

from bench.fit.question import fit
from bench.fit.report import FitReport

__all__ = ["FitReport", "fit"]
