"""Planned steps whose data lead now one way, now another: each way is a form, and every bit is eager's."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from profiler.errors import CaptureError
from rewriter import checkpoint
from tests.profiler import library_models, small
from tests.side_by_side import assert_same, own_step, seeded, snapshot


def returns_early(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if not torch.isfinite(loss):
        return {"loss": loss}
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    optimizer.step()
    return {"loss": loss, "number": loss.item()}


def by_the_batch(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss = loss * 2 if batch[0].mean() > 0 else loss
    loss.backward()
    optimizer.step()
    return loss


def many():
    """Rows enough that activations outweigh the rest."""
    return torch.randn(256, 6), torch.randint(0, 4, (256,))


def planned(workload, **options):
    return checkpoint(*workload, **{"budget": "80%", "strategy": "mutwo", "show_progress": False} | options)


def histories(make, batches_of, **options):
    """What eager and planned leave behind after each of the batches."""
    seen, steps = [], []
    for wrap in (own_step, lambda workload: planned(workload, **options)):
        workload = seeded(make)
        call = wrap(workload)
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen.append([snapshot(call(one), *workload[1:3]) for one in batches_of(workload[3])])
        steps.append(call)
    return (*seen, steps[1])


def good_and_bad(batch):
    bad = (batch[0] * math.inf, batch[1])
    return [batch, bad, batch, batch, bad, bad, batch]


def positive_and_negative(batch):
    up, down = (batch[0].abs(), batch[1]), (-batch[0].abs(), batch[1])
    return [up, down, down, up, down, up]


CASES = [(returns_early, good_and_bad), (by_the_batch, positive_and_negative)]


@pytest.mark.parametrize(("step", "batches"), CASES, ids=["by the loss", "by the batch"])
@pytest.mark.parametrize("optimizer", [small.sgd, small.adam])
def test_each_way_that_the_data_lead_is_a_form_of_its_own(step, batches, optimizer):
    eager, ours, call = histories(small.make(step, optimizer=optimizer, batch=many), batches)
    assert_same(eager, ours)
    assert len(call._forms) == 2


def test_early_updates_wait_until_the_step_is_known_to_go_on():
    options = {"early_updates": True, "free_gradients": True, "verify": False}
    eager, ours, _ = histories(small.make(returns_early, batch=many), good_and_bad, **options)
    for one in (*eager, *ours):
        for name in [name for name in one if name.startswith("grad ")]:
            del one[name]
    assert_same(eager, ours)


def test_a_value_that_differs_at_every_step_is_refused_by_its_line_after_a_few():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        (loss * float(loss)).backward()  # the offending line
        optimizer.step()

    workload = seeded(small.make(step, batch=many))
    call = planned(workload, verify=False, budget="90%")
    for i in range(3):
        with pytest.warns(UserWarning, match="the offending line") if i else nullcontext():
            call(workload[3])
    with pytest.raises(CaptureError, match=r"the offending line.*(?s:.*)checkpoint_model"):
        call(workload[3])


@pytest.mark.parametrize(
    "make",
    [
        library_models.language_model("Llama", mask=True, checkpointing=True),
        *(
            library_models.language_model(family, mask=True, checkpointing=True, num_hidden_layers=1)
            for family in ("Qwen3", "Mistral", "Gemma")
        ),
        library_models.whisper,
        library_models.transformer_encoder,
        library_models.policy,
        library_models.averaged(),
        library_models.clipped,
    ],
    ids=["Llama", "Qwen3", "Mistral", "Gemma", "Whisper", "TransformerEncoder", "Categorical", "SWA", "clipped"],
)
def test_a_library_model_is_planned_and_proven(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = planned(seeded(make), verify=True, budget="100%")
    assert call.verification.exact
