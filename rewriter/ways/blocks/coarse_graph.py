"""A model's step as a graph of blocks: what they keep can be dropped, all else is there as it was measured.

Each block is two ops, since its run can be repeated and what it hands on is kept. Bytes that are no block's (gradients,
the loss, what lies between blocks) are storages too, so that at every moment of the unplanned step the graph holds as
many bytes as were measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.ir import Graph, Op, Phase, Rerun, Role, Storage, Timing, TimingKind, Value
from profiler.measuring.meters import Span
from rewriter.ways.blocks.profile import Block, BlockProfile

KEPT = "what a block hands on is kept"
OUTSIDE = "it lies outside of the blocks"


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    """A step as a graph, and the block behind each storage that a plan may drop."""

    graph: Graph
    blocks: Mapping[int, Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """A part of the step's time: a block's forward or backward, or what lies between."""

    phase: Phase
    name: str
    end: int  # the mark that it lasts to
    span: Span
    block: Block | None = None
    backward_of: Block | None = None


@dataclass(kw_only=True)
class _Piece:
    """Memory on its way to a storage: made and last read by a stretch, None for what outlives the step."""

    name: str
    nbytes: int
    role: Role
    made: int
    read: int | None
    readers: set[int] = field(default_factory=set)  # further ones, between the two

    def is_live_after(self, stretch: int) -> bool:
        return self.made <= stretch and (self.read is None or self.read > stretch)


def block_graph(profile: BlockProfile, blocks: Sequence[Block]) -> BlockGraph:
    """The graph of a measured step that is taken apart into these blocks."""
    return _Builder(profile, blocks).built()


class _Builder:
    """One step and its blocks on the way to a graph."""

    def __init__(self, profile: BlockProfile, blocks: Sequence[Block]) -> None:
        self.profile = profile
        self.blocks = sorted(blocks, key=lambda block: block.enter)
        self.stretches = self._stretches()
        self.ends = [stretch.end for stretch in self.stretches]
        self.forward = {id(s.block): i for i, s in enumerate(self.stretches) if s.block is not None}
        self.backward = {id(s.backward_of): i for i, s in enumerate(self.stretches) if s.backward_of is not None}
        self.saved = {self.forward[id(block)]: self._saved(block) for block in self.blocks}
        self.handed = self._handed()
        self.others = self._others()

    # -- time -----------------------------------------------------------------------------------------------

    def _stretches(self) -> list[_Stretch]:
        beginnings: list[tuple[int, Phase, str, Block | None, Block | None]] = [(-1, Phase.FORWARD, "", None, None)]
        for block in self.blocks:
            beginnings.append((block.enter, Phase.FORWARD, block.name, block, None))
            beginnings.append((block.leave, Phase.FORWARD, "", None, None))
        beginnings.append((self.profile.turn, Phase.BACKWARD, "", None, None))
        for block in self.blocks:
            assert block.gradient_in is not None
            beginnings.append((block.gradient_in, Phase.BACKWARD, f"backward of {block.name}", None, block))
            if block.gradient_out is not None:
                beginnings.append((block.gradient_out, Phase.BACKWARD, "", None, None))
        beginnings.sort(key=lambda beginning: beginning[0])
        ends = [beginning[0] for beginning in beginnings[1:]] + [self.profile.end]
        return [
            _Stretch(
                phase=phase,
                name=name or f"outside {i}",
                end=end,
                span=self.profile.between(start, end),
                block=block,
                backward_of=of,
            )
            for i, ((start, phase, name, block, of), end) in enumerate(zip(beginnings, ends, strict=True))
        ]

    def _at(self, mark: int) -> int:
        """The stretch in which something happened that was noticed at a mark."""
        return min(bisect_left(self.ends, mark), len(self.ends) - 1)

    # -- memory ---------------------------------------------------------------------------------------------

    def _saved(self, block: Block) -> _Piece:
        return _Piece(
            name=f"{block.name}: saved",
            nbytes=sum(self.profile.storages[s].nbytes for s in block.saved),
            role=Role.ACTIVATION,
            made=self.forward[id(block)],
            read=self.backward[id(block)],
        )

    def _handed(self) -> list[_Piece]:
        """What blocks are given, as long as it was there."""
        found: dict[int, _Piece] = {}
        for block in self.blocks:
            for number in block.given:
                if number not in found:
                    seen = self.profile.storages[number]
                    read = None if seen.gone is None else self._at(seen.gone)
                    found[number] = _Piece(
                        name=f"given to {block.name}" + (f" ({len(found)})" if len(block.given) > 1 else ""),
                        nbytes=seen.nbytes,
                        role=Role.ACTIVATION,
                        made=self._at(seen.seen),
                        read=read,
                    )
                found[number].readers.add(self.forward[id(block)])
        return [piece for piece in found.values() if piece.nbytes]

    def _others(self) -> list[_Piece]:
        """All other bytes, by when they come and go: the last that came goes first."""
        known = [*self.saved.values(), *self.handed]
        there: list[_Piece] = []
        done: list[_Piece] = []
        for i, stretch in enumerate(self.stretches):
            modelled = sum(piece.nbytes for piece in known if piece.is_live_after(i))
            level = max(0, stretch.span.after_bytes - modelled) - sum(piece.nbytes for piece in there)
            if level > 0:
                role = Role.GRADIENT if stretch.phase is Phase.BACKWARD else Role.TEMP
                there.append(_Piece(name=f"rest of {stretch.name}", nbytes=level, role=role, made=i, read=None))
            while level < 0:
                piece = there.pop()
                gone = min(piece.nbytes, -level)
                done.append(_Piece(name=f"{piece.name}, {i}", nbytes=gone, role=piece.role, made=piece.made, read=i))
                if gone < piece.nbytes:
                    piece.nbytes -= gone
                    there.append(piece)
                level += gone
        return done + there

    # -- the graph ------------------------------------------------------------------------------------------

    def built(self) -> BlockGraph:
        draft = _Draft()
        for name, nbytes, role in (
            ("parameters and buffers", self.profile.parameter_bytes, Role.PARAM),
            ("batch", self.profile.batch_bytes, Role.INPUT),
            ("gradients of before", self.profile.gradient_bytes, Role.GRADIENT),
        ):
            draft.value(name, nbytes, role, producer=None)
        made: dict[int, int] = {}  # piece -> value
        blocks: dict[int, Block] = {}
        for i, stretch in enumerate(self.stretches):
            if stretch.block is not None:
                saved = self.saved[i]
                self._add_run(draft, i, stretch, saved, made)
                blocks[draft.values[made[id(saved)]].storage] = stretch.block
            self._add(draft, i, stretch, made)
        outlives = [made[id(piece)] for piece in (*self.handed, *self.others) if piece.read is None]
        timing = Timing(kind=TimingKind.MEASURED, device=f"{self.profile.device}, by block")
        graph = Graph(
            name=self.profile.name,
            ops=tuple(draft.ops),
            values=tuple(draft.values),
            storages=tuple(draft.storages),
            outputs=tuple(outlives),
            timing=timing,
        )
        return BlockGraph(graph=graph.validate(), blocks=blocks)

    def _live_bytes(self, stretch: int) -> int:
        """What the graph holds when a stretch begins."""
        pieces = (*self.saved.values(), *self.handed, *self.others)
        return sum(piece.nbytes for piece in pieces if piece.is_live_after(stretch - 1))

    def _add_run(self, draft: _Draft, i: int, stretch: _Stretch, saved: _Piece, made: dict[int, int]) -> None:
        """The part of a block that can be repeated: it makes what its backward reads."""
        reads = [made[id(piece)] for piece in self.handed if i in piece.readers and id(piece) in made]
        needed = stretch.span.peak_bytes - self._live_bytes(i) - saved.nbytes
        made[id(saved)] = draft.op(
            stretch.name,
            stretch,
            inputs=reads,
            makes=[saved],
            workspace_bytes=max(0, needed),
            time_us=stretch.span.time_us,
            replay_bytes=self.profile.replay_bytes,
        )[0]

    def _add(self, draft: _Draft, i: int, stretch: _Stretch, made: dict[int, int]) -> None:
        """A stretch that runs once, and behind it what it leaves beside a block's own.

        Two ops, because a backward lets go of what it reads while gradients come into being: not both at its worst.
        """
        pieces = [*self.handed, *self.others]
        makes = [piece for piece in pieces if piece.made == i]
        read = [piece for piece in (*pieces, *self.saved.values()) if piece.read == i or i in piece.readers]
        reads = [made[id(piece)] for piece in read if id(piece) in made]
        if stretch.block is None:
            needed = max(0, stretch.span.peak_bytes - self._live_bytes(i))
            draft.op(
                stretch.name, stretch, inputs=reads, makes=[], workspace_bytes=needed, time_us=stretch.span.time_us
            )
            reads = []
        else:
            reads.append(made[id(self.saved[i])])
        values = draft.op(f"{stretch.name}: end", stretch, inputs=reads, makes=makes, workspace_bytes=0, time_us=0.0)
        made.update({id(piece): value for piece, value in zip(makes, values, strict=True)})


class _Draft:
    """A graph's tables while they grow."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.storages: list[Storage] = []

    def value(self, name: str, nbytes: int, role: Role, *, producer: int | None) -> int:
        storage = self._storage(nbytes, role)
        self.values.append(Value(id=len(self.values), name=name, storage=storage, producer=producer))
        return len(self.values) - 1

    def _storage(self, nbytes: int, role: Role) -> int:
        self.storages.append(Storage(id=len(self.storages), nbytes=nbytes, role=role))
        return len(self.storages) - 1

    def op(
        self,
        name: str,
        stretch: _Stretch,
        *,
        inputs: Sequence[int],
        makes: Sequence[_Piece],
        workspace_bytes: int,
        time_us: float,
        replay_bytes: int | None = None,
    ) -> list[int]:
        """Append an op and the values that it makes: their ids. With `replay_bytes` it can be run again."""
        number = len(self.ops)
        outputs = [self.value(piece.name, piece.nbytes, piece.role, producer=number) for piece in makes]
        again = replay_bytes is not None
        self.ops.append(
            Op(
                id=number,
                name=name,
                target="block" if again or stretch.backward_of is not None else "outside",
                phase=stretch.phase,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                time_us=time_us,
                workspace_bytes=workspace_bytes,
                rerun=Rerun.REPLAY_RNG if again else Rerun.NEVER,
                never_reason="" if again else (KEPT if stretch.block is not None else OUTSIDE),
                rng_state=self._storage(replay_bytes, Role.TEMP) if replay_bytes is not None else None,
                module_path=stretch.name,
            )
        )
        return outputs
