"""`torch.compile(model, backend="recompute", options={"budget": "60%"})`: Dynamo's graphs, planned."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from rewriter.telling import warn_caller
from rewriter.ways.common import Kernels, ModelSettings
from rewriter.ways.compiled.inductor import InductorSession
from rewriter.ways.compiled.options import OptionError, Options
from rewriter.ways.compiled.session import EagerSession

# The sessions of `torch.compile`, by the options that each was called with: one dict object for all of its graphs. They
# live as long as a graph that Dynamo keeps, and hold the options, so that no others get their address meanwhile.
_sessions: weakref.WeakValueDictionary[int, InductorSession | EagerSession] = weakref.WeakValueDictionary()


def recompute(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Any:
    """The backend: one graph of Dynamo's in, what runs it within the budget out."""
    if mode is not None:
        raise OptionError(f"mode={mode!r} is inductor's own and not known to the backend 'recompute': leave it out")
    asked = Options.of(options)
    device = next((i.device for i in inputs if isinstance(i, Tensor)), torch.device("cpu"))
    assert options is not None
    session = _sessions.get(id(options))
    if session is None:
        session = _sessions[id(options)] = session_for(asked.settings(device))
        session.options = options
        warn_caller(_what_is_proven(asked))
    return session.compiled(module, inputs)


def session_for(settings: ModelSettings) -> InductorSession | EagerSession:
    """What plans the graphs of one model."""
    if settings.kernels is Kernels.INDUCTOR:
        return InductorSession(settings)
    return EagerSession(settings, sees_the_model=False)


def _what_is_proven(asked: Options) -> str:
    """What holds without the model as it was, which a backend never sees."""
    if Kernels(asked.kernels) is Kernels.INDUCTOR:
        proven = "without a proof"
    elif asked.prove:
        proven = "each planned graph is compared with the same graph as Dynamo made it, bit by bit"
    else:
        proven = "without a proof (prove=False)"
    return (
        f"planned by torch.compile's backend: {proven}. Whether Dynamo's graphs compute what the model does without "
        "torch.compile, a backend cannot see: checkpoint_model(model, budget=...) compares the two"
    )
