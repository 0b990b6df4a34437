"""checkpoint_model: forward and backward planned in place, equal to eager in loops that stay the user's own Python."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.optim import optimizer as optimizer_module

from planner.errors import BudgetError, FileFormatError, PlannerError, StrategyError
from profiler.errors import CaptureError
from profiler.measuring.meters import CpuMeter, peak_above_start
from profiler.tracing.whole_step import capture
from rewriter import BackwardError, OverBudget, checkpoint_model, uncheckpoint
from rewriter import model as model_door
from rewriter.proof import same_bits
from rewriter.ways.common import Kernels, PlannedWay, Way
from rewriter.ways.own_capture.way import OwnCapture
from rewriter.ways.trials import digest
from tests.rewriter import tiny
from tests.side_by_side import seeded


class TwoHeads(nn.Module):
    """Returns two tensors, of which a loop may use one or both."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))
        self.left, self.right = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.body(x)
        return {"left": self.left(hidden), "right": self.right(hidden), "name": "two heads"}


IMAGES, LABELS = torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,))
ROWS = torch.randn(512, 16)


def classified(model, i):
    return F.cross_entropy(model(IMAGES + i), LABELS)


def pair_of(make, **options):
    """Two models of the same weights: one as it is, one planned."""
    torch.manual_seed(0)
    eager = make().train()
    planned = copy.deepcopy(eager)
    checkpoint_model(planned, **{"budget": "70%", "strategy": "mutwo", **options})
    return eager, planned


def trained(model, loss_of, *, steps=4, accumulate=1):
    optimizer, losses = optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    torch.manual_seed(1)
    for i in range(steps):
        loss = loss_of(model, i)
        loss.backward()
        losses.append(loss.item())
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def assert_trains_equally(eager, planned, loss_of, **options):
    assert trained(eager, loss_of, **options) == trained(planned, loss_of, **options)
    assert_same_state(eager, planned)


def assert_same_state(eager, planned):
    named = (*eager.named_parameters(), *eager.named_buffers())
    for (name, a), b in zip(named, (*planned.parameters(), *planned.buffers()), strict=True):
        assert same_bits(a, b), name
        assert (a.grad is None) == (b.grad is None), name


@pytest.fixture(scope="module")
def network():
    """A network that was trained in a plain loop beside its eager twin."""
    eager, planned = pair_of(tiny.network)
    assert_trains_equally(eager, planned, classified)
    return eager, planned


def test_a_plain_loop_equals_eager_and_what_ran_was_planned_and_proven(network):
    _, planned = network
    assert planned.planned.timeline().reruns > 0
    assert planned.planned.verification.exact
    assert "proven equal to the bit" in str(planned.planned.solution)
    assert planned.planned.explain("convolution")


def test_the_predicted_peak_is_that_of_forward_and_backward_in_the_users_loop(network):
    planned = network[1]
    planned.zero_grad()
    measured = peak_above_start(CpuMeter(), lambda: F.cross_entropy(planned(IMAGES), LABELS).backward())
    planned.zero_grad()
    predicted = planned.planned.timeline().above_start_bytes
    assert abs(measured - predicted) <= 0.01 * predicted


def test_evaluation_copies_and_files_go_on_working(network):
    eager, planned = copy.deepcopy(network[0]), network[1]
    eager.load_state_dict(planned.state_dict())
    for model in (copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        assert model.planned is None
        assert model._compiled_call_impl is None
        assert same_bits(model.eval()(IMAGES), copy.deepcopy(eager).eval()(IMAGES))
    assert list(planned.state_dict()) == list(eager.state_dict())
    with torch.no_grad():
        torch.manual_seed(3)
        a = planned(IMAGES)
        torch.manual_seed(3)
        assert same_bits(a, eager(IMAGES))


def test_gradients_that_are_there_are_added_to():
    eager, planned = pair_of(tiny.network)
    assert_trains_equally(eager, planned, classified, steps=8, accumulate=2)


def test_a_graph_that_is_retained_can_be_gone_through_twice(network):
    eager, planned = network
    for model in network:
        torch.manual_seed(4)
        loss = classified(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(eager, planned)


def assert_same_gradients(eager, planned):
    for (name, p), q in zip(eager.named_parameters(), planned.parameters(), strict=True):
        assert same_bits(p.grad, q.grad), name
        p.grad = q.grad = None


def test_two_forwards_with_one_backward_and_gradients_of_inputs():
    eager, planned = pair_of(TwoHeads)

    def of_inputs(model):
        torch.manual_seed(5)
        seen = []
        for i in range(3):
            x = (ROWS + i).requires_grad_()
            y = x * 2.0  # not a leaf: its own backward is the loop's
            loss = model(y)["left"].sum() + model(y + 1)["left"].pow(2).sum()
            loss.backward()
            seen.append(x.grad.clone())
            model.zero_grad()
        return seen

    assert all(map(same_bits, of_inputs(eager), of_inputs(planned)))


def test_torch_autograd_grad_gets_what_it_asks_for(network):
    found = []
    for model in network:
        torch.manual_seed(6)
        params = list(model.parameters())
        found.append(torch.autograd.grad(classified(model, 1), [params[0], params[-1]]))
        assert all(p.grad is None for p in params)
    assert all(map(same_bits, *found))


def test_hooks_see_gradients_as_they_are_complete():
    eager, planned = pair_of(tiny.network)
    orders = []
    for model in (eager, planned):
        seen: list[str] = []
        orders.append(seen)
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name, seen=seen: seen.append(name))
    assert_trains_equally(eager, planned, classified, steps=3)
    assert sorted(orders[0]) == sorted(orders[1])
    assert len(planned.planned.taken.form.halves.stages) > 1


def test_an_output_that_gets_no_gradient_leaves_its_parameters_without_one():
    eager, planned = pair_of(TwoHeads)
    assert_trains_equally(eager, planned, lambda model, i: model(ROWS + i)["left"].pow(2).mean(), steps=4)
    assert planned(ROWS)["name"] == "two heads"
    planned(ROWS)["left"].sum().backward()
    assert planned.right.weight.grad is None


def test_another_output_used_later_is_an_error_and_then_planned_for():
    eager, planned = pair_of(TwoHeads)
    trained(planned, lambda model, i: model(ROWS + i)["left"].sum(), steps=3)
    planned.zero_grad()
    with pytest.raises(BackwardError, match=r"came back for outputs \[1\] .* planned for \[0\]"):
        planned(ROWS)["right"].sum().backward()
    assert all(p.grad is None for p in planned.parameters())
    eager.load_state_dict(planned.state_dict())
    for model in (eager, planned):
        torch.manual_seed(7)
        model(ROWS)["right"].sum().backward()
    assert same_bits(eager.right.weight.grad, planned.right.weight.grad)


def test_a_loop_that_goes_back_and_forth_between_outputs_is_left_to_blocks():
    eager, planned = pair_of(TwoHeads)
    trained(planned, lambda model, i: model(ROWS + i)["left"].sum(), steps=2)
    for name in ("right", "left"):
        with pytest.raises(BackwardError, match="came back for outputs"):
            planned(ROWS)[name].sum().backward()
    with pytest.warns(UserWarning, match=r"by blocks and not by own capture.*outputs \[0\] at one step and from \[1\]"):
        planned(ROWS)["left"].sum().backward()
    eager.load_state_dict(planned.state_dict())
    for i in range(4):
        for model in (eager, planned):
            model.zero_grad()
            torch.manual_seed(i)
            model(ROWS + i)["right" if i % 2 else "left"].sum().backward()
        for a, b in zip(eager.parameters(), planned.parameters(), strict=True):
            assert a.grad is b.grad is None or same_bits(a.grad, b.grad)
    assert planned.planned.way is Way.BLOCKS


class Tasks(nn.Module):
    """Two outputs, of which an argument says which is wanted."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.Tanh())
        self.heads = nn.ModuleDict({"left": nn.Linear(64, 16), "right": nn.Linear(64, 16)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def test_an_argument_that_says_which_output_is_wanted_has_a_plan_for_each():
    eager, planned = pair_of(Tasks, budget="100%", prove=False)
    assert_trains_equally(eager, planned, lambda model, i: model(ROWS, ("left", "right")[i % 2]).pow(2).mean(), steps=6)
    assert planned.planned.way is Way.OWN_CAPTURE
    assert len(planned.planned.taken._forms) == 2


def test_a_second_derivative_is_refused_with_a_way_out(network):
    _, planned = network
    with pytest.raises(BackwardError, match="uncheckpoint"):
        torch.autograd.grad(classified(planned, 0), list(planned.parameters()), create_graph=True)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}])
def test_a_second_derivative_is_refused_in_the_first_step_too_and_an_ordinary_one_after_it_is_eagers(options):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))  # whose forward is torch's own
    planned = checkpoint_model(copy.deepcopy(eager), budget="100%", strategy="mutwo", **options)
    with pytest.raises(BackwardError, match="create_graph=True"):
        torch.autograd.grad(planned(torch.ones(256, 16)).sum(), list(planned.parameters()), create_graph=True)
    for i in range(3):
        for model in (eager, planned):
            model.zero_grad()
            model(torch.full((256, 16), 1.0 + i)).square().mean().backward()
        assert all(map(same_bits, *([p.grad for p in model.parameters()] for model in (eager, planned))))
    assert planned.planned.way is (Way.DYNAMO if options else Way.OWN_CAPTURE)


def test_a_weight_that_changes_between_forward_and_backward_is_noticed_as_in_eager(network):
    _, planned = network
    loss = classified(planned, 0)
    with torch.no_grad():
        planned[0].weight.mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_uncheckpoint_puts_the_model_back():
    model = TwoHeads()
    before = dict(vars(model))
    planned = checkpoint_model(model, budget="90%", strategy="mutwo")
    trained(planned, lambda model, i: model(ROWS)["left"].sum(), steps=2)
    uncheckpoint(planned)
    assert vars(model) == before
    with pytest.raises(PlannerError, match="not planned"):
        uncheckpoint(planned)


def test_a_budget_that_nobody_can_meet_names_the_floor_and_leaves_the_model():
    eager, planned = pair_of(TwoHeads, budget="1KiB")
    planned(ROWS)["left"].sum().backward()
    planned.zero_grad()
    with pytest.raises(OverBudget, match="No plan at all can go under"):
        planned(ROWS)
    uncheckpoint(planned)
    assert vars(planned).keys() == vars(eager).keys()
    assert_same_state(eager, planned)


def on_two_devices():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def compiled_in_place():
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("model", "options", "kind", "said"),
    [
        (lambda: nn.Linear(2, 2), {"budget": "many"}, BudgetError, "give bytes"),
        (lambda: nn.Linear(2, 2), {"budget": "50%", "strategy": "none such"}, StrategyError, "there are"),
        (lambda: nn.Linear(2, 2), {"budget": "50%", "kernels": "fast"}, PlannerError, "there are 'eager'"),
        (lambda: nn.Linear(2, 2), {"budget": "50%", "most_shapes": 0}, PlannerError, "at least 1"),
        (lambda: nn.Linear(2, 2), {"budget": "50%", "time_limit_s": 0}, PlannerError, "seconds"),
        (lambda: nn.Linear(2, 2), {"budget": "50%", "plan": "nowhere.json"}, FileFormatError, "no such plan"),
        (lambda: nn.Linear(2, 2), {"budget": "50%", "optimizer": 3}, PlannerError, "optimizer=3: give the torch"),
        (lambda: nn.Linear(2, 2), {"budget": "50%", "dynamic": "yes"}, PlannerError, "dynamic='yes': there are"),
        (nn.ReLU, {"budget": "50%"}, PlannerError, "no parameters"),
        (on_two_devices, {"budget": "50%"}, PlannerError, r"several devices \(cpu, meta\).*: move it to one"),
        (lambda: checkpoint_model(nn.Linear(2, 2), budget="50%"), {"budget": "50%"}, PlannerError, "planned already"),
        (lambda: torch.compile(nn.Linear(2, 2)), {"budget": "50%"}, PlannerError, "compiled"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), {"budget": "50%"}, PlannerError, "compiled by TorchScript"),
        (compiled_in_place, {"budget": "50%"}, PlannerError, "compiled"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_bad_input_is_one_sentence_and_the_model_as_it_was(model, options, kind, said):
    given = model()
    before = dict(vars(given))
    with pytest.raises(kind, match=said) as error:
        checkpoint_model(given, **options)
    assert ". " not in str(error.value)
    assert vars(given) == before


def test_what_is_no_model_is_refused():
    with pytest.raises(PlannerError, match="takes a model, not a int"):
        checkpoint_model(3, budget="50%")


class Other(PlannedWay):
    """A way that takes everything and plans nothing."""

    way = Way.BLOCKS
    promise = "nothing in particular"

    def __call__(self, *args, **kwargs):
        return self.model._call_impl(*args, **kwargs)

    solution = verification = None


class Confetti(nn.Module):
    """Has a shape that depends on data, which no single graph holds."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return (x * self.weight)[x > 0]


def test_where_a_way_refuses_the_next_is_taken_with_a_warning_and_the_same_call_goes_on(monkeypatch):
    monkeypatch.setitem(model_door.WAYS, Kernels.EAGER, (OwnCapture, Other))
    eager, planned = pair_of(Confetti)
    with pytest.warns(UserWarning, match="(?s)planned by blocks and not by own capture.*nothing in particular"):
        assert_trains_equally(eager, planned, lambda model, i: model(ROWS + i).sum(), steps=3)
    assert planned.planned.way is Way.BLOCKS
    assert planned.planned.promise == "nothing in particular"
    ((refused, why),) = planned.planned.refusals
    assert refused is Way.OWN_CAPTURE
    assert "shape depends on data" in why


def test_a_model_that_every_way_refuses_is_an_error_that_says_why():
    class Hidden(Confetti):
        @torch.compiler.disable
        def forward(self, x):
            return super().forward(x)

    _, planned = pair_of(Hidden)
    said = r"(?s)own capture: .*shape depends on data.*Dynamo: .*no graph.*blocks: there are no blocks"
    with pytest.warns(UserWarning, match="planned by blocks"), pytest.raises(CaptureError, match=said):
        trained(planned, lambda model, i: model(ROWS + i).sum(), steps=3)


@pytest.mark.filterwarnings("ignore:this model is planned by")
def test_a_model_that_returns_what_cannot_be_copied_is_refused_in_a_sentence():
    class Yielding(nn.Linear):
        def forward(self, x):
            return (y for y in [super().forward(x)])

    model = checkpoint_model(Yielding(4, 4), budget="90%")
    for _ in range(2):  # by the model as it was: what it returns is known only then
        next(model(torch.ones(2, 4))).sum().backward()
    with pytest.raises(CaptureError, match=r"of type generator .*: return tensors in lists, dicts or records"):
        model(torch.ones(2, 4))
    next(uncheckpoint(model)(torch.ones(2, 4))).sum().backward()


def test_nothing_is_planned_before_the_second_step():
    _, planned = pair_of(TwoHeads)
    with pytest.raises(PlannerError, match="nothing is planned yet"):
        _ = planned.planned.solution
    assert repr(planned.planned).startswith("planned by own capture: nothing is planned yet")


def test_a_digest_tells_single_bits_and_places_apart():
    a = torch.randn(10_000)
    b, c = a.clone(), a.clone()
    b.view(torch.int32)[7777] ^= 1
    c[[3, 9000]] = c[[9000, 3]]
    assert len({int(digest(t)) for t in (a, b, c)}) == 3
    assert same_bits(digest(a), digest(a.clone()))


def _watching_hooks():
    gc.collect()
    hooks = optimizer_module._global_optimizer_pre_hooks
    return [hook for hook in hooks.values() if getattr(hook, "only_watches", False)]


def test_a_planned_model_that_nothing_has_stepped_yet_does_not_disturb_a_planned_step():
    before = len(_watching_hooks())
    waiting = checkpoint_model(nn.Linear(4, 4), budget="90%")
    waiting(torch.ones(2, 4)).sum().backward()
    step, model, optimizer, batch = seeded(tiny.plain)
    traced = capture(step, model, optimizer, batch)
    assert not traced.opaque_reason
    other = checkpoint_model(nn.Linear(4, 4), budget="90%")
    assert traced.convention.check(batch) == []
    del waiting, other
    assert len(_watching_hooks()) == before
