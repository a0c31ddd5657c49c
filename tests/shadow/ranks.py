"""What ranks send to a shadow, and when: a trainer's recorder and link as a small pure model. See `agreement`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from checkmate.layout import Layout
from checkmate.shadow.partition import Partition
from checkmate.wire.frames import Header, Kind
from checkmate.wire.messages import Anchor, Block, Entry, Fingerprint, Part, Spec, Update

CELL = 64  #: bytes
Key = tuple[Kind, int, int]  #: a buffer of a step: kind, block, update or entry


def layout(*cells: int, ranks: int = 2) -> Layout:
    """One replica set; each block so many cells long."""
    blocks = [Block(f"b{i}", "uint8", 1, [0], [n * CELL], [n * CELL]) for i, n in enumerate(cells)]
    return Layout(Spec(ranks, [list(range(ranks))], blocks, [], Fingerprint("", "", 1, False, "cpu")))


@dataclass(frozen=True, eq=False)
class Case:
    """What may happen. Budgets of faults count over all ranks."""

    layout: Layout
    steps: int = 2  #: that training closes
    start: str = "streaming"  #: at step 0; or "anchoring" step 0; or "unknown" to the shadow
    gaps: int = 0  #: how often a rank's staging is full
    cuts: int = 0  #: how often a rank loses its connections
    restarts: int = 0  #: how often the shadow dies and comes back empty
    failures: int = 0  #: how often a step cannot be applied
    gated: bool = False
    chunk: int = 1 << 20  #: longest payload
    updates: Callable[[int], tuple[tuple[int, ...], ...]] | None = None  #: per step: the blocks of each update
    changes: Callable[[int], tuple[int, ...]] | None = None  #: per step: blocks changed outside an optimizer
    partition: type[Partition] = Partition
    complete_once: bool = False  #: mutant: a complete record comes with the first step of an epoch only
    forgets_gaps: bool = False  #: mutant: that a step was not kept need not be said once later ones are stable
    trusts_sent: bool = False  #: mutant: what is sent counts as delivered

    def blocks_of(self, step: int) -> tuple[tuple[int, ...], ...]:
        if step == 0:
            return ()
        return self.updates(step) if self.updates else (tuple(range(len(self.layout.blocks))),)

    def owned(self, rank: int) -> tuple[int, ...]:
        return tuple(b for b, owner in enumerate(self.layout.owners) if owner == rank)


# ---------------------------------------------------------------- what ranks send


class Frame:
    """Compared by identity: `closes` and `begins` make each but once."""

    __slots__ = ("buffer", "cells", "header", "part")

    def __init__(self, header: Header, part: Part | None = None) -> None:
        self.header, self.part = header, part
        self.buffer: Key = (header.kind, header.block, header.update if header.kind is Kind.GRAD else header.entry)
        self.cells = range(header.offset // CELL, -(-(header.offset + header.length) // CELL))


@dataclass(frozen=True, eq=False)
class Batch:
    epoch: int
    step: int
    frames: tuple[Frame, ...]
    gap: bool = False

    def void(self, epoch: int, step: int) -> bool:
        return self.epoch < epoch or (self.epoch == epoch and self.step <= step and not self.gap)


def _part_frame(part: Part) -> Frame:
    return Frame(Header(Kind.PART, 1, rank=part.rank, epoch=part.epoch, step=part.step), part)


@lru_cache(None)
def begins(rank: int, epoch: int, step: int) -> Batch:
    return Batch(epoch, step, (_part_frame(Part(rank, step, epoch, begins=True)),))


@lru_cache(None)
def closes(case: Case, rank: int, epoch: int, step: int, anchors: tuple[int, ...], complete: bool, gap: bool) -> Batch:
    """Everything that a rank puts for one step. At a gap, the first update was kept before memory ran out."""

    def pieces(kind: Kind, block: int, update: int, entry: int, offset: int, nbytes: int) -> Iterator[Frame]:
        for at in range(offset, offset + nbytes, case.chunk):
            length = min(case.chunk, offset + nbytes - at)
            yield Frame(Header(kind, length, b"", rank, epoch, step, block, update, entry, at))

    slices, updates = case.layout.slices[rank], case.blocks_of(step)
    frames: list[Frame] = []
    for number, blocks in enumerate(updates[:1] if gap else updates):
        for b in blocks:
            if b in slices:
                frames += pieces(Kind.GRAD, b, number, 0, slices[b].offset, slices[b].nbytes)
    listed = [] if gap else [Update(0, list(blocks), 0) for blocks in updates]
    described = []
    for b in anchors:
        nbytes = case.layout.blocks[b].nbytes
        described.append(Anchor(b, 0, [Entry("", "uint8", [nbytes], nbytes), Entry("step", "uint8", [4], 4)], b""))
    sidecar = {"now": b"", "constant": b""} if complete else {"now": b""}
    frames.append(_part_frame(Part(rank, step, epoch, gap=gap, updates=listed, anchors=described, sidecar=sidecar)))
    for anchor in described:
        for number, entry in enumerate(anchor.entries):
            frames += pieces(Kind.ANCHOR, anchor.block, 0, number, 0, entry.nbytes)
    return Batch(epoch, step, tuple(frames), gap and not case.forgets_gaps)


class Rank:
    """One rank's recorder and link. Fields are immutable, so that a copy is cheap."""

    __slots__ = (
        "ack", "at_once", "batches", "connected", "epoch", "first", "gap", "inbox", "incoming", "life", "number",
        "settled", "step", "unanchored", "wanted", "wire",
    )  # fmt: skip

    def __init__(self, number: int, epoch: int, life: int) -> None:
        self.number, self.epoch, self.life = number, epoch, life
        self.step = 0
        self.wanted = epoch  #: the epoch that the shadow asked for; taken up between two steps
        self.gap = False
        self.settled = True  #: parts say only what changed, no longer everything
        self.at_once = False  #: anchor all blocks in one step
        self.unanchored: tuple[int, ...] = ()
        self.first = (0, 0)  #: an epoch and its first step, as the shadow said: anchors count from there on
        self.batches: tuple[Batch, ...] = ()  #: kept until stable
        self.connected = False
        self.wire: tuple[Frame, ...] = ()  #: on their way to the shadow
        self.incoming: tuple[Frame, Buffer | None] | None = None  #: its header has come, its payload is coming
        self.inbox: tuple[tuple[str, int, int], ...] = ()  #: Resume and Anchoring, on their way here
        self.ack: tuple[int, int] | None = None  #: epoch and stable step of the newest Ack on its way here

    def copy(self) -> Rank:
        other = object.__new__(Rank)
        for name in Rank.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def close(self, case: Case, gap: bool) -> None:
        """Close the next step, then take up a new epoch if one is wanted."""
        self.step += 1
        if not self.gap:
            self.gap = gap
            counts = self.first[0] == self.epoch and self.step >= self.first[1]
            changed = case.changes(self.step) if case.changes and not gap else ()
            anchors = tuple(b for b in changed if b in case.owned(self.number) and b not in self.unanchored)
            if counts and not gap:
                anchors += self.unanchored if self.at_once else self.unanchored[:1]
            self.unanchored = tuple(b for b in self.unanchored if b not in anchors)
            self.put(case, closes(case, self.number, self.epoch, self.step, anchors, not self.settled, gap))
            self.settled = self.settled or counts or case.complete_once
        if self.wanted > self.epoch:
            self.at_once = self.epoch > 0 and bool(self.unanchored)
            self.epoch, self.gap, self.settled = self.wanted, False, False
            self.unanchored = case.owned(self.number)
            self.put(case, begins(self.number, self.epoch, self.step))

    def put(self, case: Case, batch: Batch) -> None:
        if batch.epoch >= self.wanted:
            if not (case.trusts_sent and self.connected):
                self.batches += (batch,)
            if self.connected:
                self.wire += batch.frames

    def want(self, epoch: int) -> None:
        if epoch > self.wanted:
            self.wanted = epoch
            self.batches = tuple(b for b in self.batches if b.epoch >= epoch)

    def hear(self) -> None:
        (kind, epoch, step), self.inbox = self.inbox[0], self.inbox[1:]
        if kind == "resume":
            self.want(epoch)
        else:
            self.first = (epoch, step)

    def hear_ack(self) -> None:
        assert self.ack is not None
        (epoch, stable), self.ack = self.ack, None
        self.batches = tuple(b for b in self.batches if not b.void(epoch, stable))

    def cut(self) -> None:
        self.connected, self.wire, self.incoming, self.inbox, self.ack = False, (), None, (), None


class Buffer:
    """Memory of one gradient or anchor, in its place (step, key) or free (None). A cell is 1 if it is right there."""

    __slots__ = ("cells", "place")

    def __init__(self, place: object, cells: bytes | bytearray) -> None:
        self.place = place
        self.cells = bytearray(cells)
