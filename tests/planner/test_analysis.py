"""What a graph says of itself: when storages are used, what may be dropped, and the peak no plan goes under."""

from __future__ import annotations

from planner.analysis import candidates, cannot_drop, floor, least_bytes, liveness, temporaries
from planner.ir import Graph, Phase, Role
from planner.synthetic import Builder, accumulation, chain, residual_tower
from tests.small import foreign_view, names, storage, updated_between


def timed_line() -> Graph:
    """f (2 µs), g (3), loss (1), then their backwards (4, 5, 6); g_bw reads f, and f's statistics idle at once."""
    b = Builder("timed-line")
    x = b.input("x", 8)
    f, stats = b.op("f", [x], [16, 2], time_us=2.0)
    g = b.one("g", [f], 16, time_us=3.0)
    loss = b.one("loss", [g], 4, time_us=1.0)
    backward = {"phase": Phase.BACKWARD, "role": Role.GRADIENT}
    d_g = b.one("loss_bw", [loss, g], 16, time_us=4.0, **backward)
    d_f = b.one("g_bw", [d_g, f], 16, time_us=5.0, **backward)
    b.one("f_bw", [d_f, stats, x], 8, time_us=6.0, **backward)
    b.outputs.append(loss)
    return b.build()


def live_of(graph: Graph, name: str) -> tuple:
    live = liveness(graph)[graph.storage_names.index(name)]
    return (
        live.created_at,
        (live.first_fw_access, live.last_fw_access),
        (live.first_bw_access, live.last_bw_access),
        (live.idle_after, live.idle_until),
        live.inactive_us,
    )


def test_liveness_is_what_a_hand_finds():
    graph = timed_line()
    assert graph.elapsed_us == (0.0, 2.0, 5.0, 6.0, 10.0, 15.0, 21.0)
    # f is read by g (op 1) and by g_bw (op 4); loss (1 µs) and loss_bw (4 µs) pass in between.
    assert live_of(graph, "f.0") == (0, (1, 1), (4, 4), (1, 4), 5.0)
    # Nobody reads the statistics before f_bw: they idle from the end of f (2 µs) to its start (15 µs).
    assert live_of(graph, "f.1") == (0, (None, None), (5, 5), (0, 5), 13.0)
    # loss reads g last, and loss_bw comes right after it.
    assert live_of(graph, "g") == (1, (2, 2), (3, 3), (2, 3), 0.0)
    # What is live before the step, and what the backward makes, never idles.
    assert live_of(graph, "x") == (None, (0, 0), (5, 5), (None, None), 0.0)
    assert live_of(graph, "g_bw") == (4, (None, None), (5, 5), (None, None), 0.0)


def test_each_round_of_an_accumulation_idles_until_its_own_backward():
    graph = accumulation(2, 2)
    names = [op.name for op in graph.ops]
    for r in (0, 1):
        live = liveness(graph)[graph.storage_names.index(f"r{r}_f0")]
        assert (names[live.idle_after], names[live.idle_until]) == (f"r{r}_f1", f"r{r}_f1_bw")
        # loss (1 µs) and its backward (2 µs) pass in between.
        assert live.inactive_us == 3.0


def test_what_the_forward_reads_after_a_backward_still_idles_until_then():
    b = Builder("late-reader")
    h = b.one("f", [b.input("x", 8)], 8)
    b.one("f_bw", [h], 8, phase=Phase.BACKWARD, time_us=7.0)
    b.one("other_bw", [h], 8, phase=Phase.BACKWARD)
    b.outputs.append(b.one("again", [h], 8))
    live = liveness(b.build())[1]
    assert (live.idle_after, live.idle_until, live.last_fw_access, live.last_access) == (0, 1, 3, 3)


# -- what may be dropped ----------------------------------------------------------------------------------------


def test_candidates_idle_until_the_backward_and_temporaries_do_not():
    graph = residual_tower(1)
    assert names(graph, candidates(graph)) == ["stem", "b0_conv", "b0_norm.1", "b0_relu", "b0_add"]
    assert names(graph, temporaries(graph)) == ["b0_norm.0"]


def test_what_cannot_be_recomputed_as_it_was_is_no_candidate():
    assert candidates(updated_between()) == ()


def test_what_is_read_through_a_view_that_cannot_be_made_again_is_no_candidate():
    graph = foreign_view()
    assert candidates(graph) == ()
    assert cannot_drop(graph, storage(graph, "f")) == "op 'peek' may never be rerun: it calls foreign code"


# -- the floor ------------------------------------------------------------------------------------------------------


def test_the_floor_counts_the_largest_op_with_its_tensors():
    graph = chain(5, nbytes=100)
    # x (4), the loss (1), and one backward op: an activation, and the gradients it reads and makes.
    assert floor(graph).nbytes == 4 + 1 + 300


def test_an_op_that_may_not_run_in_place_needs_its_second_tensor():
    graph = residual_tower(1)
    with_forms, without = least_bytes(graph), least_bytes(graph, in_place=False)
    more = {graph.ops[op].name: int(n) for op, n in enumerate(without - with_forms) if n}
    assert more == {"b0_relu": 100}
    assert floor(graph, in_place=False).nbytes >= floor(graph).nbytes
