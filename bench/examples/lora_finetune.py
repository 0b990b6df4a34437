"""LoRA by peft under a budget: the frozen weights need no gradients, and the plan knows.

Only the adapters are trained, so gradients and optimizer state are small and activations are nearly all of the memory:
where planning them pays most. `--dora` decomposes the weights, too.

    python bench/examples/lora_finetune.py --budget 80% --dora
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from bench.workloads.zoo import declare_torchvision_ops
from rewriter import checkpoint_model


def adapted(*, dora: bool) -> Any:
    """A small GPT-2 with adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    adapters = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.1, fan_in_fan_out=True, use_dora=dora)
    return get_peft_model(GPT2LMHeadModel(config), adapters).train()


def train(budget: str | None, *, dora: bool, steps: int) -> tuple[list[float], Any]:
    """The losses of all steps, and the model; without a budget as it is."""
    model = adapted(dora=dora)
    if budget is not None:
        checkpoint_model(model, budget=budget)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    rows, losses = (torch.arange(24) + 3 * torch.arange(8)[:, None]) % 100, []
    for _ in range(steps):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="80%", help="as for checkpoint_model(): '4GiB', '80%%'")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dora", action="store_true")
    options = parser.parse_args(arguments)

    declare_torchvision_ops()  # transformers asks for torchvision, which may be built for another torch
    losses, model = train(options.budget, dora=options.dora, steps=options.steps)
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    print(model.planned.solution)
    print(model.planned.verification)


if __name__ == "__main__":
    main()
