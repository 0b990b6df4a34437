"""`python -m bench`: finds the command, and turns errors made on purpose into one line."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.commands.options import OneLineParser, add_verbosity, check_writable
from bench.show.log_lines import telling
from planner.errors import PlannerError

# What the help says of each command; its module is bench.commands.NAME.
COMMANDS = {
    "profile": "what a training step is made of: time, memory, roles",
    "verify": "prove on a step that the planned one does the same arithmetic",
    "accept": "what is promised, put to the test on this machine: a verdict for every promise",
    "accuracy": "predicted memory and time against two independent meters",
    "calibrate": "estimated op times, and plans made from them, against measured ones",
    "exactness": "models x optimizers x strategies, each compared with eager bit by bit",
    "fit": "will it train on a GPU that is not here, at which batch, at what cost",
    "scaled": "the peak at a batch from captures at two others, against the meter",
    "large": "models too large for this machine: captured, planned, predicted",
    "plans": "strategies on full-size graphs with the times of a fixed roofline",
    "pareto": "the whole trade-off of a step: overhead against peak, with the proven bound; as a figure",
    "ablation": "what each part of the planner is worth: taken away, or added, at one budget",
    "arena": "what each idea of memory planning is worth, and what PyTorch's allocator would hold",
    "moves": "a plan that moves tensors to files, carried out: peak and waits as predicted, against the meter",
    "results": "make the tables and figures of bench/results again from the rows beside them",
    "graph": "the step before and after rewriting: text, DOT, a page, the plan as a figure",
    "export": "a plan for PyTorch's memory viewer, for Perfetto, and as a selective-checkpoint policy",
    "distributed": "replicas and shards on processes of this machine: eager, and planned",
    "zoo": "both doors on every architecture of torchvision, timm and transformers, compared bit by bit",
    "goals": "how soon plans are proven, in processor time, against goals",
    "micro": "how fast planning is, and how it grows",
}
EXAMPLES = """\
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
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "compare"
    try:
        return _run(name, arguments)
    except PlannerError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


def _run(name: str, arguments: Sequence[str]) -> int:
    command = importlib.import_module(f"bench.commands.{name}")
    parser = OneLineParser(
        prog="python -m bench" if name == "compare" else f"python -m bench {name}",
        description=command.HELP,
        epilog=_commands_help() if name == "compare" else None,
        formatter_class=argparse.RawDescriptionHelpFormatter if name == "compare" else argparse.HelpFormatter,
    )
    command.add_options(parser)
    add_verbosity(parser)
    options = parser.parse_args(arguments)
    rows_file: Path | None = getattr(options, "rows_file", None)
    if rows_file is not None:
        check_writable(rows_file)
    with telling(options.verbose):
        return int(command.run(options))


def _commands_help() -> str:
    lines = ["commands:", f"  {'python -m bench':32} compare strategies on a model: this page"]
    lines += [f"  {f'python -m bench {name}':32} {what}" for name, what in COMMANDS.items()]
    return "\n".join([*lines, "", EXAMPLES])


if __name__ == "__main__":
    sys.exit(main())
