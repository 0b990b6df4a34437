"""torchvision's models of images and videos, small pictures, random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

from bench.workloads.architectures.catalogue import Architecture
from bench.workloads.zoo import declare_torchvision_ops, fused_sgd
from planner.extras import needs_extra
from profiler.workload import Workload

CLASSES = 10
BATCH = 4


def train_on_all_outputs(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One step on everything that the model gives: its auxiliary heads too."""
    inputs, labels = batch
    optimizer.zero_grad()
    loss = sum((F.cross_entropy(out, labels) for out in _outputs(model(inputs))), torch.zeros(()))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def _outputs(returned: Any) -> list[Tensor]:
    if isinstance(returned, Tensor):
        return [returned]
    entries = returned.values() if isinstance(returned, dict) else returned
    return [entry for entry in entries if isinstance(entry, Tensor)]


def make(architecture: Architecture) -> Workload:
    """The training step of a model of torchvision's."""
    torch.manual_seed(0)
    with needs_extra("bench"):
        declare_torchvision_ops()
        import torchvision
    name = architecture.model
    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **_without_weights(architecture))
    model.train()
    batch = _pictures(architecture)
    return Workload(train_on_all_outputs, model, fused_sgd(list(model.parameters())), batch)


def _without_weights(architecture: Architecture) -> dict[str, Any]:
    return {"weights_backbone": None} if architecture.kind == "segmentation" else {}


def _pictures(architecture: Architecture) -> tuple[Tensor, Tensor]:
    size = architecture.size
    match architecture.kind:
        case "segmentation":
            return torch.randn(BATCH, 3, size, size), torch.randint(0, CLASSES, (BATCH, size, size))
        case "video":
            return torch.randn(2, 3, 16, size, size), torch.randint(0, CLASSES, (2,))
        case _:
            return torch.randn(BATCH, 3, size, size), torch.randint(0, CLASSES, (BATCH,))
