"""Compare strategies on a model, on a saved graph, or over batch sizes: what `python -m bench` does by itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bench.commands.options import (
    LIBERTIES,
    WORKLOAD,
    add_host_links,
    add_liberties,
    add_workload,
    batches,
    budgets,
    check_folder,
    check_writable,
    given_graphs,
    host_links,
    one,
    positive,
    refuse_together,
    seconds,
    split_commas,
    strategy_specs,
    workload,
)
from planner.errors import PlannerError

if TYPE_CHECKING:
    from rewriter.moving import HostAccess

HELP = """\
Compare recomputation strategies: peak memory and time against the plain step.
Without arguments: ResNet-152 at batch 16 with images of 96 pixels, about two minutes on two cores."""
DEFAULT_BATCH_AND_IMAGE = (16, 96)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy",
        help="one, several with commas, or 'all'; options after a colon: sqrtn:segments=12 "
        "(default sqrtn,mutwo,ilp; auto with --batches)",
    )
    parser.add_argument(
        "--budget",
        default="60%",
        help="one or several with commas: bytes of total peak ('4GiB') or '50%%' of what the step adds to memory",
    )
    add_workload(parser)
    add_liberties(parser)
    parser.add_argument(
        "--pairs", type=positive, default=5, help="rounds of eager and planned steps in turn (default 5)"
    )
    parser.add_argument("--time-limit", type=seconds, default=5.0, help="seconds a strategy may take (default 5)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figures (default out/)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--peers",
        nargs="?",
        const="all",
        metavar="NAMES",
        help="also the planned model (checkpoint_model) and what users would pick instead, each in a process of its "
        "own; with parts of names and commas, 'selective,planned model', only these",
    )
    parser.add_argument(
        "--batches", type=batches, help="4,8,16: peak and latency against batch size, for one strategy and budget"
    )
    add_host_links(parser)
    parser.add_argument(
        "--offload-dir", type=Path, help="folder that a model on the CPU moves tensors to (default: that of --out)"
    )
    parser.add_argument("--graph", type=Path, help="plan on a saved graph (graph.json of `profile`) instead of a model")
    parser.add_argument("--synthetic", help="plan on made-up graphs: chain, tower, unet, transformer, resnet-like, ...")


def run(options: argparse.Namespace) -> int:
    check_options(options)
    if options.json is not None:
        check_writable(options.json)
    usual = "auto" if options.batches is not None else "sqrtn,mutwo,ilp"
    specs, limits = strategy_specs(options.strategy or usual), budgets(options.budget)
    if options.graph is not None or options.synthetic is not None:
        return _compare_graphs(options, specs, limits)
    if options.batches is not None:
        return _sweep(options, _only_one("--strategy", specs), _only_one("--budget", limits))
    return _compare_model(options, specs, limits)


def check_options(options: argparse.Namespace) -> None:
    """PlannerError for options of which one would be ignored, naming both."""
    refuse_together(options, "--graph", ["--synthetic"], "say one of them")
    for graph in ("--graph", "--synthetic"):
        others = [*WORKLOAD, *LIBERTIES, "--peers", "--batches"]
        refuse_together(options, graph, others, "a graph is planned on as it is, and nothing is run")
    refuse_together(options, "--model", ["--import"], "train one of them")
    refuse_together(options, "--batches", ["--batch"], "the one is a list of the other")
    refuse_together(options, "--batches", ["--host-link"], "a sweep plans without the host")
    refuse_together(options, "--batches", ["--peers"], "peers are measured at one batch, so say --batch with them")


def _only_one(flag: str, chosen: list[str]) -> str:
    if len(chosen) != 1:
        text = ", ".join(chosen)
        raise PlannerError(f"--batches and several of {flag} contradict each other: a sweep takes one of {text}")
    return chosen[0]


def _compare_graphs(options: argparse.Namespace, specs: list[str], limits: list[str]) -> int:
    from bench.experiments.plans.rows import PLANS, PlanRow, compare_graph
    from bench.experiments.results_file import save_rows
    from bench.show.tables import graph_caption, print_comparison

    rows, links = [], host_links(options)
    for graph in given_graphs(options):
        found = compare_graph(graph, specs, limits, time_limit_s=options.time_limit, links=links)
        rows += found
        print_comparison(found, title=f"{graph.name}: strategies compared", caption=graph_caption(found))
    if options.json is not None:
        save_rows(options.json, PLANS, [PlanRow.of(row) for row in rows])
    return 0


def _sweep(options: argparse.Namespace, spec: str, budget: str) -> int:
    from bench.experiments.sweep.run import run_sweep

    check_folder(options.out)
    run_sweep(
        workload(options),
        options.batches,
        spec,
        budget,
        pairs=options.pairs,
        time_limit_s=options.time_limit,
        out=options.out,
        json_file=options.json,
    )
    return 0


def _compare_model(options: argparse.Namespace, specs: list[str], limits: list[str]) -> int:
    from bench.experiments.comparison.run import compare_model

    check_folder(options.out)
    trained = workload(options, default=DEFAULT_BATCH_AND_IMAGE)
    compare_model(
        trained,
        specs,
        limits,
        pairs=options.pairs,
        time_limit_s=options.time_limit,
        out=options.out,
        json_file=options.json,
        peers=_peers(options.peers, limits),
        access=_access(options, trained.device),
    )
    return 0


def _access(options: argparse.Namespace, device: str) -> HostAccess | None:
    """The host that a model's plans may use: one link, or what is measured here."""
    import torch

    from rewriter.moving import HostAccess

    if options.host_link is None:
        if options.offload_dir is not None:
            raise PlannerError("--offload-dir without --host-link: say how fast the way there is, or 'measure'")
        return None
    link = one("host-link", split_commas(options.host_link))
    return HostAccess.of(link, options.offload_dir or options.out, None, torch.device(device))


def _peers(text: str | None, limits: list[str]) -> list[str]:
    """The peers whose names hold one of the pieces; a piece that no name holds is told before any work."""
    if text is None:
        return []
    from bench.workloads.peers import peer_names

    names = peer_names(limits)
    if text == "all":
        return names
    for piece in split_commas(text):
        if not any(piece in name for name in names):
            raise PlannerError(f"no peer has {piece!r} in its name: there are {'; '.join(names)}")
    return [name for name in names if any(piece in name for piece in split_commas(text))]
