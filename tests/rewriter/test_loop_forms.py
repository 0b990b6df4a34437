"""Loops as people write them, around a planned model: equal to the bit to the same loop around the model as it is."""

import copy
import io
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from rewriter import checkpoint_model
from rewriter.proof import same_bits
from rewriter.ways.common import Way
from rewriter.ways.rehearsal import stop_watching

X, Y = torch.randn(128, 8), torch.randint(0, 4, (128,))


class Net(nn.Module):
    def __init__(self, outputs=4):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.1)) for _ in range(3))
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), nn.BatchNorm1d(8), nn.Linear(8, outputs)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Around(nn.Module):
    """A model with another inside."""

    def __init__(self, outputs=4):
        super().__init__()
        self.inner = Net(outputs)


class Tied(Around):
    def __init__(self):
        super().__init__(12)
        self.words = nn.Embedding(12, 8)
        self.inner.head.weight = self.words.weight

    def forward(self, ids):
        return self.inner(self.words(ids))


class WithLabels(Around):
    def forward(self, x, labels=None):
        logits = self.inner(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


@dataclass
class Returned:
    loss: torch.Tensor
    name: str
    others: list


class Structured(Around):
    """Returns what it was given, a parameter, views, the same memory twice, in a class of its own."""

    def forward(self, x):
        out = self.inner(x)
        head = self.inner.head.weight
        return Returned(out.pow(2).mean(), "some", [out.detach(), (x, x.view(-1)), head, out * 2, out[:, 0], out])


class ThreeTimes(Around):
    def __init__(self):
        super().__init__(8)

    def forward(self, x):
        return self.inner(self.inner(self.inner(x)))[:, :4]


class ByValue(Around):
    """Goes another way where the data are large, and at random."""

    def forward(self, x):
        x = x * 0.5 if x.mean() > 1.5 else x
        x = self.inner.norm(x)
        return self.inner(x * 2 if torch.rand(()) > 0.5 else x)


class Sigmoid(Around):
    def forward(self, x):
        return self.inner(x).sigmoid()


LOOPS = {}


def loop(make=Net, *, plan=lambda model: [model]):
    """Registers a loop; `plan` says which modules are planned."""

    def register(function):
        LOOPS[function.__name__] = make, plan, function
        return function

    return register


def sgd(model):
    return optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def stepping(model, loss_of, steps=4):
    optimizer = sgd(model)
    for i in range(steps):
        loss = loss_of(i)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def plain(model, steps=4):
    return list(stepping(model, lambda i: F.cross_entropy(model(X + i % 4), Y), steps))


@loop()
def train_and_eval_take_turns(model):
    seen = []
    for _ in range(3):
        seen += plain(model.train(), 2)
        with torch.no_grad():
            seen.append(model.eval()(X).sum().item())
        with torch.inference_mode():
            seen.append(model(X[:5]).sum().item())
        seen += plain(model, 2)
    return seen


@loop()
def the_type_changes(model):
    seen = plain(model, 3)
    model.double()
    return seen + list(stepping(model, lambda i: F.cross_entropy(model(X.double()), Y), 3))


@loop()
def parameters_are_frozen_and_freed(model):
    seen = plain(model, 2)
    for frozen in (True, False):
        model.blocks[0].requires_grad_(not frozen)
        seen += plain(model, 2)
    return seen


@loop()
def hooks_on_the_model_itself_stay_alive(model):
    seen = []
    model.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
    model.register_forward_hook(lambda _, args, out: seen.append(out.sum().item()) or out * 2)
    model.register_full_backward_hook(lambda _, into, out: seen.append(out[0].norm().item()))
    return plain(model) + seen


@loop()
def hooks_of_layers_are_part_of_the_plan(model):
    model.blocks[0].register_forward_hook(lambda _, args, out: out * 0.9)
    model.blocks[1].register_full_backward_hook(lambda _, into, out: (into[0] * 0.5,))
    return plain(model)


@loop()
def hooks_on_parameters_see_each_gradient_once(model):
    seen = []
    model.head.weight.register_hook(lambda g: seen.append(g.norm().item()) or g * 0.5)
    return plain(model) + seen


@loop()
def the_optimizer_steps_inside_of_the_backward(model):
    optimizers = {p: optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    seen = []
    for i in range(4):
        loss = F.cross_entropy(model(X + i), Y)
        loss.backward()
        seen.append(loss.item())
    return seen


@loop(Tied)
def weights_are_tied(model):
    ids = torch.arange(128) % 12
    return list(stepping(model, lambda i: F.cross_entropy(model(ids), (ids + i) % 12)))


@loop()
def inputs_get_gradients(model):
    seen, optimizer = [], sgd(model)
    for i in range(4):
        x = (X + i).requires_grad_()
        (attack,) = torch.autograd.grad(F.cross_entropy(model(x), Y), x)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.detach() + 0.1 * attack.sign()), Y)
        loss.backward()
        optimizer.step()
        seen += [loss.item(), attack.sum().item()]
    return seen


@loop()
def two_forwards_of_two_sizes_have_one_backward(model):
    return list(stepping(model, lambda i: model(X + i).pow(2).mean() + model(X[:32] - i).pow(2).mean()))


@loop()
def a_forward_without_gradients_comes_first(model):
    def loss_of(i):
        with torch.no_grad():
            target = model(X - i)
        return (model(X + i) - target).pow(2).mean()

    return list(stepping(model, loss_of))


@loop(WithLabels)
def the_loss_is_inside_and_outside(model):
    def loss_of(i):
        return model(X + i, labels=Y)["loss"] if i % 2 else F.cross_entropy(model(X + i)["logits"], Y)

    return list(stepping(model, loss_of, 6))


@loop(Structured)
def anything_is_returned(model):
    seen = []

    def loss_of(i):
        x = X + i
        out = model(x)
        same, (given, flat), head, twice, column, again = out.others
        assert isinstance(out, Returned)
        assert given is x
        assert head is model.inner.head.weight
        seen.extend([flat.data_ptr() == x.data_ptr(), same.requires_grad, twice.sum().item(), column.sum().item()])
        return out.loss + head.pow(2).mean() + again.mean()

    return list(stepping(model, loss_of)) + seen


@loop(ThreeTimes, plan=lambda model: [model.inner])
def a_part_is_planned_that_is_called_three_times(model):
    return plain(model)


@loop(Tied, plan=lambda model: [model.inner, model])
def a_planned_part_is_inside_of_a_planned_model(model):
    return weights_are_tied(model)


@loop(ByValue)
def the_data_and_the_generator_decide(model):
    return plain(model, 8)


@loop()
def an_output_is_written_to(model):
    return list(stepping(model, lambda i: F.cross_entropy(model(X + i).mul_(2.0), Y)))


@loop(Sigmoid)
def a_gradient_lies_across(model):
    def loss_of(i):
        out = model(X + i)
        factors = torch.randn(4, 128, generator=torch.Generator().manual_seed(i)).t()
        return out.mul(factors).sum() if i < 2 else (out.t().contiguous() * factors.t()).sum()

    return list(stepping(model, loss_of))


@loop()
def two_models_take_turns(model):
    torch.manual_seed(2)
    model.head, judge, seen = nn.Linear(8, 8), Net(1), []
    if hasattr(model, "planned"):
        checkpoint_model(judge, budget="90%", strategy="mutwo")
    ours, theirs = sgd(model), sgd(judge)
    for i in range(4):
        made = model(X + i)
        theirs.zero_grad()
        loss = F.softplus(judge(made.detach())).mean() + F.softplus(-judge(X)).mean()
        loss.backward()
        theirs.step()
        ours.zero_grad()
        gain = F.softplus(-judge(made)).mean()
        gain.backward()
        ours.step()
        seen += [loss.item(), gain.item()]
    return seen + [p.sum().item() for p in judge.parameters()]


@loop()
def it_is_saved_loaded_and_copied(model):
    seen, file = plain(model, 3), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    seen.append(torch.load(file, weights_only=False).eval()(X).sum().item())
    seen.append(copy.deepcopy(model).eval()(X).sum().item())
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    return seen + plain(model, 3)


@loop()
def another_thread_trains(model):
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(plain(model)))
    thread.start()
    thread.join()
    return seen


@loop()
def two_threads_go_forward_at_once(model):
    model.eval()  # where no generator is shared
    losses = {}

    def go(i):
        losses[i] = F.cross_entropy(model(X + i), Y)

    for step in range(4):
        threads = [threading.Thread(target=go, args=(2 * step + k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (losses[2 * step] + losses[2 * step + 1]).backward()
    return [p.grad.sum().item() for p in model.parameters()]


@loop()
def it_goes_on_in_another_thread(model):
    seen = plain(model, 1)

    def go():
        seen.extend(plain(model, 2))

    for _ in range(2):
        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        seen.extend(plain(model, 1))
    return seen


@loop()
def its_forward_is_replaced(model):
    seen, own = plain(model, 3), model.forward
    model.forward = lambda x: own(x) * 2
    seen += plain(model, 3)
    del model.forward
    return seen + plain(model, 2)


@loop()
def mixed_precision_with_a_scaler(model):
    scaler, optimizer, seen = torch.amp.GradScaler("cpu", init_scale=8.0), sgd(model), []
    for i in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(X + i), Y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@loop()
def lbfgs_evaluates_as_often_as_it_likes(model):
    optimizer, seen = optim.LBFGS(model.eval().parameters(), lr=0.1, max_iter=3), []

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        seen.append(loss.item())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return seen


@loop()
def it_is_recomputed_by_torch_itself(model):
    def loss_of(i):
        out = torch.utils.checkpoint.checkpoint(model, X + i, use_reentrant=False, preserve_rng_state=True)
        return F.cross_entropy(out, Y)

    model.norm = nn.LayerNorm(8)
    return list(stepping(model, loss_of))


@loop()
def anomalies_are_looked_for(model):
    with torch.autograd.set_detect_anomaly(True):
        return plain(model)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings(
    "ignore:Full backward hook", "ignore:Anomaly Detection", "ignore:this forward runs unplanned"
)
def test_a_loop_around_a_planned_model_equals_the_same_loop(name):
    make, plan, run = LOOPS[name]
    stop_watching()  # another test's, which would have threads run unplanned
    torch.manual_seed(0)
    eager = make().train()
    planned = copy.deepcopy(eager)
    modules = plan(planned)
    for module in modules:
        checkpoint_model(module, budget="90%", strategy="mutwo")
    found = []
    for model in (eager, planned):
        torch.manual_seed(1)
        found.append(run(model))
    assert found[0] == found[1]
    for (key, a), b in zip(eager.state_dict().items(), planned.state_dict().values(), strict=True):
        assert same_bits(a, b), key
    assert modules[-1].planned.way is Way.OWN_CAPTURE
    assert modules[-1].planned.verification.exact
