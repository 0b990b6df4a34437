"""Which architectures there are, by library and family, and how a training step of one is made."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from planner.errors import PlannerError
from profiler.workload import Workload

NAMES = Path(__file__).with_name("names.toml")


class Library(Enum):
    """Where models come from."""

    TORCHVISION = "torchvision"
    TIMM = "timm"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model of a family: `kind` is what it is trained for, `size` the pixels a side of what it sees."""

    library: Library
    family: str
    model: str
    kind: str
    size: int = 0

    @property
    def name(self) -> str:
        return f"{self.library.value}/{self.family}"

    def make(self) -> Workload:
        """Its training step on made data, from a fixed seed."""
        module = importlib.import_module(f"bench.workloads.architectures.{self.library.value}_models")
        made: Workload = module.make(self)
        return made


def all_architectures() -> list[Architecture]:
    """Every architecture that is tried, library after library."""
    names = tomllib.loads(NAMES.read_text(encoding="utf-8"))
    found = [
        Architecture(library=Library.TORCHVISION, family=model, model=model, kind=kind, size=size)
        for kind, models in names["torchvision"].items()
        for model, size in models.items()
    ]
    found += [
        Architecture(library=Library.TIMM, family=family, model=model, kind="classification", size=size)
        for family, (model, size) in names["timm"].items()
    ]
    return found + [
        Architecture(library=Library.TRANSFORMERS, family=family, model=model, kind=kind)
        for kind, models in names["transformers"].items()
        for family, model in models.items()
    ]


def chosen(texts: Sequence[str]) -> list[Architecture]:
    """Those whose `library/family` contains one of the texts, or all; PlannerError where there is none."""
    everything = all_architectures()
    found = [one for one in everything if not texts or any(text in one.name for text in texts)]
    if not found:
        raise PlannerError(
            f"no architecture has {', '.join(texts)} in its name; there are {len(everything)}, such as "
            f"{everything[0].name} and {everything[-1].name}"
        )
    return found
