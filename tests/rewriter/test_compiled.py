"""Planning through torch.compile: graphs that break, sizes that change, one budget, eager's bits; inductor."""

import copy
import gc
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

import rewriter
from planner.errors import BudgetError, PlannerError, StrategyError
from planner.simulator import simulate
from profiler.measuring.meters import CpuMeter, peak_above_start
from profiler.tracing.eager_ways.assumptions import Turns
from rewriter import BackwardError, OverBudget, VerificationError, checkpoint_model
from rewriter import model as model_door
from rewriter.model import ways_for
from rewriter.proof import same_bits
from rewriter.ways.blocks.way import BlockWise
from rewriter.ways.common import Kernels, Refused, Way
from rewriter.ways.compiled import backend, seams
from rewriter.ways.compiled.backend import recompute
from rewriter.ways.compiled.comparison import ROUNDING
from rewriter.ways.compiled.dynamo_way import DynamoWay
from rewriter.ways.compiled.graph_proof import prove_graph
from rewriter.ways.compiled.inductor_way import Differences, InductorWay
from rewriter.ways.compiled.options import OptionError
from rewriter.ways.compiled.proving import RouteProofs
from rewriter.ways.own_capture.way import OwnCapture
from rewriter.ways.rehearsal import stop_watching

WIDTH = 16


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(self.first(x))


class Broken(nn.Module):
    """Two halves with a weight that both read twice, and something between them that no graph holds."""

    def __init__(self, *, between=lambda x: print(end="")):
        super().__init__()
        self.before, self.after, self.norm = Half(), Half(), nn.BatchNorm1d(WIDTH)
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.between = between

    def forward(self, x):
        x = self.norm(self.before(x @ self.shared) @ self.shared)
        self.between(x)
        return self.after(x @ self.shared) @ self.shared


class Whole(Broken):
    """The same in one graph."""

    def __init__(self):
        super().__init__(between=torch.relu)


def pair_of(make):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = make().train()
    return eager, copy.deepcopy(eager)


def rows(count):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


def stepped(call, model, batch, *, seed=1):
    """What one step leaves: loss, gradients, buffers, generator."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = call(batch).pow(2).mean()
    loss.backward()
    grads = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def assert_equal_steps(eager, call, model, counts):
    for i, count in enumerate(counts):
        expected = stepped(eager, eager, rows(count), seed=i)
        actual = stepped(call, model, rows(count), seed=i)
        assert all(map(same_bits, expected, actual)), f"step {i}"


def measured(call, model, batch, *, seed=0):
    model.zero_grad()
    torch.manual_seed(seed)
    peak = peak_above_start(CpuMeter(), lambda: call(batch).pow(2).mean().backward())
    model.zero_grad()
    return peak


@pytest.fixture(scope="module")
def broken():
    """A model in two graphs, planned with sizes as symbols and trained beside its eager twin."""
    eager, planned = pair_of(Broken)
    checkpoint_model(planned, budget="60%", strategy="mutwo", dynamic=True)
    assert_equal_steps(eager, planned, planned, [512, 512, 512])
    return eager, planned


def test_the_private_parts_of_torch_that_are_used_are_those_of_the_version_they_were_written_for():
    assert torch.__version__.startswith(seams.WRITTEN_FOR)


def test_a_model_that_breaks_into_graphs_has_eagers_bits_and_one_plan_for_all_of_them(broken):
    _, planned = broken
    assert planned.planned.way is Way.DYNAMO
    (route,) = planned.planned.taken.session.routes.values()
    assert len(route.route.stops) == 2
    assert route.route.backward == (1, 0)
    assert planned.planned.verification.exact
    assert "proven equal to the bit" in str(planned.planned.solution)
    assert planned.planned.timeline().reruns > 0


def test_the_predicted_peak_of_nested_graphs_is_that_of_the_users_loop(broken):
    eager, planned = broken
    peak, predicted = measured(planned, planned, rows(512)), planned.planned.timeline().above_start_bytes
    assert abs(peak - predicted) <= 0.02 * predicted
    assert peak < 0.75 * measured(eager, eager, rows(512))


def test_ten_sizes_go_through_one_capture_and_a_handful_of_plans(broken):
    eager, planned = broken
    session = planned.planned.taken.session
    before = len(session.graphs)
    assert_equal_steps(eager, planned, planned, [64, 700, 300, 128, 512, 900, 65, 256, 1000, 333])
    assert len(session.graphs) == before
    assert sum(len(route.plans) for route in session.routes.values()) <= 4
    predicted = planned.planned.timeline().above_start_bytes
    assert abs(measured(planned, planned, rows(333)) - predicted) <= 0.02 * predicted
    measured(eager, eager, rows(333))


def test_gradients_that_are_there_are_added_to_and_graphs_may_be_retained(broken):
    for _ in range(3):
        found = []
        for model in broken:
            model.zero_grad()
            torch.manual_seed(2)
            for _ in range(2):
                loss = model(rows(256)).pow(2).mean()
                loss.backward(retain_graph=True)
                loss.backward()
            found.append([p.grad.clone() for p in model.parameters()])
        assert all(map(same_bits, *found))


def test_a_hook_that_is_added_later_is_noticed():
    eager, planned = pair_of(Whole)
    checkpoint_model(planned, budget="90%", strategy="mutwo", dynamic=True)
    assert_equal_steps(eager, planned, planned, [64, 64])
    for model in (eager, planned):
        model.before.register_forward_hook(lambda module, given, output: output * 1.5)
    assert_equal_steps(eager, planned, planned, [64, 64])


def test_evaluation_runs_as_it_was(broken):
    eager, planned = broken
    calls = planned.planned.taken.session.calls
    eager.load_state_dict(planned.state_dict())
    with torch.no_grad():
        assert same_bits(eager.eval()(rows(8)), planned.eval()(rows(8)))
    assert planned.planned.taken.session.calls == calls
    for model in broken:
        model.train()


def test_a_second_derivative_is_refused_with_a_sentence(broken):
    eager, planned = broken
    assert_equal_steps(eager, planned, planned, [512])
    planned.zero_grad()  # as in the steps that were planned
    with pytest.raises(BackwardError, match="create_graph"):
        torch.autograd.grad(planned(rows(512)).sum(), planned.shared, create_graph=True)


def test_sizes_that_hang_on_data_are_refused_by_own_capture_and_taken_by_dynamo():
    class Masked(Broken):
        def forward(self, x):
            x = self.norm(self.before(x))
            return self.after(x[x[:, 0] > 0])

    eager, planned = pair_of(Masked)
    checkpoint_model(planned, budget="70%", strategy="mutwo")
    with pytest.warns(UserWarning, match="planned by Dynamo and not by own capture"):
        assert_equal_steps(eager, planned, planned, [512, 512, 512])
    assert planned.planned.way is Way.DYNAMO
    assert planned.planned.taken.session.planned_calls


def test_a_branch_that_turns_off_the_known_way_is_planned_once_it_was_seen():
    class Turning(Broken):
        def forward(self, x):
            x = self.before(x)
            if x[0, 0].item() > 1e6:
                return self.norm(x)
            return self.after(x)

    eager, planned = pair_of(Turning)
    call = torch.compile(planned, backend="recompute", options={"budget": "70%", "strategy": "mutwo"})
    assert_equal_steps(eager, call, planned, [512, 512])
    found = []
    for one, model in ((eager, eager), (call, planned)):
        model.zero_grad()
        for i in range(3):
            torch.manual_seed(i)
            one(rows(512) + 1e7).sum().backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert a is b is None or same_bits(a, b)


def test_torch_compile_finds_the_backend_and_plans_from_the_second_step_on():
    eager, planned = pair_of(Whole)
    options = {"budget": "60%", "strategy": "mutwo"}
    call = torch.compile(planned, backend="recompute", options=options)
    with pytest.warns(UserWarning, match="each planned graph is compared with the same graph") as said:
        assert_equal_steps(eager, call, planned, [512, 512, 512])
    assert len(said) == 1
    assert measured(call, planned, rows(512)) < 0.75 * measured(eager, eager, rows(512))


def test_the_backend_proves_each_planned_graph_against_dynamos_own(monkeypatch):
    _, planned = pair_of(Broken)
    proven = []

    def noted(graph, piece, args):
        prove_graph(graph, piece, args)
        proven.append((graph.index, piece))
        with pytest.raises(VerificationError, match=f"graph {graph.index} of Dynamo's, planned, differs .* first in"):
            prove_graph(graph, replace(piece, own=replace(piece.own), halves=_spoilt(piece.halves)), args)

    monkeypatch.setattr("rewriter.ways.compiled.session.prove_graph", noted)
    call = torch.compile(planned, backend="recompute", options={"budget": "70%", "strategy": "mutwo"})
    for seed in range(3):
        state = torch.get_rng_state()
        stepped(call, planned, rows(128), seed=seed)
        assert not same_bits(state, torch.get_rng_state())
    assert [index for index, _ in proven] == [0, 1]


def _spoilt(halves):
    """A backward that is off by a little."""
    *stages, last = halves.stages

    def run(carried):
        gradients, carried = last.run(carried)
        return [gradient * 1.0001 for gradient in gradients], carried

    return replace(halves, stages=(*stages, replace(last, run=run)))


def test_nothing_is_left_of_a_session_once_dynamo_has_forgotten_its_graphs():
    _, planned = pair_of(Whole)
    gc.collect()
    before = set(backend._sessions)
    call = torch.compile(planned, backend="recompute", options={"budget": "90%", "strategy": "mutwo"})
    for _ in range(3):
        stepped(call, planned, rows(64))
    assert len(set(backend._sessions) - before) == 1
    del call
    torch._dynamo.reset()
    gc.collect()
    assert set(backend._sessions) <= before


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (None, OptionError, "needs a budget"),
        ({"strategy": "mutwo"}, OptionError, "needs a budget"),
        ({"budget": "60%", "bugdet": 1}, OptionError, "'bugdet' is not known"),
        ({"budget": "60%", "kernels": "triton"}, OptionError, "'eager', 'inductor'"),
        ({"budget": "lots"}, BudgetError, "lots"),
        ({"budget": "60%", "strategy": "magic"}, StrategyError, "magic"),
        ({"budget": "60%", "time_limit_s": -1}, PlannerError, "time_limit_s=-1"),
    ],
)
def test_options_that_cannot_be_used_are_one_sentence_each(options, error, words):
    with pytest.raises(error, match=words):
        recompute(torch.fx.symbolic_trace(nn.ReLU()), [torch.ones(2)], options=options)


def test_a_mode_of_inductors_is_no_mode_of_the_backend():
    with pytest.raises(OptionError, match="max-autotune"):
        recompute(torch.fx.symbolic_trace(nn.ReLU()), [], options={"budget": "60%"}, mode="max-autotune")


def test_a_budget_that_no_plan_meets_is_an_error_with_the_floor():
    _, planned = pair_of(Whole)
    checkpoint_model(planned, budget="1%", strategy="mutwo", dynamic=True)
    planned(rows(64)).sum().backward()
    planned.zero_grad()
    with pytest.raises(OverBudget, match="No plan at all can go under"):
        planned(rows(64))


def one_step(model):
    model.zero_grad()
    torch.manual_seed(0)
    model(rows(64)).pow(2).mean().backward()


def test_several_graphs_that_fit_no_plan_are_left_to_blocks_and_over_budget_stands_if_those_refuse(monkeypatch):
    def over(*_):
        raise OverBudget("No plan at all can go under 9 GiB")

    monkeypatch.setattr(RouteProofs, "prove", over)
    for class_ in (Broken, Bare):
        _, planned = pair_of(class_)
        checkpoint_model(planned, budget="90%", strategy="mutwo")
        ways = iter([DynamoWay, BlockWise])
        planned.planned._taken, planned.planned._others = next(ways)(planned, planned.planned._settings), [*ways]
        one_step(planned)
        with pytest.warns(UserWarning, match="planned by blocks and not by Dynamo.*9 GiB"):
            one_step(planned)
        if class_ is Broken:
            one_step(planned)
            assert planned.planned.way is Way.BLOCKS
            assert planned.planned.verification.exact
        else:
            with pytest.raises(OverBudget, match="9 GiB"):
                one_step(planned)


class Bare(nn.Module):
    """Nothing in it is a block, and it breaks."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x):
        x = (x @ self.weight).sin()
        print(end="")
        return (x @ self.weight).sin()


def test_a_step_without_any_graph_is_refused_and_the_model_is_as_it_was():
    class Hidden(Whole):
        @torch._dynamo.disable
        def forward(self, x):
            return super().forward(x)

    _, planned = pair_of(Hidden)
    checkpoint_model(planned, budget="60%", dynamic=True)
    (way,) = ways_for(Kernels.EAGER, dynamic=True)[:1]
    before = torch.get_rng_state()
    with pytest.raises(Refused, match="Dynamo gave no graph"):
        planned.planned.taken(rows(64))
    assert way is type(planned.planned.taken)
    assert same_bits(before, torch.get_rng_state())


def test_a_part_that_is_compiled_again_and_again_is_told(monkeypatch):
    monkeypatch.setattr("rewriter.ways.compiled.session.MANY_COMPILATIONS", 2)
    torch._dynamo.reset()

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.kind = nn.Linear(4, 4), "a"

        def forward(self, x):
            return self.scale(x) if self.kind else x

    model = Counting()
    call = torch.compile(model, backend="recompute", options={"budget": "90%"})
    for kind in ("a", "b"):
        model.kind = kind
        call(torch.ones(2, 4)).sum().backward()
    model.kind = "c"
    with pytest.warns(UserWarning, match="compiled 3 times by now"):
        call(torch.ones(2, 4))


class Annealed(Whole):
    """Another graph at every step."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return super().forward(x) / self.steps


@pytest.mark.filterwarnings("ignore:a part of the model was compiled")
def test_another_graph_at_every_step_has_eagers_bits_and_no_watch_begins_where_one_was_cut(monkeypatch):
    begun = []
    begin = CpuMeter.watch
    monkeypatch.setattr(CpuMeter, "watch", lambda meter: begun.append(begin(meter)) or begun[-1])
    eager, planned = pair_of(Annealed)
    call = torch.compile(planned, backend="recompute", options={"budget": "1GiB", "strategy": "mutwo"})
    stop_watching()
    for i in range(6):
        expected, actual = stepped(eager, eager, rows(64)), stepped(call, planned, rows(64))
        assert all(map(same_bits, expected, actual)), f"step {i}"
        assert len(begun) == i // 2 + 1, "every other step ends a watch inside of Dynamo's record, and begins none"
    stop_watching()
    assert [watch.is_cut for watch in begun] == [True, True, True]


class Routed(nn.Module):
    """Numbers decide how many rows go where, and are others at every step."""

    def __init__(self):
        super().__init__()
        self.first, self.others = Block(), nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.first(x)
        sizes = (x[:, 0] > x[:, 1]).long().bincount(minlength=2).tolist()
        return torch.cat([block(part) for block, part in zip(self.others, x.split(sizes), strict=True)])


class Counted(Routed):
    """A number of the batch alone decides, and is another at every step."""

    def forward(self, x):
        count = int(x.abs().sum() * 1000) % 50 + 4
        return self.others[0](self.first(x)) + self.others[1](x[:count]).sum(0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Routed, Counted])
def test_numbers_that_differ_at_every_step_end_own_capture_after_a_handful(monkeypatch, make):
    monkeypatch.setitem(model_door.WAYS, Kernels.EAGER, (OwnCapture, BlockWise))  # which takes all that comes
    eager, planned = pair_of(make)
    own = checkpoint_model(planned, budget="90%", strategy="mutwo", prove=False).planned.taken
    for i, count in enumerate([64, 64, 96, 64, 96, 64, 96, 64]):
        batch = rows(count + i)[:count]
        assert all(map(same_bits, stepped(eager, eager, batch, seed=i), stepped(planned, planned, batch, seed=i)))
    assert planned.planned.way is Way.BLOCKS
    assert own._captures <= 2 + Turns.MOST_NUMBERS
    assert "further captures already" in planned.planned.refusals[0][1]


def test_sizes_on_which_data_decide_are_predicted_in_proportion_to_the_batch():
    eager, planned = pair_of(Routed)
    checkpoint_model(planned, budget="75%", strategy="mutwo", dynamic=True)
    assert_equal_steps(eager, planned, planned, [256, 256, 1024])
    predicted = planned.planned.timeline().above_start_bytes
    assert abs(measured(planned, planned, rows(1024)) - predicted) <= 0.05 * predicted


class Halting(nn.Module):
    """Numbers drawn decide how often a part runs, and whether another does after it: one way may begin another."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = Block(), Block(), Half()

    def forward(self, x):
        x = self.again(self.first(x))
        if torch.rand(()).item() < 0.5:
            x = self.again(x)
        return self.last(x) if torch.rand(()).item() < 0.5 else x


def assert_equal_draws(eager, planned, seeds):
    for seed in seeds:
        assert all(map(same_bits, *(stepped(model, model, rows(512), seed=seed) for model in (eager, planned))))


def test_a_plan_holds_for_each_way_that_data_lead_a_step_and_a_new_one_is_told_before_it_goes_on():
    eager, planned = pair_of(Halting)
    checkpoint_model(planned, budget="60%", strategy="mutwo", dynamic=True)
    with pytest.warns(UserWarning, match="goes another way through the model than any that was planned .* unplanned"):
        assert_equal_draws(eager, planned, (0, 0, 1, 1, 2, 2, 7, 7))
    session = planned.planned.taken.session
    found = {}
    for seed in (0, 1, 2, 7):
        peak, unplanned = (measured(model, model, rows(512), seed=seed) for model in (planned, eager))
        predicted = planned.planned.timeline().above_start_bytes
        assert abs(peak - predicted) <= 0.02 * predicted
        found[session.used_last.route.key.graphs] = peak, unplanned
    assert found.keys() == {key.graphs for key in session.routes}
    assert len(found) == 4
    most = max(unplanned for _, unplanned in found.values())
    assert all(peak <= 0.6 * most for peak, _ in found.values())


class Kept(Broken):
    """Keeps a part of its loss in an attribute."""

    def forward(self, x):
        y = super().forward(x)
        self.aux = x.pow(2).mean() * self.shared.mean()
        return y


class Drawing(Broken):
    """Draws from Python's generator."""

    def forward(self, x):
        return super().forward(x) * random.random()


def hooked():
    model, calls = Broken(), [0]

    def grown(module, given, output):
        calls[0] += 1
        return output * (1 + 0.1 * calls[0])

    model.after.register_forward_hook(grown)
    return model


def losses_of(model, steps=5):
    torch.manual_seed(0)
    random.seed(0)
    found = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = model(rows(64)).pow(2).mean() + getattr(model, "aux", 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Kept, Drawing, Annealed])
def test_what_dynamo_cannot_prove_goes_on_by_another_way_with_eagers_losses(make):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = make().train()
    torch.manual_seed(0)
    planned = make().train()
    checkpoint_model(planned, budget="95%", strategy="mutwo")
    assert all(map(same_bits, losses_of(eager), losses_of(planned)))


def scaled(x, by):
    return x


@torch.compiler.substitute_in_graph(scaled)
def scaled_when_traced(x, by):
    return x * by


class OtherwiseTraced(Half):
    """Library code that goes another way when it is traced."""

    by = 1 + 2**-22

    def forward(self, x):
        return scaled(super().forward(x), self.by)


def test_a_difference_that_dynamo_alone_makes_is_told_as_such_and_the_loop_goes_on():
    _, other = pair_of(Half)
    _, planned = pair_of(OtherwiseTraced)
    for model in (other, planned):
        checkpoint_model(model, budget="90%", strategy="mutwo", dynamic=True)
        one_step(model)  # watched, and the other's watch is open when the next begins
    with pytest.warns(UserWarning, match="not equal to yours to the bit: .* Dynamo alone differs too, first in"):
        one_step(planned)
    assert planned.planned.way is Way.DYNAMO
    assert "not equal to the bit" in str(planned.planned.solution)


def test_a_model_that_is_another_when_traced_is_refused_by_dynamo_and_taken_with_eagers_bits():
    eager, planned = pair_of(OtherwiseTraced)
    eager.by = planned.by = 2.0
    checkpoint_model(planned, budget="90%", strategy="mutwo", dynamic=True)
    with pytest.warns(UserWarning, match="with Dynamo alone, before anything is planned, it returns something else"):
        assert_equal_steps(eager, planned, planned, [64, 64, 64])
    assert planned.planned.way is not Way.DYNAMO


def test_inductor_computes_what_the_plan_saves_and_its_peak_is_measured():
    class Plain(Whole):
        def forward(self, x):
            return self.after(self.before(x))

    eager, planned = pair_of(Plain)
    for model in (eager, planned):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    checkpoint_model(planned, budget="60%", strategy="mutwo", kernels="inductor")
    for i in range(2):
        for a, b in zip(
            stepped(eager, eager, rows(512), seed=i), stepped(planned, planned, rows(512), seed=i), strict=True
        ):
            torch.testing.assert_close(a, b)
    verification = planned.planned.verification
    assert verification.largest_difference < 1e-2  # of sums over all rows
    assert verification.measured_peak_bytes < 0.8 * verification.eager_peak_bytes
    differences = planned.planned.taken.differences
    assert differences.ours <= differences.tolerance < ROUNDING
    assert "plain inductor by" in str(planned.planned.solution)
    (found,) = planned.planned.taken.session.planned
    assert found.saved_bytes < simulate(found.solution.problem.graph, found.solution.schedule).peak_bytes


def test_planned_inductor_that_is_further_from_eager_than_inductor_is_refused():
    InductorWay._judge(Differences(ours=3e-6, plain=1e-6, eps=1e-7))
    InductorWay._judge(Differences(ours=3e-6, plain=0.0, eps=1e-7))
    with pytest.raises(VerificationError, match="plain inductor by 1e-06"):
        InductorWay._judge(Differences(ours=1e-4, plain=1e-6, eps=1e-7))
    with pytest.warns(UserWarning, match="draws its own random numbers"):
        InductorWay._judge(Differences(ours=1.0, plain=1.0, eps=1e-7))


def test_the_package_makes_its_backend_known():
    assert rewriter.ways.compiled.registration.NAME in torch._dynamo.list_backends()
