"""What every way of planning a model has in common, and what is said of each."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from planner.plan_table import write_plan_csv
from planner.simulator import Timeline
from planner.solve import Solution
from profiler.errors import CaptureError
from rewriter.budgets import AUTO
from rewriter.proof import Verification
from rewriter.reserving import Reserve
from rewriter.settings import PlanSettings


class Way(Enum):
    """How a model is captured and planned."""

    OWN_CAPTURE = "own capture"  # one graph of forward and backward, by the capture that whole steps have
    DYNAMO = "Dynamo"  # torch.compile's graphs: any number of them, sizes that change
    BLOCKS = "blocks"  # torch.utils.checkpoint around blocks that the planner chose


class Kernels(Enum):
    """What computes a planned model."""

    EAGER = "eager"
    INDUCTOR = "inductor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(PlanSettings):
    """What a planned model was asked for."""

    optimizer: Optimizer | None
    kernels: Kernels
    dynamic: bool | None
    prove: bool

    @property
    def of_own_capture(self) -> tuple[str, ...]:
        """The options given that only own capture heeds: other ways move nothing, and reserve nothing ahead."""
        given = (("host_link", self.access is not None), ("reserve", self.reserve is not Reserve.NOTHING))
        return tuple(name for name, is_given in given if is_given)

    @property
    def in_bytes(self) -> bool:
        """Whether the budget is of the whole device: a share is of what the model adds, auto of what is free."""
        return isinstance(self.budget, int) or not (self.budget == AUTO or self.budget.rstrip().endswith("%"))


class Refused(CaptureError):  # noqa: N818 - a turn in the road, not a fault
    """A way cannot take this model, and says why; nothing of the model was changed, so that the next may try.

    `also` are ways that could not either, for the same reason: they are passed over.
    """

    def __init__(self, said: str, *, also: Collection[Way] = ()) -> None:
        super().__init__(said)
        self.also = frozenset(also)


class PlannedWay(ABC):
    """One way of planning one model: called in the place of the model's own call, hooks included.

    It is made when the model is planned, before any step, and does nothing then. Where it finds out at a call that it
    cannot take the model it raises Refused, and the same call goes to the next way.
    """

    way: ClassVar[Way]
    promise: ClassVar[str]  # what holds of bits and bytes, in a sentence

    def __init__(self, model: nn.Module, settings: ModelSettings) -> None:
        self.settings = settings
        self._model = weakref.ref(model)

    @property
    def model(self) -> nn.Module:
        """The model, whoever calls it holds it."""
        model = self._model()
        assert model is not None
        return model

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward: planned where a backward can follow, as it was everywhere else."""

    @property
    @abstractmethod
    def solution(self) -> Solution:
        """The plan used last; PlannerError before the first planned step."""

    @property
    @abstractmethod
    def verification(self) -> Verification | None:
        """What the proof of the plan used last found; None where there was none."""

    def timeline(self) -> Timeline:
        """Bytes at every step of the schedule, and the predicted time."""
        assert self.solution.timeline is not None
        return self.solution.timeline

    def explain(self, text: str = "") -> str:
        """What was kept, dropped, why and at what cost, for every tensor whose name or module contains `text`."""
        return self.solution.explain(text)

    def save(self, path: str | Path) -> None:
        """Write the plan used last to a file that `plan=` reads; `.csv`: as a table for people."""
        plan, graph = self.solution.plan, self.solution.problem.graph
        assert plan is not None
        if Path(path).suffix.lower() == ".csv":
            write_plan_csv(path, graph, plan)
        else:
            plan.save(path, graph)

    def undo(self) -> None:  # noqa: B027 - most ways leave nothing behind
        """Take out of the model whatever this way has put into it."""
