"""Stand-ins in the places of the user's tensors while a step is traced: in the model, the optimizer and the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, cached_property
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from profiler.errors import CaptureError
from profiler.ops import memory_of
from profiler.tracing.calling_convention import BatchSlot, BufferSlot, GradSlot, InputSlot, ParamSlot, StateSlot
from profiler.tracing.eager_ways.live_numbers import LIVE
from profiler.tracing.eager_ways.reads import Reads
from profiler.tracing.eager_ways.slices import outside_the_trace, worked_out
from profiler.tracing.fake_tensors.inputs import StandIns
from profiler.tracing.fake_tensors.patches import WatchedGroup, refresh_recurrent_layers
from profiler.tracing.guards import attributes_of, give_attributes, hooks_of
from profiler.tracing.guards.holders import stand_ins_in
from profiler.tracing.ranks.torch_distributed import local
from profiler.tracing.updates.learning_rates import ReadRates
from profiler.tracing.updates.optimizers import first_state


class ProbesReadError(Exception):
    """The step looks at a `.grad` that is not there in eager: trace again without stand-ins for it."""


class Placed:
    """The stand-ins as the tracer hands them to the step, and where they are put."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, batch: Any, *, probing: bool) -> None:
        self.model = model
        self.optimizer = optimizer
        self.stand_ins = StandIns(model, optimizer, batch, probing=probing)
        self.args: dict[InputSlot, Tensor] = {}
        self.tracer: Any = None
        self.outside_reads: set[tuple[int, str]] = set()  # numbers of groups that the step itself reads
        self.group_numbers: list[dict[str, Any]] = []
        self.by_stand_in: dict[int, ParamSlot] = {}
        self._live = self.stand_ins.live()  # what the user has in each input
        self.trained = {slot: slot.tensor().requires_grad for slot in self.stand_ins.params.values()}
        self._had = {id(module): _names(module) for module in model.modules()}
        self._own_groups_and_state = optimizer.param_groups, optimizer.state

    def begin(self, tracer: Any, args: dict[InputSlot, Tensor]) -> None:
        """The tracer is about to call the step with these."""
        self.tracer, self.args = tracer, args
        for slot, tensor in args.items():
            if isinstance(slot, (ParamSlot, BufferSlot, BatchSlot)):
                give_attributes(tensor, attributes_of(self._live[slot]))
        self._memory = {slot: memory_of(local(tensor))._cdata for slot, tensor in args.items()}

    def hand_back_attributes(self) -> None:
        """What the step set on stand-ins of parameters and buffers, onto these, where it is seen and undone."""
        for slot in self.stand_ins.named():
            give_attributes(self._live[slot], attributes_of(self.args[slot]))

    def live(self, slot: InputSlot) -> Tensor:
        """What the user has in an input."""
        return self._live[slot]

    def check_memory(self) -> None:
        """CaptureError where a stand-in was given other memory."""
        for slot, tensor in self.args.items():
            if memory_of(local(tensor))._cdata != self._memory[slot]:
                raise CaptureError(f"the step gives {slot.name} other memory (`.data =`): write in place")

    # -- putting them in ------------------------------------------------------------------------------------

    def hook_in(self, stack: ExitStack) -> None:
        """The parameters' own hooks onto their stand-ins: what they do to gradients becomes part of the graph."""
        for slot in self.stand_ins.named():
            live, stand_in = slot.tensor(), self.args[slot]
            if not live.requires_grad:
                continue  # hooks from before it was frozen: they never run
            on_gradient, once_accumulated = hooks_of(live)
            register: list[tuple[Any, Any]] = [(stand_in.register_hook, hook) for hook in on_gradient]
            register += [(stand_in.register_post_accumulate_grad_hook, hook) for hook in once_accumulated]
            for put_on, hook in register:
                stack.callback(put_on(hook).remove)

    def swap_in(self, stack: ExitStack, reads: Reads) -> None:
        """Stand-ins into the model, the optimizer and the `.grad`s; `preserved` takes them out again."""
        named = {s.name: t for s, t in self.args.items() if isinstance(s, (ParamSlot, BufferSlot))}
        stack.enter_context(_reparametrize_module(self.model, named, tie_weights=True))
        refresh_recurrent_layers(self.model)
        optimizer, states = self.optimizer, defaultdict[Tensor, dict[str, Any]](dict)
        for p, param in self.stand_ins.grouped():
            numbers = {k: v for k, v in optimizer.state.get(p, {}).items() if not isinstance(v, Tensor)}
            if numbers:
                states[self.args[param]].update(numbers)
        groups, rates = [], ReadRates(reads, lambda group: self.outside_reads.add((group, "lr")))
        for i, group in enumerate(optimizer.param_groups):
            params = [self.args[self.stand_ins.params[id(p)]] for p in group["params"]]
            groups.append(WatchedGroup({**group, "params": params}, i, self.outside_reads, rates.read))
        for slot, tensor in self.args.items():
            if isinstance(slot, StateSlot):
                states[self.args[slot.param]][slot.key] = tensor
            if isinstance(slot, GradSlot):
                self.args[slot.param].grad = tensor
        self.group_numbers = [numbers_of(group) for group in groups]
        self.by_stand_in = {id(self.args[slot]): slot for slot in self.stand_ins.params.values()}
        optimizer.param_groups, optimizer.state = groups, states  # type: ignore[assignment]
        self._states = {id(p): dict(state) for p, state in states.items()}

    def new_buffers(self) -> dict[BufferSlot, Tensor]:
        """Buffers that the step has registered, or filled for the first time."""
        found = {}
        for path, module in self.model.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None and key not in self._had.get(id(module), ()):
                    name, persistent = f"{path}.{key}".lstrip("."), key not in module._non_persistent_buffers_set
                    found[BufferSlot(name=name, owner=module, key=key, persistent=persistent)] = tensor
        return found

    def new_parts(self) -> list[str]:
        """Parameters and layers that the step has registered, by their names."""
        return [
            f"{path}.{key}".lstrip(".")
            for path, module in self.model.named_modules()
            for key in (*module._parameters, *module._modules)
            if key not in self._had.get(id(module), (key,))
        ]

    def other_states(self) -> list[str]:
        """State of the optimizer that the step itself has put there."""
        found = []
        for slot in self.stand_ins.params.values():
            state = self.optimizer.state.get(self.args[slot], {})
            before = self._states.get(id(self.args[slot]), {})
            found += [f"{slot.name}.{key}" for key, value in state.items() if value is not before.get(key)]
        return found

    def batch(self) -> Any:
        """The batch with stand-ins for its tensors."""
        leaves = [self.args.get(BatchSlot(leaf=i), leaf) for i, leaf in enumerate(self.stand_ins.batch_leaves)]
        return pytree.tree_unflatten(leaves, self.stand_ins.batch_tree)

    # -- asking about them ----------------------------------------------------------------------------------

    def by_object(self) -> dict[int, Tensor]:
        """The stand-ins of parameters and buffers, by the ids of the user's own."""
        named = self.stand_ins.params | self.stand_ins.buffers
        return {key: self.args[slot] for key, slot in named.items()}

    def node(self, tensor: Tensor | None) -> fx.Node:
        """The node of a traced tensor."""
        slot = None if tensor is None else get_proxy_slot(local(tensor), self.tracer, None)
        if slot is None:
            raise CaptureError("a .grad is set to a tensor from outside the step: pass it in the batch")
        node: fx.Node = slot.proxy.node
        return node

    def what_is_computed(self) -> Callable[[Any], bool]:
        """What says whether a value, or one in it, was worked out of the step's inputs or drawn at random, and is
        another each time."""
        nodes = cache(lambda: worked_out(self.tracer.graph))  # most steps change nothing, and nobody asks

        def is_computed(value: Any) -> bool:
            if not isinstance(value, Tensor):
                return any(isinstance(one, LIVE) or is_computed(one) for one in stand_ins_in([value]))
            slot = get_proxy_slot(local(value), self.tracer, None)
            return slot is not None and slot.proxy.node in nodes()

        return is_computed

    def held(self, node: fx.Node) -> Any:
        """What the user has in an input or constant of the growing graph."""
        if node.op == "get_attr":
            return getattr(self.tracer.root, str(node.target))
        slot = self._slot(node)
        if isinstance(slot, GradSlot) and slot in self.stand_ins.lazy:
            raise ProbesReadError
        if isinstance(slot, StateSlot) and slot in self.stand_ins.lazy:
            return self._lazy_state[self._live[slot.param]][slot.key]
        return self._live[slot]

    def varies(self, node: fx.Node) -> bool:
        """Whether a node is an input that is another at each step; buffers seldom are."""
        return node.op == "placeholder" and not isinstance(self._slot(node), BufferSlot)

    def _slot(self, placeholder: fx.Node) -> InputSlot:
        position: int = self.tracer.graph.find_nodes(op="placeholder").index(placeholder)
        return list(self.stand_ins.inputs)[position]

    @cached_property
    def _lazy_state(self) -> dict[Tensor, dict[str, Any]]:
        """The state that the optimizer's first step would make, of real tensors; wanted where the step reads it."""
        with outside_the_trace():
            return first_state(self.optimizer, *self._own_groups_and_state)


def _names(module: nn.Module) -> set[str]:
    """What is registered with a module, where there is something."""
    buffers = {name for name, buffer in module._buffers.items() if buffer is not None}
    return {*module._parameters, *module._modules, *buffers}


def numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group has beside its parameters."""
    return {key: value for key, value in dict.items(group) if key not in ("params", "param_names")}
