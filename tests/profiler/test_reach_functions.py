"""Whatever a step reads through functions and globals: a change is noticed by name, and no other is."""

import functools
import types

import pytest
import torch
from torch import nn

from tests.profiler import helpers_of_steps as other_file
from tests.profiler.reach_cases import Case, as_before, assert_noticed, putting, setting, squared

# -- functions --------------------------------------------------------------------------------------------------------


def default_argument():
    def weighted(loss, weight=0.5):
        return loss * weight

    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=setting(weighted, __defaults__=(0.75,)),
        said=r"the default weight of weighted was 0\.5 and is 0\.75",
    )


def default_argument_by_name():
    def weighted(loss, *, weight=0.5):
        return loss * weight

    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=lambda: weighted.__kwdefaults__.__setitem__("weight", 0.75),
        said=r"the default weight of weighted was 0\.5 and is 0\.75",
    )


def list_as_a_default():
    def weighted(loss, weights=[0.5]):  # noqa: B006 - as people write it
        return loss * weights[0]

    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=putting(weighted.__defaults__[0], 0, 0.75),
        said=r"the default weights of weighted\[0\] was 0\.5 and is 0\.75",
    )


def argument_of_a_partial():
    weighted = functools.partial(lambda loss, weight: loss * weight, weight=0.5)
    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=putting(weighted.keywords, "weight", 0.75),
        said=r"weighted of <lambda>'s argument weight was 0\.5 and is 0\.75",
    )


def list_given_to_a_partial():
    weights = [0.5]
    weighted = functools.partial(lambda weights, loss: loss * weights[0], weights)
    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=putting(weights, 0, 0.75),
        said=r"weighted of <lambda>'s argument 0\[0\] was 0\.5 and is 0\.75",
    )


def closure_behind_two_lambdas():
    weight = 0.5
    inner = lambda: weight  # noqa: E731
    outer = lambda: inner()  # noqa: E731

    def change():
        nonlocal weight
        weight = 0.75

    return Case(
        loss=lambda m, b: squared(m, b) * outer(),
        change=change,
        said=r"the outer variable weight of <lambda> was 0\.5 and is 0\.75",
    )


def function_put_in_place_of_another():
    def mean(x):
        return x.square().mean()

    def total(x):
        return x.square().sum()

    loss_fn = mean

    def change():
        nonlocal loss_fn
        loss_fn = total

    return Case(
        loss=lambda m, b: loss_fn(m(b)),
        change=change,
        said=r"loss_fn of <lambda> was the function mean and is the function total",
    )


def attribute_of_a_function():
    def weighted(loss):
        return loss * weighted.weight

    weighted.weight, weighted.epoch = 0.5, 0
    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=setting(weighted, weight=0.75),
        said=r"weighted\.weight was 0\.5 and is 0\.75",
        unrelated=setting(weighted, epoch=1),
    )


def method_of_an_object():
    class Scaler:
        def __init__(self):
            self.scale, self.steps = 0.5, 0

        def apply(self, loss):
            return loss * self.scale

    scaler = Scaler()
    bound = scaler.apply
    return Case(
        loss=lambda m, b: bound(squared(m, b)),
        change=setting(scaler, scale=0.75),
        said=r"\.scale was 0\.5 and is 0\.75",
        unrelated=setting(scaler, steps=1),
    )


def what_a_cached_function_reads():
    weights = [0.5]

    @functools.lru_cache
    def weight(_):
        return weights[0]

    def change():
        weights[0] = 0.75
        weight.cache_clear()

    return Case(
        loss=lambda m, b: squared(m, b) * weight(0),
        change=change,
        said=r"weights of weight\[0\] was 0\.5 and is 0\.75",
    )


# -- globals ----------------------------------------------------------------------------------------------------------

SETTINGS = types.SimpleNamespace(alpha=0.5)
WEIGHTS = [0.5]
EPOCH = [0]


def global_read_by_a_helper():
    return Case(
        loss=lambda m, b: _weighted(squared(m, b)),
        change=putting(WEIGHTS, 0, 0.75),
        said=r"the global WEIGHTS of \S*test_reach_functions\[0\] was 0\.5 and is 0\.75",
        unrelated=putting(EPOCH, 0, 1),
    )


def _weighted(loss):
    return loss * WEIGHTS[0]


def attribute_of_another_file():
    return Case(
        loss=lambda m, b: squared(m, b) * other_file.ALPHA,
        change=setting(other_file, ALPHA=0.75),
        said=r"the global other_file of \S*test_reach_functions\.ALPHA was 0\.5 and is 0\.75",
        unrelated=setting(other_file, EPOCH=1),
    )


def global_read_in_another_file():
    return Case(
        loss=lambda m, b: other_file.weighted(squared(m, b)),
        change=setting(other_file, BETA=0.75),
        said=r"the global BETA of tests\.profiler\.helpers_of_steps was 0\.5 and is 0\.75",
        unrelated=setting(other_file, EPOCH=2),
    )


def global_imported_in_the_function():
    def loss(m, b):
        from tests.profiler.helpers_of_steps import GAMMA

        return squared(m, b) * GAMMA

    return Case(
        loss=loss,
        change=setting(other_file, GAMMA=0.75),
        said=r"tests\.profiler\.helpers_of_steps\.GAMMA was 0\.5 and is 0\.75",
        unrelated=setting(other_file, EPOCH=3),
    )


def name_that_hides_a_builtin():
    return Case(
        loss=lambda m, b: other_file.counted(squared(m, b)),
        change=setting(other_file, len=lambda _: 7),
        said=r"the global len of tests\.profiler\.helpers_of_steps was not set and is the function <lambda>",
    )


def function_of_torch():
    own = nn.functional.tanh
    return Case(
        loss=lambda m, b: nn.functional.tanh(m(b)).square().mean(),
        change=setting(nn.functional, tanh=lambda x: own(x) * 2),
        said=r"tanh was the function tanh and is the function <lambda>",
    )


def what_is_registered_with_a_function():
    @functools.singledispatch
    def weight(kind):
        return 0.5

    return Case(
        loss=lambda m, b: squared(m, b) * weight(1),
        change=lambda: weight.register(int, lambda kind: 0.75),
        said=r"what is registered with weight\[.*int.*\] was not set",
    )


def method_of_tensors():
    own = torch.Tensor.tanh
    return Case(
        loss=lambda m, b: m(b).tanh().mean(),
        change=setting(torch.Tensor, tanh=lambda x: own(x) * 2),
        said=r"class Tensor\.tanh was not set",
    )


CASES = [
    what_is_registered_with_a_function, method_of_tensors,
    default_argument, default_argument_by_name, list_as_a_default, argument_of_a_partial, list_given_to_a_partial,
    closure_behind_two_lambdas, function_put_in_place_of_another, attribute_of_a_function, method_of_an_object,
    what_a_cached_function_reads, global_read_by_a_helper, attribute_of_another_file, global_read_in_another_file,
    global_imported_in_the_function, name_that_hides_a_builtin, function_of_torch,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _torch_and_files_as_before():
    WEIGHTS[0], EPOCH[0] = 0.5, 0
    with as_before(nn.functional, nn.Linear, torch.Tensor, other_file):
        yield


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_change_of_what_the_step_reads_is_noticed_by_name_and_another_is_not(make):
    assert_noticed(make)
