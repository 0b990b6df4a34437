"""Will it fit on several devices that are not here: figures of one rank, and how few of them would do."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from bench.__main__ import main
from bench.fit.cluster import Cluster, fewest
from bench.fit.printing import print_fit
from bench.fit.question import FitError, fit
from profiler.estimating.devices import find_device
from profiler.tracing.ranks.imagined import Sharding
from profiler.workload import Workload

WIDTH, DEPTH, RANKS, QUICK_S = 512, 3, 8, 0.2


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    return loss


def make(batch):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)))
    return Workload(step, model, torch.optim.AdamW(model.parameters(), fused=True), torch.randn(batch, WIDTH))


STATE_BYTES = 3 * 4 * DEPTH * (WIDTH * WIDTH + WIDTH)  # parameters and both moments


def small_card(mib):
    """A card with so little memory that a few small layers fill it."""
    card = replace(find_device("A100-40"), memory_bytes=mib * 2**20, reserved_bytes=0, fragmentation_share=0.0)
    return replace(card, allocator=None, workspaces={})


@pytest.fixture(scope="module")
def reports():
    def asked(sharding, mib):
        cluster = Cluster(ranks=RANKS, sharding=sharding)
        return fit(make, small_card(mib), batch=256, time_limit_s=QUICK_S, cluster=cluster)

    return {Sharding.FSDP2: asked(Sharding.FSDP2, 11), Sharding.DDP: asked(Sharding.DDP, 24)}


def test_a_rank_of_shards_holds_its_share_of_parameters_and_state(reports):
    report = reports[Sharding.FSDP2]
    assert STATE_BYTES / RANKS < report.start_bytes < 1.5 * STATE_BYTES / RANKS + 256 * WIDTH * 4
    assert report.cluster.wrapper_bytes == 0
    assert report.cluster.gathers_again.peak_bytes < report.unplanned.peak_bytes
    assert report.cluster.gathers_again.communication_us > report.unplanned.communication_us


def test_a_rank_of_replicas_has_less_memory_by_the_buckets_that_its_wrapper_holds(reports):
    report = reports[Sharding.DDP]
    assert report.start_bytes >= STATE_BYTES
    assert report.cluster.wrapper_bytes == STATE_BYTES // 3
    assert report.usable_bytes == 24 * 2**20 - STATE_BYTES // 3
    assert 0 < report.unplanned.hidden_share <= 1


def test_the_smallest_number_of_ranks_is_found_and_told(reports, capsys):
    found = reports[Sharding.FSDP2].cluster
    assert found.fewest is not None
    assert 1 < found.fewest <= RANKS
    rows = {row.ranks: row for row in found.by_ranks}
    assert rows[found.fewest].fits
    assert not any(row.fits for ranks, row in rows.items() if ranks < found.fewest)
    print_fit(reports[Sharding.FSDP2])
    said = capsys.readouterr().out
    assert f"The smallest number of ranks found is {found.fewest}." in said
    assert "estimated" in said
    assert "of that hidden" in said


def test_ranks_are_looked_for_by_halves():
    for least in (1, 2, 5, 8, 20):
        assert fewest(lambda ranks, least=least: ranks >= least, asked=8, asked_fits=least <= 8) == least
    assert fewest(lambda _: False, asked=8, asked_fits=False) is None


def test_a_device_without_a_link_to_others_is_one_line():
    alone = replace(small_card(11), group_link=None)
    with pytest.raises(FitError, match="group_link_gb_per_s"):
        fit(make, alone, batch=4, cluster=Cluster(ranks=2, sharding=Sharding.DDP))


def test_a_way_to_share_without_ranks_is_one_line(capsys):
    assert main(["fit", "--model", "resnet18", "--shard", "ddp"]) == 2
    assert "--ranks 8" in capsys.readouterr().err
