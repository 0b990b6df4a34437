"""`python -m bench results`: the tables and figures of the results folder, made again."""

from __future__ import annotations

import argparse

HELP = (
    "Make the tables and figures of bench/results again from their rows and graphs, and the figure of the pipeline. "
    "Nothing is measured."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """None: everything there is made again."""


def run(options: argparse.Namespace) -> int:
    from bench.experiments.results_folder import RESULTS, make_tables
    from bench.show.pipeline_figure import draw_pipeline

    draw_pipeline(RESULTS / "pipeline.png")
    for path in (*make_tables(), RESULTS / "pipeline.png"):
        print(path)
    return 0
