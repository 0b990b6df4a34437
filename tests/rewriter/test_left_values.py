"""What a step leaves in the user's objects is there after a planned step too; what cannot be is refused, or told."""

import collections
import contextvars
import threading
import types
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from profiler.errors import CaptureError
from rewriter import checkpoint
from tests.side_by_side import same_bits

LATEST = None
CALLS = 3


def batches():
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)) for _ in range(CALLS)
    ]


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def trained(model, optimizer, batch, mask=1.0):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]) * mask, batch[1])
    loss.backward()
    optimizer.step()
    return loss


def prepared(step, model, *, verify=False, steps_of_proof=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return checkpoint(
        step,
        model,
        optimizer,
        batches()[0],
        budget="100%",
        strategy="mutwo",
        show_progress=False,
        verify=steps_of_proof if verify else False,
    )


def values_in(found):
    """Leaves of what user code finds, as they are now."""
    if isinstance(found, torch.Tensor):
        return found.detach().clone()
    if isinstance(found, dict):
        return {key: values_in(one) for key, one in found.items()}
    return [values_in(one) for one in found] if isinstance(found, (list, tuple)) else found


def are_same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(are_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(are_same, a, b))
    return same_bits(a, b)


def seen(make, *, planned, verify=False, between=None):
    """What user code finds after each of a few steps."""
    torch.manual_seed(0)
    model, step, look = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = prepared(step, model, verify=verify) if planned else (lambda batch: step(model, optimizer, batch))
    torch.manual_seed(1)
    found = []
    for i, batch in enumerate(batches()):
        call(batch)
        found.append(values_in(look(batch)))
        if between is not None:
            between(i, model)
    return found


# -- live --------------------------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("x",)


class Backed:
    @property
    def x(self):
        return self.__dict__.get("_x")

    @x.setter
    def x(self, value):
        self.__dict__["_x"] = value


class Made(nn.Module):
    """A layer that makes a ramp at its first call, and leaves a loss, a number and a flag at each."""

    def __init__(self):
        super().__init__()
        self.inner, self.ramp, self.aux, self.ran = network(), None, None, False

    def forward(self, x):
        if self.ramp is None:
            self.ramp = torch.arange(8.0)
        out = self.inner(x * self.ramp)
        self.aux, self.mean, self.ran = out.pow(2).mean(), out.mean().item(), True
        return out


def everywhere():
    """A step that leaves something in places of all kinds."""
    model, store, on_class, entries = Made(), types.SimpleNamespace(first=None), type("Own", (), {"x": None}), {}
    slotted, backed, own = Slotted(), Backed(), threading.local()
    user, weak = collections.UserDict(), weakref.WeakKeyDictionary()
    variable, module, places = contextvars.ContextVar("left", default=None), types.ModuleType("left"), [0, 0]
    record, outer = collections.namedtuple("record", "loss steps"), None
    model.inner[1].register_forward_hook(lambda layer, given, out: entries.update(hooked=out))
    model.inner[2].weight.register_hook(lambda gradient: entries.update(gradient=gradient.norm()))

    def step(model, optimizer, batch):
        global LATEST
        nonlocal outer
        loss = trained(model, optimizer, batch)
        LATEST, outer = loss.item(), loss.item() * 2
        on_class.x = slotted.x = backed.x = own.x = module.x = step.x = optimizer.x = loss.detach()
        user["x"] = weak[model] = places[1] = loss.detach() * 3
        variable.set(loss.detach())
        entries["nested"] = [loss.detach(), {"mean": loss.mean(), "steps": 3}]
        store.record, store.noise = record(loss.detach(), 1), torch.randn(3)
        store.batch, store.weight, store.bias = batch[0], model.inner[0].weight, model.inner[0].bias.detach()
        store.first = loss.detach() if store.first is None else store.first
        store.view = model.inner[0].weight.detach()[:2]
        store.gradients = {name: p.grad for name, p in model.named_parameters()}
        for p in model.parameters():
            p.norm_of_gradient = p.grad.norm()
        return loss

    def look(batch):
        held = [
            LATEST, outer, on_class.x, slotted.x, backed.x, own.x, module.x, step.x, user["x"], weak[model], places,
            variable.get(), entries, vars(store), [p.norm_of_gradient for p in model.parameters()],
            model.ramp, model.aux, model.mean, model.ran,
        ]  # fmt: skip
        return [*held, store.batch is batch[0], store.weight is model.inner[0].weight, store.bias.requires_grad]

    return model, step, look


@pytest.mark.parametrize("verify", [False, True])
def test_what_a_step_leaves_anywhere_is_there_after_each_planned_step(verify):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = seen(everywhere, planned=True, verify=verify)
    assert all(map(are_same, seen(everywhere, planned=False), planned))


def test_preparing_leaves_places_as_they_were_and_the_proof_compares_what_lies_there():
    torch.manual_seed(0)
    model, step, _ = everywhere()
    before = {**vars(model)}
    planned = prepared(step, model, verify=True, steps_of_proof=2)
    assert vars(model) == before
    assert not any("norm_of_gradient" in vars(p) for p in model.parameters())
    assert dict(planned.verification.compared)["left values"] > 30


def with_mask():
    model = network()
    model.mask = None

    def step(model, optimizer, batch):
        if model.mask is None:
            model.mask = torch.full((4,), 2.0)
        return trained(model, optimizer, batch, model.mask)

    return model, step, lambda _: (model.mask, model[0].weight)


def with_buffer(*, persistent=True):
    """Registers a buffer at its first call, and adds to it at each."""
    model = network()

    def step(model, optimizer, batch):
        if not hasattr(model, "total"):
            model.register_buffer("total", torch.zeros(()), persistent=persistent)
        loss = trained(model, optimizer, batch)
        model.total += loss.detach()
        return loss

    return model, step, lambda _: (model.total, list(model.state_dict()))


def doubled(i, model):
    if i == 0:
        with torch.no_grad():
            model.mask.mul_(3)


def taken_away(i, model):
    model.mask = None


@pytest.mark.parametrize(
    ("make", "between"),
    [
        (with_mask, doubled),
        (with_mask, taken_away),
        (with_buffer, None),
        (lambda: with_buffer(persistent=False), None),
    ],
    ids=["changed outside", "taken away", "buffer", "buffer that is not saved"],
)
@pytest.mark.filterwarnings("ignore:this step is captured and planned anew")
def test_what_the_first_step_makes_is_there_and_later_steps_read_what_became_of_it(make, between):
    expected, planned = (seen(make, planned=planned, between=between) for planned in (False, True))
    assert all(map(are_same, expected, planned))


def with_flag():
    model = network()
    model.flag = False

    def step(model, optimizer, batch):
        model.flag = True
        return trained(model, optimizer, batch)

    return model, step, lambda _: model.flag


@pytest.mark.filterwarnings("ignore:this step is captured and planned anew")
def test_what_each_step_sets_to_what_it_was_is_set_again_where_the_loop_has_changed_it():
    """Its trace shows no change of these, so that nothing but the code tells that they are set."""

    def run(plan):
        torch.manual_seed(0)
        model, state = network(), types.SimpleNamespace(seen=True, pair=(1, 2), entries={"done": True}, row=[1, 2])

        def step(model, optimizer, batch):
            loss = trained(model, optimizer, batch)
            state.seen = model.seen = True
            state.pair = (1, 2)
            state.entries["done"] = True
            state.row[0] = 1
            return loss.detach()

        model.seen = True
        call = prepared(step, model) if plan else None
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        changes = [lambda: setattr(state, "seen", False), lambda: setattr(model, "seen", None)]
        changes += [lambda: setattr(state, "pair", (3,)), lambda: state.entries.update(done=0)]
        changes += [lambda: state.row.__setitem__(0, 5), lambda: None]
        for change in changes:
            change()
            call(batches()[0]) if call else step(model, optimizer, batches()[0])
            found.append((model.seen, state.seen, state.pair, dict(state.entries), list(state.row)))
        return found

    assert run(True) == run(False) == [(True, True, (1, 2), {"done": True}, [1, 2])] * 6


def test_a_flag_that_each_step_sets_and_the_loop_takes_away_is_no_reason_to_plan_again():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seen(with_flag, planned=True, between=lambda i, model: setattr(model, "flag", False)) == [True] * CALLS


# -- told --------------------------------------------------------------------------------------------------------------


def moving_on(store):
    def step(model, optimizer, batch):
        loss = trained(model, optimizer, batch)
        store.before, store.now = store.now, loss.detach()
        return loss

    return step


def after_the_first(store):
    def step(model, optimizer, batch):
        loss = trained(model, optimizer, batch)
        if store.before:
            store.now = loss.detach()
        store.before = True
        return loss

    return step


def appending(store):
    def step(model, optimizer, batch):
        loss = trained(model, optimizer, batch)
        store.entries[len(store.entries)] = loss.detach()
        return loss

    return step


def reordering(store):
    def step(model, optimizer, batch):
        store.entries.move_to_end("a")
        return trained(model, optimizer, batch)

    return step


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (moving_on, "the outer variable store.before"),
        (after_the_first, "the outer variable store.now"),
        (appending, "the number of entries of the outer variable store.entries"),
        (reordering, "the number of entries of the outer variable store.entries"),
    ],
    ids=["moved on", "from the second on", "new keys", "order"],
)
def test_what_another_call_would_leave_elsewhere_is_told_by_its_name(make, named):
    store = types.SimpleNamespace(before=None, now=None, entries=collections.OrderedDict(a=1, b=2))
    with pytest.warns(UserWarning, match=f"does not do again.*: {named}"):
        prepared(make(store), network())


# -- refused -----------------------------------------------------------------------------------------------------------


def registers(model, optimizer, batch):
    if not hasattr(model, "extra"):
        model.extra = nn.Parameter(torch.ones(3))
    return trained(model, optimizer, batch)


def keeps_in_the_optimizer(model, optimizer, batch):
    loss = trained(model, optimizer, batch)
    optimizer.state[model[0].weight]["mine"] = loss.detach()
    return loss


def freezes(model, optimizer, batch):
    loss = trained(model, optimizer, batch)
    model[0].weight.requires_grad_(False)
    return loss


def marks_its_batch(model, optimizer, batch):
    batch[0].seen = True
    return trained(model, optimizer, batch)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (registers, "registers extra with the model: run one step of your own"),
        (keeps_in_the_optimizer, r"writes the optimizer's state 0\.weight\.mine: keep it in a buffer"),
        (freezes, r"changes requires_grad of parameter 0\.weight: do so outside"),
        (marks_its_batch, r"sets an attribute on the tensor batch\.0: return it"),
    ],
)
def test_what_no_call_could_leave_there_is_refused_with_a_way_out(step, said):
    with pytest.raises(CaptureError, match=said):
        prepared(step, network())
