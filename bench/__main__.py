"""`python -m bench`: the command line, and nothing else."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.errors import PlannerError

COMMANDS_HELP = """\
commands:
  python -m bench                  compare strategies on a model: this page
  python -m bench profile          what a training step is made of: time, memory, roles
  python -m bench verify           prove on a step that the planned one does the same arithmetic
  python -m bench accuracy         predicted memory and time against two independent meters
  python -m bench exactness        models x optimizers x strategies, each compared with eager bit by bit
  python -m bench plans            strategies on full-size graphs with the times of a fixed roofline
  python -m bench results          make the tables of bench/results again from the rows beside them
  python -m bench micro            how fast planning is, and how it grows

examples:
  python -m bench --strategy mutwo,sqrtn:segments=12 --budget 70%,50%
  python -m bench --model bert --batch 8 --seq 128 --budget 60%
  python -m bench --import my_package.train:make --budget 4GiB
  python -m bench --graph graph.json --strategy path/to/file.py:MyStrategy     (without torch)
  python -m bench --synthetic tower,unet --budget 90%,70%,50%,40%,30%          (without torch)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors made on purpose become one line and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "accuracy": _accuracy,
        "exactness": _exactness,
        "micro": _micro,
        "plans": _plans,
        "profile": _profile,
        "results": _results,
        "verify": _verify,
    }
    try:
        if arguments and arguments[0] in commands:
            return commands[arguments[0]](arguments[1:])
        return _compare(arguments)
    except PlannerError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


# -- compare ------------------------------------------------------------------------------------------------------


def _compare(arguments: list[str]) -> int:
    options = _compare_parser().parse_args(arguments)
    if options.json is not None:
        _check_writable(options.json)
    specs = _strategy_specs(options.strategy)
    budgets = [piece.strip() for piece in options.budget.split(",") if piece.strip()]
    if options.graph is not None or options.synthetic is not None:
        return _compare_graphs(options, specs, budgets)
    if options.batches is not None:
        return _sweep(options, specs, budgets)
    return _compare_model(options, specs, budgets)


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Compare recomputation strategies: peak memory and time against the plain step. Without arguments: "
        "ResNet-152 at batch 16 with images of 96 pixels, about two minutes on two cores.",
        epilog=COMMANDS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--strategy",
        default="sqrtn,mutwo,ilp",
        help="one, several with commas, or 'all'; options after a colon: sqrtn:segments=12",
    )
    parser.add_argument(
        "--budget",
        default="60%",
        help="one or several with commas: bytes of total peak ('4GiB') or '50%%' of what the step adds to memory",
    )
    _add_workload(parser)
    parser.add_argument(
        "--pairs", type=_positive, default=5, help="rounds of eager and planned steps in turn (default 5)"
    )
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds a strategy may take (default 5)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figures (default out/)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--peers", action="store_true", help="also what users would pick instead, each in a process of its own"
    )
    parser.add_argument(
        "--batches",
        type=_batches,
        help="4,8,16: peak and latency against batch size, for the first strategy and budget",
    )
    parser.add_argument("--graph", type=Path, help="plan on a saved graph (graph.json of `profile`) instead of a model")
    parser.add_argument("--synthetic", help="plan on made-up graphs: chain, tower, unet, transformer, resnet-like, ...")
    return parser


def _strategy_specs(text: str) -> list[str]:
    from strategies import make, names, split_specs

    specs = list(names()) if text == "all" else split_specs(text)
    for spec in specs:
        make(spec)  # a bad one is told before any work
    if not specs:
        raise PlannerError("--strategy names none: write one, several with commas, or 'all'")
    return specs


def _compare_graphs(options: argparse.Namespace, specs: list[str], budgets: list[str]) -> int:
    from bench.planning import SYNTHETIC, compare_graph, write_json
    from bench.report import graph_caption, print_comparison
    from planner.ir import Graph

    if options.graph is not None:
        graphs = [Graph.load(options.graph)]
    else:
        chosen = [piece.strip() for piece in options.synthetic.split(",")]
        if unknown := [name for name in chosen if name not in SYNTHETIC]:
            raise PlannerError(f"unknown graph {unknown[0]!r}: there are {', '.join(SYNTHETIC)}")
        graphs = [SYNTHETIC[name]() for name in chosen]
    rows = []
    for graph in graphs:
        found = compare_graph(graph, specs, budgets, time_limit_s=options.time_limit)
        rows += found
        print_comparison(found, title=f"{graph.name}: strategies compared", caption=graph_caption(found))
    if options.json is not None:
        write_json(options.json, rows)
    return 0


def _sweep(options: argparse.Namespace, specs: list[str], budgets: list[str]) -> int:
    _check_folder(options.out)
    from bench.sweep import run_sweep

    run_sweep(
        _workload(options),
        options.batches,
        specs[0],
        budgets[0],
        pairs=options.pairs,
        time_limit_s=options.time_limit,
        out=options.out,
    )
    return 0


def _compare_model(options: argparse.Namespace, specs: list[str], budgets: list[str]) -> int:
    _check_folder(options.out)
    from bench.compare import compare_model

    compare_model(
        _workload(options, default=(16, 96)),
        specs,
        budgets,
        pairs=options.pairs,
        time_limit_s=options.time_limit,
        out=options.out,
        json_file=options.json,
        peers=options.peers,
    )
    return 0


# -- profile, verify, micro -----------------------------------------------------------------------------------------


def _profile(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench profile",
        description="Capture one training step, measure every op, and show what it is made of.",
    )
    _add_workload(parser)
    parser.add_argument(
        "--out", type=Path, help="write graph.json, node_stats.csv, activation_stats.csv and figures here"
    )
    options = parser.parse_args(arguments)
    if options.out is not None:
        _check_folder(options.out)
    from bench.profiling import run_profile

    run_profile(_workload(options), out=options.out)
    return 0


def _verify(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench verify",
        description="Plan a step, run it and the plain one from the same state, and compare every bit they leave.",
    )
    _add_workload(parser)
    parser.add_argument("--strategy", default="auto", help="as for `python -m bench` (default auto)")
    parser.add_argument("--budget", default="70%", help="as for `python -m bench` (default 70%%)")
    parser.add_argument("--steps", type=_positive, default=3, help="training steps to compare (default 3)")
    options = parser.parse_args(arguments)
    (spec,) = _strategy_specs(options.strategy)
    from bench.compare import verify_model

    return 0 if verify_model(_workload(options), spec, options.budget, steps=options.steps) else 1


def _accuracy(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench accuracy",
        description="Simulated peak against the allocator's and the process's own; op times against the step's. "
        "Without a model: the five that the results folder shows.",
    )
    _add_workload(parser)
    parser.add_argument(
        "--pairs", type=_positive, default=15, help="eager and captured steps timed in turn (default 15)"
    )
    parser.add_argument("--out", type=Path, help="also save the rows to this file, with versions and machine")
    options = parser.parse_args(arguments)
    if options.out is not None:
        _check_writable(options.out)
    from bench.accuracy import CASES, run_accuracy

    specs = [_workload(options)] if options.model or options.source else CASES
    run_accuracy(specs, pairs=options.pairs, out=options.out)
    return 0


def _exactness(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench exactness",
        description="Prove models x optimizers x strategies equal to eager, to the bit, with all dropped that can be.",
    )
    parser.add_argument("--strategy", default="sqrtn,cheap,mutwo,ilp", help="as for `python -m bench`")
    parser.add_argument("--steps", type=_positive, default=10, help="training steps to compare (default 10)")
    parser.add_argument("--out", type=Path, help="also save the rows to this file, with versions and machine")
    options = parser.parse_args(arguments)
    if options.out is not None:
        _check_writable(options.out)
    from bench.exactness import run_exactness

    return 0 if run_exactness(_strategy_specs(options.strategy), steps=options.steps, out=options.out) else 1


def _plans(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench plans",
        description="Compare strategies on captured graphs of full size, with the times of a fixed A100-like roofline. "
        "Without a model: ResNet-50 and -152, BERT, GPT-2 and DenseNet-121.",
    )
    _add_workload(parser)
    parser.add_argument("--strategy", default="keep_all,sqrtn,cheap,mutwo:faithful=true,mutwo,ilp", help="as above")
    parser.add_argument("--budget", default="90%,70%,50%,40%,30%", help="as for `python -m bench`")
    parser.add_argument("--time-limit", type=float, default=12.0, help="seconds a strategy may take (default 12)")
    parser.add_argument("--out", type=Path, help="also save the rows to this file, with versions and machine")
    options = parser.parse_args(arguments)
    if options.out is not None:
        _check_writable(options.out)
    from bench.plans import MODELS, run_plans

    run_plans(
        [_workload(options)] if options.model or options.source else MODELS,
        _strategy_specs(options.strategy),
        [piece.strip() for piece in options.budget.split(",")],
        time_limit_s=options.time_limit,
        out=options.out,
    )
    return 0


def _results(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench results", description="Make the tables of bench/results again from their rows."
    )
    parser.parse_args(arguments)
    from bench.tables import make_tables

    for path in make_tables():
        print(path)
    return 0


def _micro(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench micro", description="Time the planner itself.")
    parser.add_argument("--repeats", type=_positive, default=7, help="runs per figure; the median counts (default 7)")
    options = parser.parse_args(arguments)
    from bench.micro import run_micro

    run_micro(repeats=options.repeats)
    return 0


# -- options that several commands share ------------------------------------------------------------------------------


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to train")
    group.add_argument(
        "--model", help="resnet18, resnet50, resnet152 (default), mobilenet, vit, densenet121, bert, gpt2"
    )
    group.add_argument(
        "--import",
        dest="source",
        default="",
        metavar="PACKAGE.MODULE:MAKE",
        help="your own: make(batch_size) -> (train_step, model, optimizer, batch)",
    )
    group.add_argument("--batch", type=_positive, help="batch size (each model has its own default)")
    group.add_argument("--image", type=_positive, help="pixels a side, for image models")
    group.add_argument("--seq", type=_positive, help="tokens, for language models")
    group.add_argument("--optimizer", help="sgd, adamw, adam (fused, inside the graph), adamw-default, adam-default")
    group.add_argument("--dtype", default="float32", help="float32, or bfloat16 for autocast")


def _workload(options: argparse.Namespace, *, default: tuple[int, int] | None = None):  # type: ignore[no-untyped-def]
    """The workload that was asked for; `default` is the batch and image of a call that names no model and no size."""
    from bench.workloads import WorkloadSpec

    batch, image = options.batch, options.image
    if default is not None and not options.model and not options.source and batch is None and image is None:
        batch, image = default
    return WorkloadSpec(
        model=options.model or "resnet152",
        source=options.source,
        batch=batch,
        image=image,
        seq=options.seq,
        optimizer=options.optimizer,
        dtype=options.dtype,
    )


def _check_writable(path: Path) -> None:
    """Notice an unwritable target before the work starts."""
    existed = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not existed:
        path.unlink()


def _check_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    _check_writable(path / ".writable")


def _batches(text: str) -> list[int]:
    return [_positive(piece) for piece in text.split(",")]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
