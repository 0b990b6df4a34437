"""`python -m bench accept`: what is promised, put to the test on the machine at hand."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.commands.options import add_rows_out

HELP = (
    "Put what is promised to the test on this machine, in some ten minutes: models x optimizers through both doors "
    "against eager, to the bit; predicted memory and time against measured. A verdict for every promise, and a file "
    "that says so with versions and machine (--out; a second call goes on from it)."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.commands.results import page_of
    from bench.experiments.acceptance import ACCEPTANCE, Verdict, run_acceptance, verdicts
    from bench.experiments.registry import load
    from bench.show.tables import print_table

    out: Path | None = options.rows_file
    rows = run_acceptance(options.device, out=out)
    print_table("Verdicts", ("promise", "verdict"), verdicts(rows))
    if out is not None:
        out.with_suffix(".md").write_text(page_of(ACCEPTANCE, load(out)[1]), encoding="utf-8")
    return 1 if any(row.verdict is Verdict.BROKEN for row in rows) else 0
