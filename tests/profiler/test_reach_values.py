"""Whatever a step reads of arrays and the standard library, to the bit: a change is noticed by name."""

import configparser
import ctypes
import logging
import multiprocessing
import threading
import types

import numpy as np
import pytest

from tests.profiler.reach_cases import Case, assert_noticed, putting, setting, squared

# -- arrays and exact equality ----------------------------------------------------------------------------------------


def numpy_array():
    table = np.array([0.5, 2.0])
    return Case(
        loss=lambda m, b: squared(m, b) * float(table[0]),
        change=putting(table, 0, 0.75),
        said=r"the content of the outer variable table of <lambda> was .* and is",
    )


def exact(then, now):
    holder = types.SimpleNamespace(value=then, epoch=0)
    return Case(
        loss=lambda m, b: squared(m, b) * (1 if holder.value is None else 2),
        change=setting(holder, value=now),
        said=r"holder of <lambda>\.value was .* and is",
        unrelated=setting(holder, epoch=1),
    )


def zero_and_minus_zero():
    return exact(0.0, -0.0)


def integers_and_floats_in_a_tuple():
    return exact((2,), (2.0,))


def true_and_one():
    return exact(True, 1)


def complex_zeros():
    return exact(complex(0.0, 0.0), complex(0.0, -0.0))


# -- objects of the standard library ----------------------------------------------------------------------------------


def numpy_array_of_objects():
    scales = np.array([1.0, [2.0]], dtype=object)
    return Case(
        loss=lambda m, b: squared(m, b) * scales[1][0],
        change=putting(scales[1], 0, 3.0),
        said=r"entry 1 of the outer variable scales of <lambda>\[0\] was 2\.0 and is 3\.0",
    )


def shared_value():
    scale = multiprocessing.Value("d", 1.0)
    return Case(
        loss=lambda m, b: squared(m, b) * scale.value,
        change=setting(scale, value=2.0),
        said=r"the content of the outer variable scale of <lambda> was 1\.0 and is 2\.0",
    )


def shared_array():
    scales = multiprocessing.Array("d", [1.0, 2.0])
    return Case(
        loss=lambda m, b: squared(m, b) * scales[1],
        change=putting(scales, 1, 3.0),
        said=r"the content of the outer variable scales of <lambda> was ",
    )


def c_value():
    scale = ctypes.c_double(1.0)
    return Case(
        loss=lambda m, b: squared(m, b) * scale.value,
        change=setting(scale, value=2.0),
        said=r"the content of the outer variable scale of <lambda> was 1\.0 and is 2\.0",
    )


def event():
    warm = threading.Event()
    return Case(
        loss=lambda m, b: squared(m, b) * (1.0 if warm.is_set() else 2.0),
        change=warm.set,
        said=r"the outer variable warm of <lambda>\.is_set\(\) was False and is True",
    )


def view_of_a_dict():
    weights = {"a": 1.0, "b": 2.0}
    values = weights.values()
    return Case(
        loss=lambda m, b: squared(m, b) * sum(values),
        change=putting(weights, "b", 3.0),
        said=r"the outer variable values of <lambda>\['b'\] was 2\.0 and is 3\.0",
    )


def config_file():
    config = configparser.ConfigParser()
    config.read_dict({"loss": {"scale": "1.0"}})
    return Case(
        loss=lambda m, b: squared(m, b) * config.getfloat("loss", "scale"),
        change=lambda: config.set("loss", "scale", "2.0"),
        said=r"the outer variable config of <lambda>\['loss'\]\['scale'\] was '1\.0' and is '2\.0'",
    )


def level_of_a_logger():
    logger, spoken = logging.Logger("asked", logging.INFO), logging.Logger("spoken", logging.INFO)

    def loss(model, batch):
        spoken.debug("a step")
        return squared(model, batch) * (2.0 if logger.isEnabledFor(logging.DEBUG) else 1.0)

    return Case(
        loss=loss,
        change=lambda: logger.setLevel(logging.DEBUG),
        said=r"the outer variable logger of loss\.isEnabledFor was ",
    )


CASES = [
    shared_value, shared_array, c_value, event, view_of_a_dict, config_file, level_of_a_logger, numpy_array,
    numpy_array_of_objects, zero_and_minus_zero, integers_and_floats_in_a_tuple, true_and_one, complex_zeros,
]  # fmt: skip


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_change_of_what_the_step_reads_is_noticed_by_name_and_another_is_not(make):
    assert_noticed(make)
