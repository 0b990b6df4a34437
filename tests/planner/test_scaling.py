"""Graphs at one batch size from those at two others."""

from dataclasses import replace

import pytest

from planner.errors import GraphError
from planner.ir import Graph, Phase, TimingKind
from planner.scaling import Scaling, difference, in_proportion, with_times_of
from planner.synthetic import chain


def sized(batch: int) -> Graph:
    """A chain whose activations grow with the batch, and whose other storages do not."""
    graph = chain(4)
    storages = tuple(
        replace(s, nbytes=s.nbytes * batch if graph.maker[s.id] is not None else s.nbytes) for s in graph.storages
    )
    ops = tuple(replace(op, time_us=3.0 + op.time_us * batch, workspace_bytes=7 * batch) for op in graph.ops)
    return replace(graph, ops=ops, storages=storages).validate()


SCALING = Scaling(low=sized(4), high=sized(10), low_batch=4, high_batch=10)


@pytest.mark.parametrize("batch", [1, 3, 4, 7, 10, 33])
def test_everything_affine_is_exact_between_and_beyond(batch):
    predicted, actual = SCALING.at(batch), sized(batch)
    assert predicted.storages == actual.storages
    assert [op.workspace_bytes for op in predicted.ops] == [op.workspace_bytes for op in actual.ops]
    assert [op.time_us for op in predicted.ops] == pytest.approx([op.time_us for op in actual.ops])
    assert SCALING.deviation(actual, batch) == ""


def test_what_is_not_affine_is_named():
    squared = sized(7)
    storages = tuple(replace(s, nbytes=s.nbytes + (s.id == 2)) for s in squared.storages)
    deviation = SCALING.deviation(replace(squared, storages=storages), 7)
    assert deviation.startswith("at batch 7 ")
    assert squared.storage_names[2] in deviation


def test_nothing_is_ever_smaller_than_nothing():
    steep = Scaling(low=sized(1), high=sized(10), low_batch=4, high_batch=5)
    assert min(s.nbytes for s in steep.at(1).storages) == 0
    assert min(op.time_us for op in steep.at(1).ops) == 0.0


def test_other_ops_are_refused_by_name():
    other = sized(10)
    ops = (*other.ops[:-1], replace(other.ops[-1], target="something else"))
    with pytest.raises(GraphError, match=r"at batch 4 and 10 are not the same: op \d+ .*something else"):
        Scaling(low=sized(4), high=replace(other, ops=ops), low_batch=4, high_batch=10)


def test_another_number_of_ops_is_refused():
    with pytest.raises(GraphError, match=r"\d+ ops and \d+"):
        Scaling(low=sized(4), high=chain(6), low_batch=4, high_batch=10)


@pytest.mark.parametrize("batches", [(4, 4), (10, 4), (0, 4)])
def test_two_different_batches_are_needed(batches):
    with pytest.raises(GraphError, match="give two, the smaller first"):
        Scaling(low=sized(4), high=sized(10), low_batch=batches[0], high_batch=batches[1])


def test_sizes_are_no_difference_and_roles_are():
    assert difference(sized(4), sized(10)) == ""
    graph = sized(4)
    roles = tuple(replace(s, role=graph.storages[-1].role) for s in graph.storages)
    assert "not for the same things" in difference(graph, replace(graph, storages=roles))


def test_another_number_of_values_is_a_difference():
    graph = sized(4)
    fewer = replace(graph, values=graph.values[:-1])
    assert difference(graph, fewer) == f"{len(graph.values)} values and {len(fewer.values)}"


# -- times known at another batch only ------------------------------------------------------------------------------


def test_times_and_workspaces_grow_with_the_largest_grown_tensor_of_an_op():
    few, many = sized(4), sized(12)
    found = with_times_of(many, few)
    batch = {op.id for op in many.ops if op.phase is not Phase.OPTIMIZER}
    assert found.storages == many.storages
    for op, source in zip(found.ops, few.ops, strict=True):
        assert op.time_us == pytest.approx(source.time_us * (3 if op.id in batch else 1))
        assert op.workspace_bytes == source.workspace_bytes * (3 if op.id in batch else 1)
    assert found.timing.kind is TimingKind.ESTIMATED


def test_an_op_that_the_other_batch_does_not_have_keeps_its_own_time():
    graph = sized(4)
    renamed = replace(graph, ops=tuple(replace(op, name=f"{op.name}_other") for op in graph.ops))
    assert with_times_of(graph, renamed).ops == graph.ops


def test_an_op_with_other_tensors_is_refused_by_name():
    graph = sized(4)
    fewer = replace(graph, ops=tuple(replace(op, inputs=op.inputs[:-1]) for op in graph.ops))
    with pytest.raises(GraphError, match="op 'f0' of chain-4 is another in chain-4"):
        with_times_of(graph, fewer)


def test_in_proportion_everything_that_the_step_makes_grows_and_what_was_there_does_not():
    graph = chain(4)
    double = in_proportion(graph, 2.0)
    assert double.start_bytes == graph.start_bytes
    assert double.time_us == 2 * graph.time_us
    made = [s.id for s in graph.storages if graph.maker[s.id] is not None]
    assert made
    assert all(double.storages[s].nbytes == 2 * graph.storages[s].nbytes for s in made)
    assert double.timing.kind is TimingKind.ESTIMATED
