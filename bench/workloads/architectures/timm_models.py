"""timm's models of images: one of each of its modules, the smallest."""

from __future__ import annotations

import torch

from bench.workloads.architectures.catalogue import Architecture
from bench.workloads.architectures.torchvision_models import BATCH, CLASSES, train_on_all_outputs
from bench.workloads.zoo import declare_torchvision_ops, fused_sgd
from planner.extras import needs_extra
from profiler.workload import Workload


def make(architecture: Architecture) -> Workload:
    """The training step of a model of timm's."""
    torch.manual_seed(0)
    declare_torchvision_ops()
    with needs_extra("zoo"):
        import timm
    model = timm.create_model(architecture.model, pretrained=False, num_classes=CLASSES)
    model.train()
    batch = torch.randn(BATCH, 3, architecture.size, architecture.size), torch.randint(0, CLASSES, (BATCH,))
    return Workload(train_on_all_outputs, model, fused_sgd(list(model.parameters())), batch)
