"""Training steps as people write them, captured: equal to eager to the bit, whatever the step does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.ir import Phase, Role
from profiler.tracing.whole_step import capture
from tests import step_forms
from tests.profiler import small
from tests.side_by_side import assert_captured_equals_eager

BOTH = pytest.mark.parametrize("optimizer", [small.sgd, small.adam])


@BOTH
def test_a_step_that_clears_gradients_at_its_end(optimizer):
    traced = assert_captured_equals_eager(small.make(step_forms.clearing_at_the_end, optimizer=optimizer))
    assert not any(s.role is Role.GRADIENT for s in map(traced.graph.storages.__getitem__, held(traced)))


def held(traced):
    return traced.graph.held_storages


@BOTH
def test_a_step_that_never_clears_its_gradients_is_captured_with_and_without_them(optimizer):
    def step(model, optimizer, batch):
        loss = step_forms.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    traced = assert_captured_equals_eager(small.make(step, optimizer=optimizer), steps=4, recaptures=1)
    inputs = [v for v in traced.graph.values if v.producer is None and v.name.endswith("_grad")]
    assert len(inputs) == 6
    assert all(traced.graph.storages[v.storage].role is Role.GRADIENT for v in inputs)


@BOTH
def test_a_step_that_zeroes_its_gradients_in_place(optimizer):
    def step(model, optimizer, batch):
        optimizer.zero_grad(set_to_none=False)
        loss = step_forms.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    assert_captured_equals_eager(small.make(step, optimizer=optimizer), recaptures=1)


@BOTH
def test_gradients_present_before_a_step_that_clears_them_do_not_matter(optimizer):
    step, model, optimizer, batch = small.make(optimizer=optimizer)()
    traced = capture(step, model, optimizer, batch)
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    assert traced.convention.check(batch) == []


@BOTH
def test_clipping_by_norm(optimizer):
    traced = assert_captured_equals_eager(small.make(step_forms.clipping, optimizer=optimizer))
    norms = [op for op in traced.graph.ops if "norm" in op.target and "batch" not in op.target]
    assert norms
    assert all(op.phase is Phase.OPTIMIZER for op in norms)


@BOTH
def test_clipping_over_a_list_of_parameters_made_before_the_step(optimizer):
    def make():
        network, batch = small.mlp(), small.data()
        params = [p for p in network.parameters() if p.requires_grad]

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            loss = step_forms.loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(params, 0.1)
            nn.utils.clip_grad_value_(params, 0.01)
            optimizer.step()
            return loss

        return step, network, optimizer(network), batch

    assert_captured_equals_eager(make)


@BOTH
def test_accumulation_over_micro_batches(optimizer):
    traced = assert_captured_equals_eager(small.make(step_forms.accumulating, optimizer=optimizer))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert {op.round for op in traced.graph.ops if op.phase is phase} == {0, 1}
    assert {op.round for op in traced.graph.ops if op.phase is Phase.OPTIMIZER} == {1}


@BOTH
def test_a_step_written_with_autograd_grad(optimizer):
    traced = assert_captured_equals_eager(small.make(step_forms.by_autograd_grad, optimizer=optimizer))
    assert len(traced.gradients) == 6


def test_an_update_written_by_hand_without_the_optimizer():
    def step(model, optimizer, batch):
        params = list(model.parameters())
        loss = step_forms.loss_of(model, batch)
        gradients = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for p, g in zip(params, gradients, strict=True):
                p -= 0.1 * g
        return loss

    assert_captured_equals_eager(small.make(step))


@BOTH
def test_two_losses_with_a_backward_each(optimizer):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        out = model(batch[0])
        first = F.cross_entropy(out, batch[1])
        first.backward(retain_graph=True)
        second = out.square().mean()
        second.backward()
        optimizer.step()
        return {"first": first, "second": second}

    assert_captured_equals_eager(small.make(step, optimizer=optimizer))


def test_a_gradient_penalty_that_differentiates_twice():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        x = batch[0].detach().clone().requires_grad_()
        loss = F.cross_entropy(model(x), batch[1])
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
        return loss

    assert_captured_equals_eager(small.make(step, model=small.plain))


@BOTH
def test_bfloat16_autocast(optimizer):
    assert_captured_equals_eager(small.make(step_forms.autocast, optimizer=optimizer))


def test_autocast_of_a_layer_used_twice_sums_its_gradient_as_eager_does():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x):
            return self.head(self.layer(self.layer(x).relu()))

    assert_captured_equals_eager(small.make(step_forms.autocast, model=Twice))


@BOTH
def test_frozen_layers(optimizer):
    def frozen():
        model = small.mlp()
        model[0].requires_grad_(False)
        return model

    traced = assert_captured_equals_eager(small.make(model=frozen, optimizer=optimizer))
    assert set(traced.gradients) == {"1.weight", "1.bias", "4.weight", "4.bias"}


def test_parameters_outside_the_optimizer_keep_gathering_gradients():
    make = small.make(optimizer=lambda model: torch.optim.SGD(model[4].parameters(), lr=0.1))
    assert_captured_equals_eager(make, recaptures=1)


def test_a_parameter_that_the_step_does_not_use():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x):
            return self.used(x)

    traced = assert_captured_equals_eager(small.make(model=Spare))
    assert sum(s.role is Role.PARAM for s in traced.graph.storages) == 4


@BOTH
def test_a_step_that_returns_more_than_the_loss(optimizer):
    assert_captured_equals_eager(small.make(step_forms.returning_more, optimizer=optimizer))


def test_a_step_that_returns_nothing():
    def step(model, optimizer, batch):
        small.step(model, optimizer, batch)

    assert_captured_equals_eager(small.make(step))


def test_a_batch_of_nested_dicts_and_numbers():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = batch["scale"] * F.cross_entropy(model(batch["x"]["images"]), batch["y"])
        loss.backward()
        optimizer.step()
        return loss

    def nested():
        images, labels = small.data()
        return {"x": {"images": images}, "y": labels, "scale": 0.5}

    assert_captured_equals_eager(small.make(step, batch=nested))


def test_a_batch_that_holds_one_tensor_twice():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = (model(batch[0]) - model(batch[1])).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def twice():
        x = torch.randn(12, 6)
        return x, x

    assert_captured_equals_eager(small.make(step, batch=twice))


def test_a_frozen_teacher_from_outside_the_step():
    def make():
        teacher = small.plain()  # its parameters require gradients: only no_grad keeps them out

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(batch[0]).softmax(1)
            loss = F.cross_entropy(model(batch[0]), wanted)
            loss.backward()
            optimizer.step()
            return loss

        model = small.mlp()
        return step, model, small.sgd(model), small.data()

    assert_captured_equals_eager(make)


def test_class_weights_from_outside_are_read_where_they_lie():
    weights = torch.rand(4)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1], weight=weights)
        loss.backward()
        optimizer.step()
        return loss

    def change(i, model, optimizer):
        weights.copy_(torch.arange(4.0) + i)

    weights_before = weights.clone()
    eager_then_captured = small.make(step)

    def make():
        weights.copy_(weights_before)
        return eager_then_captured()

    assert_captured_equals_eager(make, between=change)


def test_a_view_of_a_tensor_from_outside_is_read_where_it_lies():
    table = torch.arange(6.0)
    offset = table.unsqueeze(0)

    def step(model, optimizer, batch):
        return small.step(model, optimizer, (batch[0] + offset.detach().type_as(batch[0]), batch[1]))

    def between(i, model, optimizer):
        table.add_(0.1)

    def make():
        table.copy_(torch.arange(6.0))
        return small.make(step)()

    assert_captured_equals_eager(make, between=between)


def test_buffers_that_are_replaced_by_new_tensors_each_step():
    assert_captured_equals_eager(small.make(model=step_forms.RunningMean))


def test_a_moving_average_of_the_weights_kept_inside_the_step():
    for optimizer in (small.sgd, small.adam):
        assert_captured_equals_eager(small.make(step_forms.averaging, model=step_forms.Averaged, optimizer=optimizer))


def test_a_step_that_sets_train_mode_itself():
    def step(model, optimizer, batch):
        model.train()
        return small.step(model, optimizer, batch)

    def make():
        train_step, model, optimizer, batch = small.make(step)()
        return train_step, model.eval(), optimizer, batch

    def evaluate(i, model, optimizer):
        model.eval()

    assert_captured_equals_eager(make, between=evaluate)


def test_in_place_ops_seen_through_views_stay_exact():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = self.layer(x)
            top = h[:, :4]
            rows = h.view(-1, 2, 4)
            h.mul_(2).add_(1)  # later read through views made before
            out = rows.sum(1).repeat(1, 2) + h.relu_()
            half = out.clone()
            half[:, :4] = top.detach()  # a partial write, which stays one
            mask = torch.zeros_like(half)
            mask[0].fill_(1.0)
            return self.head(half * mask + out)

    assert_captured_equals_eager(small.make(model=Views))


def test_the_step_after_an_evaluation_and_a_restored_checkpoint():
    step, model, optimizer, batch = small.make(optimizer=small.adam)()
    traced = capture(step, model, optimizer, batch)
    torch.manual_seed(3)
    traced.run(batch)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    torch.manual_seed(4)
    after = traced.run(batch)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.manual_seed(4)
    assert torch.equal(after, traced.run(batch))


@pytest.mark.parametrize("make_sparse", [True, False])
def test_embeddings_with_dense_gradients(make_sparse):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4, padding_idx=0, max_norm=None if make_sparse else 1.0)

        def forward(self, x):
            return self.embedding(x).sum(1)

    make = small.make(model=Bag, batch=lambda: (torch.randint(0, 10, (12, 3)), torch.randint(0, 4, (12,))))
    assert_captured_equals_eager(make)


def test_channels_last_keeps_its_layout():
    def network():
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.3)
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        return model.to(memory_format=torch.channels_last)

    def images():
        x = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(0, 4, (4,))

    step, model, optimizer, batch = small.make(model=network, batch=images)()
    traced = capture(step, model, optimizer, batch)
    other = copy.deepcopy((model, optimizer))
    other_optimizer = small.sgd(other[0])
    for seed in range(3):
        torch.manual_seed(seed)
        expected = step(other[0], other_optimizer, batch)
        torch.manual_seed(seed)
        assert torch.equal(expected, traced.run(batch))
        for p, q in zip(other[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)
            assert p.grad.stride() == q.grad.stride()
