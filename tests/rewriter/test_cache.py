"""A second start finds what the first measured and planned; whatever is wrong with the folder, the step is the same."""

import json
import multiprocessing
import warnings

import pytest

import rewriter.pipeline
from planner.errors import FileFormatError
from planner.solve import Status
from rewriter import checkpoint, checkpoint_model, uncheckpoint
from rewriter.cache import ENVIRONMENT, Cache
from strategies.mutwo import MuTwo
from tests.rewriter import tiny
from tests.shared import case_of


def planned(workload, folder, **options):
    defaults = {"budget": "60%", "strategy": "mutwo", "verify": False, "show_progress": False}
    return checkpoint(*workload, **{**defaults, **options}, cache_dir=folder)


@pytest.fixture
def stages(monkeypatch):
    """What is really measured and planned, by name."""
    ran = []
    measure, plan = rewriter.pipeline.measure_within, MuTwo.plan

    def measuring(*args, **options):
        ran.append("measured")
        return measure(*args, **options)

    def planning(self, problem):
        ran.append("planned")
        return plan(self, problem)

    monkeypatch.setattr(rewriter.pipeline, "measure_within", measuring)
    monkeypatch.setattr(MuTwo, "plan", planning)
    return ran


def test_a_second_start_measures_and_plans_nothing_and_runs_the_same_plan(ordinary, tmp_path, stages):
    first = planned(ordinary, tmp_path)
    assert stages == ["measured", "planned"]
    second = planned(ordinary, tmp_path, verify=True)
    assert stages == ["measured", "planned"]
    assert second.solution.plan.evictions == first.solution.plan.evictions
    assert second.solution.problem.graph == first.solution.problem.graph
    assert str(second.solution).startswith("mutwo on ")
    assert second.verification.exact


def test_another_budget_is_planned_on_what_was_measured_before(ordinary, tmp_path, stages):
    planned(ordinary, tmp_path)
    planned(ordinary, tmp_path, budget="75%")
    assert stages == ["measured", "planned", "planned"]


def test_another_number_of_threads_is_measured_anew(ordinary, tmp_path, stages, monkeypatch):
    planned(ordinary, tmp_path)
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    planned(ordinary, tmp_path)
    assert stages.count("measured") == 2


def test_the_environment_names_a_folder_and_without_one_nothing_is_kept(ordinary, tmp_path, monkeypatch):
    assert Cache.at(None).folder is None
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "named" / "here"))
    planned(ordinary, None)
    kinds = sorted(path.name.partition("-")[0] for path in (tmp_path / "named" / "here").iterdir())
    assert kinds == ["measured", "plan"]


def cut_off(path):
    path.write_text(path.read_text()[:-200])


def of_another_version(path):
    path.write_text(path.read_text().replace('"schema":1', '"schema":0'))


def with_another_number(path):
    document = json.loads(path.read_text())
    inside = document["cache"]
    if "graph" in inside:
        inside["graph"]["ops"][0]["time_us"] += 1.0
    else:
        inside["plan"]["note"] = "another"
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("spoil", [cut_off, of_another_version, with_another_number])
@pytest.mark.parametrize("kind", ["measured", "plan"])
def test_what_is_damaged_or_stale_is_made_anew_and_said_once(ordinary, tmp_path, stages, spoil, kind):
    first = planned(ordinary, tmp_path)
    (path,) = tmp_path.glob(f"{kind}-*")
    spoil(path)
    with pytest.warns(UserWarning, match=path.name) as said:
        second = planned(ordinary, tmp_path)
    assert len(said) == 1
    assert len(stages) > 2
    assert second.solution.status is first.solution.status is Status.FITS
    stages.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(ordinary, tmp_path)
    assert stages == []


def test_a_folder_that_cannot_be_one_is_refused_before_the_work(ordinary, tmp_path, stages):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match=r"cache_dir=.*cannot be a folder"):
        planned(ordinary, tmp_path / "file")
    assert stages == []


def test_a_folder_that_takes_no_more_files_costs_the_next_start_and_not_this_one(ordinary, tmp_path, monkeypatch):
    def full(path, text):
        raise FileFormatError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr("planner.files.write_whole", full)
    with pytest.warns(UserWarning, match="nothing is kept for the next start"):
        step = planned(ordinary, tmp_path)
    assert step.solution.status is Status.FITS
    assert list(tmp_path.iterdir()) == []


def _keep(folder, rounds):
    case = case_of(tiny.plain)
    for _ in range(rounds):
        planned(case.workload, folder, budget="70%")


def test_two_processes_share_a_folder(ordinary, tmp_path):
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=_keep, args=(tmp_path, 2)) for _ in range(2)]
    for process in others:
        process.start()
    for process in others:
        process.join(60)
    assert [process.exitcode for process in others] == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(ordinary, tmp_path, budget="70%")
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())


def test_the_model_door_finds_what_it_measured_and_planned(ordinary, tmp_path, stages):
    _, model, _, (images, _) = ordinary
    for _ in range(2):
        checkpoint_model(model, budget="60%", strategy="mutwo", cache_dir=tmp_path)
        for _ in range(2):
            model.zero_grad()
            model(images).sum().backward()
        assert model.planned.solution.status is Status.FITS
        uncheckpoint(model)
    assert stages == ["measured", "planned"]
