"""Whether code asks for what is another each time: the clock, and random bytes of the system."""

from __future__ import annotations

import datetime
import os
import secrets
import time
import uuid
from collections.abc import Collection, Iterable
from typing import Any

_CLOCKS = frozenset(
    f"{name}{unit}"
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
)
_FUNCTIONS = (
    *(getattr(time, name) for name in sorted(_CLOCKS)),
    *(os.urandom, uuid.uuid1, uuid.uuid4, secrets.randbelow, secrets.choice, secrets.token_bytes, secrets.token_hex),
)
_TODAY = frozenset({"now", "utcnow", "today"})
_OF: tuple[tuple[Any, frozenset[str]], ...] = (
    (time, _CLOCKS),
    (datetime, _TODAY),
    (datetime.datetime, _TODAY),
    (datetime.date, _TODAY),
    (os, frozenset({"urandom"})),
    (uuid, frozenset({"uuid1", "uuid4"})),
    (secrets, frozenset(secrets.__all__)),
)


def is_another_each_time(globals_read: Iterable[Any], attributes: Collection[str]) -> bool:
    """Whether code that reads these globals, and these attributes of anything, can ask for time or chance."""
    for one in globals_read:
        if any(one is function for function in _FUNCTIONS):
            return True
        if any(one is owner and not names.isdisjoint(attributes) for owner, names in _OF):
            return True
    return False
