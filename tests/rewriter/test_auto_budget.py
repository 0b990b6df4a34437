"""budget="auto": what a GPU has free, read through a stand-in of torch.cuda."""

import pytest
import torch

from planner.errors import BudgetError
from planner.synthetic import chain
from rewriter.budgets import FRAGMENTATION, auto_budget


class FakeCuda:
    """A GPU of 1000 bytes with 600 free; 200 are reserved, 150 of them in use."""

    def mem_get_info(self, device):
        return 600, 1000

    def memory_reserved(self, device):
        return 200

    def memory_allocated(self, device):
        return 150


def test_it_is_the_start_and_all_that_is_free_or_cached_less_a_share_for_fragmentation():
    graph = chain(3)
    budget = auto_budget(graph, torch.device("cuda"), FakeCuda())
    assert budget == graph.start_bytes + 600 + 50 - FRAGMENTATION * 1000


def test_on_the_cpu_it_is_refused_with_what_to_say_instead():
    with pytest.raises(BudgetError, match="say bytes or a share"):
        auto_budget(chain(3), torch.device("cpu"), FakeCuda())
