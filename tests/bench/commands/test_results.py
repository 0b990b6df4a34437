"""The results folder: pages and figures made again from rows and graphs."""

import shutil

import pytest

from bench.commands.results import RESULTS, make_tables, page_of
from bench.experiments.experiment import Experiment, line_by_line
from bench.experiments.pareto.run import PARETO, trade_off
from bench.experiments.registry import EXPERIMENTS, load
from bench.experiments.results_file import save_rows
from planner.errors import FileFormatError
from planner.synthetic import chain, residual_tower

COMMITTED = sorted(RESULTS.glob("*.json"))
OF_A_STEP = ["peak_breakdown.png", "memory.png", "largest_activations.png", "time_by_kind.png"]
OF_A_PLAN = ["memory_mutwo_50pct.png", "plan_mutwo_50pct.png", "plan_mutwo_50pct.txt", "arena.png"]


@pytest.mark.parametrize("source", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_page_is_that_of_its_committed_rows(source):
    assert page_of(*load(source)) == source.with_suffix(".md").read_text(encoding="utf-8")


def test_every_kind_but_answers_about_one_question_or_machine_is_committed():
    alone = {
        "budget_for",
        "acceptance",
        "distributed",
        "goals",
        "zoo",
    }  # or take an hour, or several machines
    assert {load(source)[0].kind for source in COMMITTED} - alone == {e.kind for e in EXPERIMENTS} - alone


@pytest.mark.parametrize(("blocks", "names"), [(12, OF_A_STEP + OF_A_PLAN), (1, OF_A_STEP)])
def test_a_saved_step_has_its_figures_drawn_again_and_those_of_a_plan_if_there_is_one(tmp_path, blocks, names):
    (tmp_path / "tower").mkdir()
    residual_tower(blocks).save(tmp_path / "tower" / "graph.json")
    written = make_tables(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in written] == [f"tower/{name}" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written if path.suffix == ".png")


def test_a_curve_saved_by_pareto_becomes_a_page_and_its_figure_whatever_it_is_called(without_torch, tmp_path):
    shutil.copy(without_torch.folder / "my_curve.json", tmp_path)
    page, figure = make_tables(tmp_path)
    assert (page.name, figure.name) == ("my_curve.md", "my_curve.png")
    text = page.read_text(encoding="utf-8")
    assert "| budget | peak at most | keep_all | sqrtn | cheap | mutwo | ilp | least by ilp | gap | found by |" in text
    assert "no plan at all runs in less than" in text
    assert "(my_curve.png)" in text
    assert figure.read_bytes() == (without_torch.folder / "pareto_tower_5.png").read_bytes()


def test_the_least_memory_for_an_overhead_becomes_a_page(without_torch):
    page = page_of(*load(without_torch.folder / "least.json"))
    assert "| tower-5 | 5.0% |" in page


def test_rows_of_several_graphs_are_no_curve_and_refused_with_the_way_on(tmp_path):
    curves = [trade_off(graph, ["keep_all"], ["100%"], time_limit_s=1) for graph in (chain(2), residual_tower(2))]
    save_rows(tmp_path / "two.json", PARETO, [row for curve in curves for row in curve.rows])
    with pytest.raises(FileFormatError, match="save each graph to a file of its own"):
        make_tables(tmp_path)


def test_rows_of_no_known_kind_are_refused_with_the_file_and_the_kinds(tmp_path):
    mystery = Experiment(kind="mystery", rows=(int,), table=line_by_line((), lambda _: ()))
    save_rows(tmp_path / "accuracy.json", mystery, [])
    with pytest.raises(FileFormatError, match=r"accuracy\.json: rows of kind 'mystery'; there are ablation, accept"):
        make_tables(tmp_path)
