"""Builders of small graphs, and Hypothesis strategies that draw them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from planner.ir import Graph, Op, Phase, Rerun, Role, Storage, Value


@dataclass
class Builder:
    """Adds ops one by one; `build()` gives the validated graph."""

    name: str = "synthetic"
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def storage(self, nbytes: int, role: Role) -> int:
        self.storages.append(Storage(id=len(self.storages), nbytes=nbytes, role=role))
        return len(self.storages) - 1

    def value(self, name: str, storage: int, producer: int | None = None, base: int | None = None) -> int:
        self.values.append(Value(id=len(self.values), name=name, storage=storage, producer=producer, base=base))
        return len(self.values) - 1

    def input(self, name: str, nbytes: int = 0, role: Role = Role.INPUT) -> int:
        return self.value(name, self.storage(nbytes, role))

    def op(
        self,
        name: str,
        inputs: list[int],
        sizes: list[int],
        *,
        phase: Phase = Phase.FORWARD,
        role: Role = Role.ACTIVATION,
        rerun: Rerun = Rerun.FREELY,
        mutates: tuple[int, ...] = (),
        overwritable: tuple[int, ...] = (),
        time_us: float = 1.0,
        workspace_bytes: int = 0,
        target: str = "",
        round: int = 0,
        rng_bytes: int = 0,
    ) -> list[int]:
        """Add an op with one new storage per entry of `sizes`; return its output values."""
        op_id = len(self.ops)
        names = [name] if len(sizes) == 1 else [f"{name}.{i}" for i in range(len(sizes))]
        outputs = [self.value(n, self.storage(b, role), op_id) for n, b in zip(names, sizes, strict=True)]
        state = self.storage(rng_bytes, Role.TEMP) if rerun is Rerun.REPLAY_RNG else None
        self.ops.append(
            Op(
                id=op_id,
                name=name,
                target=target or name.rstrip("0123456789_"),
                phase=phase,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                round=round,
                mutates=mutates,
                overwritable=overwritable,
                time_us=time_us,
                workspace_bytes=workspace_bytes,
                rerun=rerun,
                never_reason="told so" if rerun is Rerun.NEVER else "",
                rng_state=state,
            )
        )
        return outputs

    def one(self, name: str, inputs: list[int], nbytes: int, **options) -> int:
        """Add an op with a single output; return that value."""
        return self.op(name, inputs, [nbytes], **options)[0]

    def view(self, name: str, of: int, *, phase: Phase = Phase.FORWARD, round: int = 0, time_us: float = 0.25) -> int:
        """Add a view op: a new value in the storage of `of`."""
        op_id = len(self.ops)
        value = self.value(name, self.values[of].storage, op_id, base=of)
        self.ops.append(
            Op(
                id=op_id,
                name=name,
                target="view",
                phase=phase,
                inputs=(of,),
                outputs=(value,),
                time_us=time_us,
                round=round,
            )
        )
        return value

    def update(self, name: str, param: int, gradient: int) -> None:
        """Add an optimizer op that writes to `param`."""
        self.op(name, [param, gradient], [], phase=Phase.OPTIMIZER, rerun=Rerun.NEVER, mutates=(param,), time_us=0.5)

    def build(self) -> Graph:
        return Graph(
            name=self.name,
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            outputs=tuple(self.outputs),
        ).validate()


@dataclass
class Layer:
    """A forward op that a network builder placed, and what its backward has to read."""

    name: str
    inputs: list[int]
    output: int
    saved: list[int]
    param: int | None = None


class Network:
    """A forward built op by op, whose backward and optimizer follow by themselves.

    The gradient of every forward op reads the gradients of its consumers and what the op saved.
    """

    def __init__(self, name: str, *, input_bytes: int = 4) -> None:
        self.build = Builder(name)
        self.x = self.build.input("x", input_bytes)
        self.layers: list[Layer] = []
        self.round = 0

    def layer(
        self,
        name: str,
        inputs: list[int],
        nbytes: int,
        *,
        time_us: float = 1.0,
        saves_input: bool = True,
        saves_output: bool = False,
        param_bytes: int = 0,
        param: int | None = None,
        extra_sizes: tuple[int, ...] = (),
        **options,
    ) -> int:
        b = self.build
        if param is None and param_bytes:
            param = b.input(f"{name}_w", param_bytes, Role.PARAM)
        reads = [*inputs, *([param] if param is not None else [])]
        mutates = options.pop("mutates_buffer", None)
        if mutates is not None:
            reads.append(mutates)
            options["mutates"] = (mutates,)
        outputs = b.op(name, reads, [nbytes, *extra_sizes], time_us=time_us, round=self.round, **options)
        saved = [*(inputs if saves_input else []), *([outputs[0]] if saves_output else []), *outputs[1:]]
        self.layers.append(Layer(name, inputs, outputs[0], saved, param))
        return outputs[0]

    def view(self, name: str, of: int) -> int:
        value = self.build.view(name, of, round=self.round)
        self.layers.append(Layer(name, [of], value, []))
        return value

    def backward(self, loss: int, *, optimizer: bool = True) -> None:
        """Append the backward of all layers since the last backward, and the parameter updates."""
        b = self.build
        gradient: dict[int, list[int]] = {loss: []}
        updates: list[tuple[str, int, int]] = []
        for layer in reversed(self.layers):
            if layer.output not in gradient:
                continue
            nbytes = [b.storages[b.values[v].storage].nbytes for v in layer.inputs]
            options = {"phase": Phase.BACKWARD, "role": Role.GRADIENT, "round": self.round, "time_us": 2.0}
            reads = [*gradient[layer.output], *dict.fromkeys(layer.saved)]
            if layer.param is not None:
                reads.append(layer.param)
                nbytes.append(b.storages[b.values[layer.param].storage].nbytes)
            grads = b.op(f"{layer.name}_bw", reads, nbytes, **options)
            for v, grad in zip(layer.inputs, grads, strict=False):
                gradient.setdefault(v, []).append(grad)
            if layer.param is not None:
                updates.append((f"{layer.name}_sgd", layer.param, grads[-1]))
        self.layers = []
        self.round += 1
        if optimizer:
            for update in updates:
                b.update(*update)

    def graph(self, loss: int) -> Graph:
        self.backward(loss)
        self.build.outputs.append(loss)
        return self.build.build()


# -- the shapes that matter -----------------------------------------------------------------------------------


def chain(length: int, *, nbytes: int = 100, time_us: float = 1.0, param_bytes: int = 0) -> Graph:
    """A straight line of `length` equal layers."""
    net = Network(f"chain-{length}")
    x = net.x
    for i in range(length):
        x = net.layer(f"f{i}", [x], nbytes, time_us=time_us, param_bytes=param_bytes)
    return net.graph(net.layer("loss", [x], 1))


def diamond(width: int = 3) -> Graph:
    """One layer read by `width` branches of different cost that meet again."""
    net = Network(f"diamond-{width}")
    top = net.layer("top", [net.x], 100)
    branches = [net.layer(f"branch{i}", [top], 50 * (i + 1), time_us=i + 1.0) for i in range(width)]
    return net.graph(net.layer("loss", [net.layer("join", branches, 100)], 1))


def residual_tower(blocks: int, *, nbytes: int = 100) -> Graph:
    """Blocks of conv, batch norm and relu with a skip around them."""
    net = Network(f"tower-{blocks}")
    x = net.layer("stem", [net.x], nbytes, time_us=8.0, param_bytes=40, target="conv")
    for i in range(blocks):
        x = residual_block(net, f"b{i}", x, nbytes)
    return net.graph(net.layer("loss", [x], 1))


def residual_block(net: Network, name: str, x: int, nbytes: int) -> int:
    conv = net.layer(f"{name}_conv", [x], nbytes, time_us=8.0, param_bytes=40, target="conv")
    norm = batch_norm(net, f"{name}_norm", conv, nbytes)
    relu = net.layer(
        f"{name}_relu", [norm], nbytes, time_us=1.0, saves_input=False, saves_output=True, target="relu",
        overwritable=(norm,),
    )  # fmt: skip
    return net.layer(f"{name}_add", [relu, x], nbytes, time_us=1.0, saves_input=False, target="add")


def batch_norm(net: Network, name: str, x: int, nbytes: int) -> int:
    """An op with two outputs that updates a buffer which a rerun must leave alone."""
    buffer = net.build.input(f"{name}_mean", 8, Role.BUFFER)
    return net.layer(
        name, [x], nbytes, time_us=2.0, extra_sizes=(8,), mutates_buffer=buffer,
        rerun=Rerun.WITHOUT_SIDE_EFFECT, target="batch_norm", workspace_bytes=4,
    )  # fmt: skip


def dropout(net: Network, name: str, x: int, nbytes: int, *, rng_bytes: int = 16) -> int:
    """A random mask and the product with it."""
    mask = net.build.one(
        f"{name}_mask", [x], nbytes, time_us=1.0, rerun=Rerun.REPLAY_RNG, rng_bytes=rng_bytes,
        target="bernoulli", round=net.round,
    )  # fmt: skip
    product = net.layer(f"{name}", [x], nbytes, time_us=1.0, saves_input=False, target="mul")
    net.layers[-1].saved.append(mask)
    ops, values = net.build.ops, net.build.values
    op = ops[values[product].producer]
    ops[op.id] = Op(**{f: getattr(op, f) for f in op.__slots__} | {"inputs": (x, mask)})
    return product


def unet(depth: int, *, nbytes: int = 256) -> Graph:
    """An encoder and a decoder with long skips: sizes halve on the way down."""
    net = Network(f"unet-{depth}")
    x, skips, size = net.x, [], nbytes
    for i in range(depth):
        x = net.layer(f"down{i}", [x], size, time_us=4.0)
        x = net.layer(f"act{i}", [x], size, time_us=1.0, saves_input=False, saves_output=True)
        skips.append(x)
        size //= 2
        x = net.layer(f"pool{i}", [x], size, time_us=1.0)
    for i in reversed(range(depth)):
        size *= 2
        x = net.layer(f"up{i}", [x], size, time_us=4.0)
        x = net.layer(f"cat{i}", [x, skips[i]], 2 * size, time_us=1.0, saves_input=False)
        x = net.layer(f"mix{i}", [x], size, time_us=4.0)
    return net.graph(net.layer("loss", [x], 1))


def transformer(blocks: int, *, nbytes: int = 100) -> Graph:
    """Residual blocks with dropout, views, and one parameter shared by the first and the last layer."""
    net = Network(f"transformer-{blocks}")
    shared = net.build.input("embedding", 60, Role.PARAM)
    x = net.layer("embed", [net.x], nbytes, time_us=2.0, param=shared, target="embedding")
    for i in range(blocks):
        h = net.layer(f"b{i}_qkv", [x], 3 * nbytes, time_us=9.0, param_bytes=90, target="mm")
        h = net.view(f"b{i}_heads", h)
        h = net.layer(f"b{i}_attn", [h], nbytes, time_us=6.0, target="bmm")
        h = dropout(net, f"b{i}_drop", h, nbytes)
        x = net.layer(f"b{i}_add", [x, h], nbytes, time_us=1.0, saves_input=False, target="add")
    logits = net.layer("logits", [x], 2 * nbytes, time_us=9.0, param=shared, target="mm")
    return net.graph(net.layer("loss", [logits], 1))


def accumulation(rounds: int, length: int, *, nbytes: int = 100) -> Graph:
    """The same chain run forward and backward `rounds` times before one update."""
    net = Network(f"accumulation-{rounds}x{length}")
    weights = [net.build.input(f"w{i}", 20, Role.PARAM) for i in range(length)]
    for r in range(rounds):
        x = net.x
        for i in range(length):
            x = net.layer(f"r{r}_f{i}", [x], nbytes, param=weights[i])
        loss = net.layer(f"r{r}_loss", [x], 1)
        if r == rounds - 1:
            return net.graph(loss)
        net.backward(loss, optimizer=False)
        net.build.outputs.append(loss)
    raise AssertionError("at least one round")


# -- drawn at random ------------------------------------------------------------------------------------------

_KINDS = ("plain", "plain", "plain", "view", "batch_norm", "dropout", "multi", "never", "overwrite", "shared")


@st.composite
def networks(draw: st.DrawFn, max_layers: int = 12) -> Graph:
    """A random network: any shape, every kind of op, shared parameters, one or two rounds."""
    net = Network("random")
    shared = net.build.input("shared_w", 12, Role.PARAM)
    for r in range(draw(st.integers(1, 2))):
        made = [net.x]
        for i in range(draw(st.integers(1, max_layers))):
            made.append(_random_layer(draw, net, f"r{r}_{i}", made, shared))
        last = net.layer(f"r{r}_loss", [made[-1]], 1)
        net.build.outputs.append(last)
        net.backward(last, optimizer=False)
    for i, value in enumerate(list(net.build.values)):
        if net.build.storages[value.storage].role is Role.PARAM:
            net.build.op(f"sgd{i}", [value.id], [], phase=Phase.OPTIMIZER, rerun=Rerun.NEVER, mutates=(value.id,))
    return net.build.build()


def _random_layer(draw: st.DrawFn, net: Network, name: str, made: list[int], shared: int) -> int:
    kind = draw(st.sampled_from(_KINDS))
    picks = draw(st.lists(st.sampled_from(made[-5:]), min_size=1, max_size=3, unique=True))
    nbytes, time_us = draw(st.integers(0, 60)), float(draw(st.integers(0, 9)))
    if kind == "view":
        return net.view(name, picks[0])
    if kind == "batch_norm":
        return batch_norm(net, name, picks[0], nbytes)
    if kind == "dropout":
        return dropout(net, name, picks[0], nbytes)
    options: dict = {
        "time_us": time_us,
        "workspace_bytes": draw(st.integers(0, 20)),
        "saves_input": draw(st.booleans()),
        "saves_output": draw(st.booleans()),
        "param_bytes": draw(st.sampled_from((0, 10))),
    }
    if kind == "multi":
        options["extra_sizes"] = (draw(st.integers(0, 30)), draw(st.integers(0, 30)))
    if kind == "never":
        options["rerun"] = Rerun.NEVER
    if kind == "shared":
        options["param"] = shared
    if kind == "overwrite":
        options["overwritable"] = (picks[0],)
        nbytes = net.build.storages[net.build.values[picks[0]].storage].nbytes
    return net.layer(name, picks, nbytes, **options)


@st.composite
def networks_with_drops(draw: st.DrawFn, max_layers: int = 12) -> tuple[Graph, list[int]]:
    """A random network and a random set of its activations to drop."""
    from planner.plan import candidates

    graph = draw(networks(max_layers))
    free = candidates(graph)
    return graph, [s for s in free if draw(st.booleans())]
