"""The step before and after rewriting: the same runs in text, DOT and on the page, without torch."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.show.activation_spans import lifelines
from bench.show.dot import dot_text, edges
from bench.show.graph_page import page
from bench.show.plan_figure import module_groups
from bench.show.schedule_table import Kind, executed
from planner.analysis import candidates
from planner.explain import Choice
from planner.plan import Plan, recompute_once
from planner.schedule import Free, Run, RunKind, lower
from planner.solve import Problem, solve
from planner.synthetic import residual_tower, transformer

ROOT = Path(__file__).parents[3]
VOID = {"meta", "input"}
NASTY = '<b>"tower" & \\co</b>'


class Fixed:
    """A strategy that proposes the plan it was made with."""

    name = "fixed"

    def __init__(self, plan):
        self._plan = plan

    def plan(self, problem):
        return self._plan


def solved(graph, dropped=6):
    plan = recompute_once(graph, candidates(graph)[:dropped])
    return solve(Problem(graph=graph, budget_bytes=1 << 60), Fixed(plan))


def renamed(graph, name):
    ops = (replace(graph.ops[0], module_path=name), *graph.ops[1:])
    return replace(graph, name=name, ops=ops)


class WellFormed(HTMLParser):
    """Raises at a tag that is not closed in its turn, and notes what the page says and asks for."""

    def __init__(self):
        super().__init__()
        self.open, self.rows, self.text, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag == "tr":
            self.rows.append(dict(attrs).get("class", ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(text):
    parser = WellFormed()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


# -- the executed sequence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [residual_tower(4), transformer(3)], ids=lambda g: g.name)
def test_the_sequence_has_every_run_and_the_simulators_bytes(graph):
    solution = solved(graph)
    runs = executed(graph, solution.schedule)
    steps = solution.schedule.steps
    assert [run.op.id for run in runs] == [step.op for step in steps if isinstance(step, Run)]
    again = [step for step in steps if isinstance(step, Run) and step.kind is RunKind.RERUN]
    assert sum(run.kind is Kind.RECOMPUTE for run in runs) == len(again) > 0
    after = iter(runs)
    run = next(after)
    for step, following, live in zip(steps, (*steps[1:], None), solution.timeline.bytes_at, strict=True):
        if isinstance(following, Free):
            continue  # more of the same run's frees to come
        if isinstance(step, Free):
            assert run.after_bytes == live
        run = next(after, None)


def test_what_is_dropped_is_made_again_and_nothing_else_is():
    graph = residual_tower(4)
    runs = executed(graph, solved(graph).schedule)
    for i, run in enumerate(runs):
        later = {storage for other in runs[i + 1 :] for storage in other.made}
        assert set(run.dropped) == set(run.freed) & later


def test_the_step_as_it_is_recomputes_and_drops_nothing():
    graph = residual_tower(4)
    runs = executed(graph, lower(graph, Plan()))
    assert not any(run.dropped or run.kind is Kind.RECOMPUTE for run in runs)


# -- life-lines ---------------------------------------------------------------------------------------------------


def test_lifelines_tell_the_kept_from_the_dropped_and_when_they_are_there():
    graph = residual_tower(4)
    solution = solved(graph, dropped=3)
    lines = lifelines(graph, executed(graph, solution.schedule))
    assert len(lines) == len(candidates(graph))
    dropped = {line.name for line in lines if line.choice is Choice.RECOMPUTE}
    assert dropped == {graph.storage_names[s] for s in solution.dropped}
    for line in lines:
        assert len(line.spans) == (1 if line.choice is Choice.KEEP else 2)
        assert all(span.start_ms < span.end_ms for span in line.spans)
        assert [bool(span.made_before) for span in line.spans] == [span.recomputed for span in line.spans]


def test_lifelines_of_the_largest_stand_in_the_order_of_the_forward():
    graph = transformer(3)
    lines = lifelines(graph, executed(graph, lower(graph, Plan())), most=5)
    sizes = sorted((graph.storages[s].nbytes for s in candidates(graph)), reverse=True)
    assert sorted((line.nbytes for line in lines), reverse=True) == sizes[:5]
    starts = [line.spans[0].start_ms for line in lines]
    assert starts == sorted(starts)


def test_neighbours_of_one_module_are_one_group():
    modules = ["conv1", "layer1.0.a.b", "layer1.0.a.c", "layer1.1.a", "layer1.0.a.d"]
    assert len(module_groups(modules)) == 5  # as deep as it goes
    assert module_groups(modules, most=4) == [
        (0, 0, "conv1"),
        (1, 2, "layer1.0.a"),
        (3, 3, "layer1.1.a"),
        (4, 4, "layer1.0.a"),
    ]
    assert module_groups(modules, most=2) == [(0, 0, "conv1"), (1, 4, "layer1")]


# -- DOT ----------------------------------------------------------------------------------------------------------


def test_dot_is_balanced_with_quoted_names_and_an_edge_for_every_value_read():
    graph = renamed(residual_tower(3), NASTY)
    runs = executed(graph, solved(graph).schedule)
    text = dot_text(graph, runs)
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "Q", text)  # every quoted text is one letter
    assert '"' not in bare
    assert bare.count("{") == bare.count("}") == 2  # the graph, and the one module
    assert bare.count("[") == bare.count("]")
    assert all(re.fullmatch(r"\s*(Q \[label=Q, fillcolor=Q(, style=Q)?\];|Q -> Q;)", line)
               for line in bare.splitlines()[2:-1] if "Q [" in line or "->" in line)  # fmt: skip
    assert bare.count("[label=") == len(runs)
    assert bare.count("->") == len(edges(graph, runs))


def test_a_recomputed_value_is_read_from_its_recomputation():
    graph = residual_tower(3)
    runs = executed(graph, solved(graph).schedule)
    by_number = {run.number: run for run in runs}
    sources = [by_number[a] for a, b in edges(graph, runs) if by_number[b].kind is Kind.BACKWARD]
    assert any(run.kind is Kind.RECOMPUTE for run in sources)
    assert all(a < b for a, b in edges(graph, runs))


# -- the page -----------------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_escaped_and_asks_for_nothing_from_outside():
    graph = renamed(residual_tower(3), NASTY)
    solution = solved(graph)
    before, after = executed(graph, lower(graph, Plan())), executed(graph, solution.schedule)
    text = page(solution, before, after)
    found = parsed(text)
    assert NASTY not in text
    assert NASTY in "".join(found.text)
    assert not {"src", "href"} & {name for name, _ in found.attributes}
    assert "http" not in text
    assert len(found.rows) == 1 + len(after)
    assert found.rows.count("again") == solution.timeline.reruns
    assert text.count('<span class="drop">') == 1 + sum(len(run.dropped) for run in after)  # and one in the legend


# -- the command --------------------------------------------------------------------------------------------------


def test_a_saved_graph_is_shown_where_importing_torch_fails(without_torch):
    names = {path.name for path in (without_torch.folder / "shown").iterdir()}
    assert names == {
        "before.txt",
        "after.txt",
        "before.dot",
        "after.dot",
        "graph.html",
        "plan.csv",
        "plan.png",
        "plan.txt",
    }
    assert "recompute" in (without_torch.folder / "shown" / "after.txt").read_text()
    assert "recompute" not in (without_torch.folder / "shown" / "before.txt").read_text()
    assert (without_torch.folder / "shown" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_is_shown_before_and_after(tmp_path):
    options = ["--import", "tests.bench.small:make", "--strategy", "mutwo", "--budget", "80%"]
    assert main(["graph", *options, "--out", str(tmp_path)]) == 0
    after = (tmp_path / "after.txt").read_text()
    assert "recompute" in after
    assert re.search(r"addmm_1 +forward +3 ", after)  # the module it stands in
    parsed((tmp_path / "graph.html").read_text())


def test_a_budget_above_the_peak_is_shown_as_nothing_to_do(tmp_path, capsys):
    residual_tower(3).save(tmp_path / "graph.json")
    assert main(["graph", "--graph", str(tmp_path / "graph.json"), "--budget", "100%", "--out", str(tmp_path)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    before, after = ((tmp_path / name).read_text().splitlines() for name in ("before.txt", "after.txt"))
    assert before[1:] == after[1:]  # all but the title


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategy", "mutwo,sqrtn"], "--strategy takes one here, not 2"),
        (["--budget", "50%,60%"], "--budget takes one here, not 2"),
        (["--budget", "4 bananas"], "4 bananas"),
        (["--graph", "no/such/graph.json"], "there is no such file"),
    ],
)
def test_bad_input_of_the_graph_command_is_one_line(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["graph", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
