"""Values that a step reads from tensors: answered as in eager, assumed of the captured form, or live."""

import math

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812

from profiler.errors import CaptureError
from profiler.tracing.eager_ways.assumptions import BrokenAssumption, Turns, same
from profiler.tracing.whole_step import capture
from tests.profiler import small
from tests.side_by_side import assert_captured_equals_eager, assert_same, snapshot


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def stepped(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# -- live: what is only computed with and returned ----------------------------------------------------------------


def returned_item(model, optimizer, batch):
    loss = loss_of(model, batch)
    stepped(loss, optimizer)
    return {"loss": loss.item(), "percent": 100 * loss.item() / 3, "rounded": round(loss.item(), 2), "tensor": loss}


def returned_count(model, optimizer, batch):
    out = model(batch[0])
    stepped(F.cross_entropy(out, batch[1]), optimizer)
    right = (out.argmax(1) == batch[1]).sum().item()
    return right, right / len(batch[1]), -right, right // 2


def returned_list(model, optimizer, batch):
    out = model(batch[0])
    stepped(F.cross_entropy(out, batch[1]), optimizer)
    return out.detach().mean(0).tolist(), out.argmax(1).view(3, 4).tolist(), out.sum().tolist()


def scaled_by_a_value(model, optimizer, batch):
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        scale = 1 / (1 + model[0].weight.grad.norm().item())
        for p in model.parameters():
            p.grad.mul_(scale)
        torch._foreach_add_([p.grad for p in model.parameters()], 1e-3 * loss.item())
    optimizer.step()
    return loss


LIVE = [returned_item, returned_count, returned_list, scaled_by_a_value]


@pytest.mark.parametrize("step", LIVE, ids=lambda step: step.__name__)
@pytest.mark.parametrize("optimizer", [small.sgd, small.adam])
def test_a_value_that_is_only_computed_with_and_returned_is_live(step, optimizer):
    traced = assert_captured_equals_eager(small.make(step, optimizer=optimizer))
    assert traced.convention.beforehand is None
    assert not checks(traced)


def test_a_value_goes_into_the_backward_as_what_it_was_and_is_assumed():
    def step(model, optimizer, batch):
        loss = loss_of(model, batch) * (batch[1] >= 0).sum().item()
        stepped(loss, optimizer)
        return loss

    traced = assert_captured_equals_eager(small.make(step))
    assert [expected.value for expected in traced.convention.beforehand.expected] == [12]


def test_a_value_made_into_text_is_refused():
    def step(model, optimizer, batch):
        loss = loss_of(model, batch)
        stepped(loss, optimizer)
        return f"{loss.item():.3f}"

    with pytest.raises(CaptureError, match="into text while it runs"):
        capture(*small.make(step)())


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_a_step_that_reads_very_many_numbers_is_refused(read):
    def step(model, optimizer, batch):
        stepped(loss_of(model, batch), optimizer)
        return len(read(model[0].weight.detach().flatten().repeat(30)))

    with pytest.raises(CaptureError, match="more than 1024 numbers"):
        capture(*small.make(step)())


# -- assumed beforehand ---------------------------------------------------------------------------------------------


def checks(traced):
    return [node for node in traced.nodes if node.name.startswith("check")]


READS = {
    "bool": lambda t: bool((t < 4).all()),
    "if": lambda t: 1 if (t < 4).all() else 0,
    "float as truth": lambda t: 1 if t.float().sum() else 0,
    "item": lambda t: t.sum().item() > 3,
    "item of truth": lambda t: (t < 4).all().item(),
    "int": lambda t: int(t.max() * 0 + 3),
    "float": lambda t: float(t.max() * 0 + 3),
    "index": lambda t: [5, 6, 7, 8][t.max() * 0 + 3],
    "range": lambda t: len(range((t.max() * 0 + 3).item())),
    "numpy": lambda t: (t[:2] * 0 + 3).numpy().sum(),
    "equal": lambda t: torch.equal(t, t.clone()),
    "allclose": lambda t: torch.allclose(t.float(), t.float() + 1e-9),
    "is_nonzero": lambda t: torch.is_nonzero((t < 4).all()),
    "in a condition of two": lambda t: 3 < t.sum().item() < 100,
    "math": lambda t: math.isfinite(t.float().sum()) and not math.isnan(t.sum().item()),
    "max of two": lambda t: max((t.max() * 0 + 3).item(), 2),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_of_the_batch_is_answered_and_repeated_before_each_step(read):
    def step(model, optimizer, batch):
        loss = loss_of(model, batch) * (2.0 if read(batch[1]) else 0.5)
        stepped(loss, optimizer)
        return loss

    traced = assert_captured_equals_eager(small.make(step))
    assert traced.convention.beforehand is not None
    assert not checks(traced)


def branching(model, optimizer, batch):
    loss = loss_of(model, batch)
    if batch[0].mean() > 0:
        loss = loss * 2
    stepped(loss, optimizer)
    return loss


def test_a_read_that_gives_another_value_is_told_by_its_line_and_captured_anew():
    step, model, optimizer, batch = small.make(branching)()
    batch = (batch[0].abs(), batch[1])
    traced = capture(step, model, optimizer, batch)
    assert traced.convention.check(batch) == []
    (said,) = traced.convention.check((-batch[0], batch[1]))
    assert "if batch[0].mean() > 0" in said
    assert "was True and is False" in said
    before = model[0].weight.clone()
    with pytest.raises(BrokenAssumption):
        traced.run((-batch[0], batch[1]))
    assert torch.equal(before, model[0].weight)
    assert capture(step, model, optimizer, (-batch[0], batch[1])).convention.check((-batch[0], batch[1])) == []


def test_reads_of_state_follow_the_state():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 4)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls += 1
            return self.inner(x) * (2 if self.calls > 2 else 1)

    traced = assert_captured_equals_eager(small.make(model=Growing), steps=4, recaptures=1)
    assert "self.calls > 2" in traced.convention.beforehand.expected[0].line
    assert not checks(traced)


# -- assumed inside the graph ---------------------------------------------------------------------------------------


def returns_early(model, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    if not torch.isfinite(loss):
        return loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    optimizer.step()
    return loss


OPTIMIZERS = [small.sgd, small.adam, lambda model: optim.AdamW(model.parameters(), fused=True)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam", "fused"])
def test_a_read_of_the_loss_is_checked_in_the_graph(optimizer):
    traced = assert_captured_equals_eager(small.make(returns_early, optimizer=optimizer))
    assert traced.convention.beforehand is None
    assert len(checks(traced)) == 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam", "fused"])
@pytest.mark.parametrize("stepped_before", [False, True])
def test_where_the_loss_leads_another_way_everything_is_put_back(optimizer, stepped_before):
    step, model, optimizer, batch = small.make(returns_early, optimizer=optimizer)()
    if stepped_before:
        small.step(model, optimizer, batch)
        optimizer.zero_grad()
    traced = capture(step, model, optimizer, batch)
    before = snapshot(None, model, optimizer)
    with pytest.raises(BrokenAssumption, match=r"if not torch.isfinite\(loss\).* was True and is False"):
        traced.run((batch[0] * math.nan, batch[1]))
    assert_same([before], [snapshot(None, model, optimizer)])


def test_a_draw_that_decides_is_checked_in_the_graph_and_put_back():
    class LayerDrop(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.layers = nn.Dropout(0.3), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            for layer in self.layers:
                x = self.drop(x)
                if torch.rand([]) < 0.5:
                    continue
                x = layer(x)
            return self.head(x)

    _, model, optimizer, batch = small.make(model=LayerDrop)()
    torch.manual_seed(0)
    traced = capture(small.step, model, optimizer, batch)
    assert len(checks(traced)) == 2
    outcomes = set()
    for seed in range(6):
        torch.manual_seed(seed)
        drawn, weights = torch.get_rng_state(), model.head.weight.clone()
        try:
            traced.run(batch)
        except BrokenAssumption:
            outcomes.add("another way")
            assert torch.equal(torch.get_rng_state(), drawn)
            assert torch.equal(model.head.weight, weights)
        else:
            outcomes.add("the same way")
    assert outcomes == {"another way", "the same way"}


def test_a_read_after_the_optimizer_is_checked_before_it_where_it_does_not_depend_on_it():
    def step(model, optimizer, batch):
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        stepped(loss, optimizer)
        return loss * (2 if out.detach().abs().max() < 1e6 else 1)

    for optimizer in OPTIMIZERS:
        traced = assert_captured_equals_eager(small.make(step, optimizer=optimizer))
        (check,) = checks(traced)
        saved = {node.name for node in check.all_input_nodes}
        assert not any("weight" in name and "running" not in name for name in saved)


def test_a_read_of_what_the_optimizer_wrote_is_put_back_with_the_parameters():
    def step(model, optimizer, batch):
        loss = loss_of(model, batch)
        stepped(loss, optimizer)
        return loss * (2 if model[0].weight.norm() < 1e6 else 1)

    assert len(checks(assert_captured_equals_eager(small.make(step)))) == 1
    with pytest.raises(CaptureError, match="runs as itself, which cannot be taken back"):
        capture(*small.make(step, optimizer=small.adam)())


# -- turns ------------------------------------------------------------------------------------------------------------


def test_a_read_that_differs_ever_again_is_refused_with_what_to_do():
    turns, batch = Turns(advice=". Keep it a tensor"), small.data()
    for _ in range(Turns.MOST):
        turns.note([BrokenAssumption("what `x.item()` reads was 1 and is 2", "x.item()")], batch)
    turns.note([BrokenAssumption("another line", "y.item()")], batch)
    turns.note([BrokenAssumption("another shape", "x.item()")], (batch[0][:3], batch[1][:3]))
    with pytest.raises(CaptureError, match=r"x.item\(\).*captured one. Keep it a tensor"):
        turns.note([BrokenAssumption("what `x.item()` reads was 1 and is 3", "x.item()")], batch)


def batch_of(rows):
    return torch.zeros(rows, 6), torch.zeros(rows)


def test_a_line_that_reads_ever_other_numbers_is_refused_whatever_the_shapes():
    turns = Turns()
    for i in range(Turns.MOST_NUMBERS):
        turns.note([BrokenAssumption(f"it was {i} and is {i + 1}", "x.item()")], batch_of(i))
        turns.passed()
    with pytest.raises(CaptureError, match="4 further captures already"):
        turns.note([BrokenAssumption("it was 8 and is 9", "x.item()")], batch_of(9))


def test_a_flag_may_turn_once_at_each_of_many_shapes():
    turns = Turns()
    for i in range(20):
        turns.note([BrokenAssumption("it was False and is True", "mask.all()")], batch_of(i))
        turns.passed()


def test_many_turns_with_no_step_between_them_are_refused_whatever_the_lines():
    turns = Turns()
    for i in range(Turns.MOST_IN_A_ROW):
        turns.note([BrokenAssumption("it was False and is True", f"line {i}")], batch_of(4))
        turns.note([], batch_of(5))  # another shape is no turn
    with pytest.raises(CaptureError, match="such reads have led to 6 further captures already"):
        turns.note([BrokenAssumption("it was False and is True", "one more")], batch_of(4))


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [(0.0, -0.0, False), (math.nan, math.nan, True), (1, True, False), (1.0, 1, False), ([1, [2.0]], [1, [2.0]], True)],
)
def test_numbers_are_the_same_to_the_bit(a, b, alike):
    assert same(a, b) is alike


# -- shapes that depend on values -------------------------------------------------------------------------------------


def weighted_by_counts(model, optimizer, batch):
    counts = torch.bincount(batch[1], minlength=4)
    loss = F.cross_entropy(model(batch[0]), batch[1], weight=counts.float() / len(batch[1]))
    stepped(loss, optimizer)
    return loss, counts


def test_counts_of_labels_are_live_and_their_length_is_assumed():
    traced = assert_captured_equals_eager(small.make(weighted_by_counts))
    assert [expected.value for expected in traced.convention.beforehand.expected] == [[[4]]]
    features, labels = small.data()
    (said,) = traced.convention.check((features, labels.clone().fill_(6)))
    assert "was [[4]] and is [[7]]" in said


class Chosen(nn.Module):
    """Picks features by a mask that is a buffer, and by labels that are constants."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.register_buffer("mask", torch.arange(8) % 2 == 0)

    def forward(self, x):
        kinds = torch.unique(torch.tensor([3, 1, 1, 0, 2]))
        return self.inner(x)[:, self.mask][:, kinds]


def test_a_shape_that_constants_and_buffers_decide_is_captured():
    assert_captured_equals_eager(small.make(model=Chosen))
    step, model, optimizer, batch = small.make(model=Chosen)()
    traced = capture(step, model, optimizer, batch)
    model.mask[1] = True
    with pytest.raises(BrokenAssumption, match=r"self.mask.* was \[\[12, 4\]\] and is \[\[12, 5\]\]"):
        traced.run(batch)


def test_ctc_with_lengths_that_are_constants_is_captured():
    lengths = torch.full((3,), 4), torch.full((3,), 2)

    def step(model, optimizer, batch):
        scores = model(batch[0]).view(4, 3, 4).log_softmax(-1)
        loss = F.ctc_loss(scores, batch[1].view(3, 4)[:, :2].clamp(1), *lengths)
        stepped(loss, optimizer)
        return loss

    assert_captured_equals_eager(small.make(step))


def of_known_labels(model, optimizer, batch):
    known = (batch[1] >= 0).nonzero().squeeze(1)
    loss = F.cross_entropy(model(batch[0])[known], batch[1][batch[1] >= 0])
    stepped(loss, optimizer)
    return loss


def test_a_mask_that_leaves_nothing_out_is_assumed_to_do_so_and_checked_before_each_step():
    traced = assert_captured_equals_eager(small.make(of_known_labels))
    features, labels = small.data()
    labels[0] = -1
    assert "was [[12, 1]] and is [[11, 1]]" in traced.convention.check((features, labels))[0]
    with pytest.raises(CaptureError, match="shape depends on data"):
        capture(*small.make(of_known_labels)()[:3], (features, labels))


@pytest.mark.parametrize("classes", [4, -1])
def test_labels_as_vectors_are_made_as_eager_makes_them_and_refused_out_of_range(classes):
    def step(model, optimizer, batch):
        loss = F.mse_loss(model(batch[0]), F.one_hot(batch[1], classes).float())
        stepped(loss, optimizer)
        return loss

    traced = assert_captured_equals_eager(small.make(step))
    assert any("scatter" in op.target for op in traced.graph.ops), "by other ops than eager's"
    features, labels = small.data()
    assert traced.convention.check((features, labels + 1)) != []
    assert traced.convention.check((features, labels - 1)) != []


# -- assertions -------------------------------------------------------------------------------------------------------

ASSERTIONS = {
    "assert": lambda out: bool(out.isfinite().all()),
    "torch._assert": lambda out: torch._assert(out.isfinite().all(), "not finite"),
    "torch._assert_async": lambda out: torch._assert_async(out.isfinite().all()),
    "torch.testing": lambda out: torch.testing.assert_close(out, out * 1.0),
}


@pytest.mark.parametrize("check", ASSERTIONS.values(), ids=ASSERTIONS)
def test_an_assertion_of_the_users_is_never_dropped(check):
    def step(model, optimizer, batch):
        out = model(batch[0])
        check(out)
        loss = F.cross_entropy(out, batch[1])
        stepped(loss, optimizer)
        return loss

    assert_captured_equals_eager(small.make(step))
    step, model, optimizer, batch = small.make(step)()
    traced = capture(step, model, optimizer, batch)
    with pytest.raises((BrokenAssumption, RuntimeError)):
        traced.run((batch[0] * math.nan, batch[1]))
