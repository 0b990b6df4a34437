"""From a cleaned fx graph to the typed graph that planning reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from planner.ir import Collective, Graph, Op, Phase, Rerun, Role, Storage, Timing, TimingKind, Value
from profiler.collectives import group_name, held_until, is_wait, kind_of, launch_of, whole_bytes
from profiler.ops import (
    ALIAS_OF,
    NUMBER,
    inplace_target,
    is_getitem,
    is_random,
    memory_of,
    storage_root,
    target_name,
    why_never_rerun,
    without_side_effect,
    written,
)
from profiler.tracing.fx_graphs.provenance import GRADIENT_OF, origin_of
from profiler.tracing.ranks.torch_distributed import size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """What a placeholder holds; a number, not a tensor, has no role."""

    name: str
    role: Role | None


@dataclass(frozen=True, kw_only=True)
class Lifted:
    """A graph, and the fx nodes of its ops and values by id."""

    graph: Graph
    nodes: tuple[fx.Node, ...]
    value_nodes: tuple[fx.Node, ...]
    gradients: Mapping[str, int]


def lift(module: fx.GraphModule, inputs: Sequence[Port], outputs: Sequence[Role], *, name: str) -> Lifted:
    """The validated Graph of a cleaned module; names its placeholders after what they hold."""
    _rename_placeholders(module, inputs)
    return _Lifter(module, inputs, outputs, name).run()


def _rename_placeholders(module: fx.GraphModule, ports: Sequence[Port]) -> None:
    for port, node in zip(ports, module.graph.find_nodes(op="placeholder"), strict=True):
        node._rename(re.sub(r"\W", "_", port.name))
        node.target = node.name
    module.recompile()


class _Lifter:
    """One walk over the nodes; ids are given in execution order."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Port], outputs: Sequence[Role], name: str) -> None:
        self.graph = module.graph
        self.inputs = inputs
        self.outputs = outputs
        self.name = name
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.nodes: list[fx.Node] = []
        self.value_nodes: list[fx.Node] = []
        self.value_of: dict[fx.Node, int] = {}
        self.storage_of: dict[fx.Node, int] = {}
        self.groups: dict[str, int] = {}  # process groups, by their names on this rank

    def run(self) -> Lifted:
        roles = self._roles()
        ports = iter(self.inputs)
        for node in self.graph.nodes:
            match node.op:
                case "placeholder":
                    role = next(ports).role
                    if role is not None:
                        self._add_value(node, producer=None, role=role)
                case "get_attr" if isinstance(node.meta.get("val"), Tensor):
                    self._add_value(node, producer=None, role=Role.BUFFER)
                case "call_function" if not is_getitem(node):
                    self._add_op(node, roles)
        graph = Graph(
            name=self.name,
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            outputs=self._ids(self._outputs()),
            timing=Timing(kind=TimingKind.MADE_UP, device="a captured step that was not yet measured"),
        )
        return Lifted(
            graph=graph.validate(),
            nodes=tuple(self.nodes),
            value_nodes=tuple(self.value_nodes),
            gradients={n.meta[GRADIENT_OF]: v for n, v in self.value_of.items() if GRADIENT_OF in n.meta},
        )

    # -- values ---------------------------------------------------------------------------------------------

    def _add_value(self, node: fx.Node, *, producer: int | None, role: Role) -> int:
        tensor: Tensor = node.meta["val"]
        base = node.meta[ALIAS_OF]
        if base is None:
            self.storage_of[node] = self._add_storage(memory_of(tensor).nbytes(), role)
        value = Value(
            id=len(self.values),
            name=node.name,
            storage=self.storage_of[storage_root(node)],
            producer=producer,
            base=None if base is None else self.value_of[base],
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
        self.values.append(value)
        self.value_nodes.append(node)
        self.value_of[node] = value.id
        return value.id

    def _add_storage(self, nbytes: int, role: Role) -> int:
        self.storages.append(Storage(id=len(self.storages), nbytes=nbytes, role=role))
        return len(self.storages) - 1

    def _ids(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.value_of[node] for node in nodes if node in self.value_of))

    def _outputs(self) -> tuple[fx.Node, ...]:
        (output,) = self.graph.find_nodes(op="output")
        return tuple(output.args[0])

    # -- ops ------------------------------------------------------------------------------------------------

    def _add_op(self, node: fx.Node, roles: dict[fx.Node, Role]) -> None:
        op = len(self.ops)
        made = _made(node)
        inputs = self._ids((*node.all_input_nodes, *held_until(node)))
        outputs = tuple(self._add_value(out, producer=op, role=roles.get(out, Role.TEMP)) for out in made)
        origin, rerun, reason = origin_of(node), *_rerun(node)
        rng = self._add_storage(_generator_bytes(made), Role.TEMP) if rerun is Rerun.REPLAY_RNG else None
        self.ops.append(
            Op(
                id=op,
                name=node.name,
                target=target_name(node),
                phase=origin.phase,
                round=origin.round,
                inputs=inputs,
                outputs=outputs,
                mutates=self._ids(written(node)),
                overwritable=self._overwritable(node),
                rerun=rerun,
                never_reason=reason,
                rng_state=rng,
                module_path=origin.module_path,
                source_line=origin.source_line,
                collective=self._collective(node),
            )
        )
        self.nodes.append(node)

    def _collective(self, node: fx.Node) -> Collective | None:
        """What processes do together that a node launches or waits for; groups are told apart by their order of use."""
        launch = launch_of(node)
        if launch is None:
            return None
        name = group_name(launch)
        return Collective(
            kind=kind_of(launch),
            group=f"group {self.groups.setdefault(name, len(self.groups))}",
            ranks=size_of(name),
            nbytes=whole_bytes(launch),
            storage=self.storage_of[storage_root(launch)],
            waits=is_wait(node),
        )

    def _overwritable(self, node: fx.Node) -> tuple[int, ...]:
        if inplace_target(node) is None:
            return ()
        into = node.args[0]
        assert isinstance(into, fx.Node)
        storages = [self.storages[self.storage_of[storage_root(n)]] for n in (into, node)]
        # Memory that holds more than this tensor, or outlives the step, is not to be written over.
        user_owned = storage_root(into).op != "call_function"
        if user_owned or storages[0].nbytes != storages[1].nbytes or node.meta[ALIAS_OF] is not None:
            return ()
        return (self.value_of[into],)

    # -- roles ----------------------------------------------------------------------------------------------

    def _roles(self) -> dict[fx.Node, Role]:
        """The role of each storage that the step makes, by the node that makes it."""
        roles: dict[fx.Node, Role] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and not is_getitem(node):
                self._note_backward_reads(node, roles)
        for role, node in zip(self.outputs, self._outputs(), strict=True):
            roles[storage_root(node)] = role
        for node in self.graph.nodes:
            if GRADIENT_OF in node.meta:
                roles[storage_root(node)] = Role.GRADIENT
        return roles

    def _note_backward_reads(self, node: fx.Node, roles: dict[fx.Node, Role]) -> None:
        if origin_of(node).phase is not Phase.BACKWARD:
            return
        for source in node.all_input_nodes:
            root = storage_root(source)
            if root.op == "call_function" and origin_of(root).phase is Phase.FORWARD:
                roles[root] = Role.ACTIVATION


def _made(node: fx.Node) -> list[fx.Node]:
    """The nodes of an op's output tensors: itself, or the names behind it, in order."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    if NUMBER in node.meta:
        return []
    names = {user.args[1]: user for user in node.users if is_getitem(user)}
    return [names[index] for index in range(len(node.meta.get("val") or ())) if index in names]


def _rerun(node: fx.Node) -> tuple[Rerun, str]:
    reason = why_never_rerun(node)
    if reason:
        return Rerun.NEVER, reason
    if without_side_effect(node) is not None:
        return Rerun.WITHOUT_SIDE_EFFECT, ""
    writes = written(node)
    if writes:
        return Rerun.NEVER, f"writes to {', '.join(n.name for n in writes[:3])} in place"
    return (Rerun.REPLAY_RNG, "") if is_random(node) else (Rerun.FREELY, "")


def _generator_bytes(made: Sequence[fx.Node]) -> int:
    device = made[0].meta["val"].device if made else torch.device("cpu")
    if device.type == "cpu":
        return torch.get_rng_state().numel()
    return 16  # the seed and offset of a Philox generator
