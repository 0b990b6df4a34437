"""What a refusal says: whose line it is, the cause by its name, and a way that works."""

import io
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from profiler.errors import CaptureError, explain
from rewriter import checkpoint
from rewriter.budgets import OverBudget
from rewriter.proof import VerificationError
from tests.profiler.library_models import transformers

BATCH = torch.randn(64, 8)


def network():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 6))


def planned(step, model=None, batch=BATCH, *, budget="100%", verify=False, optimizer=torch.optim.SGD):
    model = network() if model is None else model
    chosen = None if optimizer is None else optimizer(model.parameters(), lr=0.1)
    options = {"budget": budget, "strategy": "mutwo", "show_progress": False, "verify": verify}
    return checkpoint(step, model, chosen, batch, **options)


def descend(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def plain(model, optimizer, batch):
    return descend(optimizer, model(batch).pow(2).mean())


# -- shapes that depend on data ----------------------------------------------------------------------------------------


def with_a_mask(model, optimizer, batch):
    return descend(optimizer, model(batch)[batch[:, 0] > 0].pow(2).mean())


def with_ctc(model, optimizer, batch):
    scores = model(batch).view(4, 16, 6).log_softmax(-1).transpose(0, 1)
    lengths = batch[:4, 0].abs().long().clamp(1, 3)
    return descend(optimizer, F.ctc_loss(scores, torch.ones(4, 5).long(), torch.full((4,), 16), lengths))


def with_packed_sequences(model, optimizer, batch):
    lengths = batch[:4, 0].abs().long().clamp(1, 3)
    packed = nn.utils.rnn.pack_padded_sequence(model(batch).view(4, 16, 6), lengths, True, False)
    return descend(optimizer, packed.data.pow(2).mean())


@pytest.mark.parametrize("step", [with_a_mask, with_ctc, with_packed_sequences])
def test_a_shape_that_depends_on_data_is_named_and_sent_to_the_model_door(step):
    with pytest.raises(CaptureError) as refusal:
        planned(step)
    said = str(refusal.value)
    assert "test_messages.py" in said
    assert "checkpoint_model(part, budget=...)" in said
    assert "mask of fixed shape" not in said


# -- whose line --------------------------------------------------------------------------------------------------------


def test_a_line_of_a_library_is_called_so_with_a_door_that_helps():
    library = transformers()
    config = library.DebertaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    ids = torch.randint(0, 20, (2, 6))

    def step(model, optimizer, batch):
        return descend(optimizer, model(**batch).loss)

    model = library.DebertaForSequenceClassification(config)
    assert planned(step, model, {"input_ids": ids, "labels": torch.tensor([0, 1])}).solution
    with pytest.raises(CaptureError) as refusal:
        planned(step, model, {"input_ids": ids, "labels": torch.tensor([0, -1])})  # which it leaves out
    said = str(refusal.value)
    assert "inside " in said
    assert "modeling_deberta.py" in said
    assert "That line is a library's: look for a setting that avoids it, or plan around it. checkpoint_model" in said


def test_a_line_of_the_users_is_not_called_a_librarys():
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("no")
    assert "library" not in explain(raised.value)


# -- state -------------------------------------------------------------------------------------------------------------


def test_a_list_whose_length_the_step_reads_and_changes_is_refused_by_name():
    calls = []

    def step(model, optimizer, batch):
        calls.append(0)
        return plain(model, optimizer, batch * (1.0 if len(calls) < 3 else 2.0))

    with pytest.raises(CaptureError, match="the number of entries of the outer variable calls was 0 and is 1"):
        planned(step, verify=2)
    assert calls == []


@pytest.mark.filterwarnings("ignore:.*which cannot be looked into")
def test_a_proof_that_fails_asks_for_state_first_and_names_what_changed():
    calls, hidden = [], io.BytesIO()

    def step(model, optimizer, batch):
        calls.append(0)
        hidden.write(b".")
        return plain(model, optimizer, batch * (1.0 if hidden.tell() < 5 else 2.0))

    with pytest.warns(UserWarning, match="calls"), pytest.raises(VerificationError) as refusal:
        planned(step, verify=4)
    said = str(refusal.value)
    asked = (
        "Does the step keep state of its own from call to call (it changed the number of entries of the outer variable"
    )
    assert said.index(asked) < said.index("please report it")
    assert "calls" in said[said.index(asked) :]
    assert "pass that in the batch, or use checkpoint_model" in said


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_lbfgs_is_sent_to_forward_and_backward_alone():
    with pytest.raises(CaptureError, match=r"LBFGS .*checkpoint\(forward_backward, model, None, batch.*in its closure"):
        planned(plain, optimizer=torch.optim.LBFGS)


def test_optimizers_that_step_in_gradient_hooks_are_sent_to_the_model_door():
    model = network()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())

    def step(model, _, batch):
        model(batch).pow(2).mean().backward()

    with pytest.raises(CaptureError, match=r"step in gradient hooks .*checkpoint_model"):
        planned(step, model, optimizer=None)


# -- other libraries' loops --------------------------------------------------------------------------------------------


def test_what_a_step_logs_into_a_loops_own_results_is_there_after_each_planned_step():
    """As Lightning's `self.log` keeps the tensor in the results of its trainer."""
    results = types.SimpleNamespace(current={})

    def step(model, optimizer, batch):
        loss = plain(model, optimizer, batch)
        results.current["loss"] = loss.detach()
        return loss

    call = planned(step)
    assert results.current == {}
    losses = [call(BATCH).item() for _ in range(2)]
    assert results.current["loss"].item() == losses[-1] != losses[0]


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_the_bytes_that_a_refused_budget_names_are_enough():
    with pytest.raises(OverBudget) as refusal:
        planned(plain, budget="1%")
    enough = int(str(refusal.value).split("a budget of at least ")[1].split(" bytes")[0])
    assert planned(plain, budget=enough)(BATCH) is not None
