"""What cannot be captured is refused with the user's line, and nothing is changed by trying."""

import copy
import random

import pytest
import torch
from torch import distributed, nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F  # noqa: N812

from profiler.errors import CaptureError
from profiler.tracing.whole_step import capture
from tests.profiler import small
from tests.side_by_side import assert_captured_equals_eager, same_bits


def reads_the_loss(model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    print(loss.item())  # the offending line: item
    optimizer.step()


def selects_by_mask(model, optimizer, batch):
    out = model(batch[0])
    chosen = out[batch[1] > 0]  # the offending line: mask
    chosen.sum().backward()
    optimizer.step()


def uses_a_closure(model, optimizer, batch):
    optimizer.step(lambda: F.cross_entropy(model(batch[0]), batch[1]))  # the offending line: closure


def steps_a_scheduler(model, optimizer, batch):
    small.step(model, optimizer, batch)
    SCHEDULERS[optimizer].step()  # the offending line: scheduler


def steps_a_second_optimizer(model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optim.SGD(model.parameters(), lr=0.1).step()  # the offending line: second


def has_a_bug(model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0].T), batch[1])  # the offending line: bug
    loss.backward()


def raises(model, optimizer, batch):
    raise KeyError("no such thing")  # the offending line: raises


SCHEDULERS = {}
LINES = {
    reads_the_loss: ("item", "return the value"),
    selects_by_mask: ("mask", "shape depends on data"),
    uses_a_closure: ("closure", "without a closure"),
    steps_a_scheduler: ("scheduler", "after the step"),
    steps_a_second_optimizer: ("second", "one optimizer"),
    has_a_bug: ("bug", "RuntimeError"),
    raises: ("raises", "no such thing"),
}


def everything(model, optimizer):
    """All that capture must leave alone."""
    return {
        "state": copy.deepcopy((model.state_dict(), optimizer.state_dict())),
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "objects": [id(t) for t in (*model.parameters(), *model.buffers())],
        "grad objects": [id(p.grad) for p in model.parameters() if p.grad is not None],
        "training": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "optimizer": sorted(vars(optimizer)),
        "groups": id(optimizer.param_groups),
        "rng": (torch.get_rng_state(), random.getstate()),
        "global": (torch.autograd.backward, torch.autograd.grad, optim.lr_scheduler.LRScheduler.step),
    }


def assert_unchanged(before, after):
    assert before.keys() == after.keys()
    for key in before:
        flat_before, tree_before = torch.utils._pytree.tree_flatten(before[key])
        flat_after, tree_after = torch.utils._pytree.tree_flatten(after[key])
        assert tree_before == tree_after, key
        assert all(map(same_bits, flat_before, flat_after)), key


@pytest.mark.parametrize("step", LINES, ids=lambda s: s.__name__)
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("optimizer", [small.sgd, small.adam])
def test_a_refusal_names_the_users_line_and_changes_nothing(step, stepped, optimizer):
    torch.manual_seed(0)  # labels among which there is a 0, so that a mask leaves something out
    _, model, optimizer, batch = small.make(optimizer=optimizer)()
    SCHEDULERS[optimizer] = optim.lr_scheduler.StepLR(optimizer, 1)
    if stepped:
        small.step(model, optimizer, batch)
    before = everything(model, optimizer)
    epochs = SCHEDULERS[optimizer].last_epoch
    with pytest.raises(CaptureError) as refusal:
        capture(step, model, optimizer, batch)
    assert_unchanged(before, everything(model, optimizer))
    assert SCHEDULERS[optimizer].last_epoch == epochs
    mark, advice = LINES[step]
    assert f"the offending line: {mark}" in str(refusal.value)
    assert "test_capture_refusals.py:" in str(refusal.value)
    assert advice in str(refusal.value)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("optimizer", [small.sgd, small.adam, lambda m: optim.AdamW(m.parameters(), fused=True)])
def test_a_capture_that_succeeds_changes_nothing(stepped, optimizer):
    def step(model, optimizer, batch):
        model.eval()
        model.train()
        model.last_batch = batch
        return small.step(model, optimizer, batch)

    _, model, optimizer, batch = small.make(optimizer=optimizer)()
    if stepped:
        small.step(model, optimizer, batch)
    before = everything(model, optimizer)
    capture(step, model, optimizer, batch)
    assert_unchanged(before, everything(model, optimizer))


def test_a_step_that_draws_from_pythons_random_is_refused():
    def step(model, optimizer, batch):
        return random.random() * small.step(model, optimizer, batch)

    before = random.getstate()
    with pytest.raises(CaptureError, match="random"):
        capture(*small.make(step)())
    assert random.getstate() == before


def test_a_step_that_changes_the_rate_is_refused():
    def step(model, optimizer, batch):
        loss = small.step(model, optimizer, batch)
        optimizer.param_groups[0]["lr"] *= 0.5
        return loss

    _, model, optimizer, batch = small.make()()
    with pytest.raises(CaptureError, match="outside of it"):
        capture(step, model, optimizer, batch)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_rate_that_the_step_itself_needs_as_a_number_is_guarded():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1]) * optimizer.param_groups[0]["lr"]
        loss.backward()
        optimizer.step()
        return loss

    _, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)
    optimizer.param_groups[0]["lr"] = 0.2
    assert "'lr' of optimizer group 0 was 0.1 and is 0.2" in traced.convention.check(batch)


def test_a_parameter_outside_the_model_is_refused():
    model, extra = small.mlp(), nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([*model.parameters(), extra], lr=0.1)
    with pytest.raises(CaptureError, match="part of the model"):
        capture(small.step, model, optimizer, small.data())


def test_a_closed_over_trainable_parameter_is_refused():
    scale = nn.Parameter(torch.ones(()))

    def step(model, optimizer, batch):
        loss = scale * F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(CaptureError, match="not the model's"):
        capture(*small.make(step)())
    assert scale.grad is None


def test_a_batch_whose_tensors_cannot_be_seen_is_refused():
    class Bundle:
        images = torch.zeros(2, 6)

    _, model, optimizer, _ = small.make()()
    with pytest.raises(CaptureError, match="Bundle"):
        capture(small.step, model, optimizer, Bundle())


def test_a_result_whose_tensors_cannot_be_seen_is_refused():
    class Bundle:
        pass

    with pytest.raises(CaptureError, match="Bundle"):
        capture(*small.make(lambda model, optimizer, batch: Bundle())())


def test_memory_swapped_under_a_parameter_is_refused():
    def step(model, optimizer, batch):
        model[0].weight.data = model[0].weight.data * 2
        return small.step(model, optimizer, batch)

    _, model, optimizer, batch = small.make()()
    before = everything(model, optimizer)
    with pytest.raises(CaptureError, match="write in place"):
        capture(step, model, optimizer, batch)
    assert_unchanged(before, everything(model, optimizer))


def changed_group(model, optimizer, batch):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    return batch


def changed_freeze(model, optimizer, batch):
    model[0].weight.requires_grad_(False)
    return batch


def changed_mode(model, optimizer, batch):
    model.eval()
    return batch


def changed_batch(model, optimizer, batch):
    return batch[0][:5], batch[1][:5]


def changed_dtype(model, optimizer, batch):
    return batch[0].double(), batch[1]


def changed_tree(model, optimizer, batch):
    return list(batch)


def changed_hooks(model, optimizer, batch):
    optimizer.register_step_pre_hook(lambda *args: None)
    return batch


def changed_rate(model, optimizer, batch):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    return batch


CHANGES = {
    changed_hooks: "hook",
    changed_rate: "is a Tensor",
    changed_group: "parameter groups",
    changed_freeze: "requires_grad",
    changed_mode: "training",
    changed_batch: r"batch leaf 0 was torch.float32\[12, 6\]",
    changed_dtype: "float64",
    changed_tree: "the batch was",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_step_that_is_no_longer_the_captured_one_is_noticed(change):
    step, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)
    assert traced.convention.check(batch) == []
    batch = change(model, optimizer, batch)
    weights = model[0].weight.clone()
    with pytest.raises(CaptureError, match=CHANGES[change]):
        traced.run(batch)
    assert torch.equal(weights, model[0].weight)


# -- wrappers that hide what happens ------------------------------------------------------------------------------


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def distributed_inside(model, mesh):
    model[0] = nn.parallel.DistributedDataParallel(model[0])
    return model


def fully_sharded_data_parallel(model, mesh):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fully_sharded(model, mesh):
    return fully_shard(model, mesh=mesh)


WRAPPED = {
    fully_sharded_data_parallel: "the model is of class FullyShardedDataParallel",
}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("wrap", WRAPPED, ids=lambda w: w.__name__)
def test_a_model_that_communicates_is_refused(wrap, one_process):
    model = wrap(small.mlp(), one_process)
    with pytest.raises(CaptureError, match=f"{WRAPPED[wrap]}: communication .* pass the bare module"):
        capture(small.step, model, small.sgd(model), small.data())


def test_a_sharded_model_of_one_process_is_captured(one_process):
    model = fully_sharded(small.mlp(), one_process)
    traced = capture(small.step, model, small.sgd(model), small.data())
    assert any("all_gather" in op.target for op in traced.graph.ops)


def test_a_part_of_the_model_that_communicates_is_refused(one_process):
    model = distributed_inside(small.mlp(), one_process)
    with pytest.raises(CaptureError, match=r"module 0 is wrapped in DistributedDataParallel .* pass the wrapped model"):
        capture(small.step, model, small.sgd(model), small.data())


def compiled_in_place(model):
    model[4].compile()
    return model


@pytest.mark.parametrize("compiled", [torch.compile, compiled_in_place])
def test_a_compiled_model_is_refused(compiled):
    model = compiled(small.mlp())
    with pytest.raises(CaptureError, match="pass the uncompiled model"):
        capture(small.step, model, small.sgd(model), small.data())


def test_a_compiled_step_is_refused():
    _, model, optimizer, batch = small.make()()
    with pytest.raises(CaptureError, match="pass the uncompiled function"):
        capture(torch.compile(small.step), model, optimizer, batch)


# -- switches of torch's --------------------------------------------------------------------------------------------

TURNED = {
    torch.set_default_dtype: (torch.get_default_dtype, torch.float64),
    torch.set_float32_matmul_precision: (torch.get_float32_matmul_precision, "medium"),
    torch.use_deterministic_algorithms: (torch.are_deterministic_algorithms_enabled, True),
}


@pytest.mark.parametrize("turn", TURNED, ids=lambda turn: turn.__name__)
def test_a_step_that_turns_a_switch_is_refused_and_the_switch_stays_as_it_was(turn):
    get, other = TURNED[turn]
    before = get()

    def step(model, optimizer, batch):
        getattr(torch, turn.__name__)(other)
        try:
            return small.step(model, optimizer, batch)
        finally:
            turn(before)

    with pytest.raises(CaptureError, match=f"the step calls torch.{turn.__name__}"):
        capture(*small.make(step)())
    assert get() == before


def test_a_step_may_set_a_switch_to_what_it_is():
    def step(model, optimizer, batch):
        torch.set_default_dtype(torch.float32)
        return small.step(model, optimizer, batch)

    assert_captured_equals_eager(small.make(step))


# -- TorchScript ---------------------------------------------------------------------------------------------------


@torch.jit.script
def scripted(x: torch.Tensor):
    return x * torch.sigmoid(x)


@pytest.mark.parametrize("make", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(1, 6))])
def test_a_module_in_torchscript_is_refused_with_both_ways_out(make):
    model = small.mlp()
    model[0] = make(model[0])
    with pytest.raises(
        CaptureError, match=r"module 0 is of class ScriptModule.* before torch.jit.script .*_model\(part"
    ):
        capture(small.step, model, optim.SGD(model[4].parameters(), lr=0.1), small.data())


def scripted_loss(model, optimizer, batch):
    optimizer.zero_grad()
    loss = scripted(F.cross_entropy(model(batch[0]), batch[1]))
    loss.backward()
    optimizer.step()
    return loss


def test_a_differentiated_function_in_torchscript_is_refused_unless_it_is_not_rewritten():
    with pytest.raises(
        CaptureError, match=r"scripted is in TorchScript and differentiated.*optimized_execution\(False"
    ):
        capture(*small.make(scripted_loss)())
    with torch.jit.optimized_execution(False):
        assert_captured_equals_eager(small.make(scripted_loss))


def test_a_function_in_torchscript_of_data_alone_equals_eager():
    def step(model, optimizer, batch):
        return small.step(model, optimizer, (scripted(batch[0]), batch[1]))

    assert_captured_equals_eager(small.make(step))


# -- gradient scalers ---------------------------------------------------------------------------------------------


def scaled(scaler):
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()  # the offending line: scale
        scaler.unscale_(optimizer)  # the offending line: unscale
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


class OwnScaler(torch.amp.GradScaler):
    """One with its own way to scale."""

    def scale(self, outputs):
        return super().scale(outputs)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, OwnScaler])
@pytest.mark.parametrize("used", [False, True])
def test_a_gradient_scaler_is_refused_and_left_as_it_was(kind, used):
    scaler = kind("cpu", init_scale=4.0)
    _, model, optimizer, batch = small.make()()
    if used:
        scaled(scaler)(model, optimizer, batch)
    before, methods = copy.deepcopy(vars(scaler)), dict(vars(kind))
    with pytest.raises(
        CaptureError, match=r"the offending line: unscale\s+\w+ decides by the values .* bfloat16 autocast"
    ):
        capture(scaled(scaler), model, optimizer, batch)
    assert vars(scaler) == before
    assert dict(vars(kind)) == methods
    scaled(scaler)(model, optimizer, batch)
    assert scaler.get_scale() == 4.0


def test_a_step_through_a_scaler_alone_is_refused():
    scaler = torch.amp.GradScaler("cpu")

    def step(model, optimizer, batch):
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        scaler.step(optimizer)  # the offending line: step

    with pytest.raises(CaptureError, match="the offending line: step"):
        capture(*small.make(step)())
    assert not scaler._per_optimizer_states


def test_a_disabled_scaler_passes_through():
    assert_captured_equals_eager(small.make(scaled(torch.amp.GradScaler("cpu", enabled=False))))


# -- sparse tensors -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_batch_is_refused_whether_it_comes_first_or_later(sparse):
    step, model, optimizer, (images, labels) = small.make()()
    with pytest.raises(CaptureError, match=r"batch leaf 0 is torch.sparse_\w+, .* use .to_dense\(\)"):
        capture(step, model, optimizer, (sparse(images), labels))
    traced = capture(step, model, optimizer, (images, labels))
    (said,) = traced.convention.check((sparse(images), labels))
    assert "and is torch.float32[12, 6] torch.sparse_" in said


def test_a_sparse_buffer_is_refused():
    step, model, optimizer, batch = small.make()()
    model.register_buffer("neighbours", torch.eye(3).to_sparse())
    with pytest.raises(CaptureError, match=r"neighbours is torch\.sparse_coo"):
        capture(step, model, optimizer, batch)
