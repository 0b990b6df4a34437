"""Progress of long work, on a terminal and in a pipe."""

import io

from rich.console import Console

import bench.show.terminal


def told(monkeypatch, **options):
    shown = Console(file=io.StringIO(), width=80, **options)
    monkeypatch.setattr(bench.show.terminal, "console", shown)
    with bench.show.terminal.stage("measuring [b]it[/b]"):
        bench.show.terminal.say("half of it")
    return shown.file.getvalue()


def test_in_a_pipe_every_stage_is_one_plain_line(monkeypatch):
    assert told(monkeypatch) == "measuring [b]it[/b]\nhalf of it\n"


def test_on_a_terminal_a_stage_is_no_line_of_its_own(monkeypatch):
    assert "half of it" not in told(monkeypatch, force_terminal=True)
