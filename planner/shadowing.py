"""Whose `planner` is it? The names of the rooms are common, and a user's own module of the same name is found first.

Every room that imports another runs this file by its path, in its first line: `planner` may be the one shadowed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def check(room: str, *needed: str) -> None:
    """ImportError, one sentence that names both files, if a room needed is not the one beside the folder `room`."""
    for name in needed:
        ours, found = Path(room).absolute().parent / name, _found(name)
        if found is not None and found.parent.resolve() != ours.resolve():
            raise ImportError(
                f"{Path(room).name} needs its own {name}, {ours / '__init__.py'}, but Python finds {found} first: "
                "rename that one, or start Python in another folder"
            )


def _found(name: str) -> Path | None:
    """The file that `import name` runs, or has run; None for a folder without `__init__.py`, which hides nothing."""
    module = sys.modules.get(name)
    spec = find_spec(name) if module is None else None
    file = getattr(module, "__file__", None) if spec is None else spec.origin
    return None if file is None else Path(file)
