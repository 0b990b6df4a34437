"""A planned model's budget bounds the whole loop, its optimizer included; where nothing is planned, that is said."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from planner.errors import FileFormatError
from profiler.measuring.memory import live_bytes
from profiler.measuring.meters import CpuMeter, peak_above_start
from profiler.tracing.fx_graphs.layouts import Layout
from rewriter import OverBudget, checkpoint_model, uncheckpoint
from rewriter.proof import same_bits
from rewriter.ways import rehearsal
from rewriter.ways.optimizer_steps import elsewhere_bytes, missing_state_bytes
from rewriter.ways.others import Others

CPU = torch.device("cpu")
ROWS, LABELS = torch.randn(1024, 16), torch.randint(0, 4, (1024,))


class Tower(nn.Sequential):
    def __init__(self, width=16, depth=6):
        layers = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth))
        super().__init__(*layers, nn.Linear(width, 4))


def loss_of(model, i=0, rows=1024):
    return F.cross_entropy(model(ROWS[:rows] + i), LABELS[:rows])


def make(**options):
    torch.manual_seed(0)
    model = Tower().train()
    return checkpoint_model(model, strategy="mutwo", **options) if options else model


def train(model, optimizer, steps=3, accumulate=1):
    torch.manual_seed(1)
    for i in range(steps * accumulate):
        loss_of(model, i).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def whole_peak(model, optimizer, *, accumulate=1):
    """What one round of the loop has live at most, everything included."""
    gc.collect()
    before = live_bytes(CPU, without=[])
    return before + peak_above_start(CpuMeter(), lambda: train(model, optimizer, 1, accumulate))


# -- one budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: optim.Adam(p),
        lambda p: optim.AdamW(p, amsgrad=True, foreach=True),
        lambda p: optim.SGD(p, 0.1, momentum=0.9),
        lambda p: optim.SGD(p, 0.1),
        lambda p: optim.RMSprop(p, centered=True),
    ],
)
def test_the_state_that_an_optimizer_will_make_is_known_before(kind):
    model = Tower()
    optimizer = kind(model.parameters())
    expected = missing_state_bytes(optimizer)
    assert not optimizer.state
    loss_of(model).backward()
    optimizer.step()
    made = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert expected == sum(tensor.untyped_storage().nbytes() for tensor in made)
    assert missing_state_bytes(optimizer) == 0


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("told", [True, False])
def test_a_budget_in_bytes_is_kept_by_the_whole_loop_optimizer_included(told, accumulate):
    model = make()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, accumulate=accumulate)
    unplanned = whole_peak(model, optimizer, accumulate=accumulate)
    budget = unplanned - 150_000
    checkpoint_model(model, budget=budget, strategy="mutwo", optimizer=optimizer if told else None)
    train(model, optimizer, accumulate=accumulate)
    assert model.planned.timeline().reruns > 0
    assert whole_peak(model, optimizer, accumulate=accumulate) <= budget


def test_forms_planned_before_the_optimizer_had_its_state_are_planned_again():
    model = make(budget=10**9)
    optimizer = optim.Adam(model.parameters())
    for _ in range(3):
        loss_of(model).backward()
    early = model.planned.taken.form
    optimizer.step()
    loss_of(model).backward()
    assert model.planned.taken.form is not early


def test_what_a_step_of_the_optimizer_allocates_for_a_moment_is_seen():
    model = make(budget="80%")
    optimizer = optim.AdamW(model.parameters(), foreach=True)
    train(model, optimizer, steps=2)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert model.planned.taken._steps.for_a_moment_bytes >= nbytes
    assert not model.planned.taken._steps.close.alive  # it looks no more


def test_an_optimizer_whose_own_step_does_not_fit_is_told_as_such(monkeypatch):
    model = make(budget=10**9)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, steps=1)
    model.planned.taken._steps.for_a_moment_bytes = 10**9
    with pytest.raises(OverBudget, match=r"optimizer's own step does not fit 953.7 MiB: .*gradients .*for a moment"):
        train(model, optimizer, steps=1)


# -- several forwards at a time ---------------------------------------------------------------------------------------


def siamese(model, i=0):
    (loss_of(model, i) + loss_of(model, -i)).backward()


def three_at_a_time(model, i=0):
    F.triplet_margin_loss(*(model(ROWS + i + k) for k in range(3))).backward()


def one_after_the_other(model, i=0):
    losses = loss_of(model, i), loss_of(model, -i)
    for loss in losses:
        loss.backward()


def twice_through_a_graph(model, i=0):
    loss = loss_of(model, i)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("go", [siamese, three_at_a_time, one_after_the_other, twice_through_a_graph])
def test_a_budget_in_bytes_holds_for_all_forwards_that_are_alive_together(go):
    def peak_of(model):
        gc.collect()
        before = live_bytes(CPU, without=[])
        peak = before + peak_above_start(CpuMeter(), lambda: go(model))
        model.zero_grad()
        return peak

    eager = make()
    budget = int(0.8 * peak_of(eager))
    del eager
    model = make(budget=budget)
    for i in range(2):  # watched, then planned once
        go(model, i)
        model.zero_grad()
    assert model.planned.taken._captures == 1
    assert model.planned.timeline().reruns > 0
    assert peak_of(model) <= budget


def test_forwards_of_several_kinds_before_one_backward_are_all_planned():
    model = make(budget="90%")
    for i in range(4):
        (F.cross_entropy(model(ROWS + i), LABELS) + F.cross_entropy(model(input=ROWS - i), LABELS)).backward()
        model.zero_grad()
    assert model.planned.taken._captures == 2


def test_a_loop_that_begins_to_keep_more_alive_is_told_and_planned_for_that():
    model = make(budget=10**9)
    for i in range(2):
        loss_of(model, i).backward()
        model.zero_grad()
    alone = model.planned.taken.form
    assert alone.beside_bytes == 0
    with pytest.warns(UserWarning, match="the loop keeps 1 other forward without a backward yet.*planned anew"):
        siamese(model)
    model.zero_grad()
    assert model.planned.taken.form.beside_bytes > 0
    with pytest.warns(UserWarning, match="a graph that is kept"):
        twice_through_a_graph(model)


def test_forwards_that_fit_alone_and_not_together_are_over_budget_with_the_sum():
    def eight_at_a_time(model):
        sum(loss_of(model, k) for k in range(8)).backward()
        model.zero_grad()

    def alone():
        model = make()
        return live_bytes(CPU, without=[]) + peak_above_start(CpuMeter(), lambda: loss_of(model).backward())

    model = make(budget=int(0.6 * alone()))
    eight_at_a_time(model)
    said = r"fit .*, but not with what the loop keeps beside them: 7 other forwards"
    with pytest.raises(OverBudget, match=said):
        eight_at_a_time(model)


# -- other tensors that grow -----------------------------------------------------------------------------------------


def discarding(model, i):
    """Looks at one batch before it trains on another: what was the plan's batch is another tensor later."""
    model(ROWS)
    loss_of(model, i).backward()
    model.zero_grad()


def test_tensors_that_grow_after_it_was_planned_are_planned_for_and_told():
    def peak_of(model):
        gc.collect()
        before = live_bytes(CPU, without=[])
        return before + peak_above_start(CpuMeter(), lambda: discarding(model, 5))

    budget = int(0.7 * peak_of(make()))
    model = make(budget=budget)
    for i in range(3):
        discarding(model, i)
    assert peak_of(model) <= budget
    form = model.planned.taken.form
    there = elsewhere_bytes(model, ((ROWS,), {}), None)
    grown = torch.empty(form.most_elsewhere_bytes - there + 1000, dtype=torch.uint8)
    with pytest.warns(UserWarning, match=r"other tensors have grown by .*: it is planned anew for the budget"):
        discarding(model, 1)
    assert model.planned.taken.form.solution.timeline.peak_bytes < form.solution.timeline.peak_bytes
    assert peak_of(model) <= budget
    del grown


def test_tensors_that_outgrow_a_budget_are_told_before_anything_runs_and_gone_they_are_forgotten():
    model = make(budget=3_000_000)
    for i in range(3):
        loss_of(model, i).backward()
    torch.manual_seed(0)
    state, large = torch.get_rng_state(), torch.empty(3_000_000)
    with pytest.raises(OverBudget, match=r"beside 1[0-9].. MiB of tensors outside of the plan"):
        loss_of(model)
    assert same_bits(state, torch.get_rng_state())
    del large
    loss_of(model).backward()


def test_others_are_counted_only_where_more_is_allocated():
    counts = []
    others = Others()

    def exceed(most):
        return others.exceed(most, CPU, lambda: counts.append(1) or 1000)

    assert not exceed(10**6)
    assert not exceed(10**6)
    assert len(counts) == 1
    held = torch.empty(10**6)
    assert not exceed(10**6)
    assert len(counts) == 2
    assert exceed(999)
    del held


# -- gradients leave as they are complete -----------------------------------------------------------------------------


def in_backward(model):
    """The peak of a backward whose hooks step each parameter at once."""
    optimizers = {p: optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for i in range(3):
        loss_of(model, i, rows=64).backward()
    return peak_above_start(CpuMeter(), lambda: loss_of(model, rows=64).backward())


def accumulating(model):
    """The peak of a backward that adds to gradients which are there."""
    for i in range(4):
        loss_of(model, i, rows=64).backward()
    return peak_above_start(CpuMeter(), lambda: loss_of(model, rows=64).backward())


@pytest.mark.parametrize("peak_of", [in_backward, accumulating])
def test_gradients_do_not_pile_up_above_eagers(peak_of):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(16, 96), *(nn.Linear(96, 96) for _ in range(16)), nn.Linear(96, 4))
    planned = checkpoint_model(copy.deepcopy(eager), budget="100%", strategy="mutwo")
    gradient_bytes = sum(p.numel() * p.element_size() for p in eager.parameters())
    least, ours = peak_of(eager), peak_of(planned)
    assert least < gradient_bytes
    assert ours < 1.05 * least


# -- memory that is short ---------------------------------------------------------------------------------------------


def test_a_first_forward_that_leaves_too_little_is_planned_at_once_with_everything_put_back(monkeypatch):
    eager, planned = make(), make(budget="70%")
    eager.append(nn.BatchNorm1d(4))
    planned.append(nn.BatchNorm1d(4))
    there = iter([10**9, 10**9, 1000])
    monkeypatch.setattr(rehearsal, "available_bytes", lambda device: next(there, 0))
    with pytest.warns(UserWarning, match="too little for its backward.*planned at once"):
        train(planned, optim.SGD(planned.parameters(), lr=0.1), steps=1)
    assert planned.planned.timeline().reruns > 0
    train(planned, optim.SGD(planned.parameters(), lr=0.1), steps=2)
    for steps in (1, 2):
        train(eager, optim.SGD(eager.parameters(), lr=0.1), steps=steps)
    assert all(map(same_bits, eager.state_dict().values(), planned.state_dict().values()))


# -- never silently nothing -------------------------------------------------------------------------------------------


def test_a_model_that_no_backward_ever_reaches_is_warned_of():
    model = make(budget="80%")
    with pytest.warns(UserWarning, match="8 training forwards of this model have gone by and none was planned"):
        [model(ROWS) for _ in range(9)]


def test_more_forms_than_are_kept_are_a_warning_that_says_what_to_raise():
    model = make(budget="90%", most_shapes=1)
    with pytest.warns(UserWarning, match=r"planned 2 times, and 1 forms are kept.*raise most_shapes"):
        two_lengths(model)


def two_lengths(model):
    for i in range(4):
        loss_of(model, i, rows=(1024, 512)[i % 2]).backward()


def test_another_profiler_that_is_on_only_makes_the_bytes_outside_an_estimate():
    model = make(budget="80%")
    with torch.profiler.profile(profile_memory=True):
        train(model, optim.SGD(model.parameters(), lr=0.1), steps=3)
    train(model, optim.SGD(model.parameters(), lr=0.1), steps=2)
    assert model.planned.timeline().reruns > 0


# -- plans from files -------------------------------------------------------------------------------------------------


def test_a_plan_that_was_saved_is_used_again_and_refused_for_another_model(tmp_path):
    first = make(budget="70%")
    train(first, optim.SGD(first.parameters(), lr=0.1))
    first.planned.save(tmp_path / "plan.json")
    first.planned.save(tmp_path / "plan.csv")
    assert "RECOMPUTE" in (tmp_path / "plan.csv").read_text()
    again = make(budget="90%", plan=tmp_path / "plan.json")
    train(again, optim.SGD(again.parameters(), lr=0.1))
    assert again.planned.solution.strategy == "plan file"
    assert again.planned.timeline().reruns == first.planned.timeline().reruns
    other = checkpoint_model(Tower(depth=2), budget="90%", plan=tmp_path / "plan.json")
    with pytest.raises(FileFormatError):
        train(other, optim.SGD(other.parameters(), lr=0.1))
    uncheckpoint(other)


# -- how gradients lie in memory --------------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize(
    "tangent",
    [
        lambda y: torch.ones_like(y),
        lambda y: torch.ones(()).expand(y.shape),
        lambda y: torch.randn(y.shape[2], *y.shape[:2]).permute(1, 2, 0),
        lambda y: torch.randn(y.shape[1], y.shape[0], y.shape[2]).transpose(0, 1),
        lambda y: torch.randn(*y.shape[:2], 11)[..., 2:8],
        lambda y: torch.randn(y.shape[0], 1, y.shape[2]).expand(y.shape),
    ],
)
@pytest.mark.filterwarnings("ignore:gradients of outputs")
def test_a_gradient_may_lie_in_memory_as_it_likes_and_change_its_mind(tangent):
    torch.manual_seed(0)
    eager = Tokens()
    planned = checkpoint_model(copy.deepcopy(eager), budget="100%", strategy="mutwo")
    turns = (tangent, tangent, tangent, lambda y: torch.randn(y.shape), tangent, tangent)
    for i, turn in enumerate(turns):
        for model in (eager, planned):
            torch.manual_seed(3)
            x = torch.randn(4, 16, 8, requires_grad=True)
            y = model(x)
            y.backward(turn(y))
        for p, q in zip(eager.parameters(), planned.parameters(), strict=True):
            # Where it has just changed its mind, a warning says that sums may round otherwise this once.
            assert same_bits(p.grad, q.grad) or (i in (3, 4) and torch.allclose(p.grad, q.grad, atol=1e-5))
            p.grad = q.grad = None


def test_a_layout_holds_at_other_sizes_unless_it_has_gaps():
    across = Layout.of(torch.empty(5, 3, 4).permute(2, 0, 1))
    assert across.strides((8, 2, 6)) == torch.empty(2, 6, 8).permute(2, 0, 1).stride()
    assert Layout.of(torch.ones(()).expand(3, 4)).strides((5, 6)) == (0, 0)
    gapped = Layout.of(torch.empty(3, 10)[:, :4])
    assert gapped.strides((3, 4)) == (10, 1)
    assert gapped.strides((5, 4)) == (4, 1)


def test_warnings_are_those_of_the_callers_line():
    model = make(budget="90%", most_shapes=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        two_lengths(model)
    assert {w.filename for w in caught if "most_shapes" in str(w.message)} == {__file__}
