"""Plans that move tensors to the host, carried out: equal to the bit, within the budget, nothing left behind."""

import copy
import errno
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import strategies
from planner.analysis import candidates, movable
from planner.errors import BudgetError, LinkError, PlannerError
from planner.host_link import HostLink
from planner.incremental import Incremental
from planner.placement import Move, Placement
from planner.schedule import COPY_IN, COPY_OUT, Launch, Wait
from planner.solve import Problem, Status, solve
from profiler.measuring import hosts
from profiler.measuring.hosts import FileHost, HostError
from profiler.measuring.op_times import measure
from profiler.workload import Workload
from rewriter import checkpoint, checkpoint_model, provisional
from rewriter.budgets import OverBudget
from rewriter.moving import HostAccess, buffer_sizes
from rewriter.pipeline import prepare
from rewriter.provisional import provisional_schedules
from tests.rewriter import tiny
from tests.small import Says

FAST = HostLink.of(1000.0, latency_us=0.0)


def classify(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


def small():
    """A few layers whose activations make the peak."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return classify, model, optimizer, (torch.randn(256, 16), torch.randint(0, 4, (256,)))


def access(folder, link=FAST, **more):
    return HostAccess(host=FileHost(folder), link=link, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("host")


@pytest.fixture(scope="module", params=["resnet", "bert"])
def ready(request, folder):
    torch.manual_seed(0)
    return prepare(Workload(*tiny.ZOO[request.param]()), ["60%"], access=access(folder))


@pytest.mark.parametrize("spec", ["offload_only", "mutwo", "ilp"])
def test_a_step_that_moves_is_equal_to_the_bit_and_within_its_prediction(ready, spec, folder):
    problem = ready.access.offered_in(Problem.of(ready.graph, "60%", time_limit_s=2.0))
    solution = solve(problem, strategies.make(spec))
    assert solution.status is Status.FITS
    assert solution.moved
    found = ready.proof(ready.replayed(solution.schedule), solution, ready.workload.batch, steps=2)
    assert found.exact, found
    assert abs(found.prediction_error) <= 0.005
    assert list(folder.iterdir()) == []


def test_moves_and_reruns_together_are_equal_to_the_bit(ready):
    slow = HostLink.of(0.5, latency_us=20.0)
    problem = Problem.of(ready.graph, "60%", host_link=slow, time_limit_s=2.0)
    solution = solve(problem, strategies.make("mutwo"))
    assert solution.status is Status.FITS
    assert ready.proof(ready.replayed(solution.schedule), solution, ready.workload.batch, steps=2).exact


@pytest.mark.parametrize("seed", range(3))
def test_any_moves_between_any_boundaries_are_carried_out_exactly(ready, seed):
    graph, random = ready.graph, Random(seed)
    state = Incremental(graph, [s for s in candidates(graph) if random.random() < 0.3], in_place=seed != 1)
    moves = []
    for s in movable(graph):
        after, need = state.freed_after(s), state.need(s)
        if not state.is_dropped(s) and need > after and random.random() < 0.8:
            gone = random.randint(after + 1, need)
            moves.append(Move(s, graph.storages[s].nbytes, after, need, gone, random.randint(gone, need)))
    placed = Placement(moves=tuple(moves), stage_bytes=state.stage_bytes(), stall_us=0.0, recompute_us=0.0, stalls={})
    chosen = Says(lambda _: placed.added_to(state.plan()))
    problem = Problem(graph=graph, budget_bytes=1 << 50, host_link=FAST, in_place=state.in_place)
    solution = solve(problem, chosen)
    found = ready.proof(ready.replayed(solution.schedule), solution, ready.workload.batch, steps=2)
    assert found.exact, found
    assert abs(found.prediction_error) <= 0.005


def test_buffers_of_one_size_are_used_again(ready):
    solution = solve(Problem.of(ready.graph, "60%", host_link=FAST), strategies.make("offload_only"))
    sizes = buffer_sizes(ready.graph, solution.schedule)
    assert 0 < sum(sizes) <= solution.timeline.moved_bytes
    assert sum(sizes) >= solution.timeline.host_peak_bytes


def test_ops_are_measured_under_a_plan_that_moves(ready):
    solution = solve(Problem.of(ready.graph, "60%", host_link=FAST), strategies.make("offload_only"))
    measured = measure(
        ready.traced, ready.workload.batch, schedule=solution.schedule, host=ready.access.host, show_progress=False
    )
    assert [op.workspace_bytes for op in measured.graph.ops] == [op.workspace_bytes for op in ready.graph.ops]
    assert measured.graph.time_us > 0
    with pytest.raises(LinkError, match="there is none here"):
        measure(ready.traced, ready.workload.batch, schedule=solution.schedule, show_progress=False)
    with pytest.raises(LinkError, match="there is none here"):
        prepare(ready.workload, ["60%"]).replayed(solution.schedule)


def test_a_provisional_plan_may_move(ready):
    added = Problem(graph=ready.graph, budget_bytes=1).unplanned.above_start_bytes
    limit = ready.graph.start_bytes + int(0.45 * added)
    schedule = next(provisional_schedules(ready.traced, limit, ready.access))
    assert schedule.moves


# -- the one call ---------------------------------------------------------------------------------------------------


def plan(folder, **options):
    return checkpoint(*small(), **({"budget": "60%", "offload_dir": folder, "show_progress": False} | options))


def test_the_one_call_trains_as_eager_does_and_moves(tmp_path):
    step, model, optimizer, batch = small()
    planned = plan(tmp_path, host_link=1000, strategy="offload_only")
    assert planned.solution.moved
    assert planned.verification.exact
    torch.manual_seed(1)
    losses = [float(planned(batch)) for _ in range(3)]
    torch.manual_seed(1)
    assert losses == [float(step(model, optimizer, batch)) for _ in range(3)]
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_does_not_fit_is_measured_while_it_moves_and_trains_as_eager_does(tmp_path, monkeypatch):
    step, model, optimizer, batch = small()
    schedules = []

    def noted(*given, schedule, **more):
        schedules.append(schedule)
        return measure(*given, schedule=schedule, **more)

    monkeypatch.setattr(provisional, "measure", noted)
    monkeypatch.setattr(provisional, "usable_bytes", lambda device: 1000)
    with pytest.warns(UserWarning, match=r"under a provisional plan|this plan is unproven"):
        planned = plan(tmp_path, host_link=1000, budget="45%")
    (schedule,) = schedules
    assert schedule.moves
    torch.manual_seed(1)
    losses = [float(planned(batch)) for _ in range(3)]
    torch.manual_seed(1)
    assert losses == [float(step(model, optimizer, batch)) for _ in range(3)]


def test_a_measured_link_will_do(tmp_path):
    planned = plan(tmp_path, host_link="measure")
    assert planned.solution.problem.host_link.out_bytes_per_s > 0


def test_measuring_a_link_keeps_no_room_in_the_folder(tmp_path):
    access = HostAccess.of("measure", tmp_path, None, torch.device("cpu"))
    assert access.host._files == []


def test_a_saved_plan_with_moves_is_used_again_and_needs_a_link(tmp_path):
    plan(tmp_path, host_link=1000, strategy="offload_only").save(tmp_path / "plan.json")
    again = plan(tmp_path, host_link=1000, plan=tmp_path / "plan.json")
    assert again.solution.moved
    with pytest.raises(LinkError, match=r"moves \d+ tensors to the host, .* and there is no link to it"):
        plan(None, plan=tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"host_link": 0}, LinkError, "give a speed above 0"),
        ({"host_link": -3.0}, LinkError, "give a speed above 0"),
        ({"host_link": "soon"}, LinkError, "such as 24"),
        ({"offload_dir": None, "host_link": 24}, HostError, "say in which folder with offload_dir"),
        ({"offload_dir": "no/such/folder", "host_link": 24}, HostError, "there is no such folder"),
        ({"host_link": None}, LinkError, "offload_dir without host_link"),
        ({"host_link": 24, "host_budget": "60%"}, BudgetError, "give bytes"),
        ({"host_link": 24, "host_budget": "lots"}, BudgetError, "lots"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_anything_is_captured(tmp_path, options, error, message):
    step, model, optimizer, batch = small()
    given = {"budget": "60%", "offload_dir": tmp_path} | options
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(error, match=message) as caught:
        checkpoint(step, model, optimizer, batch, **given)
    assert isinstance(caught.value, PlannerError)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_full_disk_is_told_and_the_model_is_as_before(tmp_path, monkeypatch):
    step, model, optimizer, batch = small()
    before = [t.clone() for t in model.state_dict().values()]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostError, match="no room for"):
        checkpoint(
            step, model, optimizer, batch, budget="60%", strategy="offload_only", host_link=1000, offload_dir=tmp_path
        )
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert list(tmp_path.iterdir()) == []


def test_a_host_without_room_is_planned_without_and_told(tmp_path):
    planned = plan(tmp_path, host_link=1000, host_budget=1)
    assert planned.solution.moved == ()
    assert "the host may hold 1 B, and the smallest activation that idles has" in planned.solution.why_nothing_moves
    assert "moves nothing to the host" in str(planned.solution)


def test_where_moving_cannot_help_the_error_names_the_op_that_makes_the_peak(tmp_path):
    with pytest.raises(OverBudget, match=r"in .*op '.*' with its own .*: moving tensors to the host does not"):
        plan(tmp_path, host_link=1000, budget="12%", time_limit_s=1.0)


def test_steps_after_one_that_was_broken_off_in_any_part_of_a_move_are_as_if_it_had_not_been(tmp_path, monkeypatch):
    batch = small()[3]
    undisturbed, planned = (plan(tmp_path, host_link=1000, strategy="offload_only") for _ in range(2))
    torch.manual_seed(1)
    expected = [undisturbed(batch) for _ in range(5)]
    torch.manual_seed(1)
    losses = [planned(batch)]
    for part in ("__init__", "away", "fetch", "back"):
        generator = torch.get_rng_state()
        with monkeypatch.context() as patching:
            patching.setattr(hosts.Move, part, interrupted_at_second(getattr(hosts.Move, part)))
            with pytest.raises(KeyboardInterrupt):
                planned(batch)
        torch.set_rng_state(generator)  # which eager's broken steps draw from too
        losses.append(planned(batch))
    assert all(map(torch.equal, losses, expected))
    assert list(tmp_path.iterdir()) == []


def interrupted_at_second(method):
    calls = []

    def interrupted(move, *given):
        calls.append(move)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return method(move, *given)

    return interrupted


def test_two_planned_steps_in_two_threads_move_and_train_as_each_does_alone(tmp_path):
    def made():
        step, model, optimizer, batch = small()
        for layer in model:
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0  # the generator is one for all threads
        given = {"budget": "60%", "strategy": "offload_only", "host_link": 1000, "offload_dir": tmp_path}
        return checkpoint(step, model, optimizer, batch, **given), batch

    def trained_by(planned, batch):
        return [planned(batch) for _ in range(8)]

    alone, *both = trained_by(*made()), made(), made()
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda one: trained_by(*one), both):
            assert all(map(torch.equal, found, alone))


def test_a_planned_step_is_not_copied_and_says_what_to_do(tmp_path):
    planned = plan(tmp_path, host_link=1000, strategy="offload_only")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PlannerError, match="is not copied: copy those, and plan them"):
            copied(planned)


def test_the_lanes_of_a_schedule_are_the_ones_carried_out(ready):
    solution = solve(Problem.of(ready.graph, "60%", host_link=FAST), strategies.make("offload_only"))
    module = ready.replayed(solution.schedule).module
    names = {
        "send_to_host": [s for s in solution.schedule.steps if isinstance(s, Launch) and s.lane == COPY_OUT],
        "wait_until_away": [s for s in solution.schedule.steps if isinstance(s, Wait) and s.lane == COPY_OUT],
        "fetch_from_host": [s for s in solution.schedule.steps if isinstance(s, Launch) and s.lane == COPY_IN],
        "wait_until_back": [s for s in solution.schedule.steps if isinstance(s, Wait) and s.lane == COPY_IN],
    }
    calls = [getattr(n.target, "__name__", "") for n in module.graph.nodes if n.op == "call_function"]
    assert {name: calls.count(name) for name in names} == {name: len(steps) for name, steps in names.items()}


# -- the model alone ------------------------------------------------------------------------------------------------


def trained(model, batch, *, backwards=1, steps=4):
    """Losses, gradients and parameters of a few steps in an own loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return seen


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_planned_model_moves_and_trains_as_eager_does(tmp_path, backwards):
    _, model, _, batch = small()
    expected = trained(model, batch, backwards=backwards)
    _, model, _, batch = small()
    checkpoint_model(model, budget="60%", strategy="offload_only", host_link=1000, offload_dir=tmp_path)
    assert all(map(torch.equal, trained(model, batch, backwards=backwards), expected))
    assert model.planned.solution.moved
    assert model.planned.verification.exact
    with torch.no_grad():
        model(batch[0])
    model(batch[0])  # and no backward after it
    assert list(tmp_path.iterdir()) == []


def test_forwards_that_are_alive_together_share_what_the_host_may_hold(tmp_path, monkeypatch):
    kept = []
    new = FileHost._new

    def noted(host, nbytes):
        made = new(host, nbytes)
        kept.append(sum(os.fstat(file.fileno()).st_size for file in host._files))
        return made

    monkeypatch.setattr(FileHost, "_new", noted)
    _, model, _, (x, y) = small()
    options = {"strategy": "offload_only", "host_link": 1000, "offload_dir": tmp_path, "host_budget": "64KiB"}
    checkpoint_model(model, budget="90%", prove=False, **options)
    for _ in range(3):
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x), y)).backward()
    assert model.planned.solution.moved
    assert model.planned.solution.problem.host_budget_bytes == 2**15
    assert 0 < max(kept) <= 2**16
    with pytest.raises(HostError, match="raise host_budget"):
        sum(F.cross_entropy(model(x), y) for _ in range(9))


def test_only_own_capture_moves(tmp_path):
    _, model, _, _ = small()
    with pytest.raises(PlannerError, match="host_link is for own capture alone"):
        checkpoint_model(model, budget="60%", dynamic=True, host_link=1000, offload_dir=tmp_path)
    with pytest.raises(HostError, match="say in which folder"):
        checkpoint_model(model, budget="60%", host_link=1000)
