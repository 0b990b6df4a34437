"""What a GPU would run instead: each substitution, what it saves, and that the result is never run here."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.ir import Rerun, Role
from planner.plan import Plan
from planner.schedule import lower
from profiler import CaptureError, capture, capture_without_memory
from profiler.estimating.roofline import flops
from profiler.tracing.fx_graphs.gpu_kernels import PHILOX_STATE_BYTES, Change, Target
from rewriter.replay import apply
from tests.profiler.small import make

AMPERE = Target(name="a new card", has_bfloat16=True)
TURING = Target(name="an old card", has_bfloat16=False)
BATCH, SEQ, HEADS, HEAD = 3, 32, 2, 8
WIDTH = HEADS * HEAD


class Attention(nn.Module):
    """One layer that calls attention itself, and a norm."""

    def __init__(self, *, p=0.1, mask=None, head=HEAD):
        super().__init__()
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * HEADS * head), nn.LayerNorm(HEADS * head)
        self.p, self.mask, self.head = p, mask, head

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, self.head).permute(2, 0, 3, 1, 4)
        mask = None if self.mask is None else self.mask(rows, length)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.p)
        return self.norm(out.transpose(1, 2).flatten(2))


class Torchs(nn.Module):
    """torch's own multi-head attention, which calls the rest from inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


def square(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss


def bfloat16(model, optimizer, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return square(model, optimizer, x)


def captured(model, step=square, *, target=AMPERE):
    workload = make(step, model=model, batch=lambda: torch.randn(BATCH, SEQ, WIDTH))
    return capture_without_memory(lambda n: workload(), BATCH, target=target)


def targets(step):
    return [op.target for op in step.graph.ops]


def changes(step):
    return {s.change: (s.count, s.cpu_bytes, s.gpu_bytes) for s in step.substitutions}


def test_dropout_has_a_mask_of_bytes_and_its_state_is_a_philox():
    step = captured(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 4)))
    elements = BATCH * SEQ * WIDTH
    assert changes(step) == {Change.DROPOUT: (1, 4 * elements, elements)}
    (op,) = [op for op in step.graph.ops if op.target == "aten.native_dropout.default"]
    assert [step.graph.storages[s].nbytes for s in step.graph.makes[op.id]] == [4 * elements, elements]
    assert op.rerun is Rerun.REPLAY_RNG
    assert step.graph.storages[op.rng_state].nbytes == PHILOX_STATE_BYTES
    assert not any("bernoulli" in t for t in targets(step))


def test_dropout_by_the_names_of_either_function():
    class Named(nn.Linear):
        def forward(self, x):
            x = torch.dropout(input=super().forward(x), p=0.2, train=True)
            return nn.functional.dropout(input=x, p=0.2, training=True)

    assert changes(captured(lambda: Named(WIDTH, WIDTH)))[Change.DROPOUT][0] == 2


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_all_or_nothing_stays(p):
    step = captured(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(p)))
    assert step.substitutions == ()


def test_dropout_in_place_is_said_to_be_unknown():
    step = captured(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2, inplace=True)))
    assert step.substitutions == ()
    assert step.unknown == ("1x dropout in place: has the CPU's form",)


def test_attention_in_float32_is_memory_efficient_and_keeps_no_scores():
    step = captured(Attention)
    count, cpu, gpu = changes(step)[Change.EFFICIENT]
    scores = 4 * BATCH * HEADS * SEQ * SEQ
    assert (count, cpu >= 2 * scores, gpu) == (1, True, 4 * BATCH * HEADS * SEQ + 16)  # logsumexp, seed and offset
    assert "aten._scaled_dot_product_efficient_attention_backward.default" in targets(step)
    biggest = max(s.nbytes for s in step.graph.storages if s.role is Role.ACTIVATION)
    assert biggest < scores
    node = next(n for n in step.nodes if "efficient_attention.default" in str(n.target))
    assert flops(node) == 4 * BATCH * HEADS * SEQ * SEQ * HEAD


@pytest.mark.parametrize(
    ("target", "mask", "change"),
    [
        (AMPERE, None, Change.FLASH),
        (TURING, None, Change.EFFICIENT),
        (AMPERE, lambda b, s: torch.ones(b, 1, s, s, dtype=torch.bool), Change.EFFICIENT),
        (AMPERE, lambda b, s: torch.zeros(s, s), Change.EFFICIENT),
    ],
)
def test_half_precision_takes_flash_attention_where_card_and_mask_allow(target, mask, change):
    step = captured(lambda: Attention(mask=mask), bfloat16, target=target)
    assert change in changes(step)
    assert len([t for t in targets(step) if "attention" in t]) == 2  # and its backward
    query = next(n for n in step.nodes if "attention" in str(n.target)).all_input_nodes[0]
    assert query.meta["val"].dtype is torch.bfloat16


def test_attention_without_dropout_is_replaced_too():
    step = captured(lambda: Attention(p=0.0))
    assert Change.EFFICIENT in changes(step)
    assert not any("for_cpu" in t for t in targets(step))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Attention(head=6), "with heads of 6 and 6 elements"),
        (lambda: Attention(head=264), "with heads of 264 and 264 elements"),
    ],
)
def test_attention_without_a_fused_kernel_is_said_to_be_unknown(model, why):
    step = captured(model)
    assert step.substitutions == ()
    assert step.unknown == (f"1x attention {why}: has the CPU's form",)


def test_torchs_own_attention_is_seen_from_inside():
    step = captured(Torchs)
    assert [(s.change, s.count) for s in step.substitutions] == [(Change.EFFICIENT, 1)]
    assert F.dropout.__module__ == F.softmax.__module__ == "torch.nn.functional"


def test_norms_run_in_float32_under_autocast_as_on_cuda():
    plain = make(bfloat16, model=Attention, batch=lambda: torch.randn(BATCH, SEQ, WIDTH))
    on_cpu = {op.target: op for op in capture(*plain()).graph.ops}
    assert "aten.native_layer_norm.default" in on_cpu
    step = captured(Attention, bfloat16)
    assert changes(step)[Change.FLOAT32][0] == 1
    node = next(n for n in step.nodes if "native_layer_norm.default" in str(n.target))
    assert node.all_input_nodes[0].meta["val"].dtype is torch.float32


def test_float32_steps_keep_their_norms():
    assert Change.FLOAT32 not in changes(captured(Attention))


def test_the_reserve_of_batch_norm_is_said_to_be_unknown():
    step = captured(lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(SEQ)))
    assert step.unknown == ("1x batch norm: cuDNN's reserve space is not counted",)


def test_what_adds_in_no_fixed_order_on_a_gpu_is_not_recomputed():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(x).cumsum(1).sigmoid()

    op = next(op for op in captured(Sums).graph.ops if op.target == "aten.cumsum.default")
    assert (op.rerun, op.never_reason) == (Rerun.NEVER, "adds in no fixed order on a GPU")


def test_real_tensors_give_the_same_graph_for_a_target():
    workload = make(square, model=Attention, batch=lambda: torch.randn(BATCH, SEQ, WIDTH))
    real = capture(*workload(), target=AMPERE)
    assert real.graph.fingerprint == captured(Attention).graph.fingerprint
    assert real.substitutions == captured(Attention).substitutions


def test_a_step_for_another_device_is_never_rewritten_or_run():
    workload = make()()
    step = capture(*workload, target=AMPERE, name="theirs")
    with pytest.raises(CaptureError, match=r"theirs was captured for planning .* its kernels are those of a new card"):
        apply(step, lower(step.graph, Plan()))
    with pytest.raises(CaptureError, match="captured for planning"):
        step.run(workload[3])
