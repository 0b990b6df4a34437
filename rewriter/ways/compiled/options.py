"""What `torch.compile(model, backend="recompute", options={...})` may be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from planner.errors import PlannerError
from planner.solve import DEFAULT_TIME_LIMIT_S, Strategy
from rewriter.other_shapes import LEAST_FORMS, MOST_FORMS_BYTES
from rewriter.settings import read_settings
from rewriter.ways.common import Kernels, ModelSettings


class OptionError(PlannerError):
    """An option of the backend that is not known, or whose value cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the backend; their names are the fields. Meanings are those of `checkpoint_model`."""

    budget: str | int
    strategy: str | Strategy = "auto"
    kernels: str = "eager"
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    in_place: bool = True
    most_shapes: int = LEAST_FORMS
    prove: bool = True

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Options:
        """The options, or OptionError in one sentence."""
        known = [field.name for field in fields(Options)]
        if not given or "budget" not in given:
            raise OptionError(
                "the backend 'recompute' needs a budget: torch.compile(model, backend=\"recompute\", "
                'options={"budget": "60%"})'
            )
        if unknown := [name for name in given if name not in known]:
            raise OptionError(f"option {unknown[0]!r} is not known to the backend 'recompute': there are {known}")
        return Options(**given)

    def settings(self, device: torch.device) -> ModelSettings:
        """What is asked of the planner; an error where a value cannot be used."""
        kernels = [k.value for k in Kernels]
        if self.kernels not in kernels:
            raise OptionError(f"kernels={self.kernels!r}: there are {', '.join(map(repr, kernels))}")
        return read_settings(
            ModelSettings,
            device,
            budget=self.budget,
            strategy=self.strategy,
            optimizer=None,
            kernels=Kernels(self.kernels),
            dynamic=None,
            time_limit_s=self.time_limit_s,
            prove=self.prove,
            in_place=self.in_place,
            most_shapes=self.most_shapes,
            most_forms_bytes=MOST_FORMS_BYTES,
            show_progress=False,
        )
