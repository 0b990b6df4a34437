"""A step that is captured, measured and run in a second, for `--import tests.bench.small:make`."""

from bench.models import Workload, classify
from tests.rewriter import tiny


def make(batch_size: int) -> Workload:
    """The small network with SGD."""
    model = tiny.network()
    return classify, model, tiny.sgd(model), tiny.images(batch_size)
