"""`python -m bench`: the command line, and nothing else."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from planner.errors import PlannerError

EPILOG = """\
commands:
  python -m bench                  compare strategies (this page)
  python -m bench micro            how fast planning is, and how it grows

examples:
  python -m bench --strategy mutwo,sqrtn:segments=12 --budget 70%,50%
  python -m bench --synthetic unet --strategy all
  python -m bench --graph graph.json --strategy path/to/file.py:MyStrategy
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["micro"]:
            return _micro(arguments[1:])
        return _compare(arguments)
    except (PlannerError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


def _micro(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench micro", description="Time the planner itself.")
    parser.add_argument("--repeats", type=_positive, default=7, help="runs per figure; the median counts (default 7)")
    options = parser.parse_args(arguments)
    from bench.micro import run_micro

    run_micro(repeats=options.repeats)
    return 0


def _compare(arguments: list[str]) -> int:
    options = _compare_parser().parse_args(arguments)
    from bench.planning import SYNTHETIC, compare_graph, write_json
    from bench.report import print_comparison
    from planner.ir import Graph
    from strategies import names, split_specs

    if options.json is not None:
        _check_writable(options.json)
    specs = list(names()) if options.strategy == "all" else split_specs(options.strategy)
    budgets = [piece.strip() for piece in options.budget.split(",")]
    graphs = [Graph.load(options.graph)] if options.graph else [SYNTHETIC[n]() for n in _chosen(options.synthetic)]
    rows = []
    for graph in graphs:
        found = compare_graph(graph, specs, budgets, time_limit_s=options.time_limit)
        rows += found
        base = found[0].solution.problem.unplanned
        caption = (
            f"{len(graph.ops):,} ops, times {graph.timing}. Unplanned peak {base.peak_bytes:,} bytes, of which "
            f"{base.start_bytes:,} before the step. 'of step': what the step adds at its peak, planned to unplanned."
        )
        print_comparison(found, title=f"{graph.name}: strategies compared", caption=caption)
    if options.json is not None:
        write_json(options.json, rows)
    return 0


def _compare_parser() -> argparse.ArgumentParser:
    from bench.planning import SYNTHETIC

    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Compare recomputation strategies: peak memory and extra time at several budgets.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--strategy",
        default="keep_all,sqrtn,cheap,mutwo",
        help="one, several with commas, or 'all'; options after a colon: sqrtn:segments=12",
    )
    parser.add_argument(
        "--budget",
        default="90%,70%,50%,40%,30%",
        help="one or several with commas: bytes, '4GiB', or '50%%' of what the step adds to memory",
    )
    parser.add_argument("--graph", type=Path, help="a saved graph (graph.json) instead of a made-up one")
    parser.add_argument("--synthetic", default="tower,unet,resnet-like", help=f"any of {', '.join(SYNTHETIC)}")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds a strategy may take (default 10)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser


def _chosen(text: str) -> list[str]:
    from bench.planning import SYNTHETIC

    chosen = [piece.strip() for piece in text.split(",")]
    for name in chosen:
        if name not in SYNTHETIC:
            raise PlannerError(f"unknown graph {name!r}: there are {', '.join(SYNTHETIC)}")
    return chosen


def _check_writable(path: Path) -> None:
    """Notice an unwritable target before the work starts."""
    with path.open("a", encoding="utf-8"):
        pass


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
