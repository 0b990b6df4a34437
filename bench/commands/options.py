"""Options that several commands share, and the checks done before any work starts."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from planner.errors import PlannerError
from planner.extras import needs_extra
from planner.units import read_budget

if TYPE_CHECKING:
    from planner.host_link import HostLink
    from planner.ir import Graph

# What to train, and what its planned form may do: none of them has a default, so that a given one can be told.
WORKLOAD = ("--model", "--import", "--batch", "--image", "--seq", "--optimizer", "--dtype", "--device")
LIBERTIES = ("--free-gradients", "--early-updates")


class OneLineParser(argparse.ArgumentParser):
    """Tells what is wrong with the options as an error like any other, not beside a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise PlannerError(f"{message}; `{self.prog} --help` tells the options")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The options that say what to train."""
    group = parser.add_argument_group("what to train")
    group.add_argument(
        "--model",
        help="resnet18, resnet50, resnet152 (default), mobilenet, vit, vit-l, densenet121, convnext, bert, bert-large, "
        "gpt2, gpt2-xl",
    )
    group.add_argument(
        "--import",
        dest="source",
        metavar="PACKAGE.MODULE:MAKE",
        help="your own: make(batch_size) -> (train_step, model, optimizer, batch)",
    )
    group.add_argument("--batch", type=positive, help="batch size (each model has its own default)")
    group.add_argument("--image", type=size, help="pixels a side, for image models")
    group.add_argument("--seq", type=size, help="tokens, for language models")
    group.add_argument("--optimizer", help="sgd, adamw, adam (fused, inside the graph), adamw-default, adam-default")
    group.add_argument("--dtype", help="float32 (default), or bfloat16 for autocast")
    group.add_argument("--device", help="cpu (default), cuda or cuda:N")


def add_liberties(parser: argparse.ArgumentParser) -> None:
    """What the planned step may do that the plain one does not; every ratio stays one to the plain step."""
    group = parser.add_argument_group("what the planned step may do that the plain one does not")
    group.add_argument(
        "--free-gradients",
        action="store_true",
        help="end each step with .grad at None: gradients go as early as can be",
    )
    group.add_argument(
        "--early-updates", action="store_true", help="update each parameter as soon as its gradient is complete"
    )


def add_planning(parser: argparse.ArgumentParser, *, strategy: str, budget: str, time_limit_s: float) -> None:
    """Who plans, within what, in which time, with a command's own defaults."""
    parser.add_argument("--strategy", default=strategy, help=f"as for `python -m bench` (default {strategy})")
    default = budget.replace("%", "%%")
    parser.add_argument("--budget", default=budget, help=f"as for `python -m bench` (default {default})")
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=time_limit_s,
        help=f"seconds a strategy may take (default {time_limit_s:g})",
    )


def add_host_links(parser: argparse.ArgumentParser) -> None:
    """The ways to the host that plans may use, each beside what is done without."""
    parser.add_argument(
        "--host-link",
        metavar="GB/S",
        help="also plans that move tensors to the host, at 24 GB/s each way, or 24/12 out and in; several with commas "
        "for graphs, 'measure' for a model",
    )


def host_links(options: argparse.Namespace) -> list[HostLink]:
    """The links named, each one that can be."""
    from planner.host_link import parse_link

    return [] if options.host_link is None else [parse_link(piece) for piece in options.host_link.split(",")]


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """How much of what happens is told on the error stream; every command has it."""
    parser.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="tell what was captured, measured, chosen and proven, and the seconds of each; -vv: what was tried, too",
    )


def workload(options: argparse.Namespace, *, default: tuple[int, int] | None = None):  # type: ignore[no-untyped-def]
    """The workload that was asked for; `default` is the batch and image of a call that names no model and no size."""
    from bench.workloads.spec import WorkloadSpec

    refuse_together(options, "--model", ["--import"], "train one of them")
    batch, image = options.batch, options.image
    if default is not None and not options.model and not options.source and batch is None and image is None:
        batch, image = default
    return WorkloadSpec(
        model=options.model or "resnet152",
        source=options.source or "",
        batch=batch,
        image=image,
        seq=options.seq,
        optimizer=options.optimizer,
        dtype=options.dtype or "float32",
        device=options.device or "cpu",
        free_gradients=getattr(options, "free_gradients", False),
        early_updates=getattr(options, "early_updates", False),
    )


def refuse_together(options: argparse.Namespace, flag: str, others: Sequence[str], why: str) -> None:
    """PlannerError that names both if `flag` was given and one of `others` too, of which one would be ignored."""
    clashing = [other for other in others if given(options, other)]
    if clashing and given(options, flag):
        raise PlannerError(f"{flag} and {clashing[0]} contradict each other: {why}")


def given(options: argparse.Namespace, flag: str) -> bool:
    """Whether an option without a default stands on the command line."""
    name = "source" if flag == "--import" else flag.removeprefix("--").replace("-", "_")
    value = getattr(options, name)
    return value is not None and value is not False


def given_graphs(options: argparse.Namespace) -> list[Graph]:
    """The graphs of --graph or --synthetic."""
    from bench.workloads.made_up_graphs import made_up
    from planner.ir import Graph

    return made_up(split_commas(options.synthetic)) if options.graph is None else [Graph.load(options.graph)]


def check_writable(path: Path) -> None:
    """Notice an unwritable target before the work starts."""
    existed = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not existed:
        path.unlink()


def check_folder(path: Path) -> None:
    """Make the folder for figures, and notice before the work starts when none can be drawn or written there."""
    with needs_extra("bench"):
        importlib.import_module("matplotlib")
    path.mkdir(parents=True, exist_ok=True)
    check_writable(path / ".writable")


def batches(text: str) -> list[int]:
    """Batch sizes with commas: '4,8,16'."""
    return [positive(piece) for piece in text.split(",")]


def positive(text: str) -> int:
    """A whole number of at least 1, and no more than anything here can be."""
    return _whole(text, most=2**40)


def size(text: str) -> int:
    """Pixels a side, or tokens."""
    return _whole(text, most=2**16)


def _whole(text: str, *, most: int) -> int:
    digits = text.strip().removeprefix("+")
    number = int(digits) if digits.isdecimal() and len(digits) < 20 else 0
    if not 1 <= number <= most:
        raise argparse.ArgumentTypeError(f"{text[:20]}: must be a whole number of at least 1 and at most {most}")
    return number


def seconds(text: str) -> float:
    """A time limit: a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:20]}: must be a number of seconds above 0")
    return number


def strategy_specs(text: str) -> list[str]:
    """The strategies named, each known to exist with these options."""
    from strategies import make, names, split_specs

    specs = list(names()) if text == "all" else split_specs(text)
    for spec in specs:
        make(spec)  # a bad one is told before any work
    if not specs:
        raise PlannerError("--strategy names none: write one, several with commas, or 'all'")
    return specs


def budgets(text: str) -> list[str]:
    """The budgets named, each one that can be read."""
    pieces = split_commas(text)
    for piece in pieces:
        read_budget(piece)  # a bad one is told before any work
    if not pieces:
        raise PlannerError("--budget names none: write one or several with commas, such as 4GiB,60%")
    return pieces


def one(kind: str, chosen: list[str]) -> str:
    """The only one of what was named; PlannerError if there are several."""
    if len(chosen) != 1:
        raise PlannerError(f"--{kind} takes one here, not {len(chosen)}: {', '.join(chosen)}")
    return chosen[0]


def split_commas(text: str) -> list[str]:
    """The pieces between commas, without blanks."""
    return [piece.strip() for piece in text.split(",") if piece.strip()]


def add_rows_out(parser: argparse.ArgumentParser) -> None:
    """The file that keeps a command's rows; found unwritable before the work starts."""
    parser.add_argument(
        "--out", dest="rows_file", type=Path, help="also save the rows to this file, with versions and machine"
    )


def names_a_workload(options: argparse.Namespace) -> bool:
    """Whether the call says what to train, rather than leaving it to the command; sizes of nothing are refused."""
    if options.model or options.source:
        return True
    if told := [flag for flag in WORKLOAD if given(options, flag)]:
        raise PlannerError(f"{', '.join(told)} without a model: say which with --model or --import")
    return False
