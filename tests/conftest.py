"""What holds for every test: one thread, the same random examples in every run, and a short way for the collector."""

import gc
import logging
import os
import random
import signal
import sys

import pytest
from hypothesis import settings

# Small models lose time with more threads, bits never depend on them then, and two workers share two cores. Set before
# torch is first imported, and so that the processes which tests start keep to it as well.
os.environ["OMP_NUM_THREADS"] = "1"

# What runs in the background of a shell is told to ignore interrupts, and so would be the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")


_MANY_MODULES = 25
_modules_frozen = 0


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect():
    """What is there when a file's tests begin stays: the collector need not look through it again at every capture."""
    _freeze()


def _freeze():
    global _modules_frozen
    gc.collect()
    gc.freeze()
    _modules_frozen = len(sys.modules)


@pytest.fixture(autouse=True)
def _nor_of_what_a_test_imported():
    """Nor what a test before this one imported: torch alone brings hundreds of modules with its first capture."""
    if len(sys.modules) > _modules_frozen + _MANY_MODULES:
        _freeze()


@pytest.fixture(autouse=True)
def _torch_traces_for_nobody():
    """pytest listens to every logger that hands nothing on, and torch writes a stack for each fake tensor then."""
    logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def _drawn_from_a_seed():
    """What a test draws does not hang on the tests that ran before it in the same process."""
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
