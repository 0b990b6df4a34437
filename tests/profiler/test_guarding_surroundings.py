"""Modes and switches around a step are noticed by name, and honoured by the next capture."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.errors import CaptureError
from profiler.tracing.whole_step import capture
from tests.profiler import small
from tests.profiler.small import captured
from tests.side_by_side import assert_captured_equals_eager

# -- mixed precision around the step ----------------------------------------------------------------------------------


def in_bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Partly(nn.Module):
    """A part of it insists on float32."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.inner(self.inner(x.float()).tanh())
        return self.head(x)


class Whitened(torch.optim.Optimizer):
    """An optimizer with a matrix product, which autocast changes."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            whitened = (p.grad @ p.grad.T) @ p.grad if p.dim() == 2 else p.grad
            p.sub_(whitened.float(), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("optimizer", [small.sgd, small.adam, Whitened])
@pytest.mark.parametrize("model", [small.mlp, Partly])
def test_a_step_inside_autocast_equals_eager_inside_it(model, optimizer):
    assert_captured_equals_eager(small.make(model=model, optimizer=optimizer), around=in_bfloat16)


def test_autocast_around_the_step_changes_what_the_step_computes():
    def bits(around):
        torch.manual_seed(0)
        step, model, optimizer, batch = small.make(model=Partly)()
        with around():
            return step(model, optimizer, batch)

    assert not torch.equal(bits(in_bfloat16), bits(torch.enable_grad))


def test_a_step_called_in_another_precision_than_it_was_captured_in_is_noticed():
    traced, model, optimizer, batch = captured()
    with in_bfloat16():
        assert traced.convention.check(batch) == ["autocast on cpu was off and is torch.bfloat16"]
        inside = capture(small.step, model, optimizer, batch)
        assert inside.convention.check(batch) == []
    assert inside.convention.check(batch) == ["autocast on cpu was torch.bfloat16 and is off"]
    with torch.autocast("cpu", dtype=torch.float16):
        assert inside.convention.check(batch) == ["autocast on cpu was torch.bfloat16 and is torch.float16"]
    with torch.autocast("cpu", enabled=False):
        assert traced.convention.check(batch) == []


def test_a_run_leaves_autocast_as_it_was():
    _, model, optimizer, batch = small.make()()
    with in_bfloat16():
        capture(small.step, model, optimizer, batch).run(batch)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


# -- modes and switches around the step -------------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Following(TorchFunctionMode):
    """The same for functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def switched(setter, now, then):
    setter(now)
    try:
        yield
    finally:
        setter(then)


@contextlib.contextmanager
def hook_on_all_modules():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        yield
    finally:
        handle.remove()


AROUND = {
    "no_grad": (torch.no_grad, ["gradient mode was on and is off"]),
    "inference": (torch.inference_mode, ["gradient mode was on and is off", "inference mode was off and is on"]),
    "dispatch mode": (Watching, ["the stack of torch dispatch modes was () and is (Watching)"]),
    "function mode": (Following, ["the stack of torch function modes was () and is (Following)"]),
    "attention": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]),
        ["memory-efficient attention was on and is off"],
    ),
    "dtype": (
        lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
        ["the default dtype was torch.float32 and is torch.float64"],
    ),
    "determinism": (
        lambda: switched(torch.use_deterministic_algorithms, True, False),
        ["use of deterministic algorithms was off and is on"],
    ),
    "precision": (
        lambda: switched(torch.set_float32_matmul_precision, "medium", "highest"),
        ["float32 matmul precision was highest and is medium"],
    ),
    "threads": (lambda: switched(torch.set_num_threads, 2, 1), ["the number of threads was 1 and is 2"]),
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(keep, keep),
        ["the pair of hooks on saved tensors was () and is (keep, keep)"],
    ),
    "hooks": (hook_on_all_modules, ["the list of hooks on all modules was () and is (<lambda>)"]),
}


def keep(tensor):
    return tensor


@pytest.mark.parametrize("name", AROUND)
def test_a_mode_or_switch_around_the_step_is_noticed_while_it_is_there(name):
    around, said = AROUND[name]
    traced, _, _, batch = captured()
    with around():
        found = traced.convention.check(batch)
    assert found[: len(said)] == said
    assert traced.convention.check(batch) == []


def scaling_hooks(factor):
    """Made anew each time, as a context manager of the user's makes them."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t * factor if t.is_floating_point() else t, keep)


def test_hooks_on_saved_tensors_are_told_apart_by_what_they_have_closed_over():
    with scaling_hooks(1.0):
        traced, _, _, batch = captured()
    with scaling_hooks(1.0):
        assert traced.convention.check(batch) == []
    with scaling_hooks(2.0):
        [said] = traced.convention.check(batch)
    assert "<lambda> with factor=1.0" in said
    assert "<lambda> with factor=2.0" in said


def test_a_numpy_array_in_the_batch_is_refused_with_what_to_pass_instead():
    _, model, optimizer, (x, y) = small.make()()
    with pytest.raises(CaptureError, match=r"torch\.from_numpy"):
        capture(small.step, model, optimizer, (x.numpy(), y))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_fails_as_eager_does_and_changes_nothing(around):
    traced, model, optimizer, batch = captured()
    before = copy.deepcopy(model.state_dict())
    with around():
        with pytest.raises(RuntimeError, match="does not require grad"):
            small.step(model, optimizer, batch)
        with pytest.raises(CaptureError, match="gradient mode was on and is off"):
            traced.run(batch)
        with pytest.raises(CaptureError, match="does not require grad"):
            capture(small.step, model, optimizer, batch)
    before["1.num_batches_tracked"] += 1  # what the failing eager step did
    assert all(torch.equal(model.state_dict()[name], was) for name, was in before.items() if "running" not in name)
