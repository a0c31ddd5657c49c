"""A small model of one run: ranks that train, their connections, and one shadow around a real `Partition`.

A `World` is one moment. `events` lists what may happen next, `do` makes it happen, `key` tells moments apart, and
every effect is checked as it is performed. Nothing here knows sockets, threads, clocks or tensors:

- a *cell* stands for up to 64 bytes of a buffer: either it holds what the step needs, or it does not;
- a block's value is the number of the step that it stands at; replay adds one.

Ranks do what `trainer.recorder` and `trainer.link` do, the shadow what `shadow.run` does. ``shadow/DESIGN.md`` explains
the invariants, whose names begin the text of a `Violation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from checkmate.layout import Layout
from checkmate.shadow.partition import (
    RING_STEPS, Acknowledge, Apply, AskAnchors, AskResume, Drop, Effect, Freeze, Partition, Phase, Slot, Verdict,
)  # fmt: skip
from checkmate.wire.frames import Header, Kind
from checkmate.wire.messages import Anchor, Block, Entry, Fingerprint, Part, Spec, Update
from checkmate.wire.ranges import RangeSet

CELL = 64
Event = tuple[str, int]
Key = tuple[Kind, int, int]


class Violation(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, invariant: str, *details: object) -> None:
    if not holds:
        raise Violation(f"{invariant}: {' '.join(map(str, details))}")


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
    partition: type[Partition] = Partition
    complete_once: bool = False  #: mutant: a complete record comes with the first step of an epoch only
    trusts_sent: bool = False  #: mutant: what is sent counts as delivered

    def blocks_of(self, step: int) -> tuple[tuple[int, ...], ...]:
        if step == 0:
            return ()
        return self.updates(step) if self.updates else (tuple(range(len(self.layout.blocks))),)

    def owned(self, rank: int) -> tuple[int, ...]:
        return tuple(b for b, owner in enumerate(self.layout.owners) if owner == rank)


# ---------------------------------------------------------------- what ranks send


@dataclass(frozen=True, eq=False)
class Frame:
    header: Header
    part: Part | None = None

    @property
    def buffer(self) -> Key:
        h = self.header
        return (h.kind, h.block, h.update if h.kind is Kind.GRAD else h.entry)

    @property
    def cells(self) -> range:
        return range(self.header.offset // CELL, -(-(self.header.offset + self.header.length) // CELL))


@dataclass(frozen=True, eq=False)
class Batch:
    epoch: int
    step: int
    frames: tuple[Frame, ...]


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
    return Batch(epoch, step, tuple(frames))


class Rank:
    """One rank's recorder and link. Fields are immutable, so that a copy is cheap."""

    __slots__ = (
        "ack", "batches", "connected", "epoch", "first", "fresh", "gap", "inbox", "incoming", "life", "number", "step",
        "unanchored", "wanted", "wire",
    )  # fmt: skip

    def __init__(self, number: int, epoch: int, life: int) -> None:
        self.number, self.epoch, self.life = number, epoch, life
        self.step = 0
        self.wanted = epoch  #: the epoch that the shadow asked for; taken up between two steps
        self.gap = False
        self.fresh = False
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
            known = self.first[0] == self.epoch
            anchors = self.unanchored[:1] if known and self.step >= self.first[1] and not gap else ()
            self.unanchored = tuple(b for b in self.unanchored if b not in anchors)
            complete = self.fresh if case.complete_once else not known or self.step <= self.first[1]
            self.fresh = False
            self.put(case, closes(case, self.number, self.epoch, self.step, anchors, complete, gap))
        if self.wanted > self.epoch:
            self.epoch, self.gap, self.fresh = self.wanted, False, case.complete_once
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
        self.batches = tuple(b for b in self.batches if b.epoch != epoch or b.step > stable)

    def cut(self) -> None:
        self.connected, self.wire, self.incoming, self.inbox, self.ack = False, (), None, (), None


# ---------------------------------------------------------------- one moment


class Buffer:
    """Memory of one gradient or anchor, in its place (step, key) or free (None). A cell is 1 if it holds what that needs."""

    __slots__ = ("cells", "place")

    def __init__(self, place: object, cells: bytes | bytearray) -> None:
        self.place = place
        self.cells = bytearray(cells)


class World:
    def __init__(self, case: Case, transitions: set[tuple[str, ...]] | None = None) -> None:
        self.case = case
        self.transitions = set() if transitions is None else transitions  #: phase, event, next phase, effects
        self.gaps, self.cuts, self.restarts, self.failures = case.gaps, case.cuts, case.restarts, case.failures
        self.life = 0
        self.partition: Partition | None = None
        self.buffers: dict[int, dict[Key, Buffer]] = {}
        self.seen = (0, -1)  #: epoch and step that the outside has seen received, and therefore calls stable
        self._empty()
        world, unknown = case.layout.world_size, case.start == "unknown"
        self.ranks = [Rank(r, 0 if unknown else 1, 0 if unknown else 1) for r in range(world)]
        if unknown:
            return
        self.life = 1
        streaming = case.start == "streaming"
        phase = Phase.STREAMING if streaming else Phase.ANCHORING
        base = 0 if streaming else -1
        self.partition = case.partition(case.layout, epoch=1, phase=phase, base=base, gated=case.gated)
        if streaming:
            self.values, self.known = (0,) * len(case.layout.blocks), frozenset(range(world))
        for rank in self.ranks:
            rank.connected = True
            rank.first = (1, base + 1)
            if not streaming:
                rank.put(case, closes(case, rank.number, 1, 0, case.owned(rank.number), True, False))

    def _empty(self) -> None:
        """The shadow's memory, as it begins."""
        self.values: tuple[int | None, ...] = (None,) * len(self.case.layout.blocks)  #: the step that each block stands at
        self.known: frozenset[int] = frozenset()  #: ranks whose complete record belongs to the state
        self.frozen = -1
        self.queue: tuple[Apply | Freeze, ...] = ()
        self.buffers = {}
        self.free: dict[int, list[Buffer]] = {b: [] for b in range(len(self.values))}

    def copy(self) -> World:
        other = object.__new__(World)
        other.__dict__.update(self.__dict__)
        twins: dict[int, Buffer] = {}

        def twin(buffer: Buffer) -> Buffer:
            return twins.setdefault(id(buffer), Buffer(buffer.place, buffer.cells))

        other.buffers = {s: {k: twin(b) for k, b in held.items()} for s, held in self.buffers.items()}
        other.free = {b: [twin(x) for x in free] for b, free in self.free.items()}
        other.ranks = [rank.copy() for rank in self.ranks]
        for rank in other.ranks:
            if rank.incoming is not None and rank.incoming[1] is not None:
                rank.incoming = (rank.incoming[0], twin(rank.incoming[1]))
        if self.partition is not None:
            other.partition = _copy(self.partition)
        return other

    def key(self) -> object:
        places: dict[int, object] = {id(b): (n, i) for n, free in self.free.items() for i, b in enumerate(free)}

        def place(incoming: tuple[Frame, Buffer | None] | None) -> object:
            if incoming is None or incoming[1] is None:
                return incoming
            return (incoming[0], places.get(id(incoming[1]), incoming[1].place))

        ranks = tuple(
            (r.step, r.epoch, r.wanted, r.life, r.gap, r.fresh, r.unanchored, r.first, r.batches, r.connected, r.wire,
             r.inbox, r.ack, place(r.incoming)) for r in self.ranks
        )  # fmt: skip
        buffers = tuple((s, k, bytes(b.cells)) for s, held in sorted(self.buffers.items()) for k, b in sorted(held.items()))
        queue = tuple((type(work), work.epoch, getattr(work, "step", None)) for work in self.queue)
        budgets = (self.gaps, self.cuts, self.restarts, self.failures)
        partition = None if self.partition is None else _frozen(self.partition.__dict__)
        return (
            ranks, buffers, tuple(map(len, self.free.values())), queue, self.values, self.known, self.frozen, self.seen,
            self.life, budgets, partition,
        )  # fmt: skip

    # ------------------------------------------------------------ what may happen

    def events(self) -> Iterator[Event]:
        """Everything that may happen next, faults last. What the shadow lets wait is listed, but `do` says no to it."""
        slowest = min(rank.step for rank in self.ranks)
        for rank in self.ranks:
            number = rank.number
            if rank.incoming is not None:
                yield "payload", number
            elif rank.wire:
                yield "frame", number
            if rank.inbox:
                yield "hear", number
            if rank.ack is not None:
                yield "ack", number
            if not rank.connected:
                yield "connect", number
            if rank.step == slowest < self.case.steps:  # all ranks take part in each step
                yield "close", number
                if self.gaps and not rank.gap:
                    yield "gap", number
            if self.cuts and rank.connected:
                yield "cut", number
        if self.queue:
            yield "replay", 0
            if self.failures and isinstance(self.queue[0], Apply):
                yield "fail", 0
        if self.case.gated and self.partition is not None:
            if self.partition.phase is not Phase.RESUMING and self._progress() != self.seen:
                yield "see", 0
            if self.seen[0] == self.partition.epoch and self.seen[1] > self.partition.stable:
                yield "stable", 0
        if self.restarts and self.partition is not None:
            yield "restart", 0

    def _progress(self) -> tuple[int, int]:
        assert self.partition is not None
        return (self.partition.epoch, self.partition.received)

    def do(self, event: Event) -> bool:
        """Make it happen. False: it has to wait, and nothing has changed."""
        name, number = event
        rank = self.ranks[number]
        match name:
            case "close":
                rank.close(self.case, gap=False)
            case "gap":
                self.gaps -= 1
                rank.close(self.case, gap=True)
            case "hear":
                rank.hear()
            case "ack":
                rank.hear_ack()
            case "cut":
                self.cuts -= 1
                rank.cut()
            case "connect":
                self._connect(rank)
            case "frame":
                return self._frame(rank)
            case "payload":
                self._payload(rank)
            case "replay":
                self._replay()
            case "fail":
                self._fail()
            case "see":
                self.seen = self._progress()
            case "stable":
                self._tell("stabilise", lambda p: p.stabilise(*self.seen))
            case "restart":
                self.restarts -= 1
                self.partition = None
                self._empty()
                for each in self.ranks:
                    each.cut()
        self.check()
        return True

    def _connect(self, rank: Rank) -> None:
        """`Run.join`, then what `Link` makes of the answer."""
        if self.partition is None:
            self.life += 1
            self.seen = (0, -1)
            epoch = rank.wanted + 1
            self.partition = self.case.partition(
                self.case.layout, epoch=epoch, phase=Phase.RESUMING, gated=self.case.gated
            )
        if rank.life != self.life and rank.wanted >= self.partition.epoch:
            self._tell("end_epoch", lambda p: p.end_epoch("the shadow was restarted", rank.wanted + 1))
        p = self.partition
        rank.life, rank.connected = self.life, True
        rank.inbox = (("anchoring", p.epoch, p.first),) if p.phase is Phase.ANCHORING else ()
        rank.ack = (p.epoch, p.stable)
        rank.want(p.epoch)
        rank.batches = tuple(b for b in rank.batches if b.epoch >= p.epoch and b.step > p.received)
        rank.wire = tuple(frame for batch in rank.batches for frame in batch.frames)

    def _frame(self, rank: Rank) -> bool:
        """`Run.place`; for a part, whose payload needs no buffer, `Run.arrived` as well."""
        assert self.partition is not None
        frame = rank.wire[0]
        verdict = self.partition.begin(frame.header)
        if verdict is Verdict.WAIT:
            return False
        rank.wire = rank.wire[1:]
        if (part := frame.part) is not None:
            event = "begins" if part.begins else "gap" if part.gap else "part"
            self._tell(event if part.epoch == self.partition.epoch else "older part", lambda p: p.part(part))
        elif verdict is Verdict.DRAIN:
            rank.incoming = (frame, None)
        else:
            buffer = self._buffer(frame)
            for cell in frame.cells:
                buffer.cells[cell] = 0  # bytes come one by one
            rank.incoming = (frame, buffer)
        self.check()
        return True

    def _buffer(self, frame: Frame) -> Buffer:
        held = self.buffers.setdefault(frame.header.step, {})
        if (buffer := held.get(frame.buffer)) is None:
            free = self.free[frame.header.block] if frame.header.kind is Kind.GRAD else []
            size = -(-self.case.layout.blocks[frame.header.block].nbytes // CELL)
            buffer = held[frame.buffer] = free.pop() if free else Buffer(None, bytes(size))
            buffer.place = (frame.header.step, frame.buffer)
            buffer.cells[:] = bytes(len(buffer.cells))
        return buffer

    def _payload(self, rank: Rank) -> None:
        assert rank.incoming is not None
        (frame, buffer), rank.incoming = rank.incoming, None
        if buffer is not None:
            right = buffer.place == (frame.header.step, frame.buffer)  # else it has been given to another step meanwhile
            for cell in frame.cells:
                buffer.cells[cell] = right
            self._tell("arrived", lambda p: p.arrived(frame.header))

    # ------------------------------------------------------------ the shadow's replayer

    def _replay(self) -> None:
        work, self.queue = self.queue[0], self.queue[1:]
        if isinstance(work, Freeze):
            if work.keep and self._whole(self.values):
                self.frozen = self.values[0] if self.values[0] is not None else -1
            self.values, self.known = (None,) * len(self.values), frozenset()
            return
        self._require_bytes(work.step, work.parts)
        for value in self.values:
            require(value in (None, work.step - 1), "one step", f"{self.values} when step {work.step} is applied")
        self.values = self._after(self.values, work)
        self.known |= {rank for rank, part in work.parts.items() if "constant" in part.sidecar}
        if self._whole(self.values):
            missing = set(range(len(self.ranks))) - self.known
            require(not missing, "complete record", f"step {work.step} is whole without that of ranks {missing}")
            self.frozen = -1
        event = "applied" if self.partition is not None and work.epoch == self.partition.epoch else "older applied"
        self._tell(event, lambda p: p.applied(work.epoch, work.step))

    def _fail(self) -> None:
        """`Run._broken`: the state is of no step any more."""
        self.failures -= 1
        work, self.queue = self.queue[0], self.queue[1:]
        assert isinstance(work, Apply)
        self.values, self.known = (None,) * len(self.values), frozenset()
        self._tell("lost", lambda p: p.lost(work.epoch, work.step, self.frozen, "it cannot be applied"))

    @staticmethod
    def _whole(values: tuple[int | None, ...]) -> bool:
        return None not in values

    @staticmethod
    def _after(values: tuple[int | None, ...], work: Apply) -> tuple[int | None, ...]:
        anchored = {anchor.block for part in work.parts.values() for anchor in part.anchors}
        return tuple(work.step if v is not None or b in anchored else None for b, v in enumerate(values))

    def found(self) -> int:
        """What a restart would find: `Run.prepare` lets the replayer finish first."""
        values, frozen = self.values, self.frozen
        for work in self.queue:
            if isinstance(work, Apply):
                values = self._after(values, work)
                frozen = -1 if self._whole(values) else frozen
            else:
                if work.keep and self._whole(values):
                    frozen = values[0] if values[0] is not None else -1
                values = (None,) * len(values)
        return values[0] if self._whole(values) and values[0] is not None else frozen

    # ------------------------------------------------------------ effects and invariants

    def _tell(self, event: str, call: Callable[[Partition], list[Effect]]) -> None:
        """Tell the partition of an event, and perform its effects as `Run._perform` does."""
        p = self.partition
        assert p is not None
        phase, epoch, recovery = p.phase, p.epoch, p.recovery
        stable = p.stable  # newest step of this epoch that is in the replayer's queue
        effects = call(p)
        for effect in effects:
            match effect:
                case Apply():
                    require(effect.epoch == epoch and effect.step == stable + 1, "effects", effect, "after", stable)
                    require(len(effect.parts) == len(self.ranks), "received exactly", effect.step, "lacks parts")
                    stable = effect.step
                    self.queue += (effect,)
                case Freeze():
                    require(effect.epoch == epoch, "effects", effect, "in epoch", epoch)
                    require(
                        self.seen[0] != epoch or self.seen[1] <= stable, "gate", f"step {self.seen} was called stable"
                    )
                    epoch, stable = p.epoch, -1
                    self.queue += (effect,)
                case Drop(step):
                    held = step in p._slots or (step in {w.step for w in self.queue if isinstance(w, Apply)})
                    require(not held, "dropped last", f"step {step}")
                    for key, buffer in self.buffers.pop(step, {}).items():
                        buffer.place = None
                        if key[0] is Kind.GRAD:
                            self.free[key[1]].append(buffer)
                case AskResume() | AskAnchors():
                    message = (
                        ("resume", effect.epoch, 0)
                        if isinstance(effect, AskResume)
                        else ("anchoring", effect.epoch, effect.step)
                    )
                    require(effect.epoch == (epoch if isinstance(effect, AskAnchors) else p.epoch), "effects", effect, "in epoch", epoch)
                    if isinstance(effect, AskAnchors):
                        stable = effect.step - 1
                    for rank in self.ranks:
                        if rank.connected:
                            rank.inbox += (message,)
                case Acknowledge():
                    require((epoch, stable) == (p.epoch, p.stable), "effects", f"{p.stable} acknowledged, not queued")
                    for rank in self.ranks:
                        if rank.connected:
                            rank.ack = (p.epoch, p.stable)
        require((epoch, stable) == (p.epoch, p.stable), "effects", f"{p.stable} is stable, but not queued")
        if event != "lost":
            require(p.recovery >= recovery, "recovery never falls", f"from {recovery} to {p.recovery}")
        names = [type(effect).__name__ for effect in effects]
        runs = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
        self.transitions.add((phase.value, event, p.phase.value, ", ".join(runs)))

    def _require_bytes(self, step: int, parts: dict[int, Part]) -> None:
        """Everything that these parts list is in its buffer."""
        held = self.buffers.get(step, {})
        for part in parts.values():
            mine = self.case.layout.slices[part.rank]
            wanted = [
                ((Kind.GRAD, b, u), mine[b].offset // CELL, -(-(mine[b].offset + mine[b].nbytes) // CELL))
                for u, update in enumerate(part.updates) for b in update.blocks if b in mine
            ] + [
                ((Kind.ANCHOR, anchor.block, e), 0, -(-entry.nbytes // CELL))
                for anchor in part.anchors for e, entry in enumerate(anchor.entries)
            ]  # fmt: skip
            for key, start, stop in wanted:
                whole = key in held and all(held[key].cells[start:stop])
                require(whole, "received exactly", f"step {step}: bytes of rank {part.rank} are not in", key)

    def check(self) -> None:
        """The invariants of a moment."""
        p = self.partition
        if p is None:
            return
        require(p.applied_step <= p.stable <= p.received, "order", p.applied_step, p.stable, p.received)
        require(self.found() == p.recovery, "truth", f"{p.recovery} promised, a restart would find {self.found()}")
        for work in self.queue:
            if isinstance(work, Apply):
                self._require_bytes(work.step, work.parts)
        resuming = p.phase is Phase.RESUMING
        for step, slot in p._slots.items():
            if resuming:
                require(step < min(p._starts.values()) + RING_STEPS, "ring", step, p._starts)
            else:
                require(p.stable < step <= p.applied_step + RING_STEPS, "ring", step, p.stable, p.applied_step)
            if not resuming and step <= p.received:
                self._require_bytes(step, slot.parts)
        live = set(p._slots) | {work.step for work in self.queue if isinstance(work, Apply)}
        require(live >= set(self.buffers), "memory", f"buffers of steps {set(self.buffers) - live} are of no use")
        if self.case.gated and not resuming:
            limit = max(p.first - 1, self.seen[1] if self.seen[0] == p.epoch else -1)
            require(p.stable <= limit, "gate", f"{p.stable} is stable, the outside says {limit}")
        for rank in self.ranks:
            require(not rank.connected or rank.wanted <= p.epoch, "epochs", rank.wanted, "wanted in", p.epoch)


def _copy(value: Any) -> Any:
    """A copy of everything in a Partition that may change."""
    match value:
        case Partition():
            other = object.__new__(type(value))
            other.__dict__.update({name: _copy(field) for name, field in value.__dict__.items()})
            return other
        case dict():
            return {key: _copy(item) for key, item in value.items()}
        case set():
            return set(value)
        case list():
            return list(value)
        case Slot():
            return Slot(*(_copy(getattr(value, name)) for name in Slot.__slots__))
        case RangeSet():
            other = RangeSet()
            other._starts, other._stops = list(value._starts), list(value._stops)
            return other
        case _:
            return value


def _frozen(value: Any) -> Any:
    """A Partition's fields as something hashable. What is only for people, or never changes, is left out."""
    match value:
        case dict():
            return tuple(sorted((key, _frozen(item)) for key, item in value.items() if key not in ("newest", "layout")))
        case set():
            return frozenset(value)
        case Slot():
            return tuple(_frozen(getattr(value, name)) for name in Slot.__slots__)
        case RangeSet():
            return tuple(value)
        case Part():
            return id(value)  # `closes` makes equal ones but once
        case Phase():
            return value.value
        case _:
            return value
