"""The "keep, or recompute once" program as sparse arrays, for any set of moments.

Moments are positions at which memory is counted: position j stands for the run of op j itself, after the
reruns placed before it. Stage k is everything in (moment k-1, moment k]; the last stage is the tail. With
K_x "x is kept", A_{o,k} "o was rerun by the end of stage k" and L_{x,k} "x is still held at moment k for a later
rerun", every plan that recomputes each op at most once, no later than its first need, is a point of this program
with the same recompute time and, at every moment, no more bytes than the simulator counts. Its optimum is therefore
a lower bound for that class.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from planner.analysis import liveness, rerun_reads
from strategies.ilp.linear import ONE, ZERO, Floats, Ints, Linear, SparseModel, bytes_of, sparse, total
from strategies.ilp.reduction import NEVER, Anchor, Block, Node, Reduction
from strategies.ilp.small import Small, idle_small, prices


class StagedProgram:
    """The program for one set of moments; `at(budget)` gives it as arrays for one budget.

    An *inner* moment (j, q) counts memory during a rerun of op q placed just before op j: it makes j - 1 and j
    moments too, so that one stage holds exactly the reruns before j. Without `in_place`, no op is credited with an
    in-place form.
    """

    def __init__(
        self, reduction: Reduction, moments: Iterable[int], inner: Iterable[tuple[int, int]] = (), *, in_place: bool
    ) -> None:
        self.reduction = reduction
        self.in_place = in_place
        self.inner = sorted(set(inner))
        self.moments = sorted({*moments, *(j for j, _ in self.inner), *(max(0, j - 1) for j, _ in self.inner)})
        self.tail = len(self.moments)
        self.cost: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[tuple[dict[int, float], float]] = []
        self.keep = {x: self._variable(integer=True) for x in reduction.blocks}
        self._reruns: dict[tuple[int, int], Linear] = {}
        self._held: dict[tuple[int, int], Linear] = {}
        self.idle_small = self._idle_small()
        self.without_small = self._prices()
        self.offset = 0.0
        for node in reduction.nodes.values():
            self._add_node(node)
        for node in reduction.nodes.values():
            self._tie(node)
        fixed = fixed_bytes(reduction)
        self.memory = [self._memory(k, fixed) for k in range(len(self.moments))]
        self.memory += [self._inner_memory(j, q) for j, q in self.inner]

    # -- what is asked ----------------------------------------------------------------------------------------

    def at(self, budget_bytes: int, excluded: Iterable[frozenset[int]] = ()) -> SparseModel:
        """The program under a budget, without the `excluded` sets of kept blocks."""
        unit = max(1.0, budget_bytes / 100)
        rows = list(self.rows)
        for memory in self.memory:
            rows.append(({v: -c / unit for v, c in memory.terms.items()}, (memory.constant - budget_bytes) / unit))
        for kept in excluded:
            signs = {v: -1.0 if x in kept else 1.0 for x, v in self.keep.items()}
            rows.append((signs, 1.0 - len(kept)))
        return sparse(self.cost, self.offset, self.integer, rows)

    def smallest(self, peak_bytes: int, *, max_us: float | None) -> SparseModel:
        """Minimise the peak, as a share of `peak_bytes`, which is within reach; recomputing at most `max_us`."""
        share, unit = len(self.cost), peak_bytes / 100
        rows = list(self.rows)
        for memory in self.memory:
            terms = {v: -c / unit for v, c in memory.terms.items()}
            rows.append(({**terms, share: 100.0}, memory.constant / unit))
        if max_us is not None:
            limit = max(max_us, 1.0)
            rows.append(({v: -c / limit for v, c in enumerate(self.cost) if c}, (self.offset - max_us) / limit))
        return sparse([0.0] * share + [1.0], 0.0, [*self.integer, False], rows)

    def kept(self, solution: Floats) -> set[int]:
        """The blocks that a solution keeps."""
        return {x for x, variable in self.keep.items() if solution[variable] > 0.5}

    def where_full(self, solution: Floats, budget_bytes: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The moments, and those inside a rerun, at which `solution` is at the budget."""
        full = [bytes_of(memory, solution) >= (1 - 1e-6) * budget_bytes for memory in self.memory]
        moments = [j for j, tight in zip(self.moments, full, strict=False) if tight]
        return moments, [at for at, tight in zip(self.inner, full[len(self.moments) :], strict=True) if tight]

    # -- variables ----------------------------------------------------------------------------------------------

    def _variable(self, *, integer: bool = False) -> int:
        self.cost.append(0.0)
        self.integer.append(integer)
        return len(self.cost) - 1

    def _fresh(self) -> Linear:
        return Linear(0.0, {self._variable(): 1.0})

    def _at_least(self, left: Linear, right: Linear) -> None:
        """Add the row left ≥ right."""
        terms = left.terms.copy()
        for variable, coefficient in right.terms.items():
            terms[variable] = terms.get(variable, 0.0) - coefficient
        if 0.0 in terms.values():
            terms = {v: c for v, c in terms.items() if c != 0.0}
        if terms:
            self.rows.append((terms, right.constant - left.constant))

    def stage(self, position: int) -> int:
        """The stage in which a position lies."""
        return bisect_left(self.moments, position)

    def k(self, x: int) -> Linear:
        """K_x."""
        return Linear(0.0, {self.keep[x]: 1.0})

    def dropped(self, x: int) -> Linear:
        """1 - K_x."""
        return Linear(1.0, {self.keep[x]: -1.0})

    def a(self, op: int, k: int) -> Linear:
        """A_{o,k}."""
        return self._reruns[op, min(k, self.tail)] if k >= 0 else ZERO

    # -- reruns -------------------------------------------------------------------------------------------------

    def _add_node(self, node: Node) -> None:
        """A_{o,k} for every stage: 0 before any need, 1 - K_x from its only block's own need on."""
        first, own = self.stage(node.earliest), self.stage(node.direct) if node.direct != NEVER else self.tail + 1
        settled = own if len(node.blocks) == 1 else self.tail + 1
        previous = ZERO
        for k in range(self.tail + 1):
            if k < first:
                current = ZERO
            elif k >= settled:
                current = self.dropped(node.blocks[0])
            else:
                current = self._fresh()
            self._reruns[node.op, k] = current
            if k > first and k <= settled:
                self._at_least(current, previous)
            previous = current
        self._charge(node, previous)
        if settled > self.tail:
            self._only_if_dropped(node, previous)

    def _charge(self, node: Node, reruns: Linear) -> None:
        self.offset += node.time_us * reruns.constant
        for variable, coefficient in reruns.terms.items():
            self.cost[variable] += node.time_us * coefficient

    def _only_if_dropped(self, node: Node, reruns: Linear) -> None:
        """An op runs again only for a block that was dropped."""
        self._at_least(total(*((1.0, self.dropped(x)) for x in node.blocks)), reruns)

    def _tie(self, node: Node) -> None:
        """A rerun, and a direct need, find what they read."""
        own = self._direct_stages(node)
        if len(node.blocks) > 1:
            for x, k in own.items():
                self._at_least(self.a(node.op, k), self.dropped(x))
        last = self.stage(node.direct) if len(node.blocks) == 1 and node.direct != NEVER else self.tail
        for maker, x in node.sources:
            self._tie_source(node, maker, x, last)

    def _direct_stages(self, node: Node) -> dict[int, int]:
        """Per block of a node: the stage of the block's first direct need."""
        blocks = self.reduction.blocks
        return {x: self.stage(blocks[x].first) for x in node.blocks if x in blocks and blocks[x].first != NEVER}

    def _tie_source(self, node: Node, maker: int, x: int, last: int) -> None:
        source = self.reduction.nodes[maker]
        lone = len(source.blocks) == 1 and source.direct != NEVER
        settled = self.stage(source.direct) if lone else self.tail + 1
        same = x in node.blocks  # a view in the storage that it reads: it is rerun only if that was dropped
        for k in range(self.stage(node.earliest), min(last, settled - 1, self.tail) + 1):
            available = self.a(maker, k) if same else total((1.0, self.a(maker, k)), (1.0, self.k(x)))
            self._at_least(available, self.a(node.op, k))

    # -- memory -------------------------------------------------------------------------------------------------

    def live(self, block: Block, k: int) -> Linear:
        """How much of a block is resident at moment k."""
        position = self.moments[k]
        if position < block.made:
            return ZERO
        if position <= block.freed or block.first <= position <= block.last:
            return ONE
        if position < block.first and block.first != NEVER:
            return self._awaited(block, k)
        return self._lingering(block, k)

    def _lone(self, block: Block) -> bool:
        return len(self.reduction.nodes[block.maker].blocks) == 1

    def _awaited(self, block: Block, k: int) -> Linear:
        """Kept, or already rerun, and its own need is yet to come."""
        rerun, kept = self.a(block.maker, k), self.k(block.storage)
        if self._lone(block):
            return total((1.0, rerun), (1.0, kept))
        key = (block.storage, k)
        if key not in self._held:
            self._held[key] = self._fresh()
            self._at_least(self._held[key], rerun)
            self._at_least(self._held[key], kept)
            both = self._rerun_for_others(block)
            self._at_least(self._held[key], total((1.0, rerun), (1.0, kept), (-1.0, both)))
        return self._held[key]

    def _rerun_for_others(self, block: Block) -> Linear:
        """At least 1 where the maker is rerun although the block is kept: something else that it makes is asked for."""
        reason = Linear()
        for y in self.reduction.nodes[block.maker].blocks:
            other = self.reduction.blocks.get(y)
            if other is None:
                return ONE
            if other is block:
                continue
            if other.first != NEVER:
                reason.add(self.dropped(y))
            for w in other.readers:
                reason.add(self.a(w, self.tail))
        return reason

    def _lingering(self, block: Block, k: int) -> Linear:
        """Held beyond its own uses for reruns that still read it."""
        key = (block.storage, k)
        if key in self._held:
            return self._held[key]
        readers = [w for w in block.readers if self._may_rerun_after(w, k)]
        if not readers:
            return ZERO
        held = self._held[key] = self._fresh()
        maker = block.maker
        for w in readers:
            for until in (k + 1, self.tail):
                # A rerun in between reads what is held now, or what is recomputed in between.
                soon = total((1.0, self.a(w, until)), (-1.0, self.a(w, k)))
                again = total((1.0, self.a(maker, until)), (-1.0, self.a(maker, k)))
                self._at_least(total((1.0, held), (1.0, again)), soon)
            if not self._lone(block):
                rest = total((1.0, self.a(w, self.tail)), (-1.0, self.a(w, k)), (-1.0, ONE))
                self._at_least(held, total((1.0, self.k(block.storage)), (1.0, rest)))
        if k > 0 and self.moments[k - 1] >= block.made:
            before = self.live(block, k - 1)
            made = total((1.0, self.a(maker, k)), (-1.0, self.a(maker, k - 1)))
            self._at_least(total((1.0, before), (1.0, made)), held)
        return held

    def _may_rerun_after(self, op: int, k: int) -> bool:
        node = self.reduction.nodes[op]
        return len(node.blocks) != 1 or node.direct == NEVER or self.stage(node.direct) > k

    def _anchored(self, anchor: Anchor, k: int) -> Linear:
        readers = [w for w in anchor.readers if self._may_rerun_after(w, k)]
        if self.moments[k] <= anchor.last or not readers:
            return ZERO
        held = self._fresh()
        for w in readers:
            self._at_least(held, total((1.0, self.a(w, self.tail)), (-1.0, self.a(w, k))))
        return held

    def _memory(self, k: int, fixed: Ints) -> Linear:
        """Bytes at moment k."""
        position, reduction = self.moments[k], self.reduction
        memory = Linear(float(fixed[position]))
        for block in reduction.blocks.values():
            memory.add(self.live(block, k), block.nbytes)
        for anchor in reduction.anchors:
            if anchor.last < position:
                memory.add(self._anchored(anchor, k), anchor.nbytes)
        for node in reduction.nodes.values():
            state = sum(nbytes for op, nbytes in node.rng if op <= position)
            if state:
                waiting = total((1.0, self.a(node.op, self.tail)), (-1.0, self.a(node.op, k)))
                memory.add(waiting, state)
        self._add_small(
            memory, ((s.freed < position < s.first, s.first <= position <= s.last) for s in self.idle_small)
        )
        return memory.add(overwrite_credit(self, position), -1.0) if self.in_place else memory

    def _idle_small(self) -> tuple[Small, ...]:
        """The small storages that are there unless their makers are rerun."""
        return idle_small(self.reduction)

    def _prices(self) -> Linear:
        """Bytes of small storages that are had back, for the time that it takes at least."""
        back = Linear()
        for price in prices(self.reduction, self.idle_small):
            variable = self._variable()
            self.cost[variable] = price.time_us
            back.terms[variable] = float(price.nbytes)
        return back

    def _add_small(self, memory: Linear, there: Iterable[tuple[bool, bool]]) -> None:
        """Add small storages: idle ones unless their makers are rerun or they are had back, and those in use."""
        kept = Linear()
        for small, (idle, used) in zip(self.idle_small, there, strict=True):
            root = self.reduction.root.get(small.maker)
            if used:
                kept.constant += small.nbytes
            elif idle:
                kept.add(ONE, small.nbytes)
                kept.add(self.a(root, self.tail) if root is not None else ZERO, -float(small.nbytes))
        if kept.terms or kept.constant:
            memory.add(kept).add(self.without_small, -1.0)

    # -- memory during a rerun ----------------------------------------------------------------------------------

    def _inner_memory(self, position: int, op: int) -> Linear:
        """Bytes while `op` is rerun just before `position`; without that rerun, part of what is live there anyway."""
        graph, reduction, k = self.reduction.graph, self.reduction, self.stage(position)
        root = reduction.root[op]
        rerun = total((1.0, self.a(root, k)), (-1.0, self.a(root, k - 1)))
        reads = dict.fromkeys(graph.values[v].storage for v in rerun_reads(graph.ops[op]))
        memory = Linear(float(carried_bytes(reduction, position)))
        for block in reduction.blocks.values():
            memory.add(self._live_before(block, k, op, rerun if block.storage in reads else None), block.nbytes)
        self._add_small(
            memory, ((s.freed < position <= s.first, s.first < position <= s.last) for s in self.idle_small)
        )
        transient = graph.ops[op].workspace_bytes + sum(graph.storages[s].nbytes for s in graph.makes[op])
        transient += sum(graph.storages[s].nbytes for s in reads if s in reduction.merged)
        if self.in_place and graph.ops[op].overwritable and graph.makes[op]:
            transient -= min(transient, max(graph.storages[s].nbytes for s in graph.makes[op]))
        return memory.add(rerun, float(transient))

    def _live_before(self, block: Block, k: int, op: int, read: Linear | None) -> Linear:
        """How much of a block is resident while `op` is rerun in stage k, which is a single position."""
        position = self.moments[k]
        if position <= block.made:
            return ZERO
        if position <= block.freed or block.first < position <= block.last:
            return ONE
        before = self.a(block.maker, k - 1)
        if position <= block.first != NEVER:
            return self._awaited(block, k if block.maker < op else k - 1)
        if read is not None:
            return read
        held = self._lingering(block, k)
        if held is ZERO or block.maker < op:
            return held
        return total((1.0, held), (1.0, before), (-1.0, self.a(block.maker, k)))


def carried_bytes(reduction: Reduction, position: int) -> int:
    """Bytes that lie there from before `position` to its op, whatever is decided."""
    graph, small = reduction.graph, set(reduction.small)
    carried = graph.start_bytes
    for storage in graph.storages:
        made = graph.maker[storage.id]
        if made is not None and made < position and storage.id not in reduction.blocks:
            first, last = _fixed_span(reduction, storage.id, made, small)
            carried += storage.nbytes if first < position <= last else 0
    return carried


def fixed_bytes(reduction: Reduction) -> Ints:
    """Per position: bytes live at that op whatever is decided, with its outputs and workspace."""
    graph, change = reduction.graph, np.zeros(len(reduction.graph.ops) + 1, dtype=np.int64)
    small = set(reduction.small)
    for storage in graph.storages:
        made = graph.maker[storage.id]
        if made is None or storage.id in reduction.blocks:
            continue
        first, last = _fixed_span(reduction, storage.id, made, small)
        change[first] += storage.nbytes
        change[last + 1] -= storage.nbytes
    workspace = np.array([op.workspace_bytes for op in graph.ops], dtype=np.int64)
    return graph.start_bytes + np.cumsum(change[:-1]) + workspace


def _fixed_span(reduction: Reduction, storage: int, made: int, small: set[int]) -> tuple[int, int]:
    graph = reduction.graph
    if storage in graph.held_storages:
        return made, len(graph.ops) - 1
    readers = graph.readers[storage]
    if storage in small or storage in reduction.merged:
        # Dropped or kept, it is there up to the last use before it idles; after that the bound leaves it out.
        turn = liveness(graph)[storage].idle_after
        return made, turn if turn is not None else (readers[-1] if readers else made)
    return made, readers[-1] if readers else made


def overwrite_credit(program: StagedProgram, position: int) -> Linear:
    """Bytes that an in-place form of the op at `position` may save there: never fewer than it does."""
    graph = program.reduction.graph
    op = graph.ops[position]
    if not op.overwritable or len(op.outputs) != 1 or graph.values[op.outputs[0]].base is not None:
        return ZERO
    nbytes = graph.storages[graph.values[op.outputs[0]].storage].nbytes
    inputs = dict.fromkeys(graph.values[v].storage for v in op.overwritable)
    dying = [_dies(program, s, position) for s in inputs if graph.storages[s].nbytes == nbytes]
    possible = [d for d in dying if d is not ZERO]
    return total((float(nbytes), possible[0] if len(possible) == 1 else ONE)) if possible else ZERO


def _dies(program: StagedProgram, storage: int, position: int) -> Linear:
    """Whether an input may die at `position`; reruns that still read it are left out of account."""
    graph, block = program.reduction.graph, program.reduction.blocks.get(storage)
    if block is None:
        small = storage in program.reduction.small
        return ONE if small or position >= _fixed_span(program.reduction, storage, 0, set())[1] else ZERO
    if position == block.freed:
        return program.dropped(storage) if block.first != NEVER or block.readers else ONE
    return ONE if position >= max(block.last, graph.readers[storage][-1]) else ZERO


def unavoidable_bytes(reduction: Reduction) -> Ints:
    """Per position: bytes live at that op if every block were there only while it is used directly."""
    change = np.zeros(len(reduction.graph.ops) + 1, dtype=np.int64)
    for block in reduction.blocks.values():
        for first, last in ((block.made, block.freed), (block.first, block.last)):
            if first != NEVER:
                change[first] += block.nbytes
                change[last + 1] -= block.nbytes
    return fixed_bytes(reduction) + np.cumsum(change[:-1])
