"""The training loops of other libraries and of bench/examples around a planned model: equal to the same unplanned."""

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from bench.examples import accelerate_loop, any_loop, lightning_loop, lora_finetune, trainer_budget
from bench.workloads.zoo import declare_torchvision_ops
from rewriter import checkpoint_model
from rewriter.proof import same_bits
from rewriter.trainer import budget_callback
from rewriter.ways.common import Way

declare_torchvision_ops()

BUDGET = {"budget": "85%", "strategy": "mutwo"}


def assert_equal(eager, planned):
    (losses, model), (same_losses, other) = eager, planned
    assert losses == same_losses
    for (key, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert same_bits(a, b), key


def assert_planned_and_lower(planned):
    assert planned.way is Way.OWN_CAPTURE
    assert planned.verification.exact
    assert planned.verification.measured_peak_bytes < planned.verification.eager_peak_bytes


@pytest.fixture
def quick(monkeypatch):
    """The examples with a strategy that takes no seconds."""
    for example in (accelerate_loop, lightning_loop, lora_finetune):
        monkeypatch.setattr(example, "checkpoint_model", lambda model, budget: checkpoint_model(model, **BUDGET))


@pytest.mark.parametrize("name", any_loop.LOOPS)
def test_a_loop_that_is_no_single_step_is_the_same_around_planned_models(name):
    results = []
    for plan in (lambda model: None, lambda model: checkpoint_model(model, **BUDGET)):
        torch.manual_seed(0)
        losses, models = any_loop.LOOPS[name](plan, 256, 4)
        results.append((losses, nn.ModuleList(models)))
    assert_equal(*results)
    for model in results[1][1]:
        assert_planned_and_lower(model.planned)


@pytest.mark.parametrize("bf16", [False, True])
def test_hugging_faces_trainer_accumulates_clips_and_casts_as_ever(tmp_path, bf16):
    callback = budget_callback(**BUDGET)
    eager, planned = (
        trainer_budget.train(callbacks, accumulate=2, steps=3, folder=str(tmp_path), bf16=bf16)
        for callbacks in ([], [callback])
    )
    assert_equal(eager, planned)
    assert_planned_and_lower(callback.planned)
    assert not hasattr(planned[1], "planned")


@pytest.fixture
def fresh_accelerator():
    """Accelerate keeps one setting for a whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_that_accelerate_prepares_stays_planned(quick, fresh_accelerator, precision):
    eager, planned = (
        accelerate_loop.train(budget, precision=precision, accumulate=2, rows=256) for budget in (None, "85%")
    )
    assert_equal(eager, planned)
    assert_planned_and_lower(planned[1].planned)


@pytest.mark.filterwarnings("ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning")
def test_lightnings_automatic_optimization_is_as_ever(quick):
    eager, planned = (lightning_loop.train(budget, rows=256) for budget in (None, "85%"))
    assert_equal(eager, planned)
    assert_planned_and_lower(planned[1].planned)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_trained_as_ever(quick, dora):
    eager, planned = (lora_finetune.train(budget, dora=dora, steps=3) for budget in (None, "85%"))
    assert_equal(eager, planned)
    assert_planned_and_lower(planned[1].planned)
