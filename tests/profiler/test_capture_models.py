"""Every model of the zoo, small, captured: the graph's bits are eager's over several steps."""

import pytest
import torch
from torch import nn

from bench.workloads import zoo as models
from planner.ir import Rerun
from profiler.tracing.fake_tensors.without_memory import without_memory
from tests.rewriter import tiny
from tests.side_by_side import assert_captured_equals_eager


def test_a_captured_mobilenet_as_published_equals_eager():
    assert_captured_equals_eager(lambda: models.mobilenet(2, image=32, classes=10), steps=2)


def test_a_captured_resnet_of_basic_blocks_equals_eager():
    assert_captured_equals_eager(tiny.resnet)


def test_a_captured_resnet152_equals_eager():
    """All 155 of its norms, with narrow convolutions between; ResNet-50 has the same blocks, fewer of them."""
    narrow = {"image": 32, "classes": 10, "width_per_group": 1}
    traced = assert_captured_equals_eager(lambda: models.resnet152(2, **narrow), steps=2)
    norms = [op for op in traced.graph.ops if "native_batch_norm.default" in op.target]
    assert len(norms) == 155
    assert all(op.rerun is Rerun.WITHOUT_SIDE_EFFECT and len(op.mutates) == 2 for op in norms)


def test_a_captured_densenet_whose_layers_read_all_before_them_equals_eager():
    assert_captured_equals_eager(tiny.densenet, steps=2)


PUBLISHED = [("resnet18", 11.7), ("resnet50", 25.6), ("densenet121", 8.0), ("convnext", 28.6)]


@pytest.mark.parametrize(("name", "million_params"), PUBLISHED)
def test_a_model_whose_blocks_are_captured_elsewhere_is_made_as_published(name, million_params):
    with without_memory():
        _, model, _, _ = models.ZOO[name](2)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6 * million_params, rel=0.01)


def test_a_captured_vision_transformer_equals_eager():
    assert_captured_equals_eager(tiny.vit)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_captured_bert_with_tied_decoder_and_dropout_equals_eager(attention):
    traced = assert_captured_equals_eager(lambda: models.bert(2, seq=16, attention=attention, **tiny.BERT))
    assert any(op.rerun is Rerun.REPLAY_RNG for op in traced.graph.ops)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_captured_gpt2_with_dropout_equals_eager(attention):
    assert_captured_equals_eager(lambda: models.gpt2(2, seq=16, attention=attention, **tiny.GPT2))


def test_a_recurrent_model_equals_eager():
    class Tagger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(4, 8, num_layers=2, dropout=0.1, batch_first=True)
            self.head = torch.nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    def make():
        model = Tagger()
        batch = torch.randn(4, 5, 4), torch.randint(0, 3, (4,))
        return models.classify, model, torch.optim.SGD(model.parameters(), lr=0.1), batch

    assert_captured_equals_eager(make)


def test_a_product_of_groups_is_eagers_in_float32():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 16) * 0.1)

        def forward(self, x):
            ends = torch.tensor([2, 5, 8], dtype=torch.int32)
            return torch.nn.functional.grouped_mm(x, self.weight, offs=ends)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    def make():
        model = Experts()
        return step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 8)

    assert_captured_equals_eager(make)
