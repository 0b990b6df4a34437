"""`python -m bench results`: the tables of the results folder, made again from the rows beside them."""

from __future__ import annotations

import argparse

HELP = "Make the tables of bench/results again from their rows."


def add_options(parser: argparse.ArgumentParser) -> None:
    """None: everything there is made again."""


def run(options: argparse.Namespace) -> int:
    from bench.tables import make_tables

    for path in make_tables():
        print(path)
    return 0
