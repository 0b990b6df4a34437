"""Collectives on lanes: bytes follow from the order of steps, and a wait costs what is left."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planner.errors import GraphError, LinkError, PlanError
from planner.exports.trace import trace
from planner.group_link import GroupLink, with_group_link
from planner.ir import Collective, CollectiveKind, Graph, Op, Phase, Role, Storage, Value
from planner.plan import Plan
from planner.schedule import Free, Lane, Launch, Run, Schedule, Wait, Work, lower
from planner.simulator import simulate, unplanned
from planner.solve import Problem, solve
from strategies.keep_all import KeepAll

LANE = Lane(Work.COLLECTIVE, "group 0")


def op(
    i: int, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], time_us: float, work: Collective | None
) -> Op:
    return Op(
        id=i,
        name=name,
        target=name,
        phase=Phase.FORWARD,
        inputs=inputs,
        outputs=outputs,
        time_us=time_us,
        collective=work,
    )


def gathering() -> Graph:
    """shard -> part -> launch (whole) ; other work ; wait ; use."""
    launch = Collective(kind=CollectiveKind.ALL_GATHER, group="group 0", ranks=4, nbytes=400, storage=2)
    return Graph(
        name="gathering",
        ops=(
            op(0, "part", (0,), (1,), 10, None),
            op(1, "gather", (1,), (2,), 1, launch),
            op(2, "other", (0,), (3,), 20, None),
            op(3, "wait", (2, 1), (4,), 30, replace(launch, waits=True)),
            op(4, "use", (4, 3), (5,), 5, None),
        ),
        values=(
            Value(id=0, name="shard", storage=0),
            Value(id=1, name="part", storage=1, producer=0),
            Value(id=2, name="whole", storage=2, producer=1),
            Value(id=3, name="other", storage=3, producer=2),
            Value(id=4, name="waited", storage=2, producer=3, base=2),
            Value(id=5, name="used", storage=4, producer=4),
        ),
        storages=(
            Storage(id=0, nbytes=100, role=Role.PARAM),
            Storage(id=1, nbytes=100, role=Role.TEMP),
            Storage(id=2, nbytes=400, role=Role.TEMP),
            Storage(id=3, nbytes=50, role=Role.TEMP),
            Storage(id=4, nbytes=10, role=Role.OUTPUT),
        ),
        outputs=(5,),
    ).validate()


def test_what_a_launch_reads_is_held_to_its_wait_and_the_wait_costs_what_is_left():
    graph = gathering()
    schedule = lower(graph, Plan())
    assert schedule.steps == (
        Run(0),
        Run(1),
        Launch(LANE, 2, 1),
        Run(2),
        Wait(LANE, 2),
        Run(3),
        Free(1),
        Run(4),
        Free(2),
        Free(3),
    )
    found = simulate(graph, schedule)
    assert found.time_us == 10 + 1 + 20 + (30 - 20) + 5
    assert (found.communication_us, found.hidden_us, found.stall_us) == (30, 20, 0)
    assert found.peak_bytes == 100 + 100 + 400 + 50


def test_a_lane_serves_one_collective_at_a_time():
    graph = gathering()
    slow = replace(graph, ops=tuple(replace(o, time_us=100.0) if o.waits else o for o in graph.ops))
    assert simulate(slow, lower(slow, Plan())).time_us == 10 + 1 + 20 + (100 - 20) + 5
    assert unplanned(slow).peak_bytes == unplanned(graph).peak_bytes


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((Run(0), Run(1), Launch(LANE, 2, 1), Free(1)), "frees 'part' while it is being copied or sent"),
        ((Run(0), Run(1), Launch(LANE, 2, 1), Run(2), Run(3)), "runs 'wait' while processes still make 'whole'"),
        ((Run(0), Run(1), Run(2), Wait(LANE, 2)), "which was not launched"),
        ((Run(0), Launch(LANE, 2, 0)), "which no op of the graph launches and waits for"),
    ],
)
def test_a_schedule_that_touches_what_is_under_way_is_refused(steps, said):
    with pytest.raises(PlanError, match=said):
        simulate(gathering(), Schedule(steps))


def test_a_collective_that_nobody_waits_for_is_no_graph():
    graph = gathering()
    with pytest.raises(GraphError, match="op 'gather' is never waited for"):
        replace(graph, ops=tuple(replace(o, collective=None) if o.waits else o for o in graph.ops)).validate()


def test_a_trace_has_a_line_for_each_group(tmp_path):
    graph = gathering()
    solution = solve(Problem.of(graph, "100%"), KeepAll())
    bars = [e for e in trace(solution)["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["name"], e["ts"], e["dur"]) for e in bars if e["cat"] == "communication"] == [("whole", 11, 30)]
    assert [e["dur"] for e in bars if e["cat"] == "waiting"] == [10]
    assert [e["dur"] for e in bars if e["name"] == "wait"] == [0.0]
    json.dumps(bars)


def test_a_graph_with_collectives_is_saved_and_loaded(tmp_path):
    gathering().save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json") == gathering()


def test_a_link_says_how_long_collectives_take():
    link = GroupLink.of(1.0, latency_us=2.0)  # 1,000 bytes a µs
    work = Collective(kind=CollectiveKind.ALL_GATHER, group="g", ranks=4, nbytes=4000, storage=0)
    assert link.collective_us(work) == 3 * (2 + 1)
    assert link.collective_us(replace(work, kind=CollectiveKind.ALL_REDUCE)) == 6 * (2 + 1)
    assert link.collective_us(replace(work, ranks=1)) == 0
    timed = with_group_link(gathering(), link)
    assert [o.time_us for o in timed.ops] == [10, 0, 20, pytest.approx(3 * 2.1), 5]


@pytest.mark.parametrize(("speed", "latency"), [(0, 1), (float("inf"), 1), (1, -1)])
def test_a_link_that_cannot_be_is_refused(speed, latency):
    with pytest.raises(LinkError):
        GroupLink.of(speed, latency_us=latency)


def test_what_processes_take_for_themselves_counts_from_the_launch_to_the_wait():
    graph = gathering()
    scratchy = replace(graph, ops=tuple(replace(o, workspace_bytes=64) if o.id == 1 else o for o in graph.ops))
    plain, found = (simulate(g, lower(g, Plan())).bytes_at for g in (graph, scratchy))
    runs = {position: step.op for position, step in enumerate(lower(graph, Plan()).steps) if isinstance(step, Run)}
    assert {runs[i] for i, (a, b) in enumerate(zip(plain, found, strict=True)) if b - a == 64} == {1, 2}
    assert {b - a for a, b in zip(plain, found, strict=True)} == {0, 64}
