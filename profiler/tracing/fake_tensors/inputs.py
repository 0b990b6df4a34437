"""The inputs of a trace: a fake stand-in for every tensor that the step could read."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from profiler.errors import CaptureError
from profiler.tracing.calling_convention import BatchSlot, BufferSlot, GradSlot, InputSlot, ParamSlot, StateSlot
from profiler.tracing.fake_tensors.eager_layouts import EagerLayouts
from profiler.tracing.fake_tensors.patches import preserved
from profiler.tracing.fake_tensors.without_memory import fake_mode_of
from profiler.tracing.guards import PLAIN, attributes_of, give_attributes
from profiler.tracing.updates.optimizers import make_lazy_state


class StandIns:
    """Fakes of parameters, buffers, optimizer state, gradients and batch; the user's objects stay as they are."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, batch: Any, *, probing: bool) -> None:
        self.model = model
        self.optimizer = optimizer
        self.params = {id(p): ParamSlot(**_owner(model, n)) for n, p in model.named_parameters()}
        self.buffers = {id(b): BufferSlot(**_owner(model, n)) for n, b in model.named_buffers()}
        self.batch_leaves, self.batch_tree = pytree.tree_flatten(batch)
        self.mode = fake_mode_of(model) or EagerLayouts(allow_non_fake_inputs=True)
        self.inputs: dict[InputSlot, Tensor] = {}  # in the order of the placeholders
        self.lazy: dict[InputSlot, None] = {}  # those of what is not there yet
        self.absent: set[ParamSlot] = set()  # whose `.grad` must be None when the step begins
        self._check_batch()
        self._check_layouts()
        self._make_inputs(probing)

    def _check_batch(self) -> None:
        for leaf in self.batch_leaves:
            if isinstance(leaf, np.ndarray):
                raise CaptureError(
                    f"the batch holds a numpy array of shape {leaf.shape}, which a graph cannot read: pass "
                    "torch.from_numpy(array)"
                )
            if not isinstance(leaf, (Tensor, *PLAIN)):
                raise CaptureError(
                    f"the batch holds a {type(leaf).__name__}, whose tensors cannot be seen: pass tensors in "
                    "tuples, lists or dicts (`dict(batch)`)"
                )

    def _check_layouts(self) -> None:
        named = {slot.name: slot.tensor() for slot in self.named()}
        given = {f"batch leaf {i}": leaf for i, leaf in enumerate(self.batch_leaves) if isinstance(leaf, Tensor)}
        for name, tensor in (named | given).items():
            if tensor.layout != torch.strided:
                raise CaptureError(f"{name} is {tensor.layout}, and a graph follows dense memory only: use .to_dense()")

    def _make_inputs(self, probing: bool) -> None:
        for slot in self.named():
            self.inputs[slot] = self._stand_in(slot.tensor())
            give_attributes(self.inputs[slot], attributes_of(slot.tensor()))
        self._make_state_inputs()
        for param in self.params.values():
            self._make_grad_input(param, probing)
        for i, leaf in enumerate(self.batch_leaves):
            if isinstance(leaf, Tensor):
                self.inputs[BatchSlot(leaf=i)] = self._stand_in(leaf)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """A fake of its own for each input, also where one tensor is passed twice; memory stays shared."""
        base = tensor._base
        # What was given memory of another type (`grad.data = ...`) is no view any more of what it was one of.
        fake = self.mode.from_tensor(tensor if base is None or base.dtype == tensor.dtype else tensor.data)
        if any(fake is other for other in self.inputs.values()):
            with self.mode:
                return fake.detach()
        return fake

    def _make_state_inputs(self) -> None:
        """Stand-ins for the state there is, and for what the optimizer's first step would make."""
        grouped = self.grouped()
        fakes = {slot: self.inputs[slot] for _, slot in grouped}
        states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for p, slot in grouped:
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    self.inputs[StateSlot(param=slot, key=key)] = self._stand_in(value)
                states[fakes[slot]][key] = self.inputs.get(StateSlot(param=slot, key=key), value)
        groups = [
            {**g, "params": [fakes[self.params[id(p)]] for p in g["params"]]} for g in self.optimizer.param_groups
        ]
        with preserved(self.model, self.optimizer), self.mode:
            self.optimizer.param_groups, self.optimizer.state = groups, states
            make_lazy_state(self.optimizer, [fake for fake in fakes.values() if fake.requires_grad])
        for slot, fake in fakes.items():
            for key, value in states[fake].items():
                state = StateSlot(param=slot, key=key)
                if isinstance(value, Tensor) and state not in self.inputs:
                    self.inputs[state] = value
                    self.lazy[state] = None

    def _make_grad_input(self, param: ParamSlot, probing: bool) -> None:
        live, slot = param.tensor(), GradSlot(param=param)
        if live.grad is not None:
            self.inputs[slot] = self._stand_in(live.grad)
        elif live.requires_grad and probing:
            # A probe: whether the step clears a `.grad` before reading it shows only where there is one.
            with self.mode:
                self.inputs[slot] = torch.empty_like(self.inputs[param], requires_grad=False)
            self.lazy[slot] = None
        elif live.requires_grad:
            self.absent.add(param)

    def live(self) -> dict[InputSlot, Tensor]:
        """What the user has in each input, of those that are there already."""
        live: dict[InputSlot, Tensor] = {slot: slot.tensor() for slot in self.named()}
        for p, param in self.grouped():
            state = self.optimizer.state.get(p, {})
            live |= {StateSlot(param=param, key=key): value for key, value in state.items()}
        for param in self.params.values():
            gradient = param.tensor().grad
            if gradient is not None:
                live[GradSlot(param=param)] = gradient
        return live | {BatchSlot(leaf=i): leaf for i, leaf in enumerate(self.batch_leaves)}

    def named(self) -> list[ParamSlot | BufferSlot]:
        """The model's parameters and buffers."""
        return [*self.params.values(), *self.buffers.values()]

    def grouped(self) -> list[tuple[Tensor, ParamSlot]]:
        """The optimizer's parameters, group after group."""
        pairs = []
        for i, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if id(p) not in self.params:
                    raise CaptureError(
                        f"optimizer group {i} holds a parameter of shape {tuple(p.shape)} that is not the "
                        "model's: make it part of the model; where the model was given new parameters, make the "
                        "optimizer anew"
                    )
                pairs.append((p, self.params[id(p)]))
        return pairs


def _owner(model: nn.Module, name: str) -> dict[str, Any]:
    path, _, key = name.rpartition(".")
    return {"name": name, "owner": model.get_submodule(path), "key": key}
