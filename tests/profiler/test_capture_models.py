"""Every model of the zoo, small, captured: the graph's bits are eager's over several steps."""

import pytest
import torch

from bench.workloads import zoo as models
from planner.ir import Rerun
from tests.side_by_side import assert_captured_equals_eager

BERT = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {
    "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet", "densenet121"])
def test_a_captured_image_model_equals_eager(name):
    assert_captured_equals_eager(lambda: models.ZOO[name](2, image=32, classes=10), steps=2)


def test_a_captured_resnet152_equals_eager():
    traced = assert_captured_equals_eager(lambda: models.resnet152(2, image=32, classes=10), steps=2)
    norms = [op for op in traced.graph.ops if "native_batch_norm.default" in op.target]
    assert len(norms) == 155
    assert all(op.rerun is Rerun.WITHOUT_SIDE_EFFECT and len(op.mutates) == 2 for op in norms)


def test_a_captured_vision_transformer_equals_eager():
    make = lambda: models.vit(2, image=32, layers=2, heads=2, width=32, dropout=0.1, classes=10)  # noqa: E731
    assert_captured_equals_eager(make)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_captured_bert_with_tied_decoder_and_dropout_equals_eager(attention):
    traced = assert_captured_equals_eager(lambda: models.bert(2, seq=16, attention=attention, **BERT))
    assert any(op.rerun is Rerun.REPLAY_RNG for op in traced.graph.ops)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_captured_gpt2_with_dropout_equals_eager(attention):
    assert_captured_equals_eager(lambda: models.gpt2(2, seq=16, attention=attention, **GPT2))


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
