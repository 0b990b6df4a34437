"""Steps made of tensors without memory: the same graph as of real ones, and never run."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.plan import Plan
from planner.schedule import lower
from planner.simulator import simulate
from profiler import CaptureError, capture, capture_without_memory, measure
from profiler.tracing.fake_tensors.without_memory import without_memory
from rewriter.replay import apply
from tests.profiler.small import adam, make, mlp, plain, sgd
from tests.rewriter import tiny
from tests.shared import case_of


class Tied(nn.Module):
    """One matrix as embedding and as head."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def tied_step(model, optimizer, tokens):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    return loss


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


WORKLOADS = {
    "batch norm, dropout, sgd": make(model=mlp, optimizer=sgd),
    "fused adamw": make(model=mlp, optimizer=fused_adamw),
    "opaque adam": make(model=plain, optimizer=adam),
    "tied weights": make(tied_step, model=Tied, optimizer=fused_adamw, batch=lambda: torch.randint(0, 11, (3, 5))),
} | {name: tiny.ZOO[name] for name in ("resnet", "vit", "gpt2")}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_graph_is_that_of_real_tensors(name):
    real = case_of(WORKLOADS[name]).captured.graph
    fake = capture_without_memory(lambda n: WORKLOADS[name](), 3).graph
    assert fake.fingerprint == real.fingerprint
    peaks = [simulate(graph, lower(graph, Plan())) for graph in (real, fake)]
    assert peaks[0].peak_bytes == peaks[1].peak_bytes
    assert peaks[0].peak_by_role == peaks[1].peak_by_role


def test_a_model_whose_library_reads_a_value_is_captured_on_the_path_it_takes_when_traced():
    """BERT asks whether its mask is all ones, which nobody can say of a tensor without memory."""
    assert len(capture_without_memory(lambda n: tiny.ZOO["bert"](), 3).graph.ops) > 100


def test_a_model_larger_than_any_memory_is_captured():
    width = 2**20  # a matrix of 4 TiB

    def huge(batch):
        model = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, 4, bias=False))
        return make(model=lambda: model, batch=lambda: (torch.randn(batch, width), torch.randint(0, 4, (batch,))))()

    graph = capture_without_memory(huge, 8).graph
    assert graph.start_bytes > 4 * width * width


def test_the_optimizers_state_that_does_not_exist_yet_is_counted():
    graph = capture_without_memory(lambda n: make(model=plain, optimizer=fused_adamw)(), 3).graph
    roles = [s.role.value for s in graph.storages]
    assert roles.count("opt_state") == 3 * roles.count("param")  # two moments and the step counter


def test_making_without_memory_leaves_the_generators_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    capture_without_memory(lambda n: tiny.resnet(), 8)
    assert torch.equal(torch.rand(3), expected)


def test_a_step_without_memory_is_refused_by_all_that_would_run_it():
    with without_memory():
        workload = make()()
    step = capture(*workload, name="ghost")
    schedule = lower(step.graph, Plan())
    for use in (lambda: step.run(workload[3]), lambda: measure(step, workload[3]), lambda: apply(step, schedule)):
        with pytest.raises(
            CaptureError, match="ghost was captured for planning and cannot be run: its tensors have no"
        ):
            use()


def test_a_workload_that_reads_values_while_it_is_made_is_told_with_its_line():
    def reads(batch):
        rate = torch.linspace(0, 1, 3)[1].item()
        return make(model=lambda: nn.Sequential(nn.Dropout(rate), plain()))()

    with pytest.raises(CaptureError, match=r"without memory(.|\n)*test_fake_capture(.|\n)*reads a tensor's value"):
        capture_without_memory(reads, 3)


def test_a_model_that_is_fake_in_part_is_refused():
    train_step, model, optimizer, batch = make()()
    with without_memory():
        model[0].weight = nn.Parameter(torch.empty(8, 6))
    with pytest.raises(CaptureError, match="is a real tensor and others of the model are fake"):
        capture(train_step, model, optimizer, batch)


def test_a_model_of_two_modes_is_refused():
    with without_memory():
        train_step, model, optimizer, batch = make()()
    with without_memory():
        model[0].weight = nn.Parameter(torch.empty(8, 6))
    with pytest.raises(CaptureError, match="several modes"):
        capture(train_step, model, optimizer, batch)


def test_a_real_batch_goes_with_a_model_without_memory():
    batch = torch.randn(12, 6), torch.randint(0, 4, (12,))
    real = capture(*make()()).graph
    assert capture_without_memory(lambda n: make(batch=lambda: batch)(), 12).graph.fingerprint == real.fingerprint
