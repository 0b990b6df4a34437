"""Hugging Face's Trainer under a budget: one callback, nothing else changes.

`budget_callback("8GiB")` plans the model in place when training begins and puts it back when it ends; accumulation,
clipping, bfloat16, evaluation and saving are the Trainer's own, as ever. `--without` trains the same without a plan.

    python bench/examples/trainer_budget.py --budget 80% --accumulate 2
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from bench.workloads.zoo import declare_torchvision_ops
from rewriter.trainer import budget_callback


def small_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    return GPT2LMHeadModel(config)


def sentences(count: int) -> list[dict[str, Any]]:
    """Counting up, from random beginnings."""
    starts = torch.randint(0, 90, (count,), generator=torch.Generator().manual_seed(0))
    rows = (starts[:, None] + torch.arange(24)) % 100
    return [{"input_ids": row, "labels": row} for row in rows]


def train(callbacks: list[Any], *, accumulate: int, steps: int, folder: str, **options: Any) -> tuple[list[float], Any]:
    """An ordinary use of Trainer; the losses of all steps, and the model."""
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(
        output_dir=folder, max_steps=steps, gradient_accumulation_steps=accumulate, max_grad_norm=1.0, logging_steps=1,
        per_device_train_batch_size=8, report_to=[], use_cpu=True, seed=0, save_strategy="no", disable_tqdm=True,
        **options,
    )  # fmt: skip
    trainer = Trainer(small_gpt2(), settings, train_dataset=sentences(64), callbacks=callbacks)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="80%", help="as for checkpoint_model(): '4GiB', '80%%'")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16")
    parser.add_argument("--without", action="store_true", help="train as it is")
    options = parser.parse_args(arguments)

    declare_torchvision_ops()  # transformers asks for torchvision, which may be built for another torch
    callback = budget_callback(options.budget)
    with tempfile.TemporaryDirectory() as folder:
        losses, _ = train(
            [] if options.without else [callback],
            accumulate=options.accumulate,
            steps=options.steps,
            folder=folder,
            bf16=options.bf16,
        )
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    if callback.planned is not None:
        print(callback.planned.solution)
        print(callback.planned.verification)


if __name__ == "__main__":
    main()
