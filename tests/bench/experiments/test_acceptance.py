"""What is promised, put to the test: a verdict for every promise, failures in sentences, a file to go on from."""

import json

import pytest
import torch

from bench.__main__ import main
from bench.commands.results import make_tables
from bench.experiments import acceptance
from bench.experiments.acceptance import AcceptanceRow, Case, Promise, Verdict, tried, verdicts
from bench.workloads.spec import WorkloadSpec
from planner.errors import PlannerError
from profiler.measuring.memory import OutOfMemory


@pytest.fixture
def small(monkeypatch):
    """One small model and optimizer through both doors, and a small step that is measured."""
    tiny = {"seq": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}
    monkeypatch.setattr(acceptance, "MODELS", {"gpt2": (16, tiny)})
    monkeypatch.setattr(acceptance, "OPTIMIZER_NAMES", ("adamw",))
    monkeypatch.setattr(acceptance, "MEASURED", {"cpu": WorkloadSpec(source="tests.bench.small:make", batch=8)})


def test_the_command_tries_everything_and_goes_on_from_its_file(small, tmp_path, capsys, monkeypatch):
    out = tmp_path / "acceptance_cpu.json"
    main(["accept", "--out", str(out)])
    document = json.loads(out.read_text(encoding="utf-8"))
    found = {(row["promise"], row["verdict"]) for row in document["rows"]}
    assert {
        (Promise.EXACT.value, "kept"), (Promise.EXACT_MODEL.value, "kept"), (Promise.PEAK.value, "kept"),
        (Promise.BUDGET.value, "kept"), (Promise.RESERVED.value, "not to be tried here"),
        (Promise.NEIGHBOURS.value, "not to be tried here"), (Promise.MOVES.value, "kept"),
        (Promise.RANKS.value, "kept"),
    } <= found  # fmt: skip
    assert any(promise == Promise.TIME.value for promise, _ in found)
    assert document["settings"]["device"] == "cpu"
    assert Promise.EXACT.value in out.with_suffix(".md").read_text(encoding="utf-8")
    monkeypatch.setattr(acceptance, "tried", lambda case: pytest.fail(f"{case.title} was run again"))
    main(["accept", "--out", str(out)])
    assert len(json.loads(out.read_text(encoding="utf-8"))["rows"]) == len(document["rows"])


def test_ranks_that_have_no_device_of_their_own_are_not_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (row,) = acceptance._on_two_ranks(torch.device("cuda", 0), "two ranks")
    assert (row.verdict, row.said) == (Verdict.NOT_HERE, "1 of 2 devices are there")


def raising(error):
    def run():
        raise error

    return Case(title="a case", promise=Promise.EXACT, run=run)


def test_an_error_is_a_verdict_in_one_sentence():
    (row,) = tried(raising(PlannerError("it\ndiffers")))
    assert (row.verdict, row.said) == (Verdict.BROKEN, "PlannerError: it differs")
    (row,) = tried(raising(ValueError("odd")))
    assert (row.verdict, row.said) == (Verdict.BROKEN, "ValueError: odd")


def test_too_little_memory_breaks_no_promise():
    (row,) = tried(raising(OutOfMemory("too large")))
    assert (row.verdict, row.said) == (Verdict.NOT_HERE, "too large")
    (row,) = tried(raising(torch.OutOfMemoryError("CUDA out of memory")))
    assert row.verdict is Verdict.NOT_HERE


def test_a_promise_that_nothing_was_found_of_says_so():
    row = AcceptanceRow(case="c", promise=Promise.PEAK, verdict=Verdict.BROKEN, said="s")
    lines = dict(verdicts([row]))
    assert lines[Promise.PEAK.value] == "BROKEN in 1"
    assert lines[Promise.TIME.value] == "not tried"


def test_every_kind_of_device_has_a_step_to_measure():
    assert set(acceptance.MEASURED) == {"cpu", *acceptance.accelerators()}


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda"])
def test_a_device_that_is_not_there_is_one_line(device, capsys):
    assert main(["accept", "--device", device]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_files_of_other_machines_get_their_pages(small, tmp_path):
    (tmp_path / "devices").mkdir()
    rows = [AcceptanceRow(case="c", promise=Promise.PEAK, verdict=Verdict.KEPT, said="s")]
    settings = acceptance.AcceptanceSettings(device="cuda", name="a card")
    acceptance.save_rows(tmp_path / "devices" / "a_card.json", acceptance.ACCEPTANCE, rows, settings=settings)
    assert [path.name for path in make_tables(tmp_path)] == ["a_card.md"]
    assert "On a card" in (tmp_path / "devices" / "a_card.md").read_text(encoding="utf-8")
