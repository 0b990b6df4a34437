"""One thread: small models lose time with more, and the bits of eager and planned then never depend on it."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
