"""The model zoo: ordinary models with random weights and made data; nothing is downloaded.

Each `make` function gives `(train_step, model, optimizer, batch)`, seeded. Options beside the batch size have
the published model's own values as defaults and make small models for tests.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.optim import Optimizer

from planner.extras import needs_extra
from profiler.workload import Workload

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


# `make(batch_size, **options)`, of the zoo or of the user's own module: one of the latter may give a plain tuple.
Maker = Callable[..., Workload]


def fused_sgd(params: list[nn.Parameter]) -> Optimizer:
    """SGD with momentum, fused: inside the graph."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)


def fused_adamw(params: list[nn.Parameter]) -> Optimizer:
    """AdamW, fused: inside the graph."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


# -- images ---------------------------------------------------------------------------------------------------


def classify(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One ordinary training step of an image classifier."""
    images, labels = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def _image_model(
    name: str,
    batch_size: int,
    *,
    optimizer: MakeOptimizer,
    image: int,
    classes: int,
    seed: int,
    **config: Any,
) -> Workload:
    torch.manual_seed(seed)
    make = getattr(_torchvision_models(), name)
    model = make(num_classes=classes, **config).train()
    batch = torch.randn(batch_size, 3, image, image), torch.randint(0, classes, (batch_size,))
    return Workload(classify, model, optimizer(list(model.parameters())), batch)


def _image_maker(name: str, *, default: MakeOptimizer = fused_sgd, **fixed: Any) -> Maker:
    def make(
        batch_size: int,
        /,
        *,
        optimizer: MakeOptimizer = default,
        image: int = 224,
        classes: int = 1000,
        seed: int = 0,
        **config: Any,
    ) -> Workload:
        options = {**fixed, **config}
        return _image_model(name, batch_size, optimizer=optimizer, image=image, classes=classes, seed=seed, **options)

    make.__doc__ = f"torchvision's {name}, as published; `config` goes to its constructor."
    return make


resnet18 = _image_maker("resnet18")
resnet50 = _image_maker("resnet50")
resnet152 = _image_maker("resnet152")
mobilenet = _image_maker("mobilenet_v3_large")
densenet121 = _image_maker("densenet121")
convnext = _image_maker("convnext_tiny", default=fused_adamw)


def vit(
    batch_size: int,
    /,
    *,
    optimizer: MakeOptimizer = fused_adamw,
    image: int = 224,
    classes: int = 1000,
    seed: int = 0,
    patch: int = 16,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.0,
) -> Workload:
    """torchvision's Vision Transformer; the defaults are ViT-B/16."""
    torch.manual_seed(seed)
    model = _torchvision_models().VisionTransformer(
        image_size=image, patch_size=patch, num_layers=layers, num_heads=heads, hidden_dim=width,
        mlp_dim=4 * width, num_classes=classes, dropout=dropout,
    )  # fmt: skip
    batch = torch.randn(batch_size, 3, image, image), torch.randint(0, classes, (batch_size,))
    return Workload(classify, model.train(), optimizer(list(model.parameters())), batch)


# -- text -----------------------------------------------------------------------------------------------------


def predict_tokens(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """One ordinary training step of a language model."""
    optimizer.zero_grad()
    loss: Tensor = model(**batch).loss
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def bert(
    batch_size: int,
    /,
    *,
    optimizer: MakeOptimizer = fused_adamw,
    seq: int = 128,
    seed: int = 0,
    attention: str = "sdpa",
    **config: Any,
) -> Workload:
    """BertForMaskedLM with tied decoder and dropout; the default config is BERT-base's, `config` changes it."""
    transformers = _transformers()
    torch.manual_seed(seed)
    settings = transformers.BertConfig(attn_implementation=attention, **config)
    model = transformers.BertForMaskedLM(settings).train()
    tokens, labels = (torch.randint(0, settings.vocab_size, (batch_size, seq)) for _ in range(2))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return Workload(predict_tokens, model, optimizer(list(model.parameters())), batch)


def gpt2(
    batch_size: int,
    /,
    *,
    optimizer: MakeOptimizer = fused_adamw,
    seq: int = 256,
    seed: int = 0,
    attention: str = "sdpa",
    **config: Any,
) -> Workload:
    """GPT2LMHeadModel with tied head and dropout; the default config is the smallest GPT-2's."""
    transformers = _transformers()
    torch.manual_seed(seed)
    settings = transformers.GPT2Config(
        attn_implementation=attention, use_cache=False, loss_type="ForCausalLM", **config
    )
    model = transformers.GPT2LMHeadModel(settings).train()
    tokens = torch.randint(0, settings.vocab_size, (batch_size, seq))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return Workload(predict_tokens, model, optimizer(list(model.parameters())), batch)


BERT_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
GPT2_XL: dict[str, Any] = {"n_embd": 1600, "n_layer": 48, "n_head": 25}

bert_large = partial(bert, seq=512, **BERT_LARGE)
gpt2_xl = partial(gpt2, seq=1024, **GPT2_XL)
vit_l = partial(vit, layers=24, heads=16, width=1024)


ZOO: dict[str, Maker] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet152": resnet152,
    "mobilenet": mobilenet,
    "vit": vit,
    "bert": bert,
    "gpt2": gpt2,
    "densenet121": densenet121,
    "convnext": convnext,
    "bert-large": bert_large,
    "gpt2-xl": gpt2_xl,
    "vit-l": vit_l,
}


# -- imports that need help -----------------------------------------------------------------------------------


def _torchvision_models() -> Any:
    declare_torchvision_ops()
    with needs_extra("bench"):
        return importlib.import_module("torchvision.models")


def _transformers() -> Any:
    declare_torchvision_ops()  # every model of transformers probes torchvision
    with needs_extra("bench"):
        return importlib.import_module("transformers")


_declared: list[torch.library.Library] = []


def declare_torchvision_ops() -> None:
    """Make `import torchvision` work where its binary was built for another torch than the one installed.

    Its Python part registers shapes for two ops that only the binary declares. Where the binary cannot load,
    declaring them is all that is missing: no model of the zoo calls them.
    """
    if _declared or _torchvision_binary_loads():
        return
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(  # type: ignore[no-untyped-call]
            f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    _declared.append(library)


def _torchvision_binary_loads() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # not installed: the import will say so
    binaries = sorted(Path(spec.origin).parent.glob("_C.*"))
    try:
        for binary in binaries:
            torch.ops.load_library(binary)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return bool(binaries)
