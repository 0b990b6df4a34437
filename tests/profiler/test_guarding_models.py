"""A model made of other parts is noticed and captured as it is."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from profiler.errors import CaptureError
from profiler.tracing.calling_convention import BufferSlot, ParamSlot
from profiler.tracing.whole_step import capture
from tests.profiler import small
from tests.profiler.small import captured
from tests.side_by_side import assert_captured_equals_eager

# -- what the model is made of ----------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


def parametrized(model):
    parametrize.register_parametrization(model[0], "weight", Doubled())


def pruned(model):
    prune.l1_unstructured(model[0], "weight", 0.3)


def with_another_activation(model):
    model[2] = nn.Tanh()


def with_one_more(model):
    model.insert(2, nn.Hardtanh())


def with_one_less(model):
    del model[3]


def with_another_buffer(model):
    model[1].register_buffer("running_mean", None)
    model[1].running_var = None


def with_its_own_forward(model):
    model[2].forward = torch.tanh


SURGERY = {
    parametrized: [
        "module 0.parametrizations is new",
        "parameter 0.weight is gone",
        "module 0 is of another class, or has other bases, than before",
    ],
    pruned: [
        "parameter 0.weight is gone",
        "parameter 0.weight_orig is new",
        "buffer 0.weight_mask is new",
        "the hooks of module 0 are not those of the captured step",
    ],
    with_another_activation: ["module 2 was replaced by another"],
    with_one_more: [
        "module 2 was replaced by another",
        "module 3 was replaced by another",
        "module 4 was replaced by another",
        "module 5 is new",
    ],
    with_one_less: ["module 3 was replaced by another", "module 4 is gone"],
    with_another_buffer: ["buffer 1.running_mean is gone", "buffer 1.running_var is gone"],
    with_its_own_forward: ["module 2.forward was not set and is the function tanh"],
}


@pytest.mark.parametrize("change", SURGERY, ids=lambda change: change.__name__)
def test_a_model_made_of_other_parts_is_noticed_and_captured_as_it_is(change):
    def between(i, model, optimizer):
        if i == 0:
            change(model)

    traced, model, _, batch = captured()
    change(model)
    assert traced.convention.check(batch) == SURGERY[change]
    with pytest.raises(CaptureError, match="not the captured step any more"):
        traced.run(batch)
    assert_captured_equals_eager(small.make(), between=between, recaptures=1)


def with_another_layer(model):
    model[4] = nn.Linear(8, 4)


def with_assigned_state(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def with_tied_biases(model):
    model[1].bias = model[0].bias


def with_normed_weights(model):
    parametrizations.weight_norm(model[0])


def without_a_bias(model):
    model[4].bias = None


STRANGERS = {
    with_another_layer: "module 4 was replaced by another",
    with_assigned_state: "parameter 0.weight was replaced by another",
    with_tied_biases: "parameter 1.bias was replaced by another",
    with_normed_weights: "parameter 0.weight is gone",
    without_a_bias: "parameter 4.bias is gone",
}


@pytest.mark.parametrize("change", STRANGERS, ids=lambda change: change.__name__)
def test_parameters_that_the_optimizer_does_not_know_are_noticed_and_the_next_capture_says_what_to_do(change):
    traced, model, optimizer, batch = captured()
    change(model)
    assert STRANGERS[change] in traced.convention.check(batch)
    with pytest.raises(CaptureError, match="make the optimizer anew"):
        capture(small.step, model, optimizer, batch)
    optimizer = small.sgd(model)
    again = capture(small.step, model, optimizer, batch)
    assert again.convention.check(batch) == []


def test_a_buffer_that_is_replaced_by_an_equal_one_is_read_where_it_is():
    traced, model, _, batch = captured()
    model[1].running_mean = torch.ones(8)
    assert traced.convention.check(batch) == []
    traced.run(batch)
    assert not torch.equal(model[1].running_mean, torch.ones(8))


@pytest.mark.parametrize(("kind", "slot"), [("parameter", ParamSlot), ("buffer", BufferSlot)])
def test_a_slot_whose_tensor_is_gone_says_so(kind, slot):
    gone = slot(name="0.scale", owner=nn.Linear(2, 2), key="scale")
    assert gone.find() is None
    with pytest.raises(CaptureError, match=f"{kind} 0.scale is gone from the model: capture again"):
        gone.tensor()
