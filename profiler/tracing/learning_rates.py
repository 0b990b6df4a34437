"""Learning rates, traced as objects that stand for them, become inputs that are read at each call.

An optimizer that is traced gets a `Rate` for each group's learning rate: a float that is found by what it is, never by
its number. What the optimizer computes from it is a `Rate` again, which knows how to do so from the rate of the day.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from profiler.errors import CaptureError
from profiler.tracing.calling import RateSlot

Formula = Callable[[Any], Any]


class Rate(float):
    """A number computed from one group's learning rate: `formula` computes it from the rate of any other moment."""

    group: int
    text: str
    formula: Formula

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


class RatesKept(TorchFunctionMode):
    """Puts the Rates that a torch call was given into the nodes that it makes: on the way there they become numbers.

    For the length of one call a Rate is a number that none of the call's other arguments is.
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, kwargs = pytree.tree_leaves((args, kwargs or {})), kwargs or {}
        rates = {id(leaf): leaf for leaf in given if isinstance(leaf, Rate)}
        if not rates:
            return func(*args, **kwargs)
        free = _numbers_beside(given)
        marks = {key: next(free) for key in rates}
        args, kwargs = pytree.tree_map_only(Rate, lambda rate: marks[id(rate)], (args, kwargs))
        last = next(reversed(self._graph.nodes))
        result = func(*args, **kwargs)
        self._put_back(last, {marks[key]: rate for key, rate in rates.items()})
        return result

    def _put_back(self, last: fx.Node, rates: dict[float, Rate]) -> None:
        found: set[int] = set()

        def rate_of(value: Any) -> Any:
            rate = rates.get(value, value) if type(value) is float else value
            found.add(id(rate))
            return rate

        node = last.next
        while node is not self._graph._root:
            node.args, node.kwargs = map_aggregate(node.args, rate_of), map_aggregate(node.kwargs, rate_of)
            node = node.next
        if not found.issuperset(map(id, rates.values())):
            raise CaptureError("the optimizer gives its learning rate to an op that hides it")


def _numbers_beside(given: list[Any]) -> Iterator[float]:
    """Numbers that are none of the given ones."""
    taken = {float(leaf) for leaf in given if isinstance(leaf, (int, float))}
    return (number for number in (k + 0.5 for k in count()) if number not in taken)


def make_rates_live(graph: fx.Graph) -> list[RateSlot]:
    """Replace every Rate by a new input, and return what each of them is."""
    found: dict[RateSlot, fx.Node] = {}
    last = graph.find_nodes(op="placeholder")[-1]

    def live(value: Any) -> Any:
        if not isinstance(value, Rate):
            return value
        slot = RateSlot(group=value.group, text=value.text, formula=value.formula)
        if slot not in found:
            with graph.inserting_after([last, *found.values()][-1]):
                found[slot] = graph.placeholder(f"rate_{len(found)}")
        return found[slot]

    for node in list(graph.nodes):
        if node.op == "call_function":
            node.args, node.kwargs = map_aggregate(node.args, live), map_aggregate(node.kwargs, live)
    return list(found)
