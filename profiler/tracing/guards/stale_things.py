"""Things that stand for what an earlier step computed: whoever uses one shows that it reads that."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from profiler.tracing.guards.kinds import own_dict
from profiler.tracing.ranks.torch_distributed import local

_MARK = "_stands_for_what_an_earlier_step_computed"


class StaleReadError(Exception):
    """A step reads what the step before it has computed."""


class StaleThing:
    """Stands for a number that an earlier step computed, and cannot be used."""

    def __init__(self) -> None:
        self.is_read = False

    def _read(self, *_: Any) -> NoReturn:
        self.is_read = True
        raise StaleReadError("a value that an earlier step computed is read")


_USES = (
    "getattr getitem setitem call eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv "
    "mod rmod divmod rdivmod pow rpow neg pos abs matmul rmatmul bool int float complex index len iter contains "
    "round trunc floor ceil"
)
for _name in _USES.split():
    setattr(StaleThing, f"__{_name}__", StaleThing._read)


def stale_tensor(stand_in: Tensor) -> Tensor:
    """A tensor of the same kind that takes next to no memory."""
    like = local(stand_in)
    made = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape).data  # not as a view of another
    vars(made)[_MARK] = True
    return made


def is_stale(value: Any) -> bool:
    """Whether a value is one of these."""
    return isinstance(value, StaleThing) or (isinstance(value, Tensor) and _MARK in own_dict(value))
