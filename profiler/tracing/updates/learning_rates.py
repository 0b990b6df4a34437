"""Learning rates, traced as objects that stand for them, become inputs that are read at each call.

An optimizer that is traced gets a `Rate` for each group's learning rate: a float that is found by what it is, never by
its number. What the optimizer computes from it is a `Rate` again, which knows how to do so from the rate of the day.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from profiler.errors import CaptureError
from profiler.tracing.calling_convention import RateSlot
from profiler.tracing.eager_ways.live_numbers import LiveFloat
from profiler.tracing.eager_ways.marks import call_marked
from profiler.tracing.eager_ways.meant_calls import MeantCalls
from profiler.tracing.eager_ways.reads import Reads

Formula = Callable[[Any], Any]


class Rate(float):
    """A number computed from one group's learning rate: `formula` computes it from the rate of any other moment."""

    group: int
    text: str
    formula: Formula
    as_it_is = False  # whether it is handed to the step itself, which sees the type of it, too

    @staticmethod
    def of(group: int, value: Any) -> Rate:
        """The learning rate of a group itself."""
        return _made(value, group, "lr", lambda rate: rate)

    def __neg__(self) -> Rate:
        return _made(-float(self), self.group, f"minus_{self.text}", lambda rate: -self.formula(rate))


def _made(value: Any, group: int, text: str, formula: Formula) -> Rate:
    rate = Rate(value)
    rate.group, rate.text, rate.formula = group, text, formula
    return rate


def _combined(name: str, left: Any, right: Any) -> Rate:
    """`left name right`, of which at least one is a Rate."""
    rates = [side for side in (left, right) if isinstance(side, Rate)]
    if len({rate.group for rate in rates}) > 1:
        raise CaptureError("the optimizer computes one number from the learning rates of two groups")
    compute = getattr(operator, name)
    texts = [side.text if isinstance(side, Rate) else repr(side) for side in (left, right)]

    def formula(rate: Any) -> Any:
        return compute(*(side.formula(rate) if isinstance(side, Rate) else side for side in (left, right)))

    value = compute(*(float(side) if isinstance(side, Rate) else side for side in (left, right)))
    return _made(value, rates[0].group, f"{texts[0]}_{name}_{texts[1]}", formula)


def _refuse_decision(*_: Any) -> Any:
    raise CaptureError("the optimizer decides by its learning rate what it does")


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Rate, f"__{_name}__", lambda self, other, name=_name: _combined(name, self, other))
    setattr(Rate, f"__r{_name}__", lambda self, other, name=_name: _combined(name, other, self))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "bool"):
    setattr(Rate, f"__{_name}__", _refuse_decision)
Rate.__hash__ = object.__hash__  # type: ignore[method-assign]


# -- read by the step itself ------------------------------------------------------------------------------------------


class _OwnRate(Rate):
    """The learning rate of a group as the step itself reads it."""

    as_it_is = True


class _ReadRate(LiveFloat):
    """A learning rate that the step reads: returned or computed with it is live, and made into text it is a number."""

    def __str__(self) -> str:
        return str(self.plain())

    def __format__(self, spec: str) -> str:
        return format(self.plain(), spec)


class ReadRates:
    """Hands out learning rates to the step itself; `baked` is told the group where its number is needed."""

    def __init__(self, reads: Reads, baked: Callable[[int], None]) -> None:
        self._reads = reads
        self._baked = baked

    def read(self, group: int, value: float) -> Any:
        """What the step gets for a rate that it reads."""
        rate = _OwnRate(value)
        rate.group, rate.text, rate.formula = group, "lr", lambda now: now
        source = self._reads.number(operator.pos, rate)
        self._reads.assumed(self._reads.number(_is_a_float, source))
        return _ReadRate(_RateRecorder(self._reads, lambda: self._baked(group)), source)


class _RateRecorder:
    """Records numbers computed of a rate; a number that is needed is guarded like the optimizer's others."""

    def __init__(self, reads: Reads, baked: Callable[[], None]) -> None:
        self.number = reads.number
        self._reads = reads
        self._baked = baked

    def assumed(self, node: fx.Node) -> Any:
        """What the node holds now; where that is an outcome, only the outcome is assumed."""
        value = self._reads.assumed(node)
        if not isinstance(value, bool):
            self._baked()
        return value


def _is_a_float(value: Any) -> bool:
    return type(value) is float


class RatesKept(MeantCalls):
    """Puts the Rates that a torch call was given into the nodes that it makes."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self._graph = graph

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call itself, and its Rates into its nodes."""
        given = pytree.tree_leaves((args, kwargs))
        rates = {id(leaf): (float, leaf) for leaf in given if isinstance(leaf, Rate)}
        return call_marked(self._graph, func, args, kwargs, rates) if rates else func(*args, **kwargs)


def make_rates_live(graph: fx.Graph) -> list[RateSlot]:
    """Replace every Rate by a new input, and return what each of them is."""
    found: dict[RateSlot, fx.Node] = {}
    last = graph.find_nodes(op="placeholder")[-1]

    def live(value: Any) -> Any:
        if not isinstance(value, Rate):
            return value
        slot = RateSlot(group=value.group, text=value.text, formula=value.formula, as_it_is=value.as_it_is)
        if slot not in found:
            with graph.inserting_after([last, *found.values()][-1]):
                found[slot] = graph.placeholder(f"rate_{len(found)}")
        return found[slot]

    for node in list(graph.nodes):
        if node.op == "call_function":
            node.args, node.kwargs = map_aggregate(node.args, live), map_aggregate(node.kwargs, live)
    return list(found)
