"""`python -m bench verify`: one plan on one model, run beside the plain step and compared with it bit by bit."""

from __future__ import annotations

import strategies
from bench.show.terminal import console
from bench.workloads.spec import WorkloadSpec
from rewriter import OverBudget, VerificationError, checkpoint


def verify_model(spec: WorkloadSpec, strategy_spec: str, budget: str, *, steps: int) -> bool:
    """Prove one plan on one model; True if it is exact."""
    strategies.make(strategy_spec)
    workload = spec.make()
    try:
        planned = checkpoint(
            *workload,
            budget=budget,
            strategy=strategy_spec,
            verify=steps,
            free_gradients=spec.free_gradients,
            early_updates=spec.early_updates,
        )
    except (OverBudget, VerificationError) as error:
        console.print(f"{spec.title}: {error}")
        return False
    console.print(f"{planned.solution}")
    console.print(f"{planned.verification}")
    return True
