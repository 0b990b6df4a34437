"""Tiny models of other libraries, trained as their users write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.workloads.zoo import declare_torchvision_ops

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "use_cache": False,
}

FAMILIES = ("Llama", "Qwen3", "Mistral", "Gemma")

Make = Callable[[], tuple[Any, ...]]


def transformers() -> Any:
    """The library, whose models probe torchvision."""
    declare_torchvision_ops()
    import transformers

    return transformers


def language_model(family: str, *, mask: bool, checkpointing: bool, **changed: Any) -> Make:
    """A maker of a causal language model with everyday settings."""

    def make() -> tuple[Any, ...]:
        library = transformers()
        config = getattr(library, f"{family}Config")(**{**SIZES, **changed})
        model = getattr(library, f"{family}ForCausalLM")(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = torch.randint(3, 100, (2, 16))
        batch = {"input_ids": ids, "labels": ids.clone()} | ({"attention_mask": torch.ones_like(ids)} if mask else {})
        return _step_on_keywords, model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), batch

    return make


def _step_on_keywords(model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def whisper() -> tuple[Any, ...]:
    """Whisper with its defaults: it draws at every layer whether to skip it."""
    library = transformers()
    config = library.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=300, num_mel_bins=20, max_source_positions=50,
        max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = library.WhisperForConditionalGeneration(config).train()
    batch = {"input_features": torch.randn(2, 20, 100), "labels": torch.randint(3, 300, (2, 12))}
    return _step_on_keywords, model, torch.optim.AdamW(model.parameters(), 1e-3), batch


def transformer_encoder() -> tuple[Any, ...]:
    """torch's own encoder, which looks whether its mask is causal."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    mask = nn.Transformer.generate_square_subsequent_mask(8)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch, mask=mask).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, model, torch.optim.AdamW(model.parameters(), 1e-3), torch.randn(3, 8, 32)


def policy() -> tuple[Any, ...]:
    """A policy gradient by torch.distributions, which validates what it is given."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        chances = torch.distributions.Categorical(logits=model(batch))
        action = chances.sample()
        loss = -(chances.log_prob(action) * batch[:, 0]).mean() - 0.01 * chances.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), action

    return step, model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(5, 6)


def clipped() -> tuple[Any, ...]:
    """Clipping that looks whether the norm is finite."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
        optimizer.step()
        return loss, norm

    return step, model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(5, 6)


def averaged(**options: Any) -> Make:
    """A maker of a model whose average is updated in the step and returned by it."""

    def make() -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        average = torch.optim.swa_utils.AveragedModel(model, **options)

        def step(model: Any, optimizer: Any, batch: Any) -> Any:
            loss = model(batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            return loss, [tensor.detach().clone() for tensor in (*average.parameters(), *average.buffers())]

        return step, model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(5, 6)

    return make
