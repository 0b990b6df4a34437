"""A model's forward and backward captured as one graph, planned, and put on the autograd tape."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from planner.ir import Graph
from planner.units import human_bytes
from profiler.errors import CaptureError
from profiler.measuring.memory import OutOfMemory
from profiler.measuring.meters import meter_for
from profiler.tracing.eager_ways.assumptions import BrokenAssumption, Turns
from profiler.tracing.joint import forward_of, in_backward, without_saving_hooks
from profiler.tracing.ranks.torch_shards import is_sharded
from profiler.workload import device_of
from rewriter.agreement import ALONE, Ranks, ranks_of
from rewriter.budgets import is_share
from rewriter.reserving import Ahead
from rewriter.telling import warn_caller
from rewriter.ways.common import ModelSettings, Refused, Way
from rewriter.ways.company import Company, open_bytes
from rewriter.ways.forms import WayOfForms
from rewriter.ways.optimizer_steps import elsewhere_bytes
from rewriter.ways.others import Others
from rewriter.ways.own_capture.form import ModelForm, Seen
from rewriter.ways.own_capture.passage import Passage
from rewriter.ways.own_capture.planning import Planner
from rewriter.ways.rehearsal import Call, Facts, Rehearsal, is_graph_kept, stop_watching

log = logging.getLogger("recompute_planner")


class OwnCapture(WayOfForms[ModelForm]):
    """The model's forward and backward as one graph, by the capture that whole steps have."""

    way = Way.OWN_CAPTURE
    promise = "eager's bits, and a peak known to the byte for each shape of the inputs"

    def __init__(self, model: nn.Module, settings: ModelSettings) -> None:
        super().__init__(model, settings)
        self._facts: dict[Call, Facts] = {}
        self._rehearsing: list[tuple[Call, Rehearsal]] = []  # several where forwards come before any backward
        self._turns = Turns()
        self._uses: dict[Call, set[frozenset[int]]] = {}  # outputs that the loop has gone backward from
        self._refusal = ""  # why the next forward goes another way
        self._rehearsals: Counter[Call] = Counter()
        self._unplanned_calls = 0  # training forwards since the last plan was made
        self._captures = 0
        self._measured: list[Graph] = []  # for the times of other shapes
        self._alive: weakref.WeakSet[Passage | Rehearsal] = weakref.WeakSet()  # forwards whose graphs are still there
        self._company = Company()
        self._ranks: Ranks = ALONE
        self._others = Others()
        self._told_of_sums = False
        self._ahead = Ahead(settings.reserve, device_of(model))

    def _in_training(self, model: nn.Module, batch: Any) -> Any:
        call = Call.of(model, batch)
        if not in_backward():
            self._learn()
            self._count_the_living()
        elif call not in self._facts:  # a recomputation: as its forward was
            return forward_of(model, *batch)
        self._ranks = ranks_of(model)
        if self._ranks.size > 1 and not in_backward():
            return self._with_others(model, call, batch)
        if call not in self._facts:
            return self._rehearsed(model, call, *batch)
        return self._planned(model, call, batch)

    def _with_others(self, model: nn.Module, call: Call, batch: Any) -> Any:
        """The same on ranks that gather parameters together: all of them watch, plan or run the same form."""
        facts = self._facts.get(call)
        fits = [
            form.facts == facts and not self._mismatches(form, batch) and not self._outgrown_bytes(form, model, batch)
            for form in self._forms[:MOST_AGREED]
        ]
        mine = [facts is not None, *fits, *(False for _ in range(MOST_AGREED - len(fits)))]
        is_known, *fitting = self._ranks.fits_all(mine)
        with self._ranks.watched():
            if not is_known:
                return self._rehearsed(model, call, *batch)
            if any(fitting):
                return self._run(self._forms[fitting.index(True)], model, call, batch)
            form = self._new_form(model, batch, facts, ["a rank has another batch or model than was planned"], [])
            self._facts[call] = form.facts
            return self._run(form, model, call, batch)

    def _rehearsed(self, model: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._unplanned_calls += 1
        self._rehearsals[call] += 1
        self._warn_of_nothing_planned()
        rehearsal = Rehearsal(meter_for(device_of(model)), call=forward_of)
        try:
            returned = rehearsal.forward(model, args, kwargs)
        except OutOfMemory as error:
            said = str(error)
        else:
            self._rehearsing.append((call, rehearsal))
            self._alive.add(rehearsal)
            return returned
        warn_caller(f"{said}: it is planned at once, as if the caller went backward from the loss alone")
        return self._planned(model, call, (args, kwargs))

    def _learn(self) -> None:
        """What those rehearsals have seen that are over; others may still get their backward.

        Of several the last alone has watched the bytes outside, and the others estimate them.
        """
        if self._refusal:
            raise Refused(self._refusal, also=[Way.DYNAMO])
        rehearsed, self._rehearsing = self._rehearsing, []
        for call, rehearsal in rehearsed:
            if rehearsal.refusal:
                raise Refused(rehearsal.refusal)
            if rehearsal.keeps_graph:
                self._company = replace(self._company, keeps_graph=True)
            facts = rehearsal.facts(estimated=self._rehearsals[call] >= ENOUGH_REHEARSALS)
            if facts is not None:
                self._facts[call] = facts
            elif rehearsal.is_open:
                self._rehearsing.append((call, rehearsal))

    def _warn_of_nothing_planned(self) -> None:
        if self._unplanned_calls == ENOUGH_UNPLANNED:
            warn_caller(
                f"{ENOUGH_UNPLANNED} training forwards of this model have gone by and none was planned: no backward "
                "has come back to what it returned. Plan the module whose outputs the loss is computed from"
            )

    def _check_facts(self, call: Call, seen: Seen) -> None:
        """Notice a caller who does something else than was seen at first: the next forward is planned for that."""
        known = self._facts[call]
        layouts = tuple(sorted(seen.layouts.items()))
        if layouts == known.layouts and seen.held <= known.held:
            return
        if not seen.held <= known.held:
            warn_caller(
                f"outputs {sorted(seen.held - known.held)} of the planned model are held until its backward, which was "
                "not so when it was planned: this step may need more memory than predicted; the next one is planned "
                "anew"
            )
        used = frozenset(seen.layouts)
        if used != known.used:
            self._note_other_use(call, known.used, used)
        if used == known.used and layouts != known.layouts:
            warn_caller(
                f"gradients of outputs {sorted(used)} of the planned model lie in memory otherwise than when it was "
                "planned: they are copied, and sums over them may round otherwise than in eager this once; the next "
                "forward is planned for what was seen now"
            )
        self._facts[call] = replace(known, used=used, held=known.held | seen.held, layouts=layouts)

    def _note_other_use(self, call: Call, before: frozenset[int], now: frozenset[int]) -> None:
        """A loop may change what it goes backward from, once; one that comes back to what it did before will again."""
        known = self._uses.setdefault(call, {before})
        if now in known or len(known) >= MOST_USES:
            self._refusal = (
                f"the loop goes backward from outputs {sorted(now)} at one step and from {sorted(before)} at another "
                "(counted among the tensors that the model returns), and a captured plan is for one of these"
            )
        known.add(now)

    # -- forms ----------------------------------------------------------------------------------------------

    def _planned(self, model: nn.Module, call: Call, batch: Any) -> Any:
        """One forward by the form that fits, or by a new one; also where the data lead another way than they did."""
        facts, wrong, broken = self._facts.get(call), list[str](), None
        for form in list(self._forms):
            is_same = form.facts == facts or in_backward()  # where a recomputation goes the way that its forward went
            found = self._mismatches(form, batch) if is_same else ["the caller does something else with it"]
            wrong = wrong or found
            if found:
                continue
            form = self._within_budget(form, model, batch)
            try:
                returned = self._run(form, model, call, batch)
                self._turns.passed()
                return returned
            except BrokenAssumption as error:
                broken = broken or error
        if in_backward():
            return forward_of(model, *batch)
        reads = [broken] if broken else self._broken(facts, batch)
        form = self._new_form(model, batch, facts, [str(broken)] if broken else wrong, reads)
        self._facts[call] = form.facts
        return self._run(form, model, call, batch)

    def _within_budget(self, form: ModelForm, model: nn.Module, batch: Any) -> ModelForm:
        """The form, or one with less of a budget in bytes where other tensors have grown; OverBudget if none fits."""
        grown = self._outgrown_bytes(form, model, batch)
        if not grown:
            return form
        stop_watching()
        with without_saving_hooks():
            again = self._planner(model, batch, form.facts).again(form, to_grow_bytes=grown)
        warn_caller(
            f"other tensors have grown by {human_bytes(grown)} more than the plan of this model left to them: it is "
            f"planned anew for the budget of {self.settings.budget}"
        )
        self._forms = [again if other is form else other for other in self._forms]
        self._ahead.hold_for(again.ready.graph, again.solution)
        return again

    def _outgrown_bytes(self, form: ModelForm, model: nn.Module, batch: Any) -> int:
        """By how much other tensors have grown beyond what a form leaves to them of a budget in bytes."""
        if not self.settings.in_bytes or in_backward():
            return 0
        most, count = form.most_elsewhere_bytes, partial(elsewhere_bytes, model, batch, self.settings.optimizer)
        if not self._others.exceed(most, device_of(model), count):
            return 0
        gc.collect()  # what only a cycle holds is nobody's
        return max(0, count() - most)

    def _planner(self, model: nn.Module, batch: Any, facts: Facts | None) -> Planner:
        return Planner(
            model,
            batch,
            facts,
            self.settings,
            steps=self._steps,
            company=self._company,
            earlier=[form.solution for form in self._forms],
            ranks=self._ranks,
        )

    def _mismatches(self, form: ModelForm, batch: Any) -> list[str]:
        held = open_bytes()
        if held > form.beside_bytes and not is_share(self.settings.budget) and not in_backward():
            return [f"other forwards hold {human_bytes(held)}, and {human_bytes(form.beside_bytes)} were left to them"]
        return form.mismatches(batch)

    def _broken(self, facts: Facts | None, batch: Any) -> list[BrokenAssumption]:
        """The reads by which alone a form does not fit, of the one used last that they keep away."""
        alike = (form.broken(batch) for form in self._forms if form.facts == facts)
        return next(filter(None, alike), [])

    def _run(self, form: ModelForm, model: nn.Module, call: Call, batch: Any) -> Any:
        def on_backward(seen: Seen) -> None:
            if is_graph_kept() and not self._company.keeps_graph:
                self._expect(replace(self._company, keeps_graph=True))
            self._check_facts(call, seen)

        self._tell_of_sums()
        returned = form.run(model, batch, on_backward=on_backward, on_forward=self._alive.add)
        self._forms = [form, *(other for other in self._forms if other is not form)]
        return returned

    def _tell_of_sums(self) -> None:
        """Several forwards of shards before one backward: eager reduces the sum of their gradients, once."""
        if not self._company.forwards or self._told_of_sums or not is_sharded(self.model):
            return
        self._told_of_sums = True
        warn_caller(
            "the loop goes backward from several forwards of a sharded model at once: the plan reduces the gradients "
            "of each over the ranks, where eager adds them up first, so that they may round otherwise. Go backward "
            "after each forward, or call the model once with both batches, to have eager's bits"
        )

    def _count_the_living(self) -> None:
        """Notice a loop that goes on before a backward: what earlier forwards hold belongs into the plan."""
        others = sum(forward.is_open for forward in self._alive)
        if others > self._company.forwards:
            self._expect(replace(self._company, forwards=others))

    def _expect(self, company: Company) -> None:
        """Plan for more that is alive at a time from now on; what goes on by an earlier plan is told."""
        self._company = company
        if self._forms and not is_share(self.settings.budget):
            self._forms.clear()
            warn_caller(
                f"beside a forward of this model the loop keeps {company}, which was not so when it was planned: it is "
                f"planned anew for that, and until then the peak may exceed the budget of {self.settings.budget}"
            )

    def _new_form(
        self, model: nn.Module, batch: Any, facts: Facts | None, wrong: list[str], broken: list[BrokenAssumption]
    ) -> ModelForm:
        if self._forms:
            log.info("the model is captured and planned anew, because %s", "; ".join(wrong[:2]))
        stop_watching()
        try:
            self._turns.note(broken, batch)
            planner = self._planner(model, batch, facts)
            with without_saving_hooks():
                form = planner.form(self._measured)
        except CaptureError as error:
            raise Refused(str(error)) from error
        gc.collect()  # a trace leaves cycles behind, and tensors in them, until Python happens to look
        self._captures += 1
        self._unplanned_calls = 0
        if form.measured is not None:
            self._measured = [form.measured, *self._measured][:MOST_MEASURED]
        self._keep(form)
        self._ahead.hold_for(form.ready.graph, form.solution)
        self._warn_of_a_storm(wrong)
        return form

    def _warn_of_a_storm(self, wrong: list[str]) -> None:
        most = len(self._forms)
        if not wrong:  # forms were dropped, and that was said
            return
        if self._captures % (most + 1) and self._captures % MANY_CAPTURES:
            return
        warn_caller(
            f"this model was captured and planned {self._captures} times, and {most} forms are kept: the last time "
            f"because {'; '.join(wrong[:2])}. Each takes seconds: raise most_shapes or most_forms_bytes if these forms "
            "come again, pad to a few lengths, or use dynamic=True",
        )


# A rehearsal that saw the backward and not its bytes (another profiler is on) is repeated so often, then estimated.
ENOUGH_REHEARSALS = 3
# So many different uses of the outputs of one call are planned for, one after the other.
MOST_USES = 2
# So many training forwards without any plan, and a warning says so.
ENOUGH_UNPLANNED = 8
# So many captures, and a warning says so, whether or not all of them are kept.
MANY_CAPTURES = 32
# Ranks agree on one of so many forms, those used last.
MOST_AGREED = 64
# Graphs of which the times are kept for other shapes.
MOST_MEASURED = 16
