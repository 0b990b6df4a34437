"""What a graph has baked in is noticed when it changes, by name, and honoured by the next capture; the rest is not."""

import contextlib
import copy
import functools
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.errors import CaptureError
from profiler.tracing.calling import BufferSlot, ParamSlot
from profiler.tracing.whole_step import capture
from tests.profiler import small
from tests.profiler.equality import assert_captured_equals_eager


class Gated(nn.Module):
    """Values of every kind that is guarded, one that the forward counts itself, and one by the class."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.beta, self.layers, self.gate, self.kind, self.scales = 0.5, 1, True, "tanh", (1.0, 2.0)
        self._offset = None
        self.calls = 0
        self.history = []

    def forward(self, x):
        self.calls += 1
        for _ in range(self.layers):
            x = getattr(torch, self.kind)(self.inner(x))
        x = x * self.beta * self.scales[0] * self.gain if self.gate else x
        return self.head(x if self._offset is None else x + self._offset)


def captured(step=small.step, *, model=small.mlp, optimizer=small.sgd):
    """A captured step that is still the one it was."""
    _, network, chosen, batch = small.make(model=model, optimizer=optimizer)()
    traced = capture(step, network, chosen, batch)
    assert traced.convention.check(batch) == []
    return traced, network, chosen, batch


# -- values that modules hold --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("beta", 0.75, "module model.beta was 0.5 and is 0.75"),
        ("beta", 1, "module model.beta was 0.5 and is 1"),
        ("layers", 2, "module model.layers was 1 and is 2"),
        ("layers", True, "module model.layers was 1 and is True"),
        ("gate", False, "module model.gate was True and is False"),
        ("kind", "sigmoid", "module model.kind was 'tanh' and is 'sigmoid'"),
        ("scales", (3.0, 2.0), "module model.scales was (1.0, 2.0) and is (3.0, 2.0)"),
        ("_offset", 1.0, "module model._offset was None and is 1.0"),
        ("gain", 2.0, "module model.gain was not set and is 2.0"),
    ],
)
def test_a_changed_value_of_a_module_is_noticed_and_honoured(name, value, said):
    def change(i, model, optimizer):
        if i == 0:
            setattr(model, name, value)

    traced, model, _, batch = captured(model=Gated)
    setattr(model, name, value)
    assert traced.convention.check(batch) == [said]
    assert_captured_equals_eager(small.make(model=Gated), between=change, recaptures=1)


def test_torchs_own_layers_are_guarded_by_their_paths():
    traced, model, _, batch = captured()
    model[3].p = 0.5
    model[1].momentum = None
    assert traced.convention.check(batch) == [
        "module 1.momentum was 0.1 and is None",
        "module 3.p was 0.2 and is 0.5",
    ]


def test_a_value_that_is_taken_away_is_noticed():
    traced, model, _, batch = captured(model=Gated)
    del model.beta
    assert traced.convention.check(batch) == ["module model.beta was 0.5 and is not set"]


def test_a_value_of_the_class_is_noticed(monkeypatch):
    traced, _, _, batch = captured(model=Gated)
    monkeypatch.setattr(Gated, "gain", 3.0)
    assert traced.convention.check(batch) == ["class Gated.gain was 1.0 and is 3.0"]


def test_values_that_the_step_changes_itself_and_values_put_back_are_not_minded():
    traced, model, _, batch = captured(model=Gated)
    model.calls += 7
    model.history.append(3)
    model.note = "a new one, which no forward can have read"
    model.beta = 0.25
    model.beta = 1.0 / 2
    assert traced.convention.check(batch) == []


# -- values that the step reads from outside -----------------------------------------------------------------

RATIO = 0.5
step_count = 0  # as many a script has it
step = 0  # the name of an attribute that the step reads, too


def reads_a_global(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (lambda: RATIO)() * F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def counts_in_a_global(model, optimizer, batch):
    global step_count
    step_count += 1
    return small.step(model, optimizer, batch)


def test_a_changed_global_is_noticed_and_honoured(monkeypatch):
    def change(i, model, optimizer):
        monkeypatch.setitem(globals(), "RATIO", 0.5 if i % 2 else 0.75)

    traced, _, _, batch = captured(reads_a_global)
    monkeypatch.setitem(globals(), "RATIO", 0.25)
    assert traced.convention.check(batch) == ["the global RATIO was 0.5 and is 0.25"]
    monkeypatch.setitem(globals(), "RATIO", 0.5)
    assert_captured_equals_eager(small.make(reads_a_global), steps=2, between=change, recaptures=1)


def test_a_global_of_an_attributes_name_and_one_that_the_step_counts_are_not_minded(monkeypatch):
    for function in (reads_a_global, counts_in_a_global):
        traced, _, _, batch = captured(function)
        monkeypatch.setitem(globals(), "step", step + 1)
        monkeypatch.setitem(globals(), "step_count", step_count + 1)
        assert traced.convention.check(batch) == []


def test_a_changed_variable_of_the_surrounding_function_is_noticed_and_one_that_the_step_counts_is_not():
    ratio, calls = 0.5, 0

    def step(model, optimizer, batch):
        nonlocal calls
        calls += 1
        return ratio * small.step(model, optimizer, batch)

    def forget():
        nonlocal ratio
        del ratio

    traced, _, _, batch = captured(step)
    calls += 1
    assert traced.convention.check(batch) == []
    ratio = 0.75
    assert traced.convention.check(batch) == ["the outer variable ratio was 0.5 and is 0.75"]
    forget()
    assert traced.convention.check(batch) == ["the outer variable ratio was 0.5 and is not set"]


def scaled_step(model, optimizer, batch, *, ratio):
    return ratio * small.step(model, optimizer, batch)


def test_a_changed_argument_of_a_partial_is_noticed_and_so_is_what_its_function_reads(monkeypatch):
    def around(model, optimizer, batch, *, ratio):
        return RATIO * scaled_step(model, optimizer, batch, ratio=ratio)

    step = functools.partial(around, ratio=0.5)
    traced, _, _, batch = captured(step)
    step.keywords["ratio"] = 0.75
    monkeypatch.setitem(globals(), "RATIO", 0.25)
    assert traced.convention.check(batch) == [
        "the step's argument ratio was 0.5 and is 0.75",
        "the global RATIO was 0.5 and is 0.25",
    ]


def test_what_a_decorated_step_reads_is_noticed(monkeypatch):
    def logged(function):
        @functools.wraps(function)
        def call(*args):
            return function(*args)

        return call

    traced, _, _, batch = captured(logged(reads_a_global))
    monkeypatch.setitem(globals(), "RATIO", 0.25)
    assert traced.convention.check(batch) == ["the global RATIO was 0.5 and is 0.25"]


class Trainer:
    """A step as a method, and as what the object itself does."""

    def __init__(self):
        self.ratio, self.steps, self.epoch = 0.5, 0, 0

    def step(self, model, optimizer, batch):
        self.steps += 1
        return self.ratio * small.step(model, optimizer, batch)

    def __call__(self, model, optimizer, batch):
        return self.ratio * small.step(model, optimizer, batch)


@pytest.mark.parametrize("step_of", [lambda trainer: trainer.step, lambda trainer: trainer], ids=["method", "object"])
def test_what_a_method_reads_of_its_object_is_noticed_and_the_rest_of_the_object_is_not(step_of):
    trainer = Trainer()
    traced, _, _, batch = captured(step_of(trainer))
    trainer.epoch, trainer.steps = 1, 5
    assert traced.convention.check(batch) == []
    trainer.ratio = 0.75
    assert traced.convention.check(batch) == ["Trainer.ratio was 0.5 and is 0.75"]


# -- what the model is made of ---------------------------------------------------------------------------------


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


def parametrized(model):
    parametrize.register_parametrization(model[0], "weight", Doubled())


def pruned(model):
    prune.l1_unstructured(model[0], "weight", 0.3)


def with_another_activation(model):
    model[2] = nn.Tanh()


def with_one_more(model):
    model.insert(2, nn.Hardtanh())


def with_one_less(model):
    del model[3]


def with_another_buffer(model):
    model[1].register_buffer("running_mean", None)
    model[1].running_var = None


def with_its_own_forward(model):
    model[2].forward = torch.tanh


SURGERY = {
    parametrized: ["module 0.parametrizations is new", "parameter 0.weight is gone"],
    pruned: [
        "parameter 0.weight is gone",
        "parameter 0.weight_orig is new",
        "buffer 0.weight_mask is new",
        "the hooks of module 0 are not those of the captured step",
    ],
    with_another_activation: ["module 2 was replaced by another"],
    with_one_more: [
        "module 2 was replaced by another",
        "module 3 was replaced by another",
        "module 4 was replaced by another",
        "module 5 is new",
    ],
    with_one_less: ["module 3 was replaced by another", "module 4 is gone"],
    with_another_buffer: ["buffer 1.running_mean is gone", "buffer 1.running_var is gone"],
    with_its_own_forward: ["module 2.forward was not set and is the function tanh"],
}


@pytest.mark.parametrize("change", SURGERY, ids=lambda change: change.__name__)
def test_a_model_made_of_other_parts_is_noticed_and_captured_as_it_is(change):
    def between(i, model, optimizer):
        if i == 0:
            change(model)

    traced, model, _, batch = captured()
    change(model)
    assert traced.convention.check(batch) == SURGERY[change]
    with pytest.raises(CaptureError, match="not the captured step any more"):
        traced.run(batch)
    assert_captured_equals_eager(small.make(), between=between, recaptures=1)


def with_another_layer(model):
    model[4] = nn.Linear(8, 4)


def with_assigned_state(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def with_tied_biases(model):
    model[1].bias = model[0].bias


def with_normed_weights(model):
    parametrizations.weight_norm(model[0])


def without_a_bias(model):
    model[4].bias = None


STRANGERS = {
    with_another_layer: "module 4 was replaced by another",
    with_assigned_state: "parameter 0.weight was replaced by another",
    with_tied_biases: "parameter 1.bias was replaced by another",
    with_normed_weights: "parameter 0.weight is gone",
    without_a_bias: "parameter 4.bias is gone",
}


@pytest.mark.parametrize("change", STRANGERS, ids=lambda change: change.__name__)
def test_parameters_that_the_optimizer_does_not_know_are_noticed_and_the_next_capture_says_what_to_do(change):
    traced, model, optimizer, batch = captured()
    change(model)
    assert STRANGERS[change] in traced.convention.check(batch)
    with pytest.raises(CaptureError, match="make the optimizer anew"):
        capture(small.step, model, optimizer, batch)
    optimizer = small.sgd(model)
    again = capture(small.step, model, optimizer, batch)
    assert again.convention.check(batch) == []


def test_a_buffer_that_is_replaced_by_an_equal_one_is_read_where_it_is():
    traced, model, _, batch = captured()
    model[1].running_mean = torch.ones(8)
    assert traced.convention.check(batch) == []
    traced.run(batch)
    assert not torch.equal(model[1].running_mean, torch.ones(8))


@pytest.mark.parametrize(("kind", "slot"), [("parameter", ParamSlot), ("buffer", BufferSlot)])
def test_a_slot_whose_tensor_is_gone_says_so(kind, slot):
    gone = slot(name="0.scale", owner=nn.Linear(2, 2), key="scale")
    assert gone.find() is None
    with pytest.raises(CaptureError, match=f"{kind} 0.scale is gone from the model: capture again"):
        gone.tensor()


# -- mixed precision around the step -----------------------------------------------------------------------------


def in_bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Partly(nn.Module):
    """A part of it insists on float32."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = self.inner(self.inner(x.float()).tanh())
        return self.head(x)


class Whitened(torch.optim.Optimizer):
    """An optimizer with a matrix product, which autocast changes."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            whitened = (p.grad @ p.grad.T) @ p.grad if p.dim() == 2 else p.grad
            p.sub_(whitened.float(), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("optimizer", [small.sgd, small.adam, Whitened])
@pytest.mark.parametrize("model", [small.mlp, Partly])
def test_a_step_inside_autocast_equals_eager_inside_it(model, optimizer):
    assert_captured_equals_eager(small.make(model=model, optimizer=optimizer), around=in_bfloat16)


def test_autocast_around_the_step_changes_what_the_step_computes():
    def bits(around):
        torch.manual_seed(0)
        step, model, optimizer, batch = small.make(model=Partly)()
        with around():
            return step(model, optimizer, batch)

    assert not torch.equal(bits(in_bfloat16), bits(torch.enable_grad))


def test_a_step_called_in_another_precision_than_it_was_captured_in_is_noticed():
    traced, model, optimizer, batch = captured()
    with in_bfloat16():
        assert traced.convention.check(batch) == ["autocast on cpu was off and is torch.bfloat16"]
        inside = capture(small.step, model, optimizer, batch)
        assert inside.convention.check(batch) == []
    assert inside.convention.check(batch) == ["autocast on cpu was torch.bfloat16 and is off"]
    with torch.autocast("cpu", dtype=torch.float16):
        assert inside.convention.check(batch) == ["autocast on cpu was torch.bfloat16 and is torch.float16"]
    with torch.autocast("cpu", enabled=False):
        assert traced.convention.check(batch) == []


def test_a_run_leaves_autocast_as_it_was():
    _, model, optimizer, batch = small.make()()
    with in_bfloat16():
        capture(small.step, model, optimizer, batch).run(batch)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


# -- modes and switches around the step --------------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Following(TorchFunctionMode):
    """The same for functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def switched(setter, now, then):
    setter(now)
    try:
        yield
    finally:
        setter(then)


@contextlib.contextmanager
def hook_on_all_modules():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        yield
    finally:
        handle.remove()


AROUND = {
    "no_grad": (torch.no_grad, ["gradient mode was on and is off"]),
    "inference": (torch.inference_mode, ["gradient mode was on and is off", "inference mode was off and is on"]),
    "dispatch mode": (Watching, ["the stack of torch dispatch modes was () and is (Watching)"]),
    "function mode": (Following, ["the stack of torch function modes was () and is (Following)"]),
    "attention": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]),
        ["memory-efficient attention was on and is off"],
    ),
    "dtype": (
        lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
        ["the default dtype was torch.float32 and is torch.float64"],
    ),
    "determinism": (
        lambda: switched(torch.use_deterministic_algorithms, True, False),
        ["use of deterministic algorithms was off and is on"],
    ),
    "precision": (
        lambda: switched(torch.set_float32_matmul_precision, "medium", "highest"),
        ["float32 matmul precision was highest and is medium"],
    ),
    "threads": (lambda: switched(torch.set_num_threads, 2, 1), ["the number of threads was 1 and is 2"]),
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(keep, keep),
        ["the pair of hooks on saved tensors was () and is (keep, keep)"],
    ),
    "hooks": (hook_on_all_modules, ["the list of hooks on all modules was () and is (<lambda>)"]),
}


def keep(tensor):
    return tensor


@pytest.mark.parametrize("name", AROUND)
def test_a_mode_or_switch_around_the_step_is_noticed_while_it_is_there(name):
    around, said = AROUND[name]
    traced, _, _, batch = captured()
    with around():
        found = traced.convention.check(batch)
    assert found[: len(said)] == said
    assert traced.convention.check(batch) == []


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_fails_as_eager_does_and_changes_nothing(around):
    traced, model, optimizer, batch = captured()
    before = copy.deepcopy(model.state_dict())
    with around():
        with pytest.raises(RuntimeError, match="does not require grad"):
            small.step(model, optimizer, batch)
        with pytest.raises(CaptureError, match="gradient mode was on and is off"):
            traced.run(batch)
        with pytest.raises(CaptureError, match="does not require grad"):
            capture(small.step, model, optimizer, batch)
    before["1.num_batches_tracked"] += 1  # what the failing eager step did
    assert all(torch.equal(model.state_dict()[name], was) for name, was in before.items() if "running" not in name)


# -- the optimizer's step ----------------------------------------------------------------------------------------------


def replaced_on_the_object(optimizer):
    own = optimizer.step

    def twice():
        own()
        own()

    optimizer.step = twice


def replaced_on_its_class(optimizer):
    own = type(optimizer).step

    def twice(self, closure=None):
        own(self)
        own(self)

    type(optimizer).step = twice


@pytest.mark.parametrize("replace", [replaced_on_the_object, replaced_on_its_class], ids=lambda f: f.__name__)
@pytest.mark.parametrize("optimizer", [small.sgd, small.adam])
def test_a_replaced_step_of_the_optimizer_is_noticed_and_run(replace, optimizer, monkeypatch):
    def between(i, model, chosen):
        monkeypatch.setattr(type(chosen), "step", type(chosen).step)  # put back in the end
        if i == 0:
            replace(chosen)
        elif i == 2:
            monkeypatch.undo()

    inside = optimizer is small.sgd  # else it runs as itself, whatever that is
    assert_captured_equals_eager(
        small.make(model=small.plain, optimizer=optimizer), between=between, recaptures=int(inside)
    )


def test_a_replaced_step_is_said_and_a_scheduler_that_counts_is_no_replacement():
    traced, _, optimizer, batch = captured()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert traced.convention.check(batch) == []
    replaced_on_the_object(optimizer)
    assert traced.convention.check(batch) == ["the optimizer was given another step"]


def test_a_copy_of_the_optimizers_step_is_refused():
    _, model, optimizer, batch = small.make()()
    update = optimizer.step

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        update()

    with pytest.raises(CaptureError, match=r"call optimizer\.step\(\) itself"):
        capture(step, model, optimizer, batch)


def test_a_list_among_the_optimizers_numbers_that_changes_in_place_is_noticed():
    def adam(model):
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        return optimizer

    traced, _, optimizer, batch = captured(optimizer=adam)
    optimizer.param_groups[0]["betas"][0] = 0.5
    assert traced.convention.check(batch) == ["'betas' of optimizer group 0 was [0.9, 0.99] and is [0.5, 0.99]"]


# -- what the step itself changes --------------------------------------------------------------------------------------


class Counting:
    """A step that counts, logs, keeps and draws."""

    def __init__(self):
        self.counted, self.read, self.log, self.last = 0, 0, [], None
        self.random = random.Random(0)
        self.numpy = np.random.default_rng(0)

    def __call__(self, model, optimizer, batch):
        self.counted += 1
        self.read += 1
        loss = small.step(model, optimizer, batch) * (1 if self.read % 2 else 2)
        self.log.append("loss")
        self.last = "a text"
        return loss * self.random.random() * self.numpy.random()


def test_what_the_step_changes_is_reported_with_whether_it_is_read():
    step = Counting()
    traced, *_ = captured(step)
    changes = {change.path: change for change in traced.convention.guards.changes}
    assert not changes["Counting.counted"].read
    assert changes["Counting.read"].read
    assert str(changes["Counting.read"]) == "Counting.read was 0 and is 1"
    assert not changes["the number of entries of Counting.log"].read
    assert changes["the state of Counting.random"].read
    assert changes["the state of Counting.numpy"].read
    assert "Counting.last" not in changes


def test_what_the_step_changes_itself_is_no_reason_to_capture_again():
    step = Counting()
    traced, *_, batch = captured(step)
    step.counted, step.read, step.last = 5, 7, "another"
    step.log.append("more")
    step.random.random()
    step.numpy.random()
    assert traced.convention.check(batch) == []


# -- bounds and cost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("huge", [list(range(20_000)), dict.fromkeys(range(20_000)), np.zeros(1 << 18)], ids=type)
def test_a_container_that_is_too_large_to_be_watched_is_said_by_name(huge):
    def step(model, optimizer, batch):
        return small.step(model, optimizer, batch) * (1 + huge[7] if isinstance(huge, list) else len(huge))

    with pytest.warns(UserWarning, match=r"the outer variable huge has \d+ entries, more than are watched"):
        captured(step)


def test_a_large_container_that_is_only_written_is_not_mentioned():
    log = list(range(20_000))

    def step(model, optimizer, batch):
        log.append(0)
        return small.step(model, optimizer, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(step)


def test_values_that_are_put_there_anew_and_are_equal_hold_again_and_again():
    traced, model, _, batch = captured(model=Gated)
    for i in range(3):
        model.beta, model.scales = float(f"0.{5 + 0 * i}"), tuple(float(f"{n}.0") for n in (1, 2))
        assert traced.convention.check(batch) == []
