"""Packages that not every user needs: what is missing is told with the extra that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from planner.errors import MissingPackage


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """For imports of what the extra installs: MissingPackage, in one sentence, where it is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        raise MissingPackage(f"{package} is not installed: pip install 'recompute-planner[{extra}]'") from error
