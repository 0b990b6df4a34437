"""A strategy of your own, judged beside those that are here.

A strategy is a class with a name and `plan(problem) -> Plan`; its options are dataclass fields. It only proposes:
`solve()` lowers every plan to a schedule, simulates it to the byte and alone says whether it fits, so that a strategy
may be simple, or wrong, but its figures are right. Nothing here needs torch.

    python bench/examples/own_strategy.py --budget 70%
    python -m bench --synthetic tower --strategy mutwo,bench/examples/own_strategy.py:LargestFirst:most=50

In training: `checkpoint(train_step, model, optimizer, batch, budget="4GiB", strategy=LargestFirst())`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import strategies
from planner.analysis import candidates
from planner.plan import Plan, recompute_once
from planner.solve import Problem, solve
from planner.synthetic import residual_tower


@dataclass(frozen=True)
class LargestFirst:
    """Drop the largest activations until it fits."""

    name: ClassVar[str] = "largest_first"
    most: int = 100

    def plan(self, problem: Problem) -> Plan:
        by_size = sorted(candidates(problem.graph), key=lambda s: -problem.graph.storages[s].nbytes)[: self.most]
        plans = [recompute_once(problem.graph, by_size[:n]) for n in range(len(by_size) + 1)]
        fitting = (p for p in plans if problem.timeline(p).peak_bytes <= problem.budget_bytes)
        return next(fitting, plans[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="70%", help="of what the step adds to memory, or bytes: '4GiB'")
    parser.add_argument("--blocks", type=int, default=10, help="residual blocks of the made-up step")
    options = parser.parse_args(arguments)

    graph = residual_tower(options.blocks)  # or Graph.load("graph.json"), which `python -m bench profile` writes
    problem = Problem.of(graph, options.budget)

    own = solve(problem, LargestFirst())
    print(own)
    for name in ("sqrtn", "mutwo", "ilp"):
        print(solve(problem, strategies.make(name)))

    print(f"\nsome of what {own.strategy} dropped:")
    for decision in [d for d in own.decisions if d.storage in own.dropped][:3]:
        print(f"  {decision.name}: {decision.reason}")


if __name__ == "__main__":
    main()
