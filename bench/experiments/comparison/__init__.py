"""Planned steps against eager, and what users would pick instead: proven exact, and timed in turn."""
