"""Seeing which functions run while a step is traced."""

from __future__ import annotations

import builtins
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from profiler.tracing.fake_tensors.patches import patched
from profiler.tracing.guards.code_reads import CodeReads
from profiler.tracing.guards.exact import UNSET
from profiler.tracing.guards.inner_objects import resolve
from profiler.tracing.guards.reach import Reach
from profiler.tracing.guards.territory import is_library


@contextmanager
def learning(reach: Reach) -> Iterator[None]:
    """Inside, every Python function that is called is learned just before it runs; not so torch's own tracing."""
    before = sys.gettrace()

    def on_call(frame: FrameType, event: Any, arg: Any) -> Any:
        reads = reach.learn(frame.f_code, frame.f_globals)
        if reads is not None:
            _meet(reach, reads, frame)
        return None if before is None else before(frame, event, arg)

    unseen = (ProxyTorchDispatchMode, "__torch_dispatch__", _unseen(ProxyTorchDispatchMode.__torch_dispatch__))
    with patched([unseen, *((owner, "open", _noting_reads(open, reach)) for owner in (builtins, io))]):
        sys.settrace(on_call)
        try:
            yield
        finally:
            still_there = sys.gettrace() is on_call
            sys.settrace(before)
    if not still_there:
        warnings.warn(
            "a debugger or tracer was started inside the step while it was captured: values that the step reads after "
            "that are not watched",
            UserWarning,
            stacklevel=2,
        )


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same without anybody watching: below the dispatcher no function is the user's, and there are millions."""

    def __torch_dispatch__(*args: Any, **kwargs: Any) -> Any:  # noqa: N807 - by it interrupts are held back
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(tracer)

    return __torch_dispatch__


def _noting_reads(function: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """`open`, with a note of what is read from files."""

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax"):
            reach.found.once[f"reads {file}"] = None
        return function(file, mode, *args, **kwargs)

    return opened


def _meet(reach: Reach, reads: CodeReads, frame: FrameType) -> None:
    theirs = is_library(frame.f_globals.get("__name__", ""))
    dynamic = (reads.dynamic or reads.reads_all or reads.asked) and not theirs
    if not dynamic and not reads.own:
        return
    code, known = frame.f_code, frame.f_locals
    if code.co_argcount and code.co_varnames[0] in known:
        reach.meet(code, reads, known[code.co_varnames[0]])
    if not dynamic:
        return
    read = {name: frame.f_globals[name] for name in reads.global_names if name in frame.f_globals} | known
    for target, name in reads.asked:
        reach.ask(resolve(target, read), name)
    targets = [resolve(target, read) for target in reads.dynamic]
    targets = [one for one in targets if one is not UNSET]
    if reads.reads_all or len(targets) < len(reads.dynamic):
        targets += read.values()
    reach.open(targets, reads.anywhere | reads.own if reads.reads_all else ())
