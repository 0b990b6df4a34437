"""Several processes that train together, for tests: forked, one thread each, with a deadline that ends all."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 20.0
DEADLINE_S = 120.0  # never reached unless something hangs
# What torch imports when a model is wrapped or sharded: here once, instead of on every rank of every test.
NEEDED_BY_RANKS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one rank came back with."""

    returned: Any = None
    error: str = ""  # class and message of what it raised
    trace: str = ""
    lost: bool = False  # it ended without a word


def told_by(work: Callable[..., Any], *args: Any, ranks: int = 2, timeout_s: float = GROUP_TIMEOUT_S) -> list[Told]:
    """`work(rank, *args)` in `ranks` processes of one gloo group, which meet in a file; what each of them told."""
    for name in NEEDED_BY_RANKS:
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(rank, ranks, folder, timeout_s, theirs, work, args))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            return _collected(pipes, time.monotonic() + DEADLINE_S)
        finally:
            for process in processes:
                _end(process)


def on_ranks(work: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    """What `work(rank, *args)` returns on each rank; the error of the first that raised one fails the test."""
    told = told_by(work, *args, ranks=ranks)
    for rank, one in enumerate(told):
        assert not one.lost, f"rank {rank} ended without a word"
        assert not one.error, f"rank {rank}: {one.trace}"
    return [one.returned for one in told]


def assert_predicted(prediction_error: float) -> None:
    """A peak within 1% above its prediction, and not far below.

    What gloo's threads take for themselves counts from the launch of a collective to its wait. When they really take it
    is up to them, and where that is not at the peak less is measured: up to 12% of a step as small as those of tests.
    """
    assert -0.15 < prediction_error < 0.01


def _collected(pipes: list[Connection], deadline: float) -> list[Told]:
    told: dict[int, Told] = {}
    while len(told) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in told]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {[r for r in range(len(pipes)) if r not in told]} are still busy after {DEADLINE_S:.0f} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                told[pipes.index(pipe)] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                told[pipes.index(pipe)] = Told(lost=True)
    return [told[rank] for rank in range(len(pipes))]


def _end(process: ForkProcess) -> None:
    process.join(2)
    if process.is_alive():
        process.kill()
        process.join()


def _work(
    rank: int, ranks: int, folder: str, timeout_s: float, pipe: Connection, work: Callable[..., Any], args: Any
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    gc.freeze()  # what pytest left behind is nobody's garbage here, and looking through it copies its pages
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        pipe.send_bytes(pickle.dumps(Told(returned=work(rank, *args))))  # tensors too, as bytes
    except BaseException as error:  # whatever it is: the parent tells
        said = Told(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        pipe.send_bytes(pickle.dumps(said))
    pipe.close()
    os._exit(0)  # nothing of pytest's runs at the end of a rank
