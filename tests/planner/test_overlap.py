"""Launches earlier, waits later: time is hidden, bytes stay within the budget, and nothing crosses what it must not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.ir import Collective, CollectiveKind, Graph, Op, Phase, Rerun, Role, Storage, Value
from planner.overlap import overlapping, reordered
from planner.plan import Plan
from planner.schedule import Launch, Run, Wait, lower, unplanned_schedule
from planner.simulator import simulate

WHOLE, SHARD, WORK_US, SEND_US = 400, 100, 50.0, 40.0


def op(i: int, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], time_us: float = 0.0, **more: Any) -> Op:
    if more.get("mutates"):
        more |= {"rerun": Rerun.NEVER, "never_reason": "it writes"}
    return Op(
        id=i, name=name, target=name, phase=Phase.BACKWARD, inputs=inputs, outputs=outputs, time_us=time_us, **more
    )


def block(i: int, first_value: int, first_storage: int, x: int, *, writes: bool) -> tuple[list[Op], list[Value]]:
    """A gather of shard `i`, the wait for it, and an op that reads it and the value `x`."""
    work = Collective(kind=CollectiveKind.ALL_GATHER, group="g", ranks=4, nbytes=WHOLE, storage=first_storage)
    whole, waited, out = first_value, first_value + 1, first_value + 2
    gather, wait, use = 3 * i, 3 * i + 1, 3 * i + 2
    written = (i + 1,) if writes else ()
    ops = [
        op(gather, f"gather{i}", (i,), (whole,), collective=work),
        op(wait, f"wait{i}", (whole, i), (waited,), SEND_US, collective=replace(work, waits=True)),
        op(use, f"use{i}", (waited, x, *written), (out,), WORK_US, mutates=written),
    ]
    values = [
        Value(id=whole, name=f"whole{i}", storage=first_storage, producer=gather),
        Value(id=waited, name=f"waited{i}", storage=first_storage, producer=wait, base=whole),
        Value(id=out, name=f"out{i}", storage=first_storage + 1, producer=use),
    ]
    return ops, values


def tower(blocks: int = 3, *, writes_next_shard: bool = False) -> Graph:
    """Blocks that gather their shard right before they use it."""
    values = [Value(id=i, name=f"shard{i}", storage=i) for i in range(blocks)]
    values.append(Value(id=blocks, name="x", storage=blocks))
    storages = [Storage(id=i, nbytes=SHARD, role=Role.PARAM) for i in range(blocks)]
    storages.append(Storage(id=blocks, nbytes=10, role=Role.INPUT))
    ops: list[Op] = []
    x = blocks
    for i in range(blocks):
        writes = writes_next_shard and i + 1 < blocks
        more, made = block(i, len(values), len(storages), x, writes=writes)
        ops, values, x = [*ops, *more], [*values, *made], made[-1].id
        storages.append(Storage(id=len(storages), nbytes=WHOLE, role=Role.TEMP))
        storages.append(Storage(id=len(storages), nbytes=10, role=Role.OUTPUT))
    return Graph(
        name="tower", ops=tuple(ops), values=tuple(values), storages=tuple(storages), outputs=(values[-1].id,)
    ).validate()


def test_gathers_are_launched_while_the_block_before_computes() -> None:
    graph = tower()
    schedule = unplanned_schedule(graph)
    before = simulate(graph, schedule)
    order = overlapping(graph, schedule, budget_bytes=before.peak_bytes + WHOLE)
    assert order is not None
    after = simulate(graph, reordered(graph, schedule, order))
    assert before.hidden_us == 0
    assert after.hidden_us == 2 * SEND_US, "all but the first, before which nothing runs"
    assert after.time_us == before.time_us - 2 * SEND_US
    assert after.peak_bytes <= before.peak_bytes + WHOLE


def collected() -> Graph:
    """An op, then a gather of what several shards have side by side, and an op that reads it."""
    work = Collective(kind=CollectiveKind.ALL_GATHER, group="g", ranks=4, nbytes=WHOLE, storage=4)
    sizes = (SHARD, 10, 10, SHARD, WHOLE, 10)
    roles = (Role.PARAM, Role.INPUT, Role.TEMP, Role.TEMP, Role.TEMP, Role.OUTPUT)
    return Graph(
        name="collected",
        ops=(
            op(0, "before", (1,), (2,), WORK_US),
            op(1, "aten.cat.default", (0,), (3,)),
            op(2, "gather", (3,), (4,), collective=work),
            op(3, "wait", (4, 3), (5,), SEND_US, collective=replace(work, waits=True)),
            op(4, "use", (5, 2), (6,), WORK_US),
        ),
        values=(
            Value(id=0, name="shard", storage=0),
            Value(id=1, name="x", storage=1),
            Value(id=2, name="between", storage=2, producer=0),
            Value(id=3, name="flat", storage=3, producer=1),
            Value(id=4, name="whole", storage=4, producer=2),
            Value(id=5, name="waited", storage=4, producer=3, base=4),
            Value(id=6, name="out", storage=5, producer=4),
        ),
        storages=tuple(
            Storage(id=i, nbytes=nbytes, role=role) for i, (nbytes, role) in enumerate(zip(sizes, roles, strict=True))
        ),
        outputs=(6,),
    ).validate()


def test_what_is_collected_for_a_gather_moves_with_its_launch() -> None:
    graph = collected()
    schedule = unplanned_schedule(graph)
    order = overlapping(graph, schedule, budget_bytes=10**6)
    assert order == (1, 2, 0, 3, 4)
    assert simulate(graph, reordered(graph, schedule, order)).hidden_us == SEND_US


def test_without_room_for_a_second_whole_parameter_nothing_moves() -> None:
    graph = tower()
    schedule = unplanned_schedule(graph)
    peak = simulate(graph, schedule).peak_bytes
    assert overlapping(graph, schedule, budget_bytes=peak) is None
    assert overlapping(graph, schedule, budget_bytes=0) is None, "a peak above the budget is not raised either"


def test_a_gather_is_not_launched_before_its_shard_is_written() -> None:
    graph = tower(writes_next_shard=True)
    schedule = unplanned_schedule(graph)
    assert overlapping(graph, schedule, budget_bytes=10**6) is None


def test_nothing_is_moved_across_a_barrier() -> None:
    graph = tower()
    schedule = unplanned_schedule(graph)
    uses = [op.id for op in graph.ops if op.name.startswith("use")]
    assert overlapping(graph, schedule, budget_bytes=10**6, barriers=uses) is None


def test_a_reduction_is_waited_for_when_it_is_needed_or_done() -> None:
    work = Collective(kind=CollectiveKind.ALL_REDUCE, group="g", ranks=4, nbytes=WHOLE, storage=2)
    graph = Graph(
        name="reducing",
        ops=(
            op(0, "grad", (0,), (1,), 5),
            op(1, "reduce", (1,), (2,), collective=work),
            op(2, "wait", (2, 1), (3,), SEND_US, collective=replace(work, waits=True)),
            *(op(i, f"other{i}", (0,), (i + 1,), 30) for i in (3, 4, 5)),
            op(6, "update", (3, 0), (), 5, mutates=(0,)),
        ),
        values=(
            Value(id=0, name="param", storage=0),
            Value(id=1, name="grad", storage=1, producer=0),
            Value(id=2, name="sum", storage=2, producer=1),
            Value(id=3, name="mean", storage=2, producer=2, base=2),
            *(Value(id=i, name=f"made{i}", storage=i - 1, producer=i - 1) for i in (4, 5, 6)),
        ),
        storages=(
            Storage(id=0, nbytes=SHARD, role=Role.PARAM),
            Storage(id=1, nbytes=WHOLE, role=Role.GRADIENT),
            Storage(id=2, nbytes=WHOLE, role=Role.GRADIENT),
            *(Storage(id=i, nbytes=10, role=Role.TEMP) for i in (3, 4, 5)),
        ),
        outputs=(),
    ).validate()
    schedule = lower(graph, Plan())
    order = overlapping(graph, schedule, budget_bytes=10**6)
    assert order is not None
    moved = reordered(graph, schedule, order)
    runs = [graph.ops[run.op].name for run in moved.runs]
    assert runs == ["grad", "reduce", "other3", "other4", "wait", "other5", "update"], "done by then, and no later"
    assert simulate(graph, moved).hidden_us == SEND_US
    assert overlapping(graph, schedule, budget_bytes=simulate(graph, schedule).peak_bytes) is None


def test_only_pieces_change_places() -> None:
    graph = tower()
    schedule = unplanned_schedule(graph)
    order = overlapping(graph, schedule, budget_bytes=10**6)
    assert order is not None
    moved = reordered(graph, schedule, order)
    assert sorted(map(repr, moved.steps)) == sorted(map(repr, schedule.steps))
    steps = moved.steps
    for at, step in enumerate(steps):
        if isinstance(step, Launch):
            assert isinstance(steps[at - 1], Run)
        if isinstance(step, Wait):
            assert isinstance(steps[at + 1], Run)
