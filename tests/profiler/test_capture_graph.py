"""What the captured graph says about the step: phases, roles, memory, reruns, in-place forms."""

from collections import defaultdict

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812

from bench.workloads import zoo as models
from planner.ir import Graph, Phase, Rerun, Role
from profiler.ops import fresh, inplace_call, inplace_target, without_side_effect
from profiler.tracing.fake_tensors.patches import below_autograd
from profiler.tracing.whole_step import TracedStep, capture
from tests.profiler import small
from tests.profiler.small import op_named, targets
from tests.rewriter import tiny
from tests.shared import case_of
from tests.side_by_side import same_bits, seeded


def bert_with_eager_attention():
    return models.bert(2, seq=16, attention="eager", **tiny.BERT)


def vit_without_dropout():
    return models.vit(2, image=32, layers=1, heads=2, width=32, classes=10)


ordinary = small.make()
MODELS = {"small": ordinary} | {name: tiny.ZOO[name] for name in ("bert", "resnet", "vit", "mobilenet")}


@pytest.fixture(params=MODELS)
def make(request):
    return MODELS[request.param]


@pytest.fixture
def case(make):
    return case_of(make)


def captured(make) -> TracedStep:
    """One capture for all tests of a process that leave it as it was."""
    return case_of(make).captured


class Recorder(fx.Interpreter):
    """Runs a graph and keeps every tensor alive."""

    def __init__(self, module):
        super().__init__(module, garbage_collect_values=False)
        self.seen = {}

    def run_node(self, node):
        result = super().run_node(node)
        self.seen[node] = result
        return result


def run(case, interpreter):
    with case.kept(), below_autograd():
        interpreter.run(*case.captured.convention.gather(case.batch))
    return interpreter


def test_values_share_a_storage_exactly_where_real_tensors_share_memory(case):
    traced = case.captured
    seen = run(case, Recorder(traced.module)).seen
    real, planned = defaultdict(set), defaultdict(set)
    for value in traced.graph.values:
        tensor = seen[traced.value_nodes[value.id]]
        storage = traced.graph.storages[value.storage]
        assert tensor.untyped_storage().nbytes() == storage.nbytes, value.name
        assert tuple(tensor.shape) == value.shape
        if storage.nbytes:
            real[tensor.untyped_storage()._cdata].add(value.name)
            planned[storage.id].add(value.name)
    assert sorted(map(sorted, real.values())) == sorted(map(sorted, planned.values()))


def test_names_are_the_fx_nodes_own(case):
    traced = case.captured
    assert [op.name for op in traced.graph.ops] == [node.name for node in traced.nodes]
    assert [value.name for value in traced.graph.values] == [node.name for node in traced.value_nodes]
    assert len({value.name for value in traced.graph.values}) == len(traced.graph.values)


def test_two_captures_of_one_step_have_one_fingerprint(make):
    assert capture(*seeded(make)).graph.fingerprint == captured(make).graph.fingerprint


def test_a_graph_survives_its_file(case, tmp_path):
    graph = case.captured.graph
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json") == graph


def test_in_place_forms_give_the_same_bits(case):
    class Checker(Recorder):
        checked = 0

        def run_node(self, node):
            if inplace_target(node) is not None:
                into = self.seen[node.args[0]]
                copy = torch.empty_strided(into.shape, into.stride(), dtype=into.dtype).copy_(into)
                target, args, kwargs = inplace_call(node)
                swap = lambda n: copy if n is node.args[0] else self.seen[n]  # noqa: E731
                args, kwargs = fx.node.map_arg((args, kwargs), swap)
                out = target(*args, **kwargs)
                assert out.data_ptr() == copy.data_ptr()
                assert same_bits(out, super().run_node(node)), node.name
                self.checked += 1
                return self.seen[node]
            return super().run_node(node)

    assert run(case, Checker(case.captured.module)).checked > 3
    assert any(op.overwritable for op in case.captured.graph.ops)


def test_ops_that_may_run_again_give_the_same_bits_and_leave_no_trace(case):
    class Rerunner(Recorder):
        def __init__(self, traced):
            super().__init__(traced.module)
            self.rerun = {node: op.rerun for node, op in zip(traced.nodes, traced.graph.ops, strict=True)}
            self.counts = defaultdict(int)

        def run_node(self, node):
            how = self.rerun.get(node)
            before = torch.get_rng_state()
            result = super().run_node(node)
            if how is None or how is Rerun.NEVER:
                return result
            target, args, kwargs = node.target, node.args, node.kwargs
            if how is Rerun.WITHOUT_SIDE_EFFECT:
                target, args, kwargs = without_side_effect(node)
            args, kwargs = fx.node.map_arg((args, kwargs), self.seen.__getitem__)
            buffers = [b.clone() for b in case.model.buffers()]
            after = torch.get_rng_state()
            if how is Rerun.REPLAY_RNG:
                torch.set_rng_state(before)
            again = target(*args, **kwargs)
            assert torch.equal(torch.get_rng_state(), after), node.name
            flat = torch.utils._pytree.tree_leaves
            assert all(map(same_bits, flat(result), flat(again))), node.name
            assert all(map(same_bits, buffers, case.model.buffers())), node.name
            self.counts[how] += 1
            return result

    counts = run(case, Rerunner(case.captured)).counts
    assert counts[Rerun.FREELY] > 20


def test_phases_come_in_order_and_gradients_are_found(case):
    traced = case.captured
    model = traced.convention.model
    order = [op.phase for op in traced.graph.ops]
    assert order == sorted(order, key=list(Phase).index)
    assert set(order) == set(Phase)
    assert set(traced.gradients) == {name for name, _ in model.named_parameters()}
    for name, value in traced.gradients.items():
        value = traced.graph.values[value]
        assert value.shape == tuple(model.get_parameter(name).shape)
        assert traced.graph.storages[value.storage].role is Role.GRADIENT


def test_no_activation_changes_after_it_was_made(case):
    graph = case.captured.graph
    for storage in graph.storages:
        if storage.role is Role.ACTIVATION:
            assert graph.writers[storage.id] == (), graph.storage_names[storage.id]


def test_every_role_is_told():
    traced = captured(ordinary)
    roles = {graph_name(traced, s): s.role for s in traced.graph.storages}
    assert roles["_0_weight"] is Role.PARAM
    assert roles["_1_running_mean"] is Role.BUFFER
    assert roles["_0_weight_momentum_buffer"] is Role.OPT_STATE
    assert roles["batch_0"] is Role.INPUT
    assert roles["addmm"] is Role.ACTIVATION
    assert roles[graph_name(traced, storage_of(traced, traced.gradients["4.bias"]))] is Role.GRADIENT
    (loss,) = [s for s in traced.graph.storages if s.role is Role.OUTPUT]
    assert loss.nbytes == 4


def graph_name(traced, storage):
    return traced.graph.storage_names[storage.id]


def storage_of(traced, value):
    return traced.graph.storages[traced.graph.values[value].storage]


def test_ops_know_their_module_and_the_line_that_made_them_also_in_the_backward():
    traced = captured(tiny.resnet)
    forward = next(op for op in traced.graph.ops if op.module_path == "5.conv2")
    assert forward.target == "aten.convolution.default"
    assert forward.source_line.startswith("resnet.py:")
    assert forward.source_line.endswith("out = self.conv2(out)")
    backward = [op for op in traced.graph.ops if op.module_path == "5.conv2"]
    assert "aten.convolution_backward.default" in [op.target for op in backward]


def test_dropout_masks_read_nothing_and_replay_their_generator():
    traced = captured(ordinary)
    mask = op_named(traced, "bernoulli_")
    assert traced.nodes[mask.id].target is fresh
    assert mask.inputs == ()
    assert mask.rerun is Rerun.REPLAY_RNG
    assert traced.graph.storages[mask.rng_state].nbytes == torch.get_rng_state().numel()


def test_batch_norm_owns_up_to_its_running_statistics():
    traced = captured(ordinary)
    norm = op_named(traced, "native_batch_norm.default")
    assert norm.rerun is Rerun.WITHOUT_SIDE_EFFECT
    assert [traced.graph.values[v].name for v in norm.mutates] == ["_1_running_mean", "_1_running_var"]
    counter = next(op for op in traced.graph.ops if op.target == "aten.add_.Tensor")
    assert counter.rerun is Rerun.NEVER
    assert "num_batches_tracked" in counter.never_reason


def test_a_batch_norm_in_evaluation_is_an_ordinary_op():
    step, model, optimizer, batch = small.make()()
    traced = capture(step, model.eval(), optimizer, batch)
    norm = op_named(traced, "native_batch_norm.default")
    assert norm.rerun is Rerun.FREELY
    assert norm.mutates == ()


def test_attention_without_dropout_draws_no_random_numbers():
    traced = captured(vit_without_dropout)
    attention = op_named(traced, "scaled_dot_product")
    assert attention.rerun is Rerun.FREELY


def test_unsafe_views_share_their_bases_storage():
    traced = captured(bert_with_eager_attention)
    views = [op for op in traced.graph.ops if "_unsafe_view" in op.target]
    assert views
    for op in views:
        (value,) = (traced.graph.values[v] for v in op.outputs)
        assert value.base == op.inputs[0]


def test_unread_outputs_of_an_op_still_count():
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 2, 3), nn.Linear(2, 4)

        def forward(self, x):
            with torch.no_grad():
                pooled = F.max_pool2d(self.conv(x), 4)  # nobody reads the indices
            return self.head(pooled.flatten(1))

    make = small.make(model=Pool, batch=lambda: (torch.randn(2, 1, 6, 6), torch.randint(0, 4, (2,))))
    traced = capture(*make())
    pool = op_named(traced, "max_pool2d_with_indices")
    assert len(pool.outputs) == 2


def test_machinery_and_dead_code_are_gone_and_effects_are_not():
    def step(model, optimizer, batch):
        model(batch[0]) * 3  # dead, but for the statistics and the dropout it moves
        return small.step(model, optimizer, batch)

    traced = capture(*small.make(step)())
    names = targets(traced)
    assert not [name for name in names if "detach" in name or "profiler" in name]
    assert sum("bernoulli_" in name for name in names) == 2
    assert sum("native_batch_norm.default" in name for name in names) == 2
    assert not any(
        name == "aten.mul.Tensor" and op.inputs == () for name, op in zip(names, traced.graph.ops, strict=True)
    )


def test_the_rate_is_an_input_that_takes_no_memory():
    traced = captured(ordinary)
    names = [node.name for node in traced.module.graph.find_nodes(op="placeholder")]
    assert names[-1] == "minus_lr_0"
    assert "minus_lr_0" not in {value.name for value in traced.graph.values}


def test_only_whole_tensors_that_die_with_the_step_are_overwritable():
    graph = captured(tiny.vit).graph
    for op in graph.ops:
        for value in op.overwritable:
            into, out = graph.values[value], graph.values[op.outputs[0]]
            assert value == op.inputs[0]
            assert (into.shape, into.dtype) == (out.shape, out.dtype)
            assert graph.storages[into.storage].nbytes == graph.storages[out.storage].nbytes
            assert graph.maker[into.storage] is not None


def test_an_op_that_reads_its_memory_in_two_ways_is_not_overwritable():
    class Symmetric(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            square = self.layer(x[:6]) * 2
            return (square + square.T)[:, :4]

    def step(model, optimizer, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1][:6])
        loss.backward()
        optimizer.step()
        return loss

    traced = capture(*small.make(step, model=Symmetric)())
    add = next(op for op in traced.graph.ops if op.target == "aten.add.Tensor" and op.phase is Phase.FORWARD)
    assert add.overwritable == ()
