"""The command line: bad input is told in one line, and planning on graphs needs no torch."""

import json
from pathlib import Path

import pytest

from bench.__main__ import COMMANDS, main
from bench.commands.compare import _peers
from bench.workloads.peers import PEERS
from bench.workloads.spec import WorkloadSpec

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--synthetic", "tower", "--strategy", "nonsense"], "unknown strategy 'nonsense': there are keep_all"),
        (["--synthetic", "tower", "--strategy", "sqrtn:segmentz=3"], "no option 'segmentz=3'"),
        (["--synthetic", "tower", "--strategy", ","], "--strategy names none"),
        (["--synthetic", "castle"], "unknown graph 'castle': there are chain"),
        (["--synthetic", "tower", "--budget", "4 bananas"], "4 bananas"),
        (["--synthetic", "tower", "--budget", "0"], "nothing runs in no memory"),
        (["--synthetic", "tower", "--budget", "-3"], "-3"),
        (["--graph", "no/such/graph.json"], "no/such/graph.json: there is no such file"),
        (["--synthetic", "tower", "--json", "no/such/folder/rows.json"], "No such file or directory"),
        (["--model", "resnet9000"], "unknown model 'resnet9000': there are resnet18"),
        (["--model", "resnet18", "--seq", "3"], "takes no --seq"),
        (["--model", "resnet18", "--optimizer", "sgdd"], "unknown optimizer 'sgdd': there are sgd"),
        (["--model", "resnet18", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["--import", "no_such_module:make"], "no_such_module"),
        (["--import", "no_colon"], "write package.module:make"),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("bench: ")
    assert len(error.strip().splitlines()) == 1


CONTRADICTIONS = [
    (["--graph", "g.json", "--synthetic", "tower"], "--graph and --synthetic"),
    *(
        ([graph, "tower", *given], f"{graph} and {given[0]}")
        for graph in ("--graph", "--synthetic")
        for given in (
            ["--model", "bert"],
            ["--import", "a.b:make"],
            ["--batch", "8"],
            ["--image", "96"],
            ["--seq", "128"],
            ["--optimizer", "sgd"],
            ["--dtype", "float32"],
            ["--device", "cpu"],
            ["--free-gradients"],
            ["--early-updates"],
            ["--peers"],
            ["--batches", "4,8"],
        )
    ),
    (["--model", "bert", "--import", "a.b:make"], "--model and --import"),
    (["--batches", "4,8", "--batch", "8"], "--batches and --batch "),
    (["--batches", "4,8", "--peers"], "--batches and --peers"),
    (["--batches", "4,8", "--strategy", "mutwo,sqrtn"], "--batches and several of --strategy"),
    (["--batches", "4,8", "--strategy", "all"], "--batches and several of --strategy"),
    (["--batches", "4,8", "--budget", "50%,60%"], "--batches and several of --budget"),
    (["verify", "--model", "bert", "--import", "a.b:make"], "--model and --import"),
    (["graph", "--graph", "g.json", "--batch", "4"], "--graph and --batch"),
    (["pareto", "--graph", "g.json", "--synthetic", "tower"], "--graph and --synthetic"),
    (["pareto", "--graph", "g.json", "--model", "bert"], "--graph and --model"),
]


@pytest.mark.parametrize(("arguments", "both"), CONTRADICTIONS, ids=lambda value: " ".join(value).strip())
def test_options_of_which_one_would_be_ignored_are_told_by_name(arguments, both, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(WorkloadSpec, "make", lambda self: pytest.fail("a model was made"))
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bench: {both}")
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


PLUG_IN = """
class Raises:
    name = "raises"

    def plan(self, problem):
        raise RuntimeError("boom")


class Nothing:
    name = "nothing"

    def plan(self, problem):
        return None


class Unmade:
    name = "unmade"

    def __init__(self):
        raise ValueError("no such card")

    def plan(self, problem):
        return None
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *((["--time-limit", text], f"--time-limit: {text}: must be a number of seconds above 0")
          for text in ("nan", "inf", "-1", "0", "soon")),
        (["--pairs", "0"], "--pairs: 0: must be a whole number of at least 1"),
        (["--pairs", "1.5"], "--pairs: 1.5: must be a whole number"),
        (["--batches", "4,x"], "--batches: x: must be a whole number"),
        (["--batch", "9" * 5000], "--batch: 99999999999999999999: must be a whole number"),
        (["--budget", "9" * 5000], "no memory has"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--strategy", "nonsense"], "unknown strategy 'nonsense'"),
        (["--strategy", "plug_in.py:Raises"], "plug_in.py:Raises: plan() raised RuntimeError: boom"),
        (["--strategy", "plug_in.py:Nothing"], "plug_in.py:Nothing: plan() returned None"),
        (["--strategy", "plug_in.py:Unmade"], "no such card"),
        (["--strategy", "plug_in.py:Missing"], "plug_in.py has no 'Missing'"),
        (["--strategy", "none.py:X"], "there is no file none.py"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_number_or_a_strategy_that_cannot_be_used_is_one_line(arguments, said, capsys, monkeypatch, tmp_path):
    (tmp_path / "plug_in.py").write_text(PLUG_IN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--synthetic", "chain"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: ")
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert len(error) < 500


TIMED = ["calibrate", "fit", "graph", "large", "pareto", "plans"]


@pytest.mark.parametrize("command", TIMED)
def test_every_command_with_a_time_limit_refuses_one_that_is_none(command, capsys):
    assert main([command, "--time-limit", "nan"]) == 2
    assert "--time-limit: nan: must be a number of seconds above 0" in capsys.readouterr().err


def test_rows_are_written_as_json(tmp_path):
    file = tmp_path / "rows.json"
    assert main(["--synthetic", "tower", "--strategy", "keep_all,mutwo", "--budget", "70%", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert {"command", "versions", "machine", "commit"} <= set(document)
    keep_all, mutwo = document["rows"]
    assert (keep_all["status"], mutwo["status"]) == ("over budget", "fits")
    assert mutwo["peak_bytes"] <= mutwo["budget_bytes"] < keep_all["peak_bytes"]
    assert mutwo["overhead"] > 0


def test_a_budget_above_the_peak_of_a_graph_says_that_there_is_nothing_to_do(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["--synthetic", "tower", "--strategy", "mutwo,cheap", "--budget", "120%", "--json", str(file)]) == 0
    assert "nothing to do" in " ".join(capsys.readouterr().out.split())
    rows = json.loads(file.read_text())["rows"]
    assert [row["strategy"] for row in rows] == ["mutwo", "cheap"]
    assert all(row["dropped"] == 0 and row["reason"].startswith("nothing to do") for row in rows)


def test_a_saved_graph_is_compared_where_importing_torch_fails(without_torch):
    assert "tower-5: strategies compared" in without_torch.said


def test_every_command_teaches(capsys):
    for command in ([], *([name] for name in COMMANDS)):
        with pytest.raises(SystemExit) as stopped:
            main([*command, "--help"])
        assert stopped.value.code == 0
        assert len(capsys.readouterr().out.splitlines()) > 5


def test_peers_are_chosen_by_parts_of_their_names():
    assert _peers(None, ["60%"]) == []
    assert _peers("all", ["60%"])[-len(PEERS) :] == list(PEERS)
    assert _peers("planned model", ["60%", "4GiB"])[:2] == [
        "planned model, budget 60%",
        "planned model, budget 4GiB",
    ]
    assert _peers("selective, every second layer", ["60%"]) == [
        "selective checkpointing, products saved",
        "Hugging Face gradient checkpointing, every second layer",
    ]


def test_a_peer_that_is_not_there_is_told_before_any_work(capsys):
    assert main(["--model", "resnet18", "--peers", "magic"]) == 2
    assert "no peer has 'magic' in its name" in capsys.readouterr().err


def test_sizes_without_a_model_are_refused_by_commands_that_have_a_list_of_their_own(capsys):
    for command in ("accuracy", "plans", "large", "scaled", "calibrate"):
        assert main([command, "--batch", "3"]) == 2
        assert "--batch without a model" in capsys.readouterr().err


def test_a_step_that_cannot_be_captured_is_one_line_not_a_traceback(capsys, tmp_path, monkeypatch):
    (tmp_path / "shape_of_data.py").write_text(
        "import torch\n"
        "def step(model, optimizer, batch):\n"
        "    optimizer.zero_grad()\n"
        "    loss = model(batch)[batch > 0].sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    return loss\n"
        "def make(batch_size):\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    batch = torch.arange(2.0 * batch_size).view(-1, 2) - 1\n"
        "    return step, model, torch.optim.SGD(model.parameters(), 0.1), batch\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["profile", "--import", "shape_of_data:make"]) == 2
    assert "shape_of_data.py:4" in capsys.readouterr().err
