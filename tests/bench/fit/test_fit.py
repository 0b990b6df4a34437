"""Will it fit? Scaled graphs against captured ones, the search for the largest batch, and the whole report."""

import importlib
import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from bench.__main__ import main
from bench.fit import question
from bench.fit.printing import print_fit
from bench.fit.question import FitError, fit
from bench.fit.report import GpuRow, Option
from bench.fit.sized_step import SizedStep, largest
from bench.workloads.zoo import declare_torchvision_ops
from planner.allocator import Allocator
from planner.host_link import HostLink
from planner.plan import Plan
from planner.scaling import Scaling
from planner.schedule import lower
from planner.simulator import simulate
from planner.solve import solve
from planner.units import human_bytes
from profiler.estimating.devices import DEVICES, Device
from profiler.estimating.roofline import estimated
from profiler.tracing.fx_graphs.gpu_kernels import Target
from profiler.tracing.whole_step import capture, capture_without_memory

declare_torchvision_ops()
BasicBlock = importlib.import_module("torchvision.models.resnet").BasicBlock

WIDTH, DEPTH = 64, 3
QUICK_S = 0.2


def classify(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def make(batch):
    """A deep narrow network with dropout and batch norm."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), *layers[1:])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return classify, model, optimizer, (torch.randn(batch, WIDTH), torch.randint(0, WIDTH, (batch,)))


def convolutions(batch):
    """Two residual blocks of full width, strides and pooling included."""
    wider = nn.Sequential(nn.Conv2d(64, 128, 1, stride=2, bias=False), nn.BatchNorm2d(128))
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1), BasicBlock(64, 64), BasicBlock(64, 128, stride=2, downsample=wider),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return classify, model, optimizer, (torch.randn(batch, 3, 224, 224), torch.randint(0, 10, (batch,)))


def pairs(batch):
    """A step that compares every row with every other: batch x batch numbers."""

    def step(model, optimizer, x):
        optimizer.zero_grad()
        rows = model(x)
        loss = F.cross_entropy(rows @ rows.T, torch.arange(len(x)))
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(8, 8)
    return step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(batch, 8)


@cache
def captured_once(make, batch, has_bfloat16):
    target = None if has_bfloat16 is None else Target(name="a card", has_bfloat16=has_bfloat16)
    return capture_without_memory(make, batch, target=target)


def captured(make, batch, *, name="", target=None):
    """A capture, whatever the card is called."""
    return captured_once(make, batch, None if target is None else target.has_bfloat16)


@pytest.fixture(autouse=True)
def one_capture_of_each_size(monkeypatch):
    """The report only looks at what was captured: the same step need not be captured for each of them."""
    monkeypatch.setattr(question, "capture_without_memory", captured)


@pytest.fixture
def few_plans(monkeypatch):
    """For what is said of the step as it is, one plan is enough; `tight` has them all."""
    monkeypatch.setattr(question, "BUDGETS", ("70%",))
    monkeypatch.setattr(question, "REFINEMENTS", 0)


def card(memory_bytes, **rates):
    """A device without allowances."""
    given = {"flops_per_s": 1e12, "bytes_per_s": 1e11, "launch_us": 1.0, "block_bytes": 512, **rates}
    return Device(name=f"a card of {memory_bytes}", memory_bytes=memory_bytes, **given)


def peak_at(batch):
    """The unplanned peak by a capture at that batch."""
    graph = estimated(captured(make, batch, target=Target(name="a card", has_bfloat16=False)), card(1))
    return simulate(graph, lower(graph, Plan())).peak_bytes


@pytest.fixture(scope="module")
def unplanned_peak():
    return peak_at(64)


@pytest.fixture(scope="module")
def tight(unplanned_peak):
    """A card on which batch 64 needs a plan."""
    return fit(make, card(int(0.8 * unplanned_peak)), batch=64, name="tower", time_limit_s=QUICK_S)


# -- other batch sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", [make, convolutions])
def test_bytes_at_another_batch_are_those_of_a_capture_there(workload):
    graphs = {batch: captured(workload, batch).graph for batch in (4, 6, 11)}
    scaling = Scaling(low=graphs[4], high=graphs[6], low_batch=4, high_batch=6)
    assert scaling.deviation(graphs[11], 11) == ""
    peaks = [simulate(g, lower(g, Plan())) for g in (scaling.at(11), graphs[11])]
    assert peaks[0].bytes_at == peaks[1].bytes_at
    assert [v.shape for v in scaling.at(11).values] == [v.shape for v in graphs[11].values]


def test_blocks_are_rounded_after_scaling():
    device, steps = card(1), [captured(make, b) for b in (4, 6)]
    expected = estimated(captured(make, 11), device)
    assert SizedStep.of(steps, (4, 6), device).graph(11).storages == expected.storages


def test_times_and_workspaces_far_from_both_captures_are_those_of_a_capture_there():
    # Small batches are bound by reading the weights and large ones by arithmetic: no line through two times knows that.
    device, steps = DEVICES["A100-40"], [captured(convolutions, b) for b in (4, 6)]
    expected = estimated(captured(convolutions, 256), device)
    found = SizedStep.of(steps, (4, 6), device).graph(256)
    assert [op.time_us for op in found.ops] == pytest.approx([op.time_us for op in expected.ops], rel=1e-6)
    blocks = [abs(a.workspace_bytes - b.workspace_bytes) for a, b in zip(found.ops, expected.ops, strict=True)]
    assert max(blocks) <= device.block_bytes


def test_a_step_that_wants_other_sizes_than_the_check_is_not_refused(few_plans):
    def picky(batch_size):
        if batch_size % 12 == 0:
            raise ValueError("batches of a dozen are not sold")
        return make(batch_size)

    report = fit(picky, card(1), batch=4, time_limit_s=1.0)
    assert report.scaled.checked is None
    assert "NOT checked at a third size" in str(report.scaled)
    assert "not sold" in str(report.scaled)


def test_a_step_that_is_not_affine_says_so(few_plans):
    report = fit(pairs, card(2**30), batch=4, time_limit_s=QUICK_S)
    assert "NOT exact: at batch 12" in str(report.scaled)


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 1000])
def test_the_largest_batch_is_found(most):
    assert largest(lambda batch: batch <= most) == most
    asked = []
    assert largest(lambda batch: [asked.append(batch), batch <= most][1], known=most // 2) == most
    assert min(asked) > most // 2


# -- the report ------------------------------------------------------------------------------------------------------


def test_a_batch_that_fits_is_told_so_without_a_plan(few_plans, unplanned_peak):
    report = fit(make, card(unplanned_peak), batch=64, name="tower", time_limit_s=QUICK_S)
    assert report.fits
    assert report.planned is None
    assert report.verdict.startswith("Yes: tower at batch 64 on a card of")
    assert "(estimated)" in report.verdict
    assert report.largest[0].found.batch == 64


def test_a_batch_that_needs_a_plan_is_told_its_cost(tight):
    assert not tight.fits
    assert tight.planned.peak_bytes <= tight.usable_bytes < tight.unplanned.peak_bytes
    assert 0 < tight.planned.overhead < 1
    assert 0 <= tight.gap <= 1
    assert tight.verdict.startswith("Yes, with a plan: tower at batch 64")
    assert f"{tight.planned.overhead:.1%} more time" in tight.verdict


def test_a_batch_that_no_plan_can_help_is_told_why(few_plans):
    report = fit(make, card(100_000), batch=64, name="tower", time_limit_s=QUICK_S)
    assert (report.fits, report.planned, report.gap) == (False, None, None)
    assert report.verdict.startswith("No: tower at batch 64")
    assert human_bytes(report.floor_bytes) in report.verdict
    assert all(row.found is None for row in report.largest)
    assert (report.largest_possible, report.batches, report.fastest) == (0, (), None)


def test_more_time_trains_larger_batches(tight):
    batches = [row.found.batch for row in tight.largest]
    assert batches == sorted(batches)
    assert batches[0] < 64 <= batches[-1] <= tight.largest_possible
    for row in tight.largest:
        assert row.found.peak_bytes <= tight.usable_bytes
        assert row.limit is None or row.found.overhead <= row.limit


def test_the_largest_unplanned_batch_is_exact(tight):
    most = tight.largest[0].found.batch
    assert peak_at(most) == tight.largest[0].found.peak_bytes
    assert peak_at(most) <= tight.usable_bytes < peak_at(most + 1)


def test_the_peak_is_the_sum_of_what_it_is_made_of(tight):
    assert sum(nbytes for _, nbytes in tight.by_role) == tight.unplanned.peak_bytes
    assert {"param", "opt_state", "activation"} <= {role for role, _ in tight.by_role}


def test_every_known_card_is_asked_and_all_of_them_are_large_enough(tight):
    assert [row.device for row in tight.gpus] == list(DEVICES)
    assert {row.answer for row in tight.gpus} == {"fits as it is"}


def test_less_memory_takes_more_time(tight):
    for _, overheads in tight.overheads:
        known = [o for o in overheads if o is not None]
        assert known == sorted(known, reverse=True)


def test_what_has_to_fit_is_what_the_allocator_holds(few_plans, unplanned_peak):
    # All of it would lie in the first MiB of one segment of 2 MiB, which a card of 1 MiB has not got.
    small = fit(make, card(2**20, allocator=Allocator.CACHING), batch=64, time_limit_s=QUICK_S)
    assert small.unplanned.peak_bytes == unplanned_peak < 2**20
    assert small.unplanned.needed_bytes == 2 * 2**20
    assert not small.fits
    assert "it needs 2.0 MiB" in small.verdict
    large = fit(make, card(2 * 2**20, allocator=Allocator.CACHING), batch=64, time_limit_s=QUICK_S)
    assert large.fits


def test_a_plan_that_moves_says_how_much_it_moves_in_the_verdict_and_the_tables(
    few_plans, unplanned_peak, monkeypatch, capsys
):
    plans = []

    def noted(problem, strategy):
        plans.append(solve(problem, strategy))
        return plans[-1]

    monkeypatch.setattr(question, "solve", noted)
    linked = card(int(0.8 * unplanned_peak), host_link=HostLink.of(1e6, latency_us=0.0))
    report = fit(make, linked, batch=64, name="tower", time_limit_s=QUICK_S)
    moved = {sum(plan.problem.graph.storages[s].nbytes for s in plan.moved) for plan in plans}
    assert 0 < report.planned.moved_bytes in moved
    assert report.planned.overhead < 0.01, "moving costs next to nothing over such a link"
    words = f"with a plan that moves {human_bytes(report.planned.moved_bytes)} a step"
    assert report.verdict.startswith(f"Yes, {words}: tower at batch 64")
    print_fit(report)
    assert human_bytes(max(row.found.moved_bytes for row in report.largest)) in capsys.readouterr().out
    row = GpuRow(device="it", usable_bytes=1, unplanned_bytes=2, unplanned=None, planned=report.planned, floor_bytes=0)
    assert row.answer.startswith(f"fits {words}, ")


def test_without_a_link_no_plan_moves(tight):
    assert not any(option.moved_bytes for option in tight.batches)
    assert "moves" not in tight.verdict


def test_the_fastest_batch_has_the_most_samples_a_second(tight):
    assert tight.fastest.samples_per_s == max(o.samples_per_s for o in tight.batches)
    assert Option(batch=8, peak_bytes=1, needed_bytes=1, step_us=2e6, overhead=0.0).samples_per_s == 4


def test_what_was_replaced_and_what_is_unknown_is_listed(tight):
    (dropout,) = tight.substitutions
    assert dropout.count == DEPTH
    assert dropout.cpu_bytes == 4 * dropout.gpu_bytes == 4 * DEPTH * 64 * WIDTH
    assert tight.unknown == (f"{DEPTH}x batch norm: cuDNN's reserve space is not counted",)


def test_real_tensors_give_the_same_report(few_plans, tight):
    real = fit(make, card(tight.usable_bytes), batch=64, name="tower", time_limit_s=QUICK_S, without_memory=False)
    assert (real.unplanned, real.by_role, real.largest[0]) == (tight.unplanned, tight.by_role, tight.largest[0])


def test_it_is_printed_with_the_verdict_first_and_goes_to_json(tight, capsys):
    print_fit(tight)
    printed = capsys.readouterr().out
    assert printed.startswith("Yes, with a plan: tower at batch 64")
    assert " ".join(printed.split()).count(f"estimated for {tight.device}") >= 4
    assert json.loads(json.dumps(tight.data()))["verdict"] == tight.verdict


def test_the_cpu_at_hand_keeps_its_own_kernels(few_plans):
    at_hand = card(2**30, new_bytes_per_s=1e9)
    assert at_hand.target is None
    report = fit(make, at_hand, batch=8, time_limit_s=QUICK_S)
    assert (report.substitutions, report.gpus) == ((), ())
    graph = estimated(captured(make, 8), at_hand)
    assert report.unplanned.peak_bytes == simulate(graph, lower(graph, Plan())).peak_bytes


def test_a_step_that_cannot_be_captured_names_the_batch():
    def unlucky(batch):
        raise RuntimeError("no such thing")

    with pytest.raises(FitError, match=r"batch 8: (.|\n)*no such thing"):
        fit(unlucky, "T4")


# -- the command line --------------------------------------------------------------------------------------------------


def test_ones_own_step_by_import(few_plans, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("from tests.bench.fit.test_fit import make\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["fit", "--import", "mine:make", "--gpu", "t4", "--batch", "64", "--time-limit", str(QUICK_S)]
    assert main([*arguments, "--json", "fit.json", "--out", "figures"]) == 0
    progress, _, answer = capsys.readouterr().out.partition("Yes: ")
    assert progress.startswith("capturing at batch ")  # in a pipe, where no bar is seen
    assert answer.startswith("mine:make at batch 64 on T4")
    assert json.loads((tmp_path / "fit.json").read_text())["fits"] is True
    assert list((tmp_path / "figures").glob("fit_*.png"))


def test_an_unknown_card_is_told_with_those_there_are(capsys):
    assert main(["fit", "--model", "resnet18", "--gpu", "Voodoo2"]) == 2
    assert "unknown device 'Voodoo2': there are T4" in capsys.readouterr().err


def test_a_plan_made_without_memory_fits_the_real_step():
    fake, real = captured(make, 8), capture(*make(8))
    assert replace(fake.graph, name="") == replace(real.graph, name="")
