"""`-v`: the story of a run on the error stream, for whoever asks, and silence for everybody else."""

from __future__ import annotations

import logging
import re

import pytest

from bench.__main__ import COMMANDS, main
from rewriter import checkpoint
from tests.bench.small import make

LOG = logging.getLogger("recompute_planner")
CHAIN = ["--synthetic", "chain", "--strategy", "ilp", "--budget", "90%"]


def test_the_logger_is_silent_unless_somebody_listens(capsys):
    assert {type(handler) for handler in LOG.handlers} == {logging.NullHandler}
    assert main(CHAIN) == 0
    assert capsys.readouterr().err == ""


def test_v_tells_what_was_solved_in_how_many_seconds(capsys):
    assert main([*CHAIN, "-v"]) == 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert " solved in " in line
    assert "ilp on chain" in line


def test_vv_tells_what_was_tried_before(capsys):
    assert main([*CHAIN, "-vv"]) == 0
    *tried, solved = capsys.readouterr().err.strip().splitlines()
    assert "ilp tried mutwo after" in tried[0]
    assert " solved in " in solved


def test_a_planned_step_tells_every_stage_and_its_seconds(caplog):
    step, model, optimizer, batch = make(4)
    with caplog.at_level(logging.INFO, logger="recompute_planner"):
        checkpoint(step, model, optimizer, batch, budget="90%", strategy="mutwo", show_progress=False)
    stages = ["captured", "traced", "measured", "compared", "solved", "rewrote", "watched", "watched", "compared"]
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(" ")[0] for line in told] == stages
    assert all(re.search(r"in \d+\.\d\d s\b", line) for line in told[:-1])
    assert " ops, " in told[0]
    assert "equal to the bit" in told[-1]


def test_a_run_that_fails_leaves_the_logger_as_it_was(capsys):
    assert main(["--synthetic", "castle", "-v"]) == 2
    assert {type(handler) for handler in LOG.handlers} == {logging.NullHandler}
    assert LOG.level == logging.NOTSET


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_every_command_takes_it(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "-v", "--help"])
    assert "--verbose" in capsys.readouterr().out
