"""The rewritten step runs the schedule and nothing else: op by op, byte by byte, bit by bit."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.analysis import candidates, temporaries
from planner.ir import Phase, Rerun
from planner.plan import Eviction, Plan, recompute_each_time, recompute_once
from planner.schedule import Free, Run, RunKind, lower
from profiler.measuring.restoring import state_kept
from profiler.ops import fresh, inplace_target, without_side_effect
from profiler.random_replay import ReplayingRng, SavingRng
from rewriter.replay import STEP, apply
from tests.profiler import small
from tests.rewriter import tiny
from tests.shared import Case, case_of
from tests.side_by_side import assert_same, eager, history, measured, seeded

MAKERS = {"once": recompute_once, "each time": recompute_each_time}


CASES = {
    "network": tiny.plain,
    "bert": partial(tiny.models.bert, 8, seq=16, **{**tiny.BERT, "num_hidden_layers": 1}),
    "clipped": tiny.with_step(
        lambda model, optimizer, batch: _clipped(model, optimizer, batch),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3)),
    ),
}


def _clipped(model, optimizer, batch):
    optimizer.zero_grad()
    for images, labels in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
        F.cross_entropy(model(images), labels).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return case_of(CASES[request.param])


@pytest.fixture(scope="module")
def network():
    return case_of(CASES["network"])


@pytest.fixture(scope="module", params=["network", "bert"])
def traceable(request):
    """Those whose optimizer is inside the graph: all that they do is ops."""
    return case_of(CASES[request.param])


def everything(case, make=recompute_once):
    """The schedule that drops whatever can be dropped."""
    return lower(case.graph, make(case.graph, candidates(case.graph)))


# -- the schedule, and nothing else -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_nodes_of_the_module_are_the_runs_of_the_schedule(case, make):
    schedule = everything(case, make)
    module = apply(case.traced, schedule)
    nodes = [n for n in module.graph.nodes if STEP in n.meta]
    runs = [(i, s) for i, s in enumerate(schedule.steps) if isinstance(s, Run)]
    assert [n.meta[STEP] for n in nodes] == [i for i, _ in runs]
    for node, (_, run) in zip(nodes, runs, strict=True):
        name = case.graph.ops[run.op].name
        assert node.name.startswith(name)
        assert ("_again" in node.name) == (run.kind is RunKind.RERUN)
        assert ("_and_state" in node.name) == (run.kind is RunKind.ORIGINAL_SAVING_RNG)
    others = {n.op for n in module.graph.nodes if STEP not in n.meta}
    calls = [n for n in module.graph.nodes if n.op == "call_function" and STEP not in n.meta]
    assert others <= {"placeholder", "get_attr", "output", "call_function"}
    assert {n.target.__name__ for n in calls} <= {"getitem"}


class Log(TorchDispatchMode):
    """Every op as it runs, and the bytes of the step's own tensors that are alive just before it."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.alive_bytes = []
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:  # gradients are handed over so: nothing is computed
            return func(*args, **(kwargs or {}))
        self.calls.append(func)
        self.storages = {ref: n for ref, n in self.storages.items() if not ref.expired()}
        self.alive_bytes.append(sum(self.storages.values()))
        given = self._of((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for ref, nbytes in self._of(result).items():
            if ref not in given:
                self.storages[ref] = nbytes
        return result

    @staticmethod
    def _of(tree):
        tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return {StorageWeakRef(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}


def expected_calls(traced, schedule):
    """What the schedule says will run: per Run, the aten ops that it comes to."""
    expected = []
    for step in schedule.steps:
        if isinstance(step, Free):
            continue
        op, node = traced.graph.ops[step.op], traced.nodes[step.op]
        if step.into is not None:
            expected.append([inplace_target(node)])
        elif step.kind is RunKind.RERUN and op.rerun is Rerun.WITHOUT_SIDE_EFFECT:
            expected.append([without_side_effect(node)[0]])
        elif node.target is fresh:
            expected.append([torch.ops.aten.empty_strided.default, node.args[0]])
        else:
            expected.append([node.target])
    return expected


def alive_before_runs(graph, schedule):
    """Per Run: bytes that the step has made and, says the schedule, not yet freed; saved generator states left out."""
    states = {op.rng_state for op in graph.ops}
    alive, before = {}, []
    for step in schedule.steps:
        if isinstance(step, Free):
            alive.pop(step.storage, None)
            continue
        before.append(sum(alive.values()))
        if step.into is not None:
            del alive[step.into]
        for storage in graph.makes[step.op]:
            alive[storage] = graph.storages[storage].nbytes
    assert not states & set(alive)
    return before


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_runs_is_the_schedule_and_what_it_frees_is_gone(traceable, make, in_place):
    case = traceable
    schedule = lower(case.graph, make(case.graph, candidates(case.graph)), in_place=in_place)
    module = apply(case.traced, schedule)
    convention = case.traced.convention
    with state_kept(case.model, case.optimizer):
        convention.call(module, case.batch)  # makes what the optimizer makes lazily
        with Log() as log:
            convention.run(module, case.batch)  # unchecked: a step under another mode is another step
    expected = expected_calls(case.traced, schedule)
    assert log.calls == [call for calls in expected for call in calls]
    firsts = [0, *accumulate(map(len, expected))][:-1]
    assert [log.alive_bytes[i] for i in firsts] == alive_before_runs(case.graph, schedule)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_measured_peak_is_the_simulated_one(case, make, in_place):
    schedule = lower(case.graph, make(case.graph, candidates(case.graph)), in_place=in_place)
    state = torch.get_rng_state().nbytes  # held for a moment while a random op is replayed
    # An optimizer that runs as itself is measured while its writes are watched, which holds a number or two for longer.
    watched = 64 if case.traced.opaque_reason else 0
    assert -watched <= case.peak(schedule) - case.predicted(schedule) <= state


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_the_measured_peak_is_the_simulated_one_when_part_is_dropped(network, share):
    free = candidates(network.graph)
    schedule = lower(network.graph, recompute_once(network.graph, free[: int(share * len(free))]))
    assert network.peak(schedule) == network.predicted(schedule)


def test_dropping_everything_takes_less_memory(network):
    assert network.peak(everything(network, recompute_each_time)) < network.peak(lower(network.graph, Plan()))


# -- batch norm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_recomputed_batch_norm_updates_its_statistics_once(network, make):
    schedule = everything(network, make)
    norms = [op.id for op in network.graph.ops if op.rerun is Rerun.WITHOUT_SIDE_EFFECT]
    reruns = [s.op for s in schedule.steps if isinstance(s, Run) and s.kind is RunKind.RERUN]
    assert len(norms) == 4
    assert len(set(norms) & set(reruns)) >= 3, "the last one needs no rerun"
    module = apply(network.traced, schedule)
    with state_kept(network.model, network.optimizer):
        for steps in (1, 2, 3):
            network.traced.convention.call(module, network.batch)
            for norm in (m for m in network.model if isinstance(m, nn.BatchNorm2d)):
                assert norm.num_batches_tracked == steps
    network.assert_exact(schedule)


# -- random ops -----------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Its output is the dropout's own mask times the weight: gradients show which mask the backward saw."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(400))

    def forward(self, x):
        return F.dropout(torch.tanh(x * self.weight), 0.5)


def test_the_backward_sees_the_mask_that_the_forward_drew():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        out = model(batch)
        out.square().sum().backward()
        optimizer.step()
        return out

    model = Masked()
    workload = step, model, torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(400)
    traced = measured(workload)
    plan = recompute_each_time(traced.graph, candidates(traced.graph))
    schedule = lower(traced.graph, plan)
    replayed = [s for s in schedule.steps if isinstance(s, Run) and s.kind is RunKind.RERUN]
    assert any(traced.graph.ops[s.op].rerun is Rerun.REPLAY_RNG for s in replayed)
    module = apply(traced, schedule)
    masks = []
    for seed in range(3):
        torch.manual_seed(seed)
        out = traced.convention.call(module, workload[3])
        masks.append(out != 0)
        assert torch.equal(masks[-1], model.weight.grad != 0)
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_generator_is_left_where_eager_leaves_it(case, make):
    step, model, optimizer, batch = case.workload
    module = apply(case.traced, everything(case, make))
    states = []
    for call in (lambda: step(model, optimizer, batch), lambda: case.traced.convention.call(module, batch)):
        with state_kept(model, optimizer):
            torch.manual_seed(5)
            call()
            states.append(torch.get_rng_state())
    torch.manual_seed(5)
    assert not torch.equal(states[0], torch.get_rng_state()), "the step draws nothing: no test"
    assert torch.equal(states[0], states[1])


def test_a_random_op_that_fails_in_its_replay_still_leaves_the_generator_alone():
    def draw(n):
        drawn = torch.rand(n)
        if n > 2:
            raise ArithmeticError("too many")
        return drawn

    cpu = torch.device("cpu")
    state, first = SavingRng(draw, cpu)(2)
    before = torch.get_rng_state()
    assert torch.equal(ReplayingRng(draw, cpu)(state, 2), first)
    with pytest.raises(ArithmeticError, match="too many"):
        ReplayingRng(draw, cpu)(state, 3)
    assert torch.equal(torch.get_rng_state(), before)


# -- in-place forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_in_place_forms_change_no_bit_and_save_memory(case, make):
    plan = make(case.graph, candidates(case.graph))
    with_forms, without = lower(case.graph, plan), lower(case.graph, plan, in_place=False)
    used = [s for s in with_forms.steps if isinstance(s, Run) and s.into is not None]
    assert used
    assert not [s for s in without.steps if isinstance(s, Run) and s.into is not None]
    case.assert_exact(with_forms)
    case.assert_exact(without)
    assert case.peak(with_forms) <= case.peak(without)


def test_an_input_that_is_read_later_is_never_written_over():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        h = model[0](batch[0])
        flat = h.view(-1)  # another look at the same memory
        activated = torch.relu(h)
        loss = (activated + flat.view_as(h)).square().mean() + activated.sum()
        loss.backward()
        optimizer.step()
        return loss, activated, h.detach()

    case = Case(small.make(step))
    case.assert_exact(lower(case.graph, Plan()))
    case.assert_exact(everything(case))


def test_memory_that_an_op_sees_in_two_ways_is_never_written_over():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        h = model[0](batch[0])
        loss = h.square().mean()
        loss.backward()
        optimizer.step()
        square = h.detach()[:8] * 2.0
        return loss, square * square.t()  # nothing else reads `square`: only its other side is in the way

    case = Case(small.make(step))
    case.assert_exact(lower(case.graph, Plan()))
    case.assert_exact(everything(case))


# -- any plan ---------------------------------------------------------------------------------------------------------

a_few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@a_few
@given(data=st.data())
def test_any_set_of_dropped_activations_gives_eagers_bits(case, data):
    free = st.sampled_from(candidates(case.graph))
    dropped = data.draw(st.lists(free, unique=True))
    held = data.draw(st.lists(st.sampled_from(temporaries(case.graph)), unique=True))
    make = data.draw(st.sampled_from(list(MAKERS.values())))
    in_place = data.draw(st.booleans())
    schedule = lower(case.graph, make(case.graph, dropped, kept=held), in_place=in_place)
    case.assert_exact(schedule, steps=2)


@st.composite
def evictions(draw, graph):
    """A few evictions of any droppable storages, anywhere before the optimizer; some of them twice."""
    last = min(op.id for op in graph.ops if op.phase is Phase.OPTIMIZER) - 1
    chosen = draw(st.lists(st.sampled_from((*candidates(graph), *temporaries(graph))), unique=True, max_size=8))
    drawn = []
    for storage in sorted(chosen):
        at = graph.maker[storage]
        for _ in range(draw(st.integers(1, 2))):
            after = draw(st.integers(at, last))
            before = draw(st.one_of(st.none(), st.integers(after + 1, last + 1)))
            drawn.append(Eviction(storage=storage, free_after=after, restore_before=before))
            if before is None or before > last:
                break
            at = before
    return Plan(evictions=tuple(drawn))


@a_few
@given(data=st.data())
def test_any_evictions_anywhere_give_eagers_bits(case, data):
    plan = data.draw(evictions(case.graph))
    case.assert_exact(lower(case.graph, plan), steps=2)


@settings(parent=a_few, max_examples=10)
@given(data=st.data())
def test_the_measured_peak_of_any_evictions_is_the_simulated_one(network, data):
    schedule = lower(network.graph, data.draw(evictions(network.graph)))
    state = torch.get_rng_state().nbytes
    assert 0 <= network.peak(schedule) - network.predicted(schedule) <= state


# -- kinds of random ops ---------------------------------------------------------------------------------------------


class Between(nn.Module):
    """Two layers with something random behind each."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.between = between

    def forward(self, x):
        h = self.between(torch.tanh(self.a(x)))
        return self.c(self.between(torch.tanh(self.b(h))))


def attention(h):
    heads = h.view(2, 6, 4, 8)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).reshape(h.shape)


RANDOM = {
    "native dropout": lambda h: torch.native_dropout(h, 0.4, True)[0],
    "dropout in place": lambda h: F.dropout(h * 1.0, 0.4, inplace=True),
    "feature dropout": lambda h: F.feature_alpha_dropout(h.view(-1, 8, 2, 2), 0.3, True).flatten(1),
    "noise": lambda h: h + torch.randn_like(h),
    "noise from shape": lambda h: h * torch.rand(h.shape),
    "leaky with random slope": lambda h: F.rrelu(h, training=True),
    "Gumbel": lambda h: F.gumbel_softmax(h),
    "multinomial": lambda h: h * torch.multinomial(h.detach().softmax(1), 1),
    "Bernoulli": lambda h: h * torch.bernoulli(torch.sigmoid(h.detach())),
    "attention": attention,
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_replayed_random_op_of_any_kind_draws_what_it_drew(name):
    case = Case(small.make(model=lambda: Between(RANDOM[name])))
    assert any(op.rerun in (Rerun.REPLAY_RNG, Rerun.NEVER) for op in case.graph.ops if op.phase is Phase.FORWARD)
    for make in MAKERS.values():
        case.assert_exact(everything(case, make))


def test_an_op_that_draws_from_the_users_own_generator_is_never_rerun():
    generator = torch.Generator()

    def made():
        generator.manual_seed(3)
        return small.make(model=lambda: Between(lambda h: h * torch.rand(h.shape, generator=generator)))()

    expected = eager(seeded(made), steps=3)
    workload = seeded(made)
    traced = measured(workload)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state()), "measuring drew from it"
    drawing = [op for op in traced.graph.ops if "rand" in op.target]
    assert {op.never_reason for op in drawing} == {"draws from a generator of the user's"}
    module = apply(traced, lower(traced.graph, recompute_each_time(traced.graph, candidates(traced.graph))))
    assert_same(expected, history(lambda b: traced.convention.call(module, b), workload, steps=3))
