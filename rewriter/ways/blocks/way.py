"""The last way to plan a model: `torch.utils.checkpoint` around blocks that the planner chose.

Nothing is captured. One training step is watched by hooks, taken apart into blocks, and becomes a coarse graph: the
same strategies, simulator and judge decide which blocks are recomputed.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from profiler.measuring.meters import meter_for
from profiler.tracing.joint import forward_of, in_backward
from profiler.workload import device_of
from rewriter.ways.blocks.form import BlockForm, Kind, sizes_of
from rewriter.ways.blocks.planning import Planner, Rehearsed
from rewriter.ways.blocks.watched_step import BlockRehearsal
from rewriter.ways.common import ModelSettings, Refused, Way
from rewriter.ways.forms import WayOfForms
from rewriter.ways.rehearsal import stop_watching


class BlockWise(WayOfForms[BlockForm]):
    """`torch.utils.checkpoint` around blocks: for models that nothing can capture."""

    way = Way.BLOCKS
    promise = (
        "eager's bits as far as a proof on your own batch shows them; bytes are estimated from what one step showed, "
        "and measured once by that proof; blocks are recomputed whole, which takes longer than a captured plan, and "
        "what your code does in them beside computing (a hook, a print) happens twice"
    )

    def __init__(self, model: nn.Module, settings: ModelSettings) -> None:
        super().__init__(model, settings)
        self._rehearsed: dict[Kind, Rehearsed] = {}
        self._rehearsing: tuple[Kind, tuple[int, ...], BlockRehearsal] | None = None

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The blocks that are recomputed."""
        return tuple(block.name for block in self.form.recomputed)

    def _in_training(self, model: nn.Module, batch: Any) -> Any:
        kind, sizes = Kind.of(model, batch), sizes_of(batch)
        if not in_backward():
            self._learn()
        elif kind not in self._rehearsed:  # a recomputation: as its forward was
            return forward_of(model, *batch)
        if kind not in self._rehearsed:
            rehearsal = BlockRehearsal(model, meter_for(device_of(model)))
            self._rehearsing = kind, sizes, rehearsal
            return rehearsal.forward(*batch)
        return self._form_for(model, batch, kind, sizes).run(model, *batch)

    def _learn(self) -> None:
        """What the rehearsal has seen, if one is over."""
        if self._rehearsing is None:
            return
        (kind, sizes, rehearsal), self._rehearsing = self._rehearsing, None
        if rehearsal.refusal:
            raise Refused(rehearsal.refusal)
        profile, facts = rehearsal.profile(), rehearsal.facts()
        if profile is None or facts is None:
            return
        written = frozenset(rehearsal.written())
        self._rehearsed[kind] = Rehearsed(profile=profile, facts=facts, written=written, sizes=sizes)

    def _form_for(self, model: nn.Module, batch: Any, kind: Kind, sizes: tuple[int, ...]) -> BlockForm:
        found = next((i for i, form in enumerate(self._forms) if form.serves(kind, sizes)), None)
        if found is not None:
            self._forms.insert(0, self._forms.pop(found))
        else:
            stop_watching()
            form = Planner(model, batch, self._rehearsed[kind], self.settings, self._steps).form(kind)
            self._keep(form)
        return self._forms[0]
