"""The small network, captured once for all tests that only plan it, or run it and let it be put back."""

from collections.abc import Iterator

import pytest

import rewriter.pipeline
from tests.rewriter import tiny
from tests.shared import case_of, remembered_again, remembered_capture
from tests.side_by_side import Workload


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning the workload of a shared case again does not trace it again."""
    monkeypatch.setattr(rewriter.pipeline, "capture", remembered_capture)
    monkeypatch.setattr(rewriter.pipeline, "trace_again", remembered_again)


@pytest.fixture
def ordinary(captured_once: None) -> Iterator[Workload]:
    """The small network with the ordinary step, as new; whatever a test does with it is undone."""
    case = case_of(tiny.plain)
    with case.kept():
        yield case.workload
