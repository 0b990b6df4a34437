"""The CPU at hand as a `Device`: its rates by a short benchmark, instead of a datasheet.

First the plain rates: matrix products, bandwidth, what new memory costs, and the overhead of an op. Then two small
training steps with every kind of op are captured and measured like any other, and each kind gets the share of the plain
rates that it reached there, and the workspace that it used.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from profiler.estimating.devices import Device, Workspace
from profiler.estimating.kinds import OpKind, kind_of
from profiler.estimating.roofline import estimated, is_view, side_bytes
from profiler.measuring.meters import CpuMeter
from profiler.measuring.op_times import Measured, measure
from profiler.tracing.whole_step import TracedStep, capture

# A kind that took longer than this many times the plain rates is measured wrongly, or not at all.
LEAST_SHARE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the benchmark is: the defaults take some ten seconds on two cores."""

    matrix: int = 1024
    elements: int = 2**24  # 64 MiB: from the system each time
    fewer_elements: int = 2**22  # 16 MiB: from the allocator's own
    batch: int = 4
    image: int = 56
    channels: int = 64
    tokens: int = 256
    width: int = 512
    vocabulary: int = 16384
    repeats: int = 9


def calibrated_cpu(sizes: Sizes | None = None) -> Device:
    """This machine's CPU with the threads that torch has now; other work on it makes the rates wrong."""
    sizes = sizes or Sizes()
    with torch.random.fork_rng(devices=[]):
        plain = _plain_rates(sizes)
        measured = [_measured(make(sizes)) for make in (_images, _text)]
    return with_kinds(plain, measured)


# -- plain rates ------------------------------------------------------------------------------------------------------


def _plain_rates(sizes: Sizes) -> Device:
    meter = CpuMeter()
    rates = {name: _matmul_rate(getattr(torch, name), sizes) for name in ("float32", "bfloat16")}
    in_place_s, large_rate = _elementwise(sizes.elements, sizes)
    _, small_rate = _elementwise(sizes.fewer_elements, sizes)
    threads = torch.get_num_threads()
    return Device(
        name=f"{meter.device}, calibrated",
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        flops_per_s=rates["float32"],
        bytes_per_s=2 * 4 * sizes.elements / in_place_s,
        launch_us=_overhead_us(sizes),
        flops_by_dtype=rates,
        new_bytes_per_s=small_rate,
        new_large_bytes_per_s=large_rate,
        source=f"a benchmark on this machine with {threads} thread{'s' if threads > 1 else ''}",
    )


def _matmul_rate(dtype: torch.dtype, sizes: Sizes) -> float:
    n = sizes.matrix
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    out = torch.empty(n, n, dtype=dtype)
    return float(2 * n**3 / _median_s(lambda: torch.mm(a, b, out=out), sizes.repeats))


def _elementwise(elements: int, sizes: Sizes) -> tuple[float, float]:
    """Seconds of an elementwise op in the memory of its input, and bytes a second that new memory for it costs."""
    x = torch.ones(elements)
    in_place_s = _median_s(lambda: x.mul_(1.0), sizes.repeats)
    fresh_s = _median_s(lambda: x.mul(1.0), sizes.repeats)
    return in_place_s, 4 * elements / max(fresh_s - in_place_s, 1e-9)


def _overhead_us(sizes: Sizes) -> float:
    """What an op takes that has next to nothing to do."""
    x, calls = torch.ones(16), 200

    def many() -> None:
        for _ in range(calls):
            x.mul(1.0)

    return _median_s(many, sizes.repeats) / calls * 1e6


def _median_s(call: Callable[[], Any], repeats: int) -> float:
    call()  # the first one finds cold caches
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# -- what each kind reaches -------------------------------------------------------------------------------------------


def with_kinds(plain: Device, steps: Sequence[Measured]) -> Device:
    """`plain` with the share that each kind reached in measured steps, and the workspace that it used."""
    shares, workspaces = dict[OpKind, float](), dict[OpKind, Workspace]()
    found = [sample for step in steps for sample in _samples(step, plain)]
    for kind in OpKind:
        ours = [s for s in found if s.kind is kind]
        if not ours:
            continue
        expected, taken = sum(s.expected_us for s in ours), sum(s.taken_us for s in ours)
        shares[kind] = max(LEAST_SHARE, expected / taken) if taken > 0 and expected > 0 else 1.0
        workspaces[kind] = Workspace(share=_workspace_share(ours))
    return replace(plain, share_by_kind=shares, workspaces=workspaces)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """One op: µs at the plain rates and µs taken, both without the overhead and what new memory takes."""

    kind: OpKind
    expected_us: float
    taken_us: float
    side_bytes: int
    workspace_bytes: int


def _workspace_share(samples: Sequence[_Sample]) -> float:
    """The largest share that one of the larger ops used: scalars beside small ones say nothing of them."""
    largest = max(s.side_bytes for s in samples)
    return max(s.workspace_bytes / max(1, s.side_bytes) for s in samples if 2 * s.side_bytes >= largest)


def _samples(measured: Measured, plain: Device) -> list[_Sample]:
    at_once = replace(plain, flops_per_s=1e30, flops_by_dtype={}, bytes_per_s=1e30)
    step, graph = measured.traced, measured.graph
    besides = estimated(step, at_once).ops  # the overhead and new memory, nothing else
    whole = estimated(step, plain).ops
    return [
        _Sample(
            kind=kind_of(step.nodes[op.id]),
            expected_us=whole[op.id].time_us - besides[op.id].time_us,
            taken_us=op.time_us - besides[op.id].time_us,
            side_bytes=side_bytes(step.nodes[op.id]),
            workspace_bytes=op.workspace_bytes,
        )
        for op in graph.ops
        if not is_view(graph, op)
    ]


def _measured(work: tuple[Any, ...]) -> Measured:
    step, model, optimizer, batch = work
    traced: TracedStep = capture(step, model, optimizer, batch, name="calibration")
    return measure(traced, batch, show_progress=False)


# -- two small steps with every kind of op ----------------------------------------------------------------------------


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    optimizer.zero_grad()
    logits = model(batch[0])
    loss = F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def _images(sizes: Sizes) -> tuple[Any, ...]:
    """Convolutions of the usual shapes (wide, pointwise, strided, depthwise) with norms, activations and pooling."""
    torch.manual_seed(0)
    c = sizes.channels

    def block(into: int, out: int, size: int, *, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        conv = nn.Conv2d(into, out, size, stride=stride, padding=size // 2, groups=groups, bias=False)
        return [conv, nn.BatchNorm2d(out), nn.ReLU() if groups == 1 else nn.Hardswish()]

    model = nn.Sequential(
        *block(3, c, 7), *block(c, c, 1), *block(c, c, 3), *block(c, 4 * c, 1), nn.MaxPool2d(3, 2, 1),
        *block(4 * c, 4 * c, 3, groups=4 * c), *block(4 * c, 2 * c, 1), *block(2 * c, 2 * c, 3),
        *block(2 * c, 2 * c, 5, groups=2 * c), *block(2 * c, 4 * c, 3, stride=2), *block(4 * c, 8 * c, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * c, 1000),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    batch = torch.randn(sizes.batch, 3, sizes.image, sizes.image), torch.randint(0, 1000, (sizes.batch,))
    return _train, model, optimizer, batch


class _Language(nn.Module):
    """One layer with fused attention and one with the plain form, dropout, GELU in both forms, and a vocabulary."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = 8
        self.embedding = nn.Embedding(sizes.vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.head = nn.Linear(width, sizes.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), 0.1)
        for layer in range(2):
            x = self.norms[layer](x + self.attend(x, layer, dropout=0.1 * layer))
            hidden = F.gelu(self.up[layer](x)) if layer else torch.tanh(self.up[layer](x))
            x = x + F.dropout(self.down[layer](hidden), 0.1)
        logits: Tensor = self.head(x)
        return logits

    def attend(self, x: Tensor, layer: int, *, dropout: float) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv[layer](x).chunk(3, -1))
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return made.transpose(1, 2).flatten(2)


def _text(sizes: Sizes) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = _Language(sizes)
    tokens = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.tokens))
    return _train, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), (tokens, tokens.clone())
