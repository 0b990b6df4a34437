"""Functions of torch's own that compute otherwise where they are traced: here by the ops of eager, with its checks.

They look at their tensors in C++, below everything that could answer them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

Item = Callable[[Tensor], Any]  # the number that a tensor holds, live


def one_hot(item: Item, input: Tensor, num_classes: int = -1) -> Tensor:
    """`F.one_hot`, which refuses labels that are out of range; traced, it would make rows of zeros of them."""
    tensor = input
    if tensor.dtype is not torch.int64 or not tensor.numel() or is_functorch_wrapped_tensor(tensor):
        return F.one_hot(tensor, num_classes)
    if tensor.device.type == "cpu" or num_classes == -1:
        low, high = torch.aminmax(tensor)
        if item(low) < 0:
            raise RuntimeError("Class values must be non-negative.")
        num_classes = int(item(high)) + 1 if num_classes == -1 else num_classes
        if item(high) >= num_classes:
            raise RuntimeError("Class values must be smaller than num_classes.")
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


# By the function that is called, what makes eager's ops of it.
EAGER_FORMS: dict[Any, Callable[..., Tensor]] = {F.one_hot: one_hot}
