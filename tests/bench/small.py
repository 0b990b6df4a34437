"""Steps that are captured, measured and run in a second, for `--import tests.bench.small:make`."""

from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from bench.workloads.zoo import Workload, classify
from tests.rewriter import tiny


def make(batch_size: int) -> Workload:
    """The small network with SGD."""
    model = tiny.network()
    return classify, model, tiny.sgd(model), tiny.images(batch_size)


def make_never_clearing(batch_size: int) -> Workload:
    """The same with a step that leaves its gradients behind and never clears them."""
    model = tiny.network()
    return _never_clearing, model, tiny.sgd(model), tiny.images(batch_size)


def _never_clearing(model, optimizer, batch):
    images, labels = batch
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss
