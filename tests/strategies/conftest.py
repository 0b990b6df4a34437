"""A package on the path with a strategy of its own, as `pip install` would leave it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOY = '''
from dataclasses import dataclass
from typing import ClassVar

from planner.analysis import candidates
from planner.plan import Plan, recompute_once
from planner.solve import Problem


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Drops the largest activations, one by one, until the step fits."""

    name: ClassVar[str] = "toy"
    at_most: int = 1000

    def plan(self, problem: Problem) -> Plan:
        graph, dropped = problem.graph, []
        for storage in sorted(candidates(graph), key=lambda s: -graph.storages[s].nbytes)[: self.at_most]:
            if problem.timeline(recompute_once(graph, dropped)).peak_bytes <= problem.budget_bytes:
                break
            dropped.append(storage)
        return recompute_once(graph, dropped)
'''

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Call it with a package's name, its source and its entry points: the package is importable until the test ends."""
    modules: list[str] = []

    def put(package: str, *, source: str = TOY, entries: tuple[str, ...]) -> None:
        site = tmp_path / f"site-{package}"
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text(source)
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[recompute_planner.strategies]", *entries]) + "\n")
        monkeypatch.syspath_prepend(str(site))
        modules.append(package)

    yield put
    for package in modules:
        sys.modules.pop(package, None)
