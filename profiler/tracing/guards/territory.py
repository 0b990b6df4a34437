"""Whose code and whose objects: the user's and model libraries' are looked into, torch's machinery is not."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path

import torch

_HERE = str(Path(__file__).parents[3]) + os.sep
_ROOMS = ("planner", "profiler", "rewriter", "strategies")
_OWN = tuple(_HERE + room + os.sep for room in _ROOMS)
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep)
_INSTALLED = (sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep)

# Parts of torch whose Python acts on values of the user's objects.
_LAYERS = ("nn", "optim", "distributions", "amp", "ao")
_LAYER_FILES = tuple(_TORCH + part + os.sep for part in _LAYERS)
_LAYER_MODULES = tuple(f"torch.{part}" for part in _LAYERS)

# Libraries that only show or count: what they hold changes all the time and nothing is computed from it.
_SPECTATORS = (
    "tqdm",
    "wandb",
    "tensorboard",
    "tensorboardX",
    "rich",
    "loguru",
    "mlflow",
    "IPython",
    "pytest",
    "_pytest",
)
_SPECTATOR_FILES = tuple(root + name + os.sep for root in _INSTALLED for name in _SPECTATORS)
_PURE = ("numpy", "typing_extensions", "scipy", "numba", "_pytest", "pytest", "hypothesis")
_PURE_FILES = tuple(root + name + os.sep for root in _INSTALLED for name in _PURE)

# Classes of the standard library that are made to hold values of their users.
_CONTAINERS = ("types.SimpleNamespace", "argparse.Namespace", "_thread._local")


@functools.lru_cache(maxsize=8192)
def is_watched_file(filename: str) -> bool:
    """Whether code of this file may read state that a graph bakes in."""
    if filename.startswith(_TORCH):
        return filename.startswith(_LAYER_FILES)
    if filename.startswith(("<frozen", *_OWN, *_SPECTATOR_FILES, *_PURE_FILES)):
        return False
    return not filename.startswith(_STANDARD) or filename.startswith(_INSTALLED)


def is_library(module_name: str) -> bool:
    """Whether a Python module is torch's, numpy's or of the standard library: theirs is noted, not looked into."""
    root = module_name.partition(".")[0]
    return root in sys.stdlib_module_names or root in ("torch", "builtins", *_PURE)


@functools.lru_cache(maxsize=8192)
def is_installed(module_name: str) -> bool:
    """Whether a Python module is of an installed package, not of the user's own files."""
    return str(getattr(sys.modules.get(module_name), "__file__", None)).startswith(_INSTALLED)


def is_own(kind: type) -> bool:
    """Whether a class is one of this project's, whose objects say what a trace found."""
    return module_of(kind).partition(".")[0] in _ROOMS


def module_of(kind: type) -> str:
    """The name of the module that a class is of; some classes have something else under that name, or nothing."""
    name = kind.__module__
    return name if isinstance(name, str) else ""


@functools.lru_cache(maxsize=8192)
def is_closed(kind: type) -> bool:
    """Whether objects of a class are not looked into: what they hold is not the user's to change."""
    module = module_of(kind)
    name, root = f"{module}.{kind.__qualname__}", module.partition(".")[0]
    if name in _CONTAINERS:
        return False
    return root in _SPECTATORS or (is_library(module) and not module.startswith(_LAYER_MODULES))


# Objects of the standard library that others fill or set, and that code asks for values; not those that only lock.
_ASKED_FOR_VALUES = (
    "multiprocessing.managers", "multiprocessing.synchronize.Event", "multiprocessing.shared_memory.SharedMemory",
    "multiprocessing.connection", "sqlite3", "shelve", "dbm", "mmap.mmap", "_io.StringIO", "_io.BytesIO",
    "threading.Semaphore", "concurrent.futures._base.Future", "asyncio.locks.Event",
)  # fmt: skip


@functools.lru_cache(maxsize=8192)
def is_changed_from_elsewhere(kind: type) -> bool:
    """Whether objects of a class of the standard library hold values that others set and nobody can look at."""
    names = [f"{module_of(cls)}.{cls.__qualname__}." for cls in kind.__mro__]
    return any(name.startswith(f"{known}.") for name in names for known in _ASKED_FOR_VALUES)
