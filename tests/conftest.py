"""What holds for every test: one thread, the same random examples in every run, and a short way for the collector."""

import gc
import os

from hypothesis import settings

# Small models lose time with more threads, bits never depend on them then, and two workers share two cores. Set before
# torch is first imported, and so that the processes which tests start keep to it as well.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")


def pytest_collection_finish():
    """What the imports made stays to the end: the collector need not look through it again at every capture."""
    gc.collect()
    gc.freeze()
