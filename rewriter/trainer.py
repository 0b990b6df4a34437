"""A budget for Hugging Face's Trainer, in one argument."""

from __future__ import annotations

from typing import Any

from planner.extras import needs_extra
from rewriter.model import PlannedModel, checkpoint_model, uncheckpoint


def budget_callback(budget: str | int, **options: Any) -> Any:
    """A callback that plans the model when training begins, and puts it back when it ends.

    `Trainer(..., callbacks=[budget_callback("8GiB")])`; `options` are those of `checkpoint_model`.
    """
    with needs_extra("bench"):
        from transformers import TrainerCallback

    class BudgetCallback(TrainerCallback):
        """Keeps `planned` for who wants to know what was planned."""

        planned: PlannedModel | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            planned = checkpoint_model(model, budget=budget, **options).planned
            assert isinstance(planned, PlannedModel)
            self.planned = planned

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            uncheckpoint(model)

    return BudgetCallback()
