"""Plans for other readers: PyTorch's memory viewer, Perfetto, selective checkpointing. Each is read as they would."""

import json
import pickle
import pickletools
from dataclasses import replace
from itertools import pairwise

import pytest
from torch.cuda import _memory_viz

import strategies
from bench.__main__ import main
from planner.allocator import held
from planner.errors import FileFormatError, NoPlan, PlannerError
from planner.exports.policy import Fate, Policy, policy_of
from planner.exports.snapshot import snapshot
from planner.exports.trace import THREADS, trace
from planner.exports.writing import write_export
from planner.host_link import HostLink
from planner.incremental import Incremental
from planner.ir import Phase
from planner.placement import place
from planner.schedule import unplanned_schedule
from planner.solve import Problem, solve
from planner.synthetic import residual_tower, resnet_like
from tests.small import Says, storage

# What the page's own unpickler knows of (torch/utils/viz/MemoryViz.js).
OPCODES = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET",
    "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT",
    "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "SETITEM",
}  # fmt: skip


@pytest.fixture(scope="module")
def solution():
    graph = resnet_like((1, 1, 2, 1))
    placed = [replace(op, module_path=f"block.{op.id}", source_line=f"net.py:{op.id} y = f(x)") for op in graph.ops]
    return solve(Problem.of(replace(graph, ops=tuple(placed)), "60%"), strategies.make("mutwo"))


@pytest.fixture(scope="module")
def moving():
    """A tower whose first convolution is on the host for a while, and another dropped."""
    graph, link = residual_tower(3), HostLink.of(0.1, latency_us=1.0)
    state = Incremental(graph, [storage(graph, "b1_conv")])
    plan = place(state, [storage(graph, "b0_conv")], budget_bytes=1, link=link).added_to(state.plan())
    return solve(Problem(graph=graph, budget_bytes=1 << 40, host_link=link), Says(lambda graph: plan))


# -- snapshot -----------------------------------------------------------------------------------------------------


def test_pytorch_reads_the_snapshot(solution, tmp_path):
    write_export(tmp_path / "snapshot.pickle", solution)
    data = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert "Device 0" in _memory_viz.trace(data)
    assert "Device 1" in _memory_viz.trace(data)
    assert "segments:" in _memory_viz.segsum(data)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(data)
    assert "Allocator State History" in _memory_viz.segment_plot(data)
    lines = _memory_viz.memory(data, format_flamegraph=lambda text: text)
    assert "net.py" in lines


def test_the_page_knows_every_opcode_of_the_snapshot(solution, tmp_path):
    write_export(tmp_path / "snapshot.pickle", solution)
    used = {opcode.name for opcode, _, _ in pickletools.genops((tmp_path / "snapshot.pickle").read_bytes())}
    assert used <= OPCODES


def went_back(data, device):
    """The blocks before the recording, from those after it, as the page goes back from event to event."""
    inside = [s for s in data["segments"] if s["device"] == device]
    segments = {s["address"]: s["total_size"] for s in inside}
    live = {b["address"]: b for s in inside for b in s["blocks"] if b["state"] == "active_allocated"}
    most = sum(segments.values())
    for event in reversed(data["device_traces"][device]):
        address = event["addr"]
        match event["action"]:
            case "alloc":
                assert live.pop(address)["requested_size"] == event["size"]
            case "free_completed":
                assert address not in live
                live[address] = {"requested_size": event["size"]}
            case "free_requested":
                assert address in live
            case "segment_alloc":
                assert not any(address <= a < address + event["size"] for a in live)
                assert segments.pop(address) == event["size"]
        assert all(any(start <= a < start + size for start, size in segments.items()) for a in live)
    return live, most


@pytest.mark.parametrize("device", [0, 1])
def test_going_back_from_the_end_of_a_snapshot_leads_to_what_was_there_before_the_step(solution, device):
    graph = solution.problem.graph
    live, most = went_back(snapshot(solution), device)
    assert sum(block["requested_size"] for block in live.values()) == graph.start_bytes
    schedule = solution.schedule if device == 0 else unplanned_schedule(graph)
    assert most == held(graph, schedule, steps=1).reserved_bytes


def test_what_the_trace_has_in_use_is_the_predicted_peak(solution):
    live = peak = solution.problem.graph.start_bytes
    for event in snapshot(solution)["device_traces"][0]:
        live += {"alloc": event["size"], "free_requested": -event["size"]}.get(event["action"], 0)
        peak = max(peak, live)
    assert peak == solution.timeline.peak_bytes


def test_every_allocation_says_where_it_comes_from_and_why(solution):
    graph = solution.problem.graph
    frames = [event["frames"] for event in snapshot(solution)["device_traces"][0] if event["action"] == "alloc"]
    reasons = [frame["name"] for stack in frames for frame in stack if frame["filename"] == "plan"]
    assert all(stack[-1]["filename"] == "plan" for stack in frames)
    assert any("dropped:" in reason for reason in reasons)
    assert any("kept:" in reason for reason in reasons)
    assert sum("recomputed:" in reason for reason in reasons) > 0
    assert any(frame["filename"] == "block.0" for stack in frames for frame in stack)
    assert {"net.py"} <= {frame["filename"] for stack in frames for frame in stack}
    assert any(s["segment_type"] == "large" for s in snapshot(solution)["segments"]) == any(
        s.nbytes > 2**20 for s in graph.storages
    )


def test_what_comes_back_from_the_host_says_so(moving):
    went_back(snapshot(moving), 0)
    frames = [event["frames"] for event in snapshot(moving)["device_traces"][0] if event["action"] == "alloc"]
    assert [s[-1]["name"] for s in frames if "brought back from the host" in s[-1]["name"]] != []


# -- trace --------------------------------------------------------------------------------------------------------


def check_trace_events(document):
    """What Perfetto's JSON importer asks for: known phases, times in whole ns, no two bars of a thread that cross."""
    threads = {}
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in ("X", "C", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert all((1000 * event[name]).is_integer() for name in ("ts", "dur"))
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
    for bars in threads.values():
        ordered = sorted(bars)
        assert all(end <= start for (_, end), (start, _) in pairwise(ordered))
    return threads


def test_a_trace_is_by_the_rules_of_its_readers(solution, tmp_path):
    write_export(tmp_path / "trace.json", solution)
    check_trace_events(json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")))


def test_bars_do_not_cross_by_what_times_are_rounded_to(solution):
    graph = solution.problem.graph
    odd = replace(graph, ops=tuple(replace(op, time_us=op.time_us / 7 + 0.0006) for op in graph.ops))
    check_trace_events(trace(solve(replace(solution.problem, graph=odd), strategies.make("mutwo"))))


def test_bars_of_a_trace_add_up_to_the_step_and_its_recomputation(solution):
    bars = [e for e in trace(solution)["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    again = [e["dur"] for e in bars if e["tid"] == THREADS.index("recomputation")]
    assert sum(again) == pytest.approx(solution.timeline.recompute_us)
    assert sum(e["dur"] for e in bars) == pytest.approx(solution.timeline.time_us)
    assert {e["cat"] for e in bars} <= {phase.value for phase in Phase} | {"recomputation"}


def test_the_counter_of_a_trace_reaches_the_predicted_peak(solution):
    for number, timeline in ((1, solution.timeline), (2, solution.problem.unplanned)):
        counted = [e for e in trace(solution)["traceEvents"] if e["ph"] == "C" and e["pid"] == number]
        assert max(e["args"]["bytes"] for e in counted) == timeline.peak_bytes


def test_copies_have_lanes_of_their_own_in_a_trace(moving):
    document = trace(moving)
    check_trace_events(document)
    names = {
        e["args"]["name"]: e["tid"] for e in document["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 1
    }
    copies = {e["tid"]: e["name"] for e in document["traceEvents"] if e["ph"] == "X" and e["cat"] == "copy"}
    assert copies == {names["copy out"]: "b0_conv", names["copy in"]: "b0_conv"}
    waits = [e["dur"] for e in document["traceEvents"] if e["ph"] == "X" and e["tid"] == names["waiting"]]
    assert sum(waits) == pytest.approx(moving.timeline.stall_us)


# -- policy -------------------------------------------------------------------------------------------------------


def test_a_policy_saves_what_is_kept_and_recomputes_what_is_dropped(solution):
    graph, policy = solution.problem.graph, policy_of(solution)
    dropped = set(solution.dropped)
    by_module = {rule.module: rule.calls for rule in policy.rules}
    for op in graph.ops:
        (made,) = graph.makes[op.id] if len(graph.makes[op.id]) == 1 else (None,)
        if op.phase is Phase.FORWARD and made is not None and op.module_path in by_module:
            assert by_module[op.module_path] == ((Fate.RECOMPUTE if made in dropped else Fate.SAVE),)
    assert any("budget" in line for line in policy.lost)


def test_a_policy_says_what_is_moved_and_that_pytorch_moves_it(moving):
    policy = policy_of(moving)
    assert any(Fate.OFFLOAD in rule.calls for rule in policy.rules)
    assert any("moved by PyTorch's own copies" in line for line in policy.lost)


def test_a_policy_file_gives_back_the_policy(solution, tmp_path):
    write_export(tmp_path / "policy.json", solution)
    assert Policy.load(tmp_path / "policy.json") == policy_of(solution)


# -- files and names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["snapshot.txt", "plan", "trace.pickle"])
def test_a_name_that_says_nothing_is_refused_with_those_that_do(solution, tmp_path, name):
    with pytest.raises(FileFormatError, match=r"snapshot\.pickle for PyTorch's memory viewer, trace\.json"):
        write_export(tmp_path / name, solution)


@pytest.mark.parametrize("name", ["snapshot.pickle", "trace.json", "policy.json"])
def test_a_path_that_cannot_be_written_is_one_sentence(solution, tmp_path, name):
    with pytest.raises(PlannerError, match="cannot be written"):
        write_export(tmp_path / "nowhere" / name, solution)


def test_without_a_plan_there_is_nothing_to_export(solution, tmp_path):
    with pytest.raises(NoPlan, match="no plan to export"):
        write_export(tmp_path / "trace.json", replace(solution, schedule=None))


def test_the_command_writes_all_three_and_says_so_first_where_it_cannot(tmp_path, solution, capsys):
    solution.problem.graph.save(tmp_path / "graph.json")
    graph = ["--graph", str(tmp_path / "graph.json"), "--strategy", "mutwo"]
    assert main(["export", *graph, "--out", str(tmp_path / "out")]) == 0
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"snapshot.pickle", "trace.json", "policy.json"}
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["export", *graph, "--out", str(tmp_path / "file" / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
