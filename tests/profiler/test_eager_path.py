"""Capture goes eager's way through library code that asks whether it is traced, or looks at values."""

import pytest
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from profiler.tracing.eager_ways.eager_path import as_in_eager
from profiler.tracing.whole_step import capture
from tests.profiler import library_models as models
from tests.side_by_side import assert_captured_equals_eager, seeded


@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_a_language_model_with_a_mask_of_ones_equals_eager(family, checkpointing):
    make = models.language_model(family, mask=True, checkpointing=checkpointing)
    traced = assert_captured_equals_eager(make, steps=2)
    (expected,) = traced.convention.beforehand.expected
    assert expected.value is True
    assert "masking_utils.py" in expected.line
    assert not any("bitwise" in op.target for op in traced.graph.ops), "a mask was made where eager makes none"


def test_a_language_model_without_a_mask_equals_eager():
    assert_captured_equals_eager(models.language_model("Llama", mask=False, checkpointing=False), steps=2)


def test_a_mask_with_padding_is_another_form():
    step, model, optimizer, batch = seeded(models.language_model("Llama", mask=True, checkpointing=False))
    traced = capture(step, model, optimizer, batch)
    padded = batch | {"attention_mask": batch["attention_mask"].clone()}
    padded["attention_mask"][0, :3] = 0
    (said,) = traced.convention.check(padded)
    assert "masking_utils.py" in said
    assert "was True and is False" in said
    traced = capture(step, model, optimizer, padded)
    assert traced.convention.check(padded) == []
    assert isinstance(traced.run(padded), float)


LIBRARIES = {
    "Whisper": models.whisper,
    "TransformerEncoder": models.transformer_encoder,
    "Categorical": models.policy,
}


@pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)
def test_library_code_that_decides_by_values_equals_eager(make):
    assert_captured_equals_eager(make)


AVERAGES = {
    "SWA": models.averaged(),
    "SWA with buffers": models.averaged(use_buffers=True),
    "EMA": models.averaged(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "one by one": models.averaged(avg_fn=lambda average, now, count: average + (now - average) / (count + 1)),
}


@pytest.mark.parametrize("make", AVERAGES.values(), ids=AVERAGES)
def test_an_averaged_model_equals_eager_and_capturing_leaves_it_alone(make):
    assert_captured_equals_eager(make, recaptures=1)  # its first update copies
    step, model, optimizer, batch = seeded(make)
    average = next(cell.cell_contents for cell in step.__closure__)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    capture(step, model, optimizer, batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in average.state_dict().items())


def test_nothing_looks_traced_to_a_library():
    def step(model, optimizer, batch):
        assert not (torch.compiler.is_compiling())
        assert not (torch.compiler.is_exporting())
        assert not (torch.jit.is_tracing())
        assert not isinstance(batch, torch._subclasses.FakeTensor)
        return model(batch)

    model, was = torch.nn.Linear(2, 2), torch._subclasses.FakeTensor
    assert capture(step, model, None, torch.ones(1, 2)).graph.ops
    with as_in_eager():
        assert torch._subclasses.FakeTensor is not was
    assert torch._subclasses.FakeTensor is was
