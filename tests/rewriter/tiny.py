"""The zoo in the small: widths so small and batches so large that activations, not gradients, make the peak."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.workloads import zoo as models

BERT = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {
    "vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def _torchvision(name: str) -> Any:
    models.declare_torchvision_ops()
    return importlib.import_module(f"torchvision.models.{name}")


def resnet() -> Any:
    """torchvision's basic blocks with their batch norms, narrow."""
    block = _torchvision("resnet").BasicBlock

    def wider(inside: int, outside: int, stride: int) -> nn.Module:
        shortcut = nn.Conv2d(inside, outside, 1, stride=stride, bias=False), nn.BatchNorm2d(outside)
        return block(inside, outside, stride=stride, downsample=nn.Sequential(*shortcut))

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        wider(4, 16, 1), block(16, 16), block(16, 16), wider(16, 20, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 4),
    )  # fmt: skip
    return models.classify, model, models.fused_sgd(list(model.parameters())), images(8)


def mobilenet() -> Any:
    """torchvision's MobileNetV3 with four of its blocks: squeeze and excitation, hardswish."""
    module = _torchvision("mobilenetv3")
    config = partial(module.InvertedResidualConfig, width_mult=1.0)
    blocks = [
        config(8, 3, 16, 8, False, "RE", 1, 1),
        config(8, 3, 16, 8, True, "HS", 1, 1),
        config(8, 5, 16, 8, True, "HS", 1, 1),
        config(8, 3, 16, 8, False, "HS", 1, 1),
    ]
    model = module.MobileNetV3(blocks, last_channel=16, num_classes=4)
    return models.classify, model, models.fused_sgd(list(model.parameters())), images(8)


def densenet() -> Any:
    """torchvision's DenseNet with four blocks of few layers: every layer reads all before it in its block."""
    module = _torchvision("densenet")
    model = module.DenseNet(growth_rate=4, block_config=(2, 3, 2, 2), num_init_features=8, num_classes=4)
    return models.classify, model, models.fused_sgd(list(model.parameters())), (torch.randn(2, 3, 32, 32), images(2)[1])


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 16 pixels, in four classes."""
    return torch.randn(count, 3, 16, 16), torch.randint(0, 4, (count,))


vit = partial(models.vit, 8, image=16, patch=4, layers=2, heads=2, width=16, classes=4, dropout=0.1)
bert = partial(models.bert, 8, seq=16, **BERT)
gpt2 = partial(models.gpt2, 8, seq=16, **GPT2)

ZOO = {"resnet": resnet, "mobilenet": mobilenet, "vit": vit, "bert": bert, "gpt2": gpt2}


def network() -> nn.Module:
    """Convolutions, batch norms, in-place ReLUs, dropouts: every kind of rerun, and a few equal layers of each.

    Sixteen channels fill the vectors of every CPU: with fewer, a convolution's workspace is padded on some CPUs and not
    on others, and so large beside such small tensors that the same budget fits here and not there.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.Hardswish(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 4))


def with_step(step: Any, *, optimizer: Any = None, model: Any = network) -> Any:
    """A maker of that step on the small network."""

    def make() -> Any:
        made = model()
        chosen = (optimizer or sgd)(made)
        return step, made, chosen, images(8)

    return make


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay, as it comes."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


plain = with_step(models.classify)  # the small network with the ordinary step
