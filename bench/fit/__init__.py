"""Will it fit? A step planned for a device that need not be here."""

from bench.fit.report import FitReport, fit

__all__ = ["FitReport", "fit"]
