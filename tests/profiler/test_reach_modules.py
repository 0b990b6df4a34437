"""Whatever a step reads of tensors, modules and hooks: a change is noticed by name, and no other is."""

import types

import pytest
import torch
from torch import nn

from tests.profiler import helpers_of_steps as other_file
from tests.profiler.reach_cases import (
    Case,
    Config,
    as_before,
    assert_noticed,
    linear,
    putting,
    setting,
    squared,
    step_of,
)

# -- tensors and modules ----------------------------------------------------------------------------------------------


def tensor_put_in_place_of_another():
    holder = types.SimpleNamespace(table=torch.ones(2), epoch=0)
    return Case(
        loss=lambda m, b: (m(b) * holder.table).square().mean(),
        change=setting(holder, table=torch.ones(2)),
        said=r"holder of <lambda>\.table was a tensor torch\.float32\[2\] and is another",
        unrelated=lambda: holder.table.mul_(2),
    )


def tensor_of_another_shape():
    table = torch.ones(2)
    return Case(
        loss=lambda m, b: (m(b) * table).square().mean(),
        change=lambda: table.resize_(1, 2),
        said=r"the outer variable table of <lambda> was torch\.float32\[2\] .* and is torch\.float32\[1, 2\]",
    )


def criterion_put_in_place_of_another():
    holder = types.SimpleNamespace(criterion=nn.MSELoss(), epoch=0)
    return Case(
        loss=lambda m, b: holder.criterion(m(b), b[:, :2]),
        change=setting(holder, criterion=nn.L1Loss()),
        said=r"holder of <lambda>\.criterion was a MSELoss and is a L1Loss",
        unrelated=setting(holder, epoch=1),
    )


def value_of_a_criterion():
    criterion = nn.SmoothL1Loss(beta=1.0)
    return Case(
        loss=lambda m, b: criterion(m(b), b[:, :2]),
        change=setting(criterion, beta=0.5),
        said=r"criterion of <lambda>\.beta was 1\.0 and is 0\.5",
        unrelated=setting(criterion, note="hello"),
    )


def entry_of_a_list_of_modules():
    heads = [nn.Tanh(), nn.ReLU()]
    return Case(
        loss=lambda m, b: heads[0](m(b)).square().mean(),
        change=putting(heads, 0, nn.Sigmoid()),
        said=r"heads of <lambda>\[0\] was a Tanh and is a Sigmoid",
    )


def mode_of_a_module_outside():
    teacher = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).requires_grad_(False).eval()
    return Case(
        loss=lambda m, b: (m(b) - teacher(b)).square().mean(),
        change=lambda: teacher.train(),
        said=r"teacher of <lambda>\.training was False and is True",
    )


def parameter_of_a_module_outside():
    teacher = nn.Linear(3, 2).requires_grad_(False)
    return Case(
        loss=lambda m, b: (m(b) - teacher(b)).square().mean(),
        change=setting(teacher, weight=nn.Parameter(torch.ones(2, 3), requires_grad=False)),
        said=r"parameter weight of the outer variable teacher of <lambda> was replaced by another",
        unrelated=lambda: teacher.weight.data.mul_(2),
    )


def buffer_of_a_module_outside():
    teacher = nn.BatchNorm1d(3).eval().requires_grad_(False)
    return Case(
        loss=lambda m, b: m(teacher(b)).square().mean(),
        change=setting(teacher, running_mean=torch.ones(3)),
        said=r"buffer running_mean of the outer variable teacher of <lambda> was replaced by another",
    )


class Buffered(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.inner = linear()
        self.register_buffer("one", torch.ones(2))
        self.register_buffer("two", self.one if tied else torch.ones(2))

    def forward(self, x):
        self.two.mul_(0.5)
        return self.inner(x) * self.one


def buffer_that_is_untied():
    model = Buffered(tied=True)
    return Case(
        model=model,
        step=step_of(squared),
        change=setting(model, two=torch.ones(2)),
        said=r"buffer two was the buffer one and is one of its own",
    )


def buffer_that_is_tied():
    model = Buffered(tied=False)
    return Case(
        model=model,
        step=step_of(squared),
        change=lambda: setattr(model, "two", model.one),
        said=r"buffer two was one of its own and is the buffer one",
        unrelated=setting(model, two=torch.ones(2)),
    )


class Deep(nn.Module):
    """Reads of its own that are not plain attributes."""

    def __init__(self):
        super().__init__()
        self.inner = linear()
        self.cfg = types.SimpleNamespace(loss={"scale": 0.5, "epoch": 0})
        self.extra = [nn.Tanh()]
        self.calls = 0
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(tuple(x.shape))
        return self.extra[0](self.inner(x)) * self.cfg.loss["scale"]


def entry_behind_a_module():
    model = Deep()
    return Case(
        model=model,
        step=step_of(squared),
        change=putting(model.cfg.loss, "scale", 0.75),
        said=r"module model\.cfg\.loss\['scale'\] was 0\.5 and is 0\.75",
        unrelated=lambda: (putting(model.cfg.loss, "epoch", 1)(), model.seen.clear(), setattr(model, "calls", 9)),
    )


def module_in_a_list_of_a_module():
    model = Deep()
    return Case(
        model=model,
        step=step_of(squared),
        change=putting(model.extra, 0, nn.ReLU()),
        said=r"module model\.extra\[0\] was a Tanh and is a ReLU",
    )


def forward_of_a_class():
    class Local(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    return Case(
        model=Local(3, 2),
        step=step_of(squared),
        change=setting(Local, forward=lambda self, x: 2 * nn.Linear.forward(self, x)),
        said=r"class Local\.forward was the function forward and is the function <lambda>",
    )


def forward_of_a_class_of_torch():
    own = nn.Linear.forward
    return Case(
        model=nn.Sequential(linear()),
        step=step_of(squared),
        change=setting(nn.Linear, forward=lambda self, x: 2 * own(self, x)),
        said=r"class Linear\.forward was the function forward and is the function <lambda>",
    )


def forward_of_a_module_alone():
    model = linear()
    return Case(
        model=model,
        step=step_of(squared),
        change=setting(model, forward=lambda x: x @ model.weight.T),
        said=r"module model\.forward was not set and is the function <lambda>",
    )


# -- hooks ------------------------------------------------------------------------------------------------------------


def closure_of_a_gradient_hook():
    model, scale = linear(), [0.5]
    model.weight.register_hook(lambda gradient: gradient * scale[0])
    return Case(
        model=model,
        step=step_of(squared),
        change=putting(scale, 0, 0.75),
        said=r"the outer variable scale of <lambda>\[0\] was 0\.5 and is 0\.75",
    )


def closure_of_a_forward_hook():
    model, cfg = linear(), Config()
    model.register_forward_hook(lambda module, args, out: out * cfg.alpha)
    return Case(
        model=model,
        step=step_of(squared),
        change=setting(cfg, alpha=0.75),
        said=r"the outer variable cfg of <lambda>\.alpha was 0\.5 and is 0\.75",
        unrelated=setting(cfg, epoch=1),
    )


def object_of_a_backward_hook():
    class Clip:
        def __init__(self):
            self.limit, self.calls = 0.5, 0

        def __call__(self, module, before, after):
            self.calls += 1
            return (None if before[0] is None else before[0].clamp(-self.limit, self.limit),)

    model, clip = nn.Sequential(linear(), linear_of(2)), Clip()
    model[1].register_full_backward_hook(clip)
    return Case(
        model=model,
        step=step_of(squared),
        change=setting(clip, limit=0.25),
        said=r"a hook of module 1\.limit was 0\.5 and is 0\.25",
        unrelated=setting(clip, calls=9),
    )


def linear_of(width):
    return nn.Linear(width, 2)


# -- what is set on tensors -------------------------------------------------------------------------------------------


def asking_each_parameter(of_param):
    """A step that leaves out what a question to each parameter says."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = squared(model, batch)
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(of_param(p))
        optimizer.step()
        return loss.detach()

    return step


def attribute_of_a_parameter():
    model = linear()
    model.weight.lr_mult, model.bias.lr_mult, model.bias.note = 0.5, 2.0, "a"
    return Case(
        step=asking_each_parameter(lambda p: p.lr_mult),
        change=setting(model.bias, lr_mult=0.25),
        said=r"bias\.lr_mult was 2\.0 and is 0\.25",
        unrelated=setting(model.bias, note="b"),
        model=model,
    )


def attribute_that_a_parameter_lacks():
    model = linear()
    return Case(
        step=asking_each_parameter(lambda p: 0.0 if getattr(p, "frozen", False) else 1.0),
        change=setting(model.weight, frozen=True),
        said=r"weight\.frozen .* is True",
        unrelated=setting(model.weight, thawed=True),
        model=model,
    )


def attribute_of_a_parameter_by_a_computed_name():
    model, names = linear(), ["lr_", "mult"]
    model.weight.lr_mult = model.bias.lr_mult = 2.0
    return Case(
        step=asking_each_parameter(lambda p: getattr(p, "".join(names))),
        change=setting(model.bias, lr_mult=0.25),
        said=r"bias\.lr_mult was 2\.0 and is 0\.25",
        model=model,
    )


def list_on_a_parameter():
    model = linear()
    model.weight.factors = model.bias.factors = [1.0, 2.0]
    return Case(
        step=asking_each_parameter(lambda p: p.factors[1]),
        change=putting(model.bias.factors, 1, 3.0),
        said=r"weight\.factors\[1\] was 2\.0 and is 3\.0",
        model=model,
    )


def mask_on_a_parameter():
    model = linear()
    for p in model.parameters():
        p.mask = torch.ones_like(p)
    return Case(
        step=asking_each_parameter(lambda p: p.mask),
        change=setting(model.bias, mask=torch.zeros(2)),
        said=r"bias\.mask",
        unrelated=lambda: model.weight.mask.zero_(),  # read where it is
        model=model,
    )


def attribute_of_a_tensor_outside():
    scale = torch.ones(())
    scale.power = 1.0
    return Case(
        loss=lambda m, b: squared(m, b) * scale**scale.power,
        change=setting(scale, power=2.0),
        said=r"the outer variable scale of <lambda>\.power was 1\.0 and is 2\.0",
        unrelated=setting(scale, note=1),
    )


CASES = [
    tensor_put_in_place_of_another, tensor_of_another_shape, criterion_put_in_place_of_another,
    value_of_a_criterion, entry_of_a_list_of_modules, mode_of_a_module_outside, parameter_of_a_module_outside,
    buffer_of_a_module_outside, buffer_that_is_untied, buffer_that_is_tied, entry_behind_a_module,
    module_in_a_list_of_a_module, forward_of_a_class, forward_of_a_class_of_torch, forward_of_a_module_alone,
    closure_of_a_gradient_hook, closure_of_a_forward_hook, object_of_a_backward_hook, attribute_of_a_parameter,
    attribute_that_a_parameter_lacks, attribute_of_a_parameter_by_a_computed_name, list_on_a_parameter,
    mask_on_a_parameter, attribute_of_a_tensor_outside,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _torch_and_files_as_before():
    with as_before(nn.functional, nn.Linear, other_file):
        yield


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_change_of_what_the_step_reads_is_noticed_by_name_and_another_is_not(make):
    assert_noticed(make)
