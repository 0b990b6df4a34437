"""Every script of bench/examples runs as it stands, on its own small sizes, and shows what it promises."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main as bench
from bench.examples import (
    accelerate_loop,
    any_loop,
    lightning_loop,
    lora_finetune,
    own_loop,
    own_strategy,
    save_and_reuse_plan,
    several_processes,
    trainer_budget,
    two_models_one_budget,
    will_it_fit,
)
from planner.ir import Graph
from strategies.conformance import StrategyConformance

FOLDER = Path(own_loop.__file__).parent
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def said(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_an_own_loop_trains_within_its_budget_equal_to_the_bit(capsys):
    own_loop.main(["--epochs", "2", "--depth", "2", "--batch", "8"])
    text = said(capsys)
    assert "auto on Sequential: fits" in text
    assert "equal to the bit" in text
    assert "epoch 2: loss" in text
    assert text.endswith("learning rate 0.025")


def test_an_own_strategy_is_judged_beside_the_others(capsys):
    own_strategy.main(["--blocks", "5"])
    text = said(capsys)
    for name in ("largest_first", "sqrtn", "mutwo", "ilp"):
        assert f"{name} on tower-5: fits" in text
    assert "dropped: " in text


def test_one_process_trains_as_a_group_of_one(capsys):
    several_processes.main(["--how", "replicas", "--depth", "2", "--steps", "2"])
    assert "proven equal to the bit" in said(capsys)


def test_two_processes_of_torchrun_train_shards_by_one_plan():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(FOLDER / "several_processes.py"), "--depth", "2"],
        env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: auto on FSDPSequential: fits" in done.stdout
        assert f"rank {rank}: 4 steps, loss" in done.stdout
    assert done.stdout.count("equal to the bit (largest difference 0)") == 2


class TestOwnStrategy(StrategyConformance):
    @pytest.fixture
    def strategy(self):
        return own_strategy.LargestFirst()


def test_a_plan_that_was_saved_is_used_again_and_refused_for_another_model(capsys, tmp_path):
    save_and_reuse_plan.main(["--depth", "3", "--out", str(tmp_path)])
    text = said(capsys)
    assert "plan file on Sequential: fits" in text
    assert "for a deeper model: " in text
    assert "differ; plan again for this graph" in text
    assert Graph.load(tmp_path / "graph.json").name == "Sequential"
    assert bench(["--graph", str(tmp_path / "graph.json"), "--strategy", "mutwo"]) == 0


def test_two_models_that_take_turns_stay_within_one_budget(capsys):
    two_models_one_budget.main(["--depth", "3", "--rows", "256", "--turns", "2"])
    assert re.search(r"taking turns they need \S+ \S+ of ", said(capsys))


def test_a_gpu_that_is_not_here_needs_a_plan_and_each_known_one_is_answered(capsys):
    will_it_fit.main(["--depth", "4", "--batch", "400000", "--seconds", "0.2"])
    text = said(capsys)
    assert re.match(
        r"Yes, with a plan( that moves \S+ GiB a step)?: the network at batch 400000 on T4 \(estimated\)", text
    )
    assert "largest batch within 5% more time: " in text
    assert "H100-80: fits as it is" in text


@pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning")
def test_loops_of_other_libraries_around_a_planned_model_say_what_was_planned_and_proven(capsys):
    any_loop.main(["--rows", "256", "--loop", "scaler", "--steps", "3"])
    accelerate_loop.main(["--rows", "256"])
    lightning_loop.main(["--rows", "256"])
    lora_finetune.main(["--steps", "2"])
    trainer_budget.main(["--steps", "2"])
    text = said(capsys)
    assert len(re.findall(r"auto on \w+: fits: peak", text)) == 5
    assert text.count("proven equal to the bit") == 5


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_teaches_and_prints_its_own_command(name, capsys):
    module = importlib.import_module(f"bench.examples.{name}")
    assert f"\n    python bench/examples/{name}.py" in module.__doc__
    with pytest.raises(SystemExit):
        module.main(["--help"])
    assert "default" in (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out


def test_every_script_is_run_by_a_test():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in SCRIPTS if f"{name}.main(" not in source] == []
