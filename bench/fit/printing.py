"""A FitReport for people: the verdict first, then tables and a figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bench.fit.cluster import Cluster
from bench.fit.figure import draw_throughput
from bench.fit.question import fit
from bench.fit.report import ClusterReport, FitReport, GpuRow, Largest, Option
from bench.show.axes import ROLE_NAMES
from bench.show.file_names import slug
from bench.show.tables import print_table
from bench.show.terminal import console, progress, say
from bench.workloads.spec import WorkloadSpec
from planner.host_link import parse_link
from planner.ir import Role
from planner.units import human_bytes
from profiler.estimating.devices import DEVICES, Device, find_device
from profiler.workload import Workload


def run_fit(
    spec: WorkloadSpec,
    device_name: str,
    *,
    host_link: str | None = None,
    time_limit_s: float,
    without_memory: bool,
    json_file: Path | None,
    out: Path | None,
    cluster: Cluster | None = None,
) -> FitReport:
    """Answer the question with progress shown, print everything, and write what was asked for."""
    device = with_link(find_device(device_name), host_link)
    report = _asked(spec, device, time_limit_s=time_limit_s, without_memory=without_memory, cluster=cluster)
    print_fit(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.data(), indent=1) + "\n", encoding="utf-8")
    if out is not None:
        path = out / f"fit_{slug(spec.title_of_all_batches)}_{slug(device.name)}.png"
        rows = [(o.batch, o.samples_per_s, o.overhead) for o in report.batches]
        draw_throughput(
            path,
            rows,
            title=f"{spec.title_of_all_batches}: samples a second and extra time, estimated for {device.name}",
        )
        console.print(f"figure: {path}")
    return report


def with_link(device: Device, text: str | None) -> Device:
    """The device with another way to the host; "0" for none, None for its own."""
    if text is None:
        return device
    return replace(device, host_link=None if text.strip() == "0" else parse_link(text))


def _asked(
    spec: WorkloadSpec, device: Device, *, time_limit_s: float, without_memory: bool, cluster: Cluster | None
) -> FitReport:
    def make(batch: int) -> Workload:
        return spec.at_batch(batch).make()

    with progress() as bar:
        task = bar.add_task("making the model", total=None)

        def tell(text: str) -> None:
            say(text)
            bar.update(task, description=text)

        return fit(
            make,
            device,
            batch=spec.batch_size,
            name=spec.title_of_all_batches,
            time_limit_s=time_limit_s,
            without_memory=without_memory,
            cluster=cluster,
            tell=tell,
        )


def print_fit(report: FitReport) -> None:
    """The whole report."""
    for_device = f"estimated for {report.device}"
    console.print(f"[bold]{report.verdict}[/]", highlight=False)
    _print_peak(report, for_device)
    if report.cluster is not None:
        _print_cluster(report, report.cluster)
    print_table(
        f"Largest batches{' per rank' if report.cluster else ''}, {for_device}",
        ("extra time allowed", "largest batch", "peak", "reserved", "extra time", "moved a step", "samples/s"),
        [largest_cells(row) for row in report.largest],
        caption=f"No plan can train more than {report.largest_possible}: what cannot be dropped does not fit then.",
    )
    print_table(
        f"Batches on {report.device}: the fastest way found, {for_device}",
        ("batch", "peak", "reserved", "extra time", "moved a step", "step", "samples/s", ""),
        [option_cells(o, fastest=o == report.fastest) for o in report.batches],
    )
    if report.gpus:
        print_table(
            f"Batch {report.batch} on each device, times estimated for that device",
            ("device", "for tensors", "reserved unplanned", "answer", "step", "samples/s"),
            [gpu_cells(row) for row in report.gpus],
            caption=_left_out(report),
        )
    print_table(
        f"Extra time by batch and memory, {for_device}",
        ("batch", *(f"{human_bytes(size)} ({name})" for name, size in report.budgets_bytes)),
        [(str(b), *("-" if o is None else f"{o:.1%}" for o in row)) for b, row in report.overheads],
        caption=f"-: no plan found. What tensors can have on the cards named, at the speed of {report.device}.",
    )
    _print_how(report)


def _print_peak(report: FitReport, for_device: str) -> None:
    roles = ", ".join(f"{ROLE_NAMES[Role(role)]} {human_bytes(nbytes)}" for role, nbytes in report.by_role)
    console.print(
        f"Unplanned peak {human_bytes(report.unplanned.peak_bytes)} = {roles} ({for_device}; "
        f"{human_bytes(report.start_bytes)} are there before the step). For it the allocator holds "
        f"{human_bytes(report.unplanned.needed_bytes)}, by simulation: that is what has to fit.\n"
        f"Under any plan at least {report.floor}.",
        highlight=False,
    )


def _print_cluster(report: FitReport, cluster: ClusterReport) -> None:
    """How the ranks get on: what is communicated, how much of it costs nothing, how few of them would do."""
    lines = [f"Between ranks {cluster.link} a message, collectives round a ring (estimated). {cluster.words}"]
    if cluster.wrapper_bytes:
        held = human_bytes(cluster.wrapper_bytes)
        lines.append(f"Beside the step each rank holds {held} of DistributedDataParallel's buckets: they are left out.")
    console.print("\n".join(lines), highlight=False)
    ways = [("as captured", report.unplanned)]
    ways += [("parameters gathered twice, as fully_shard does", o) for o in (cluster.gathers_again,) if o is not None]
    ways += [("planned", o) for o in (report.planned,) if o is not None]
    print_table(
        f"Each of {cluster.ranks} ranks by {cluster.sharding}, estimated for {report.device}",
        ("way", "peak per rank", "reserved", "extra time", "step", "communication", "of that hidden"),
        [(name, *_costs(o), f"{o.step_us / 1e3:.1f} ms", *_communication_cells(o)) for name, o in ways],
    )
    print_table(
        f"Batch {report.batch} per rank on fewer or more ranks, estimated for {report.device}",
        ("ranks", "reserved unplanned", "planned", "answer"),
        [
            (
                str(row.ranks),
                human_bytes(row.unplanned_bytes),
                "-" if row.planned_bytes is None else human_bytes(row.planned_bytes),
                row.answer,
            )
            for row in cluster.by_ranks
        ],
    )


def _communication_cells(option: Option) -> tuple[str, str]:
    share = option.hidden_share
    return f"{option.communication_us / 1e3:.1f} ms", "-" if share is None else f"{share:.0%}"


def _print_how(report: FitReport) -> None:
    lines = [f"{report.ops:,} ops; {report.scaled}."]
    for change in report.substitutions:
        cpu, gpu = human_bytes(change.cpu_bytes), human_bytes(change.gpu_bytes)
        lines.append(f"Taken as {report.device} runs it: {change} (kept for the backward: {gpu}, on the CPU {cpu}).")
    lines += [f"Not known: {what}." for what in report.unknown]
    if not report.substitutions:
        lines.append(f"No op was replaced by another that {report.device} would run.")
    lines.append(
        f"Captured in {report.capture_s:.1f} s, planned in {report.plan_s:.1f} s, {report.search_s:.1f} s for other "
        f"batches and {'devices' if report.cluster is None else 'ranks'}. Nothing was measured on a GPU."
    )
    console.print("\n".join(lines), highlight=False)


def largest_cells(row: Largest) -> tuple[str, ...]:
    """A row as text: limit, batch, peak, what the allocator holds, extra time, bytes moved, samples a second."""
    limit = "any" if row.limit is None else "none: no plan" if row.limit == 0 else f"{row.limit:.0%}"
    if row.found is None:
        return (limit, "none", "-", "-", "-", "-", "-")
    return (limit, str(row.found.batch), *_costs(row.found), _moved(row.found), f"{row.found.samples_per_s:.1f}")


def option_cells(option: Option, *, fastest: bool) -> tuple[str, ...]:
    """A row as text; the fastest one is marked."""
    step = f"{option.step_us / 1e3:.1f} ms"
    mark = "most samples a second" if fastest else ""
    return (str(option.batch), *_costs(option), _moved(option), step, f"{option.samples_per_s:.1f}", mark)


def gpu_cells(row: GpuRow) -> tuple[str, ...]:
    """A row as text."""
    used = row.unplanned or row.planned
    times = ("-", "-") if used is None else (f"{used.step_us / 1e3:.1f} ms", f"{used.samples_per_s:.1f}")
    return (row.device, human_bytes(row.usable_bytes), human_bytes(row.unplanned_bytes), row.answer, *times)


def _costs(option: Option) -> tuple[str, str, str]:
    return human_bytes(option.peak_bytes), human_bytes(option.needed_bytes), f"{option.overhead:.1%}"


def _moved(option: Option) -> str:
    return human_bytes(option.moved_bytes) if option.moved_bytes else "-"


def _left_out(report: FitReport) -> str:
    """Why a known device is not in the table."""
    names = sorted(set(DEVICES) - {row.device for row in report.gpus})
    if not names:
        return ""
    return f"Not here: {', '.join(names)}, which run half precision by other kernels. Ask for one with --gpu."
