"""Hugging Face's transformers: one model of each type that trains from a small configuration."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.workloads.architectures.catalogue import Architecture
from bench.workloads.zoo import declare_torchvision_ops, fused_adamw
from planner.extras import needs_extra
from profiler.workload import Workload

BATCH, TOKENS, VOCABULARY, PIXELS = 2, 32, 96, 32

# What makes a configuration small, whichever of these it has; the rest stays as published.
SMALL: dict[str, Any] = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embed_dim": 32, "emb_dim": 32, "embedding_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "intermediate_size": 64, "n_inner": 64, "ffn_dim": 64, "hidden_dim": 64, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "d_ff": 64, "moe_intermediate_size": 32,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY, "type_vocab_size": 2, "max_position_embeddings": 64, "n_positions": 64,
    "max_source_positions": 64, "max_target_positions": 64, "image_size": PIXELS, "patch_size": 8,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "conv_dim": (16, 16), "conv_stride": (5, 4),
    "conv_kernel": (10, 4), "num_feat_extract_layers": 2, "mask_time_length": 2,
}  # fmt: skip
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def train_on_its_loss(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """One step on the loss that the model itself computes."""
    optimizer.zero_grad()
    loss: Tensor = model(**batch).loss
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def make(architecture: Architecture) -> Workload:
    """The training step of a model of Hugging Face's."""
    torch.manual_seed(0)
    declare_torchvision_ops()
    with needs_extra("bench"):
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = small(CONFIG_MAPPING[architecture.family]())
    model = getattr(transformers, architecture.model)(config)
    model.train()
    batch = _batch(architecture.kind, config)
    return Workload(train_on_its_loss, model, fused_adamw(list(model.parameters())), batch)


def small(config: Any) -> Any:
    """The configuration and those inside it, few and narrow layers; what it says of single layers is cut to two."""
    for name, value in SMALL.items():
        known = getattr(config, name, None)
        if known is not None and isinstance(known, (list, tuple)) == isinstance(value, tuple):
            with suppress(AttributeError, NotImplementedError):  # some are worked out from others
                setattr(config, name, value)
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list):
        config.layer_types = (sorted(set(kinds)) * 2)[:2]  # of each kind one, where there are two
    for inner in list(vars(config).values()):
        if type(inner).__name__.endswith("Config"):
            small(inner)
    for name, token in TOKEN_IDS.items():
        setattr(config, name, token)
    return config


def _batch(kind: str, config: Any) -> dict[str, Any]:
    pixels = getattr(config, "image_size", PIXELS)
    pixels = pixels if isinstance(pixels, int) else PIXELS
    classes = torch.arange(BATCH) % 2
    match kind:
        case "causal" | "masked":
            tokens = _tokens()
            return {"input_ids": tokens, "labels": tokens}
        case "seq2seq":
            return {"input_ids": _tokens(), "labels": _tokens()}
        case "image":
            return {
                "pixel_values": torch.randn(BATCH, getattr(config, "num_channels", 3), pixels, pixels),
                "labels": classes,
            }
        case "ctc":
            return {"input_values": torch.randn(BATCH, 2000), "labels": torch.randint(3, 30, (BATCH, 3))}
        case "speech":
            return {"input_features": _spectrogram(config), "labels": torch.randint(3, 30, (BATCH, 5))}
        case "audio":
            return {"input_values": torch.randn(BATCH, 2000), "labels": classes}
        case "video":
            return {"pixel_values": torch.randn(BATCH, config.num_frames, 3, pixels, pixels), "labels": classes}
        case _:
            return {"input_ids": _tokens(), "pixel_values": torch.randn(BATCH, 3, pixels, pixels), "return_loss": True}


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, TOKENS))


def _spectrogram(config: Any) -> Tensor:
    if config.model_type == "whisper":
        return torch.randn(BATCH, config.num_mel_bins, 128)
    return torch.randn(BATCH, 64, getattr(config, "input_feat_per_channel", 80))
