"""Training steps made up op by op: for tests, for micro-benchmarks, and to look at plans without torch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from planner.errors import GraphError
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

    def one(self, name: str, inputs: list[int], nbytes: int, **options: Any) -> int:
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
    backward_in_place: bool = False


class Network:
    """A forward built op by op, whose backward and optimizer follow by themselves.

    The gradient of every forward op reads the gradients of its consumers and what the op saved.
    """

    def __init__(self, name: str, *, input_bytes: int = 4) -> None:
        self.build = Builder(name)
        self.x = self.build.input("x", input_bytes)
        self.layers: list[Layer] = []
        self.round = 0
        self.ops_per_update = 1

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
        saves: tuple[int, ...] = (),
        mutates_buffer: int | None = None,
        backward_in_place: bool = False,
        **options: Any,
    ) -> int:
        """A forward op; its first output goes on, what it makes besides is saved. Further options are the Builder's."""
        b = self.build
        if param is None and param_bytes:
            param = b.input(f"{name}_w", param_bytes, Role.PARAM)
        reads = [*inputs, *saves, *([param] if param is not None else [])]
        if mutates_buffer is not None:
            reads.append(mutates_buffer)
            options["mutates"] = (mutates_buffer,)
        outputs = b.op(name, reads, [nbytes, *extra_sizes], time_us=time_us, round=self.round, **options)
        saved = [*saves, *(inputs if saves_input else []), *([outputs[0]] if saves_output else []), *outputs[1:]]
        self.layers.append(Layer(name, inputs, outputs[0], saved, param, backward_in_place))
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
            options: dict[str, Any] = {"phase": Phase.BACKWARD, "role": Role.GRADIENT, "round": self.round}
            options["time_us"] = 2.0 * b.ops[b.values[layer.output].producer or 0].time_us
            reads = [*gradient[layer.output], *dict.fromkeys(layer.saved)]
            if layer.param is not None:
                reads.append(layer.param)
                nbytes.append(b.storages[b.values[layer.param].storage].nbytes)
            if layer.backward_in_place:
                options["overwritable"] = tuple(gradient[layer.output])
            grads = b.op(f"{layer.name}_bw", reads, nbytes, **options)
            for v, grad in zip(layer.inputs, grads, strict=False):
                gradient.setdefault(v, []).append(grad)
            if layer.param is not None:
                updates.append((f"{layer.name}_sgd", layer.param, grads[-1]))
        self.layers = []
        self.round += 1
        if optimizer:
            for name, param, grad in updates:
                for i in range(self.ops_per_update):
                    b.update(name if self.ops_per_update == 1 else f"{name}_{i}", param, grad)

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
    h = relu(net, f"{name}_relu", norm, nbytes, time_us=1.0)
    return net.layer(f"{name}_add", [h, x], nbytes, time_us=1.0, saves_input=False, target="add")


def relu(net: Network, name: str, x: int, nbytes: int, *, time_us: float) -> int:
    """An op that could overwrite its input and whose backward reads its output."""
    return net.layer(
        name, [x], nbytes, time_us=time_us, saves_input=False, saves_output=True, target="relu", overwritable=(x,)
    )  # fmt: skip


def batch_norm(net: Network, name: str, x: int, nbytes: int, *, time_us: float = 2.0) -> int:
    """An op with two outputs that updates a buffer which a rerun must leave alone."""
    buffer = net.build.input(f"{name}_mean", 8, Role.BUFFER)
    return net.layer(
        name, [x], nbytes, time_us=time_us, extra_sizes=(8,), mutates_buffer=buffer,
        rerun=Rerun.WITHOUT_SIDE_EFFECT, target="batch_norm", workspace_bytes=4,
    )  # fmt: skip


def dropout(net: Network, name: str, x: int, nbytes: int, *, rng_bytes: int = 16) -> int:
    """A random mask and the product with it."""
    mask = net.build.one(
        f"{name}_mask", [x], nbytes, time_us=1.0, rerun=Rerun.REPLAY_RNG, rng_bytes=rng_bytes,
        target="bernoulli", round=net.round,
    )  # fmt: skip
    return net.layer(name, [x], nbytes, time_us=1.0, saves_input=False, saves=(mask,), target="mul")


def unet(depth: int, *, nbytes: int = 256) -> Graph:
    """An encoder and a decoder with long skips: sizes halve on the way down."""
    net = Network(f"unet-{depth}")
    x, size = net.x, nbytes
    skips: list[int] = []
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
    raise GraphError(f"accumulation over {rounds} rounds: there must be at least one")


def resnet_like(blocks: tuple[int, ...] = (3, 8, 36, 3), *, nbytes: int = 1 << 20, ops_per_update: int = 4) -> Graph:
    """Bottleneck residual blocks in stages whose activations halve; (3, 8, 36, 3) has the depth of ResNet-152."""
    net = Network(f"resnet-like-{3 * sum(blocks) + 2}", input_bytes=nbytes // 4)
    x = conv_norm_relu(net, "stem", net.x, nbytes, time_us=300.0)
    size = nbytes
    for stage, count in enumerate(blocks):
        for i in range(count):
            x = bottleneck(net, f"layer{stage + 1}_{i}", x, size)
        size //= 2
    loss = net.layer("loss", [net.layer("fc", [x], 4000, time_us=50.0, param_bytes=8 << 20, target="addmm")], 4)
    net.ops_per_update = ops_per_update
    return net.graph(loss)


def bottleneck(net: Network, name: str, x: int, nbytes: int) -> int:
    """1x1, 3x3 and 1x1 convolutions with a skip; the last one is four times as wide."""
    h = conv_norm_relu(net, f"{name}_1", x, nbytes // 4, time_us=200.0)
    h = conv_norm_relu(net, f"{name}_2", h, nbytes // 4, time_us=450.0)
    h = net.layer(f"{name}_3_conv", [h], nbytes, time_us=200.0, param_bytes=nbytes // 64, target="conv")
    h = batch_norm(net, f"{name}_3_norm", h, nbytes, time_us=60.0)
    added = net.layer(f"{name}_add", [h, x], nbytes, time_us=40.0, saves_input=False, target="add", overwritable=(h,))
    return relu(net, f"{name}_relu", added, nbytes, time_us=30.0)


def conv_norm_relu(net: Network, name: str, x: int, nbytes: int, *, time_us: float) -> int:
    h = net.layer(f"{name}_conv", [x], nbytes, time_us=time_us, param_bytes=nbytes // 32, target="conv")
    h = batch_norm(net, f"{name}_norm", h, nbytes, time_us=time_us / 8)
    return relu(net, f"{name}_relu", h, nbytes, time_us=time_us / 16)


def layered(nodes: int, *, seed: int = 0) -> Graph:
    """A random net: `nodes` forward ops in layers of up to five, read by the next two layers and by far skips.

    Sizes vary by 20 and costs by 70, and whether a backward reads an op's inputs, its output or both varies too.
    """
    net, draw = Network(f"layered-{nodes}", input_bytes=1000), random.Random(seed)
    layers, unread = [[net.x]], dict[int, None]()
    for width in _layer_widths(nodes, draw):
        layer = [_random_op(net, f"n{len(net.layers)}", layers, draw) for _ in range(width)]
        for made in net.layers[-width:]:
            for v in made.inputs:
                unread.pop(v, None)
        layers.append(layer)
        unread.update(dict.fromkeys(layer))
    return net.graph(net.layer("loss", list(unread), 4))


def _layer_widths(nodes: int, draw: random.Random) -> list[int]:
    widths: list[int] = []
    while (left := nodes - sum(widths)) > 0:
        widths.append(min(draw.randint(1, 5), left))
    return widths


def _random_op(net: Network, name: str, layers: list[list[int]], draw: random.Random) -> int:
    """An op that reads one to three values of the last two layers, or now and then of any before."""
    near = [v for layer in layers[-2:] for v in layer]
    if draw.random() < 0.15:
        near.append(draw.choice(draw.choice(layers)))
    pool = list(dict.fromkeys(near))
    inputs = draw.sample(pool, min(draw.randint(1, 3), len(pool)))
    saving = draw.random()
    return net.layer(
        name,
        inputs,
        1000 * draw.randint(20, 400),
        time_us=draw.choice((5, 10, 20, 50, 100, 200)) * draw.uniform(0.7, 1.3),
        saves_input=saving < 0.6,
        saves_output=saving >= 0.4,
        param_bytes=draw.choice((0, 10_000)),
    )
