"""What the one logger of all rooms tells, line by line on the error stream, for whoever asked by `-v`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("recompute_planner")


class _ToErrorStream(logging.Handler):
    """Asks for the stream at every line: a progress bar puts its own there, which prints above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


@contextmanager
def telling(verbosity: int) -> Iterator[None]:
    """While it lasts: nothing at 0, every stage at 1, what strategies tried too from 2 on."""
    if not verbosity:
        yield
        return
    handler, before = _ToErrorStream(), log.level
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
