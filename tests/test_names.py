"""No function of a package hides the module of its name."""

import importlib
import pkgutil
from types import ModuleType

import pytest

PACKAGES = ("planner", "strategies", "profiler", "rewriter")
ROOMS = ("profiler.tracing", "profiler.measuring", "profiler.estimating")


@pytest.mark.parametrize("name", PACKAGES + ROOMS)
def test_what_is_imported_by_a_modules_name_is_the_module(name):
    package = importlib.import_module(name)
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{name}.{found.name}")
        assert isinstance(getattr(package, found.name), ModuleType), f"{name}.{found.name}"
