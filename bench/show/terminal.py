"""The terminal: one console, and the progress of long work. Nothing here measures or decides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

console = Console()
if not console.is_terminal:
    console = Console(width=150)  # a file or a pipe has no width of its own


def say(text: str) -> None:
    """One plain line for a stage of long work where neither bar nor spinner shows it: in a pipe, in a file."""
    if not console.is_terminal:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def stage(text: str) -> Iterator[None]:
    """A stage of long work, shown while it lasts: by a spinner, or in a pipe by one plain line."""
    say(text)
    with console.status(text):
        yield


def progress() -> Progress:
    """A bar that says what is being done and for how long; gone when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
