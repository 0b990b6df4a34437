"""Models of other libraries behind the model door: eager's bits, a peak within the budget, one form."""

import copy
import random

import numpy as np
import pytest
import torch

from profiler.measuring.meters import CpuMeter, peak_above_start
from rewriter import checkpoint_model
from rewriter.proof import same_bits
from rewriter.ways.common import Way
from tests.profiler import library_models as models


def llama():
    _, model, _, batch = models.language_model("Llama", mask=True, checkpointing=False)()
    return model, batch


def t5():
    library = models.transformers()
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
    model = library.T5ForConditionalGeneration(library.T5Config(**sizes, decoder_start_token_id=0))
    return model, {"input_ids": torch.randint(3, 100, (2, 16)), "labels": torch.randint(3, 100, (2, 16))}


def whisper():
    _, model, _, batch = models.whisper()
    return model, batch


def wav2vec2():
    """Draws its masks from numpy, which Dynamo does by other numbers, and picks frames by them."""
    library = models.transformers()
    config = library.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16),
        conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        vocab_size=20, num_feat_extract_layers=2, mask_time_length=2, mask_feature_length=2,
    )  # fmt: skip
    batch = {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 20, (2, 5))}
    return library.Wav2Vec2ForCTC(config), batch


def unet():
    models.transformers()
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    hidden = torch.randn(2, 5, 16)
    return model, {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7]), "encoder_hidden_states": hidden}


def stepped(model, batch, seed):
    """What one forward and backward leave, from one seed of every generator."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model.zero_grad()
    returned = model(**batch)
    loss = returned.loss if "loss" in returned else returned.sample.pow(2).mean()
    loss.backward()
    grads = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [llama, t5, whisper, wav2vec2, unet])
def test_a_library_model_has_eagers_bits_at_every_step_within_its_budget(make):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, batch = make()
    planned = copy.deepcopy(eager.train())
    checkpoint_model(planned, budget="75%", strategy="mutwo")
    for seed in range(3):
        expected, actual = stepped(eager, batch, seed), stepped(planned, batch, seed)
        assert all(map(same_bits, expected, actual)), f"step {seed}"
    assert planned.planned.way is (Way.BLOCKS if make is wav2vec2 else Way.OWN_CAPTURE)
    problem = planned.planned.solution.problem
    room = problem.budget_bytes - problem.graph.start_bytes
    assert planned.planned.verification.measured_peak_bytes <= 1.005 * room


def backward_of(returned):
    """Holds what the model returned, as `stepped` does."""
    returned.loss.backward()


@pytest.mark.filterwarnings("ignore")
def test_gpt2_through_changing_lengths_has_one_capture_few_plans_and_a_known_peak():
    torch._dynamo.reset()
    torch.manual_seed(0)
    library = models.transformers()
    config = library.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=100, n_positions=64)
    eager = library.GPT2LMHeadModel(config).train()
    planned = copy.deepcopy(eager)
    checkpoint_model(planned, budget="75%", strategy="mutwo", dynamic=True)

    def batch(length):
        ids = torch.randint(0, 100, (4, length), generator=torch.Generator().manual_seed(length))
        return {"input_ids": ids, "labels": ids}

    for seed, length in enumerate((40, 40, 24, 33, 56, 17)):
        expected, actual = stepped(eager, batch(length), seed), stepped(planned, batch(length), seed)
        assert all(map(same_bits, expected, actual)), f"length {length}"
    session = planned.planned.taken.session
    assert len({key.graphs for key in session.routes}) == 1
    (route,) = {key.graphs for key in session.routes}
    assert len(route) == len(session.graphs) > 1
    assert sum(len(one.plans) for one in session.routes.values()) <= 4
    planned.zero_grad()
    peak = peak_above_start(CpuMeter(), lambda: backward_of(planned(**batch(17))))
    predicted = planned.planned.timeline().above_start_bytes
    assert abs(predicted - peak) <= 0.02 * peak
