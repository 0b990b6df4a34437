"""What the ways of the model door share that go through torch.compile."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from planner.errors import PlannerError
from profiler.tracing.joint import as_it_was, is_trained
from rewriter.proof import Verification
from rewriter.ways.common import ModelSettings, PlannedWay, Refused, Way


class CompiledWay(PlannedWay):
    """Dynamo's graphs of a model, each given to `backend`."""

    way = Way.DYNAMO

    def __init__(self, model: nn.Module, settings: ModelSettings, backend: Callable[..., Any]) -> None:
        super().__init__(model, settings)
        self._compiled = self._given_to_dynamo(backend)

    def _given_to_dynamo(self, backend: str | Callable[..., Any]) -> Callable[..., Any]:
        """The model's call as Dynamo compiles it.

        It looks at no frame of torch's own modules: a model whose forward is one of those (nn.Sequential) is called
        from a frame of ours, and its forward taken into that.
        """
        call: Callable[..., Any] = self.model._call_impl
        if type(self.model).forward.__module__.startswith("torch.nn."):
            call = _framed(call)
        compiled: Callable[..., Any] = torch.compile(call, backend=backend, dynamic=self.settings.dynamic)
        return compiled

    @property
    @abstractmethod
    def verification(self) -> Verification | None:
        """What the last proof found."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward: planned where a backward can follow, as it was everywhere else."""
        model, batch = self.model, (args, kwargs)
        if not torch.is_grad_enabled() or not is_trained(model, batch):
            return as_it_was(model, args, kwargs)
        return self._in_training(model, batch)

    @abstractmethod
    def _in_training(self, model: nn.Module, batch: Any) -> Any:
        """A forward that a backward can follow; `batch` is `(args, kwargs)`."""

    def _through_dynamo(self, batch: Any) -> Any:
        """The call; what the planner says while Dynamo compiles is said by itself, without Dynamo's words around it."""
        from rewriter.ways.compiled import seams

        args, kwargs = batch
        try:
            with seams.with_hooks_minded():
                return self._compiled(*args, **kwargs)
        except seams.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, PlannerError):
                raise error.inner_exception from None
            raise _refused(error) from error
        except seams.TorchDynamoException as error:
            raise _refused(error) from error


def _framed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call from a frame of ours; with code of its own, by which Dynamo counts how often it compiles."""

    def framed(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    framed.__code__ = framed.__code__.replace()
    return framed


def _refused(error: Exception) -> Refused:
    return Refused(f"Dynamo cannot compile this model: {str(error).splitlines()[0]}")
