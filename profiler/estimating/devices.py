"""Devices that need not be here: what their makers say of them, and what is allowed for the rest.

Every rate is the datasheet's, for dense arithmetic. No program reaches these, so each device also carries the share
of them that is counted on. These shares, the launch cost, and all memory that tensors do not get are allowances: they
were not measured here. `profiler.estimating.calibration` measures them for the CPU at hand.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from planner.allocator import Allocator
from planner.errors import PlannerError
from planner.group_link import GroupLink
from planner.host_link import HostLink
from profiler.estimating.kinds import OpKind
from profiler.tracing.fx_graphs.gpu_kernels import Target

GIB = 2**30
MIB = 2**20
_CONVOLUTIONS = frozenset({OpKind.CONVOLUTION, OpKind.CONVOLUTION_BACKWARD})


class DeviceError(PlannerError):
    """A device that is not known, or a device file that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Scratch memory of an op while it runs: so many bytes, and a share of all that it reads or makes, if larger."""

    fixed_bytes: int = 0
    share: float = 0.0

    def nbytes(self, side_bytes: int) -> int:
        return self.fixed_bytes + math.ceil(self.share * side_bytes)


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the cost model knows of a device. Only the first five are needed; the rest defaults to "nothing lost".

    `flops_per_s` is the float32 rate, and holds for every dtype not named in `flops_by_dtype`; the "tf32" named there
    serves float32 convolutions, as PyTorch does by default (matrix products in float32 do not use it).
    `arithmetic_share` and `bandwidth_share` are the parts of both rates that are reached; `share_by_kind` multiplies
    them for one kind of op. `new_bytes_per_s` is how fast new memory is had, and `new_large_bytes_per_s` in blocks from
    `large_bytes` on: a CPU's allocator gets those from the system each time, page by page.
    `block_bytes` is what the allocator rounds each tensor up to, `allocator` who it is, where that can be simulated.
    `reserved_bytes` never reach it (error correction, driver, CUDA context, loaded kernels); `fragmentation_share` of
    the rest is lost beyond what a simulation of it knows of.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    bytes_per_s: float
    launch_us: float
    flops_by_dtype: Mapping[str, float] = field(default_factory=dict)
    arithmetic_share: float = 1.0
    bandwidth_share: float = 1.0
    share_by_kind: Mapping[OpKind, float] = field(default_factory=dict)
    new_bytes_per_s: float = math.inf
    new_large_bytes_per_s: float = math.inf
    large_bytes: int = 32 * MIB
    block_bytes: int = 1
    reserved_bytes: int = 0
    fragmentation_share: float = 0.0
    allocator: Allocator | None = None
    workspaces: Mapping[OpKind, Workspace] = field(default_factory=dict)
    host_link: HostLink | None = None  # what is counted on of the way to the memory beside it
    group_link: GroupLink | None = None  # and of the way to the next device of the same server
    source: str = ""

    @property
    def usable_bytes(self) -> int:
        """Memory that tensors can have: an allowance, not a promise."""
        return int((self.memory_bytes - self.reserved_bytes) * (1 - self.fragmentation_share))

    @property
    def has_bfloat16(self) -> bool:
        """Compute capability 8.0 or newer, by the rates that it is known for."""
        return "bfloat16" in self.flops_by_dtype

    @property
    def target(self) -> Target | None:
        """Whose kernels to capture; None for the CPU at hand, which gets its memory page by page and runs its own."""
        return Target(name=self.name, has_bfloat16=self.has_bfloat16) if math.isinf(self.new_bytes_per_s) else None

    def flops_for(self, dtype: torch.dtype, kind: OpKind | None = None) -> float:
        """The datasheet's rate for arithmetic on `dtype`."""
        name = str(dtype).removeprefix("torch.")
        if name == "float32" and kind in _CONVOLUTIONS and "tf32" in self.flops_by_dtype:
            name = "tf32"
        return self.flops_by_dtype.get(name, self.flops_per_s)

    def reached_flops(self, dtype: torch.dtype, kind: OpKind) -> float:
        """Operations a second that an op of this kind is counted on to do."""
        return self.flops_for(dtype, kind) * self.arithmetic_share * self.share_by_kind.get(kind, 1.0)

    def reached_bytes(self, kind: OpKind) -> float:
        """Bytes a second that an op of this kind is counted on to move."""
        return self.bytes_per_s * self.bandwidth_share * self.share_by_kind.get(kind, 1.0)

    def new_memory_s(self, nbytes: float) -> float:
        """Seconds that a new block of this size costs beside what is done in it."""
        return nbytes / (self.new_large_bytes_per_s if nbytes >= self.large_bytes else self.new_bytes_per_s)

    def rounded(self, nbytes: int) -> int:
        """What the allocator hands out for `nbytes`."""
        return -(-nbytes // self.block_bytes) * self.block_bytes


# The fixed roofline on which the solvers are compared; its rates are round numbers, whatever the dtype.
A100 = Device(
    name="an A100 roofline (120 TFLOP/s, 1.3 TB/s, 3 µs an op)",
    memory_bytes=40 * GIB,
    flops_per_s=120e12,
    bytes_per_s=1.3e12,
    launch_us=3.0,
)

# -- allowances for CUDA devices ------------------------------------------------------------------------------------

# Large matrix products reach 60-90% of a datasheet's dense peak, those of real steps less: one factor for all.
ARITHMETIC_SHARE = 0.6
# Elementwise kernels on large tensors reach 75-90% of the datasheet's bandwidth.
BANDWIDTH_SHARE = 0.8
# Copies from pinned memory reach 75-90% of what PCI Express can carry.
HOST_LINK_SHARE = 0.8
# NCCL itself counts on 235 of an A100's 300 GB/s each way (src/graph/tuning.cc).
GROUP_LINK_SHARE = 0.78
# What a step of a ring takes over PCI Express, and what every collective takes to begin, by the same file.
GROUP_LATENCY_US = 5.7
GROUP_START_US = 8.4
# The shortest kernel, from one start to the next; a host too slow to keep the queue full costs more.
LAUNCH_US = 3.0
# A CUDA context with the kernels of PyTorch, cuBLAS and cuDNN loaded.
CONTEXT_BYTES = GIB // 2
# PyTorch's caching allocator rounds each tensor to 512 B. What lies unused between its blocks is simulated (see
# planner/allocator.py); this share is for what no simulation knows of: memory that libraries take when first used.
BLOCK_BYTES = 512
FRAGMENTATION_SHARE = 0.01
# PyTorch's own cuBLAS workspace (":4096:2:16:8").
CUBLAS_WORKSPACE_BYTES = 8 * MIB + 128 * 2**10


def cuda_workspaces(matmul_bytes: int = CUBLAS_WORKSPACE_BYTES) -> dict[OpKind, Workspace]:
    """cuBLAS as PyTorch sets it up (it keeps that for the process's life; here each product counts it).

    For cuDNN one copy of all that the convolution reads, or makes, in the kernel's own layout: what oneDNN is seen to
    use on a CPU. For the backward of fused attention the query's gradient in float32: of the five tensors of 16 bits
    that it reads, twice the size of one.
    """
    return {
        OpKind.MATMUL: Workspace(fixed_bytes=matmul_bytes),
        OpKind.CONVOLUTION: Workspace(share=1.0),
        OpKind.CONVOLUTION_BACKWARD: Workspace(share=1.0),
        OpKind.ATTENTION_BACKWARD: Workspace(share=0.4),
    }


def find_device(name_or_path: str) -> Device:
    """A known device by name, in any case, with or without its dashes; or the user's own, by a TOML file.

    "cpu" is the CPU at hand, by a benchmark of some seconds.

    The file holds datasheet figures under names that carry their units. Four are needed::

        name = "my card"
        memory_gib = 24
        bandwidth_gb_per_s = 936
        float32_tflops = 35.6

    These may follow: tf32_tflops, float16_tflops, bfloat16_tflops (left out: at float32's rate, and no flash
    attention without the last), launch_us, arithmetic_share, bandwidth_share, reserved_gib, fragmentation_share,
    block_bytes, matmul_workspace_mib, convolution_workspace_share, host_link_gb_per_s (each way; without it nothing is
    moved to the host), host_link_share, group_link_gb_per_s (each way, to the next device of the same server; without
    it there is no estimate for several), group_link_share, group_latency_us, source. Left out, they are what is allowed
    for every CUDA device. In place of reserved_gib, seen_gib may say how much of the memory the driver shows to
    programs.
    """
    path = Path(name_or_path)
    if path.suffix.lower() == ".toml" or path.is_file():
        return _from_file(path)
    wanted = _plain(name_or_path)
    if wanted == "cpu":
        from profiler.estimating import calibration

        return calibration.calibrated_cpu()
    found = next((d for d in DEVICES.values() if _plain(d.name) == wanted), None)
    if found is None:
        raise DeviceError(
            f"unknown device {name_or_path!r}: there are {', '.join(DEVICES)} and cpu; "
            "your own goes by a file, my_card.toml"
        )
    return found


def _plain(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum()).removesuffix("gb").removeprefix("nvidia")


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Number:
    """What a number in a device file may be."""

    what: str
    least: float
    most: float = math.inf
    needed: bool = False
    whole: bool = False
    least_is_allowed: bool = False

    def accepts(self, value: Any) -> bool:
        kinds = (int,) if self.whole else (int, float)
        if type(value) not in kinds or not math.isfinite(value):
            return False
        above = value >= self.least if self.least_is_allowed else value > self.least
        return bool(above and value <= self.most)


_ABOVE_ZERO = "a number above 0"
_SHARE = "a share above 0, at most 1"
_NUMBERS = {
    "memory_gib": _Number(_ABOVE_ZERO, 0, needed=True),
    "bandwidth_gb_per_s": _Number(_ABOVE_ZERO, 0, needed=True),
    "float32_tflops": _Number(_ABOVE_ZERO, 0, needed=True),
    "tf32_tflops": _Number(_ABOVE_ZERO, 0),
    "float16_tflops": _Number(_ABOVE_ZERO, 0),
    "bfloat16_tflops": _Number(_ABOVE_ZERO, 0),
    "launch_us": _Number("a number of at least 0", 0, least_is_allowed=True),
    "arithmetic_share": _Number(_SHARE, 0, 1),
    "bandwidth_share": _Number(_SHARE, 0, 1),
    "reserved_gib": _Number("a number of at least 0", 0, least_is_allowed=True),
    "seen_gib": _Number(_ABOVE_ZERO, 0),
    "fragmentation_share": _Number("a share from 0 to 0.9", 0, 0.9, least_is_allowed=True),
    "block_bytes": _Number("a whole number of at least 1", 1, whole=True, least_is_allowed=True),
    "matmul_workspace_mib": _Number("a number of at least 0", 0, least_is_allowed=True),
    "host_link_gb_per_s": _Number(_ABOVE_ZERO, 0),
    "host_link_share": _Number(_SHARE, 0, 1),
    "group_link_gb_per_s": _Number(_ABOVE_ZERO, 0),
    "group_link_share": _Number(_SHARE, 0, 1),
    "group_latency_us": _Number("a number of at least 0", 0, least_is_allowed=True),
    "convolution_workspace_share": _Number("a number of at least 0", 0, least_is_allowed=True),
}
_TEXTS = {"name": True, "source": False}  # whether it is needed


def _from_file(path: Path) -> Device:
    given = _read(path)
    _check_fields(path, given)
    return _built(given, source=f"the file {path}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DeviceError(f"{path}: no such device file; known by name are {', '.join(DEVICES)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeviceError(f"{path}: not a TOML file: {error}") from None


def _check_fields(path: Path, given: Mapping[str, Any]) -> None:
    known = [*_TEXTS, *_NUMBERS]
    for name, value in given.items():
        if name not in known:
            raise DeviceError(f"{path}: unknown field {name} = {value!r}: there are {', '.join(known)}")
        if name in _TEXTS and not (isinstance(value, str) and value.strip()):
            raise DeviceError(f"{path}: {name} = {value!r}: expected text that is not empty")
        if name in _NUMBERS and not _NUMBERS[name].accepts(value):
            raise DeviceError(f"{path}: {name} = {value!r}: expected {_NUMBERS[name].what}")
    needed = [n for n, text in _TEXTS.items() if text] + [n for n, number in _NUMBERS.items() if number.needed]
    if absent := [name for name in needed if name not in given]:
        raise DeviceError(f"{path}: the field {absent[0]} is missing; a device file needs {', '.join(needed)}")
    if given.get("reserved_gib", 0) >= given["memory_gib"]:
        raise DeviceError(
            f"{path}: reserved_gib = {given['reserved_gib']!r}: expected less than memory_gib = {given['memory_gib']!r}"
        )
    if given.get("seen_gib", 0) > given["memory_gib"]:
        raise DeviceError(
            f"{path}: seen_gib = {given['seen_gib']!r}: expected at most memory_gib = {given['memory_gib']!r}"
        )
    if {"seen_gib", "reserved_gib"} <= given.keys():
        raise DeviceError(f"{path}: seen_gib and reserved_gib say the same thing: leave one out")


def _built(given: Mapping[str, Any], *, source: str) -> Device:
    dtypes = ("float32", "tf32", "float16", "bfloat16")
    rates = {dtype: given[f"{dtype}_tflops"] * 1e12 for dtype in dtypes if f"{dtype}_tflops" in given}
    workspaces = cuda_workspaces(int(given.get("matmul_workspace_mib", CUBLAS_WORKSPACE_BYTES / MIB) * MIB))
    if "convolution_workspace_share" in given:
        share = Workspace(share=given["convolution_workspace_share"])
        workspaces |= {OpKind.CONVOLUTION: share, OpKind.CONVOLUTION_BACKWARD: share}
    memory_bytes = int(given["memory_gib"] * GIB)
    return Device(
        name=given["name"].strip(),
        memory_bytes=memory_bytes,
        flops_per_s=rates["float32"],
        bytes_per_s=given["bandwidth_gb_per_s"] * 1e9,
        launch_us=given.get("launch_us", LAUNCH_US),
        flops_by_dtype=rates,
        arithmetic_share=given.get("arithmetic_share", ARITHMETIC_SHARE),
        bandwidth_share=given.get("bandwidth_share", BANDWIDTH_SHARE),
        block_bytes=given.get("block_bytes", BLOCK_BYTES),
        reserved_bytes=min(memory_bytes, _reserved_bytes(given)),
        fragmentation_share=given.get("fragmentation_share", FRAGMENTATION_SHARE),
        allocator=Allocator.CACHING,
        workspaces=workspaces,
        host_link=_host_link(given),
        group_link=_group_link(given),
        source=given.get("source", source),
    )


def _host_link(given: Mapping[str, Any]) -> HostLink | None:
    if "host_link_gb_per_s" not in given:
        return None
    return HostLink.of(given["host_link_gb_per_s"] * given.get("host_link_share", HOST_LINK_SHARE))


def _group_link(given: Mapping[str, Any]) -> GroupLink | None:
    if "group_link_gb_per_s" not in given:
        return None
    reached = given["group_link_gb_per_s"] * given.get("group_link_share", GROUP_LINK_SHARE)
    latency_us = given.get("group_latency_us", GROUP_LATENCY_US)
    return GroupLink.of(reached, latency_us=latency_us, start_us=GROUP_START_US)


def _reserved_bytes(given: Mapping[str, Any]) -> int:
    if "reserved_gib" in given:
        return int(given["reserved_gib"] * GIB)
    return int((given["memory_gib"] - given.get("seen_gib", given["memory_gib"])) * GIB) + CONTEXT_BYTES


# -- known ones --------------------------------------------------------------------------------------------------------

_CATALOGUE = Path(__file__).with_name("devices.toml")


def _known() -> Iterator[Device]:
    for given in _read(_CATALOGUE)["device"]:
        _check_fields(_CATALOGUE, given)
        yield _built(given, source="")


# Name -> device, the smallest memory first.
DEVICES: Mapping[str, Device] = {d.name: d for d in sorted(_known(), key=lambda d: (d.usable_bytes, d.name))}
