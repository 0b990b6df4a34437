"""The proof itself: it finds a difference of any kind, names it, and leaves the user's objects alone."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from profiler.measuring.restoring import Touched
from rewriter.proof import Observation, Verification, compare, observe, same_bits, verify
from tests.profiler import small
from tests.side_by_side import snapshot

# -- same_bits ------------------------------------------------------------------------------------------------------


def test_the_zeros_of_either_sign_differ():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([-0.0]), torch.tensor([-0.0]))


def test_a_nan_equals_itself_and_no_number():
    assert same_bits(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert not same_bits(torch.tensor([math.nan]), torch.tensor([0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_one_unit_in_the_last_place_is_a_difference(dtype):
    a = torch.ones(3, 4, dtype=dtype)
    b = a.clone()
    assert same_bits(a, b)
    b[1, 2] += torch.finfo(dtype).eps
    assert not same_bits(a, b)


def test_shape_dtype_and_layout_count():
    a = torch.zeros(2, 3)
    assert not same_bits(a, torch.zeros(3, 2))
    assert not same_bits(a, torch.zeros(2, 3, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(a, a.to_sparse())


def test_numbers_without_a_point_and_layouts_in_memory_are_compared_by_value():
    a = torch.arange(6).view(2, 3)
    assert same_bits(a, a.t().contiguous().t())
    assert not same_bits(a, a + 1)
    assert same_bits(a.double(), a.double().t().contiguous().t())
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))
    assert same_bits(torch.zeros(0), torch.zeros(0))


def test_sparse_tensors_are_compared_by_what_they_hold():
    a, b = torch.eye(3).to_sparse(), torch.eye(3).to_sparse()
    assert same_bits(a, b)
    assert not same_bits(a, 2 * b)
    assert not same_bits(a, torch.eye(3).flip(0).to_sparse())


# -- compare --------------------------------------------------------------------------------------------------------


def observation(**tensors):
    kinds = {"loss": "returned values", "slope": "gradients", "weight": "parameters"}
    return Observation(steps=2, tensors={(kinds[n], n): t for n, t in tensors.items()}, peak_bytes=1000)


def one(**changed):
    tensors = {"loss": torch.tensor(1.0), "slope": torch.tensor([1.0, 2.0]), "weight": torch.zeros(3)}
    return observation(**(tensors | changed))


def test_equal_observations_are_exact():
    found = compare(one(), one(), predicted_peak_bytes=990)
    assert found.exact
    assert found.compared == (("returned values", 1), ("gradients", 1), ("parameters", 1))
    assert found.largest_difference == 0
    assert found.prediction_error == pytest.approx(0.01)
    assert "equal to the bit" in str(found)
    assert "(+1.00%)" in str(found)


@pytest.mark.parametrize("name", ["loss", "slope", "weight"])
def test_the_first_tensor_that_differs_is_named_with_the_largest_difference(name):
    changed = one().tensors[next(k for k in one().tensors if k[1] == name)] + 0.25
    found = compare(one(), one(**{name: changed}), predicted_peak_bytes=990)
    assert not found.exact
    assert found.first_mismatch == name
    assert found.largest_difference == 0.25
    assert f"DIFFERENT, first in {name}" in str(found)


def test_of_several_differences_the_first_is_named_and_the_largest_given():
    found = compare(one(), one(slope=torch.tensor([1.0, 2.5]), weight=torch.full((3,), 7.0)), predicted_peak_bytes=1)
    assert found.first_mismatch == "slope"
    assert found.largest_difference == 7.0


def test_a_tensor_that_is_missing_or_new_is_a_difference():
    less, more = one(), one()
    del less.tensors["gradients", "slope"]
    for a, b in ((more, less), (less, more)):
        found = compare(a, b, predicted_peak_bytes=1)
        assert found.first_mismatch == "slope"
        assert found.largest_difference == math.inf


def test_a_nan_on_one_side_only_is_an_infinite_difference():
    found = compare(one(), one(loss=torch.tensor(math.nan)), predicted_peak_bytes=1)
    assert found.first_mismatch == "loss"
    assert found.largest_difference == math.inf


def test_the_sign_of_a_zero_is_a_difference_of_zero():
    found = compare(one(), one(weight=torch.tensor([0.0, -0.0, 0.0])), predicted_peak_bytes=1)
    assert found.first_mismatch == "weight"
    assert found.largest_difference == 0


def test_another_shape_is_an_infinite_difference():
    found = compare(one(), one(weight=torch.zeros(4)), predicted_peak_bytes=1)
    assert found.first_mismatch == "weight"
    assert found.largest_difference == math.inf


def test_gradients_can_be_left_out():
    found = compare(one(), one(slope=torch.zeros(2)), predicted_peak_bytes=1, compare_gradients=False)
    assert found.exact
    assert "gradients" not in dict(found.compared)


def test_a_step_that_takes_no_memory_is_predicted_without_error():
    empty = Observation(steps=1, tensors={}, peak_bytes=0)
    assert compare(empty, empty, predicted_peak_bytes=0).prediction_error == 0


# -- observe and verify -----------------------------------------------------------------------------------------------


@pytest.fixture
def workload():
    torch.manual_seed(0)
    return small.make(optimizer=small.adam)()


def proven(workload, planned):
    """What the proof says of `planned`, beside the workload's own step."""
    step, model, optimizer, batch = workload
    return verify(
        lambda b: step(model, optimizer, b),
        lambda b: planned(model, optimizer, b),
        Touched(model=model, optimizer=optimizer),
        batch,
        predicted_peak_bytes=1,
    )


def test_a_step_equals_itself_and_everything_is_compared(workload):
    found = proven(workload, workload[0])
    assert found.exact
    assert dict(found.compared) == {
        "returned values": 3,
        "gradients": 3 * 6,
        "parameters": 6,
        "buffers": 3,
        "optimizer states": 3 * 6,
        "generators": 1,
    }
    assert found.measured_peak_bytes == found.eager_peak_bytes > 0


def returns_otherwise(model, optimizer, batch):
    return small.step(model, optimizer, batch) * 1.0000001


def scales_a_gradient(model, optimizer, batch):
    loss = small.step(model, optimizer, batch)
    model[1].bias.grad.mul_(2)
    return loss


def leaves_no_gradient(model, optimizer, batch):
    loss = small.step(model, optimizer, batch)
    model[4].weight.grad = None
    return loss


def nudges_a_parameter(model, optimizer, batch):
    loss = small.step(model, optimizer, batch)
    with torch.no_grad():
        model[4].bias[0] += 0.01
    return loss


def counts_a_batch_twice(model, optimizer, batch):
    loss = small.step(model, optimizer, batch)
    model[1].num_batches_tracked += 1
    return loss


def disturbs_the_optimizer(model, optimizer, batch):
    loss = small.step(model, optimizer, batch)
    if optimizer.state[model[0].weight]["step"] == 3:  # at the end: nothing else can have come of it
        optimizer.state[model[0].weight]["exp_avg"].mul_(-1)
    return loss


def draws_once_more(model, optimizer, batch):
    loss = small.step(model, optimizer, batch)
    if optimizer.state[model[0].weight]["step"] == 3:
        torch.rand(1)
    return loss


WRONG = {
    "returned value 0 of step 1": returns_otherwise,
    "gradient of 1.bias after step 1": scales_a_gradient,
    "gradient of 4.weight after step 1": leaves_no_gradient,
    "returned value 0 of step 2": nudges_a_parameter,
    "buffer 1.num_batches_tracked": counts_a_batch_twice,
    "exp_avg of 0.weight": disturbs_the_optimizer,
    "CPU generator": draws_once_more,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_difference_of_any_kind_is_named(workload, name):
    found = proven(workload, WRONG[name])
    assert found.first_mismatch == name
    assert not found.exact


def test_a_difference_in_a_parameter_alone_is_named(workload):
    def at_the_end(model, optimizer, batch):
        loss = small.step(model, optimizer, batch)
        if optimizer.state[model[0].weight]["step"] == 3:
            with torch.no_grad():
                model[4].bias[2] += 1e-6
        return loss

    assert proven(workload, at_the_end).first_mismatch == "parameter 4.bias"


def test_proving_changes_nothing(workload):
    _, model, optimizer, _ = workload
    before = snapshot(None, model, optimizer)
    proven(workload, nudges_a_parameter)
    after = snapshot(None, model, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(a, after[k]) for k, a in before.items() if isinstance(a, torch.Tensor))
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state


def test_what_a_step_returns_need_not_be_tensors(workload):
    def told(word):
        def step(model, optimizer, batch):
            return {"loss": small.step(model, optimizer, batch), "more": (word, 3, None, True)}

        return step

    _, *rest = workload
    assert proven((told("one"), *rest), told("one")).exact
    assert proven((told("one"), *rest), told("two")).first_mismatch == "returned value 1 of step 1"


def test_a_step_that_returns_nothing_is_compared_by_what_it_does(workload):
    def silent(model, optimizer, batch):
        small.step(model, optimizer, batch)

    def silent_and_wrong(model, optimizer, batch):
        counts_a_batch_twice(model, optimizer, batch)

    _, *rest = workload
    assert proven((silent, *rest), silent).exact
    assert proven((silent, *rest), silent_and_wrong).first_mismatch == "buffer 1.num_batches_tracked"


def test_a_step_that_never_clears_its_gradients_begins_each_time_as_it_was_captured():
    began = []

    def step(model, optimizer, batch):
        began.append([p.grad is None for p in model.parameters()])
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    _, model, optimizer, batch = small.make()()
    observe(lambda b: step(model, optimizer, b), Touched(model=model, optimizer=optimizer), batch, steps=3)
    assert began == [[True] * 6] * 3


def test_the_step_whose_peak_counts_begins_without_unread_gradients(workload):
    step, model, optimizer, batch = workload
    step(model, optimizer, batch)
    began = []

    def watched(b):
        began.append([p.grad is None for p in model.parameters()])
        return step(model, optimizer, b)

    touched = Touched(model=model, optimizer=optimizer, unread_gradients=list(model[0].parameters()))
    found = observe(watched, touched, batch, steps=2)
    assert began == [[False] * 6, [True, True, False, False, False, False]]
    assert found.peak_bytes > sum(p.nbytes for p in model.parameters())
    assert all(p.grad is not None for p in model.parameters())


def test_sparse_gradients_are_compared():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4, sparse=True)

        def forward(self, x):
            return self.embedding(x).sum(1)

    def wrong(model, optimizer, batch):
        loss = small.step(model, optimizer, batch)
        model.embedding.weight.grad = 2 * model.embedding.weight.grad
        return loss

    torch.manual_seed(0)
    workload = small.make(
        model=Bag,
        optimizer=lambda model: torch.optim.SparseAdam(model.parameters()),
        batch=lambda: (torch.randint(0, 10, (12, 3)), torch.randint(0, 4, (12,))),
    )()
    assert proven(workload, small.step).exact
    assert proven(workload, wrong).first_mismatch == "gradient of embedding.weight after step 1"


@pytest.mark.parametrize(("steps", "said"), [(1, "1 step, 1 gradient, 2 buffers: "), (3, "3 steps, 1 gradient, 2 buf")])
def test_a_verification_counts_in_words_that_fit(steps, said):
    found = Verification(
        steps=steps,
        compared=(("gradients", 1), ("buffers", 2)),
        largest_difference=0.0,
        first_mismatch="",
        eager_peak_bytes=2,
        measured_peak_bytes=1,
        predicted_peak_bytes=1,
    )
    assert str(found).startswith(said)
