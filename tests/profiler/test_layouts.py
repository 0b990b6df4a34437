"""Fake tensors lie in memory as eager's do: a step is traced through the views that eager takes."""

from itertools import product

import pytest
import torch
from torch import nn

from profiler.tracing.fake_tensors.eager_layouts import EagerLayouts
from rewriter import checkpoint

aten = torch.ops.aten

LAYOUTS = {
    "rows": lambda: torch.ones(3, 4, 5),
    "turned": lambda: torch.ones(3, 5, 4).transpose(1, 2),
    "reversed": lambda: torch.ones(5, 4, 3).permute(2, 1, 0),
    "repeated": lambda: torch.ones(3, 1, 5).expand(3, 4, 5),
    "with_gaps": lambda: torch.ones(3, 8, 5)[:, ::2].transpose(0, 2).contiguous().transpose(0, 2),
    "lower": lambda: torch.ones(4, 1),
}

OPS = [
    (aten.softplus_backward.default, 2, (1.0, 20.0)),
    (aten.leaky_relu_backward.default, 2, (0.1, False)),
    (aten.hardswish_backward.default, 2, ()),
    (aten.mse_loss_backward.default, 3, (1,)),
    (aten.logaddexp.default, 2, ()),
    (aten.xlogy.Tensor, 2, ()),
    (aten.add.Tensor, 2, ()),
    (aten.where.self, 3, ()),
    (aten.gelu.default, 1, ()),
]


@pytest.mark.parametrize(("op", "tensors", "numbers"), OPS, ids=lambda x: str(x) if callable(x) else "")
def test_what_an_elementwise_op_makes_lies_as_in_eager(op, tensors, numbers):
    for names in product(LAYOUTS, repeat=tensors):
        given = [LAYOUTS[name]() for name in names]
        if op is aten.where.self:
            given[0] = given[0].bool()
        expected = op(*given, *numbers)
        mode = EagerLayouts(allow_non_fake_inputs=True)
        fakes = [mode.from_tensor(tensor) for tensor in given]
        with mode:
            made = op(*fakes, *numbers)
        assert (made.shape, made.dtype, made.stride()) == (expected.shape, expected.dtype, expected.stride()), names


class Gate(nn.Module):
    """The gradient of its softplus lies turned, so that eager's reshape after it is a copy."""

    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(8, 4), nn.Linear(6, 1)

    def forward(self, x):
        gates = nn.functional.softplus(self.project(x).view(2, 6, 4))
        return self.out(gates.transpose(1, 2) * 2).sum()


def test_a_step_whose_gradients_lie_turned_is_traced_as_eager_runs_it():
    torch.manual_seed(0)
    model = Gate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    planned = checkpoint(step, model, optimizer, torch.randn(12, 8), budget="100%", show_progress=False)
    assert planned.verification.exact
