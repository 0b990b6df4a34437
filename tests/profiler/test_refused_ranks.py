"""What of training on several processes is refused: each by name, with the reason, before anything runs."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from profiler.errors import CaptureError
from profiler.tracing.ranks import torch_distributed as private
from profiler.tracing.ranks.imagined import imagined_group
from profiler.tracing.whole_step import capture


def plain():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def refused(model, train_step=step):
    with pytest.raises(CaptureError) as error:
        capture(train_step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8))
    return str(error.value)


def replicas(model=None, **options):
    with private.alone_in_group():
        return DistributedDataParallel(plain() if model is None else model, **options)


# -- replicas ---------------------------------------------------------------------------------------------------------


def with_comm_hook():
    model = replicas()
    model.register_comm_hook(None, allreduce_hook)
    return model


def with_buffer_hook():
    model = replicas()
    model._register_buffer_comm_hook(None, lambda state, buffers: None)
    return model


def with_ignored():
    model = plain()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    return replicas(model)


def with_mixed_precision():
    model = replicas()
    model.mixed_precision = object()
    return model


def joined():
    model = replicas()
    model._join_config = model._join_config._replace(enable=True)
    return model


def inside_another():
    return nn.Sequential(replicas(), nn.Linear(8, 8))


def with_sync_batch_norm():
    return nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))


REPLICAS = {
    "find_unused_parameters": lambda: replicas(find_unused_parameters=True),
    "static_graph": lambda: replicas(static_graph=True),
    "a comm hook": with_comm_hook,
    "a buffer hook": with_buffer_hook,
    "parameters or buffers to ignore": with_ignored,
    "mixed_precision": with_mixed_precision,
    "join()": joined,
    "module 0 is wrapped in DistributedDataParallel": inside_another,
    "SyncBatchNorm": with_sync_batch_norm,
}


@pytest.mark.parametrize("name", REPLICAS)
def test_what_replicas_do_beyond_sums_in_buckets_is_refused_by_name(name):
    with imagined_group(2):
        assert name in refused(REPLICAS[name]())


def test_buckets_as_views_are_refused_where_eager_divides_and_multiplies():
    with imagined_group(3):
        assert "gradient_as_bucket_view with a number of ranks" in refused(replicas(gradient_as_bucket_view=True))


# -- shards -----------------------------------------------------------------------------------------------------------


def sharded(mesh, **options):
    return fully_shard(plain(), mesh=mesh, **options)


def with_all_reduce_hook(mesh):
    model = sharded(mesh)
    model.set_all_reduce_hook(lambda gradient: None)
    return model


def with_divide_factor(mesh):
    model = sharded(mesh)
    model.set_gradient_divide_factor(3.0)
    return model


def in_one_call(mesh):
    model = plain()
    fully_shard([model[0], model[2]], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_two_dimensions(mesh):
    return sharded(init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards")))


def slices_in_two_dimensions(mesh):
    model, both = plain(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "slices"))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), both, [Replicate(), Shard(0)]))
    return model


SHARDS = {
    "a mixed-precision policy": lambda mesh: sharded(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "an offload policy": lambda mesh: sharded(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "an all-reduce hook": with_all_reduce_hook,
    "a gradient divide factor": with_divide_factor,
    "several modules in one call of fully_shard": in_one_call,
    "replicas of shards (HSDP": in_two_dimensions,
    "shards of another dimension": lambda mesh: sharded(mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1)),
    "a tensor-parallel model with a mesh of several dimensions": slices_in_two_dimensions,
    "FullyShardedDataParallel": lambda mesh: FullyShardedDataParallel(plain(), device_id=torch.device("cpu")),
}


@pytest.mark.parametrize("name", SHARDS)
def test_what_shards_do_beyond_gathers_and_reductions_is_refused_by_name(name):
    with imagined_group(2) as mesh:
        assert name in refused(SHARDS[name](mesh))


def without_sync(model, optimizer, batch):
    model.set_requires_gradient_sync(False)
    return step(model, optimizer, batch)


def returns_a_part(model, optimizer, batch):
    step(model, optimizer, batch)
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("train_step", "words"), [(without_sync, "set_requires_gradient_sync(False)"), (returns_a_part, "full_tensor()")]
)
def test_what_a_step_does_with_shards_beside_training_is_refused(train_step, words):
    with imagined_group(2) as mesh:
        assert words in refused(sharded(mesh), train_step)


def beside(other, call=lambda other, batch: other(batch)):
    def train_step(model, optimizer, batch):
        with torch.no_grad():
            target = call(other, batch)
        return step(model, optimizer, batch if target is None else batch + target)

    return train_step


def test_another_wrapped_model_that_a_step_calls_is_refused():
    with imagined_group(2) as mesh:
        for model in (replicas(), sharded(mesh), plain()):
            assert "another model that is wrapped in DistributedDataParallel" in refused(model, beside(replicas()))
            assert "another sharded model" in refused(model, beside(sharded(mesh)))
        own = sharded(mesh)
        with warnings.catch_warnings(action="error"):  # of stand-ins that fully_shard would take for its own
            assert "unshard()" in refused(own, beside(own, lambda other, batch: other.unshard()))


def trains_a_part(model, optimizer, batch):
    loss = model.module[0](batch).sum() + 0 * model(batch).detach().sum()
    loss.backward()
    optimizer.step()


def test_a_parameter_of_replicas_without_gradient_is_named():
    with imagined_group(2):
        said = refused(replicas(), trains_a_part)
    assert "got no gradient" in said
    assert "find_unused_parameters" in said


# -- the step itself --------------------------------------------------------------------------------------------------


def sums_by_itself(model, optimizer, batch):
    loss = step(model, optimizer, batch)
    return functional.all_reduce(loss, "sum", dist.group.WORLD)


def sends_in_place(model, optimizer, batch):
    loss = step(model, optimizer, batch)
    dist.all_reduce(loss)
    return loss


def is_a_stage_of_a_pipeline(model, optimizer, batch):
    out = model(batch)
    dist.send(out.detach(), dst=1)
    dist.recv(gradient := torch.empty_like(out), src=1)
    out.backward(gradient)
    optimizer.step()


@pytest.mark.parametrize("train_step", [sums_by_itself, sends_in_place, is_a_stage_of_a_pipeline])
def test_a_step_that_communicates_by_itself_is_refused(train_step):
    with imagined_group(2):
        assert "communicates with other processes by itself" in refused(plain(), train_step)


def goes_by_a_value(model, optimizer, batch):
    loss = model(batch).square().mean()
    if loss > 0.5:
        loss = loss * 2
    loss.backward()
    optimizer.step()


def test_a_branch_on_what_the_model_computes_is_refused_on_several_ranks():
    with imagined_group(2):
        assert "one rank would go alone" in refused(replicas(), goes_by_a_value)
