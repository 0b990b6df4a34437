"""The sweep over architectures: what it lists, what it finds, and how it tells it."""

import time

import pytest
import torch

from bench.experiments.histories import digest
from bench.experiments.results_file import save_rows
from bench.experiments.zoo import run, trial
from bench.experiments.zoo.rows import Door, Outcome, ZooRow, pass_rates, reasons
from bench.experiments.zoo.run import SETTINGS, ZOO, run_zoo
from bench.machine.separate_process import SeparateProcessError, in_separate_process
from bench.workloads.architectures.catalogue import Architecture, Library, all_architectures, chosen
from planner.errors import PlannerError
from profiler.errors import CaptureError
from profiler.workload import Workload
from rewriter import OverBudget, VerificationError
from tests.bench.small import make

ONE = Architecture(library=Library.TORCHVISION, family="small", model="small", kind="classification")


def row(family="a", door=Door.STEP, outcome=Outcome.EXACT, library="timm", note=""):
    return ZooRow(library=library, family=family, model=family, door=door, outcome=outcome, note=note)


def test_every_architecture_stands_once_and_each_library_has_many():
    names = [one.name for one in all_architectures()]
    assert len(set(names)) == len(names) >= 180
    for library in Library:
        assert sum(name.startswith(f"{library.value}/") for name in names) >= 30


def test_architectures_are_chosen_by_a_part_of_their_name():
    assert {one.name for one in chosen(["timm/conv"])} >= {"timm/convnext", "timm/convmixer"}
    with pytest.raises(PlannerError, match="no architecture has nonsense"):
        chosen(["nonsense"])


@pytest.mark.parametrize("name", ["torchvision/shufflenet_v2_x0_5", "transformers/llama", "transformers/t5"])
def test_an_architecture_trains_from_its_configuration_the_same_each_time(name):
    (first, *_), (second, *_) = ([one.make().run_once()] for one in [*chosen([name])[:1] * 2])
    assert torch.isfinite(first)
    assert torch.equal(first, second)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(Architecture, "make", lambda self: Workload(*make(8)))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("door", Door)
def test_a_small_net_is_exact_through_both_doors_and_its_memory_is_told(door):
    found = trial.try_architecture(ONE, door)
    assert found.outcome.is_served, found
    assert found.peak_ratio is not None
    assert found.time_ratio > 0
    assert (found.way == "own capture") == (door is Door.MODEL)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("error", "outcome"),
    [(VerificationError, Outcome.TOLD), (CaptureError, Outcome.REFUSED), (OverBudget, Outcome.REFUSED)],
)
def test_an_error_of_ours_is_told_from_a_difference(monkeypatch, error, outcome):
    def refuses(*args, **options):
        raise error("it says why")

    monkeypatch.setattr(trial, "checkpoint", refuses)
    found = trial.try_architecture(ONE, Door.STEP)
    assert (found.outcome, found.note) == (outcome, "it says why")


@pytest.mark.usefixtures("small")
def test_a_step_that_trains_otherwise_without_a_word_is_a_silent_difference(monkeypatch):
    honest = trial.checkpoint

    def cheats(train_step, model, *rest, **options):
        step = honest(train_step, model, *rest, **options)
        with torch.no_grad():
            next(model.parameters()).add_(1e-7)
        return step

    monkeypatch.setattr(trial, "checkpoint", cheats)
    found = trial.try_architecture(ONE, Door.STEP)
    assert found.outcome is Outcome.SILENT
    assert "differs after step 1" in found.note


def test_bits_are_compared_not_numbers():
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.tensor(float("nan"))) == digest(torch.tensor(float("nan")))
    assert digest(torch.zeros(2)) != digest(torch.zeros(2, dtype=torch.int32))
    assert digest(torch.zeros(2, 1).t()) == digest(torch.zeros(1, 2, requires_grad=True))


def test_rates_count_families_by_door_and_by_at_least_one():
    rows = [row("a"), row("a", Door.MODEL), row("b", outcome=Outcome.REFUSED), row("b", Door.MODEL)]
    columns, lines = pass_rates([*rows, row("c", library="torchvision", outcome=Outcome.SILENT)])
    assert columns == ("library", "architectures", "checkpoint", "checkpoint_model", "at least one")
    assert lines[0] == ["timm", "2", "1 (50.0%)", "2 (100.0%)", "2 (100.0%)"]
    assert lines[-1] == ["all", "3", "1 (33.3%)", "2 (66.7%)", "2 (66.7%)"]


def test_a_reason_stands_once_with_who_it_met():
    _, lines = reasons([row(name, outcome=Outcome.REFUSED, note="shapes from data") for name in "ab"] + [row("c")])
    assert lines == [["checkpoint", "refused", "2", "shapes from data", "a, b"]]


def test_a_run_goes_on_where_it_stopped_and_keeps_its_rows(monkeypatch, tmp_path):
    path = tmp_path / "zoo.json"
    other = Architecture(library=Library.TIMM, family="other", model="other", kind="classification")
    save_rows(path, ZOO, [row("other")], settings=SETTINGS)
    asked = []

    def answers(call, architecture, door, **options):
        asked.append((architecture.family, door))
        raise SeparateProcessError(architecture.name, "killed by SIGKILL")

    monkeypatch.setattr(run, "in_separate_process", answers)
    rows = run_zoo([other, ONE], [Door.STEP], limit_s=1.0, workers=2, out=path)
    assert asked == [("small", Door.STEP)]
    assert [(one.family, one.outcome) for one in rows] == [("other", Outcome.EXACT), ("small", Outcome.FAILED)]
    assert "killed by SIGKILL" in path.read_text()


def test_a_call_that_takes_too_long_is_ended_and_said():
    with pytest.raises(SeparateProcessError, match="sleeping: not done after 1 s"):
        in_separate_process(time.sleep, 60, what="sleeping", limit_s=1.0)
