"""A small model of one run: ranks that train, their connections, and one shadow around a real `Partition`.

A `World` is one moment. `events` lists what may happen next, `do` makes it happen, `key` tells moments apart, and
every effect is checked as it is performed. Nothing here knows sockets, threads, clocks or tensors:

- a *cell* stands for up to 64 bytes of a buffer: either it holds what the step needs, or it does not;
- a block's value is the number of the step that it stands at; replay adds one.

Ranks do what `trainer.recorder` and `trainer.link` do, the shadow what `shadow.run` does. ``shadow/DESIGN.md`` explains
the invariants, whose names begin the text of a `Violation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from checkmate.errors import ProtocolError
from checkmate.shadow.effects import Acknowledge, Apply, AskAnchors, AskResume, Drop, Effect, Freeze
from checkmate.shadow.partition import RING_STEPS, Partition, Phase, Verdict
from checkmate.shadow.slot import Slot
from checkmate.wire.frames import Kind
from checkmate.wire.messages import Part
from checkmate.wire.ranges import RangeSet

from .ranks import CELL, Buffer, Case, Frame, Key, Rank, closes

Event = tuple[str, int]
FAULTS = frozenset(("gap", "cut", "restart", "fail"))
#: So many steps without a fault are enough to be whole again.
CALM_STEPS = 6


class Violation(AssertionError):
    """An invariant does not hold."""


INVARIANTS = frozenset(
    ("order", "recovery never falls", "truth", "received exactly", "one step", "complete record", "gate", "effects",
     "dropped last", "memory", "ring", "epochs", "no refusal", "nobody waits for ever")
)  # fmt: skip


def require(holds: bool, invariant: str, *details: object) -> None:
    if not holds:
        assert invariant in INVARIANTS
        raise Violation(f"{invariant}: {' '.join(map(str, details))}")


class World:
    def __init__(self, case: Case, transitions: set[tuple[str, ...]] | None = None) -> None:
        self.case = case
        self.transitions = set() if transitions is None else transitions  #: phase, event, next phase, effects
        self.gaps, self.cuts, self.restarts, self.failures = case.gaps, case.cuts, case.restarts, case.failures
        self.limit = case.steps
        self.life = 0
        self._shared = False
        self._shadow_key: int | None = None
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
        self.values: tuple[int | None, ...] = (None,) * len(self.case.layout.blocks)  #: per block, its step
        self.known: frozenset[int] = frozenset()  #: ranks whose complete record belongs to the state
        self.frozen = -1
        self.queue: tuple[Apply | Freeze, ...] = ()
        self.buffers = {}
        self.free: dict[int, list[Buffer]] = {b: [] for b in range(len(self.values))}

    def copy(self) -> World:
        """Shares the shadow's side until something happens there."""
        other = object.__new__(World)
        other.__dict__.update(self.__dict__)
        other.ranks = [rank.copy() for rank in self.ranks]
        self._shared = other._shared = True
        return other

    def _touch(self) -> None:
        """Something is about to happen at the shadow: what another moment shares with this one is copied."""
        self._shadow_key = None
        if not self._shared:
            return
        self._shared = False
        twins: dict[int, Buffer] = {}

        def twin(buffer: Buffer) -> Buffer:
            return twins.setdefault(id(buffer), Buffer(buffer.place, buffer.cells))

        self.buffers = {s: {k: twin(b) for k, b in held.items()} for s, held in self.buffers.items()}
        self.free = {b: [twin(x) for x in free] for b, free in self.free.items()}
        for rank in self.ranks:
            if rank.incoming is not None and rank.incoming[1] is not None:
                rank.incoming = (rank.incoming[0], twin(rank.incoming[1]))
        if self.partition is not None:
            self.partition = _copy(self.partition)

    def key(self) -> int:
        """Equal for moments from which the same may happen."""
        if self._shadow_key is None:
            places: dict[int, object] = {id(b): (n, i) for n, free in self.free.items() for i, b in enumerate(free)}
            incoming = tuple(
                r.incoming if r.incoming is None or r.incoming[1] is None
                else (r.incoming[0], places.get(id(r.incoming[1]), r.incoming[1].place)) for r in self.ranks
            )  # fmt: skip
            self._shadow_key = hash((
                incoming, tuple(map(len, self.free.values())),
                frozenset((s, k, bytes(b.cells)) for s, held in self.buffers.items() for k, b in held.items()),
                tuple((type(work), work.epoch, getattr(work, "step", None)) for work in self.queue),
                self.values, self.known, self.frozen, None if self.partition is None else _key(self.partition),
            ))  # fmt: skip
        ranks = tuple(
            (r.step, r.epoch, r.wanted, r.life, r.gap, r.settled, r.at_once, r.unanchored, r.first, r.batches,
             r.connected, r.wire, r.inbox, r.ack) for r in self.ranks
        )  # fmt: skip
        budgets = (self.limit, self.gaps, self.cuts, self.restarts, self.failures)
        return hash((ranks, budgets, self.seen, self.life, self._shadow_key))

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
            if rank.step == slowest < self.limit:  # all ranks take part in each step
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
        try:
            return self._do(event)
        except ProtocolError as error:
            require(False, "no refusal", error)
            raise AssertionError from error

    def _do(self, event: Event) -> bool:
        name, number = event
        if name not in ("close", "gap", "hear", "ack", "see"):
            self._touch()
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
        self._settle()
        return True

    def _settle(self) -> None:
        if not (self.cuts or self.restarts):  # nothing will be sent again, so what ranks keep makes no difference
            for rank in self.ranks:
                if rank.connected:
                    rank.batches, rank.ack = (), None
        if self._shadow_key is None:
            self.check()

    def calm(self, backwards: bool = False) -> bool:
        """Something that is no fault happens; training goes on once nothing else does. False: it is over."""
        events = [event for event in self.events() if event[0] not in FAULTS and event[0] != "close"]
        if any(self.do(event) for event in (reversed(events) if backwards else events)):
            return True
        slowest = min(self.ranks, key=lambda rank: rank.step)
        if slowest.step == self.limit:
            if self.limit == self.case.steps + CALM_STEPS:
                return False
            self.limit += 1
        return self.do(("close", slowest.number))

    def require_protected(self) -> None:
        """After calm: every step that was closed is safe."""
        p, end = self.partition, self.limit
        assert p is not None
        protected = p.phase is Phase.STREAMING and p.recovery == p.applied_step == end and set(self.values) == {end}
        streaming = all(rank.connected and not rank.gap for rank in self.ranks)
        where = f"{p.phase.value}, {p.received} received, {p.recovery} safe, {p.missing}"
        require(protected and streaming, "nobody waits for ever", f"step {end} is closed; {where}")

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
        rank.batches = tuple(b for b in rank.batches if not b.void(p.epoch, p.received))
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
        self._settle()
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
            right = buffer.place == (frame.header.step, frame.buffer)  # else another step has it by now
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
        """`Run.failed`: the state is of no step any more."""
        self.failures -= 1
        work, self.queue = self.queue[0], self.queue[1:]
        assert isinstance(work, Apply)
        void = [work, *(w for w in self.queue if isinstance(w, Apply) and w.epoch == work.epoch)]
        self.queue = tuple(w for w in self.queue if w not in void)
        self.values, self.known = (None,) * len(self.values), frozenset()
        for each in void:
            self._free(each.step)
        event = "lost" if self.partition is not None and work.epoch == self.partition.epoch else "older lost"
        self._tell(event, lambda p: p.lost(work.epoch, self.frozen, "it cannot be applied"))

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
                    called = self.seen[1] if self.seen[0] == epoch else -1
                    require("lost" in event or called <= stable, "gate", f"step {called} was called stable already")
                    epoch, stable = p.epoch, -1
                    self.queue += (effect,)
                case Drop(step):
                    held = step in p._slots or (step in {w.step for w in self.queue if isinstance(w, Apply)})
                    require(not held, "dropped last", f"step {step}")
                    self._free(step)
                case AskResume():
                    require(effect.epoch == epoch == p.epoch, "effects", effect, "in epoch", epoch)
                    self._send("resume", effect.epoch, 0)
                case AskAnchors():
                    require(effect.epoch == epoch, "effects", effect, "in epoch", epoch)
                    stable = effect.step - 1
                    self._send("anchoring", effect.epoch, effect.step)
                case Acknowledge():
                    require((epoch, stable) == (p.epoch, p.stable), "effects", f"{p.stable} acknowledged, not queued")
                    for rank in self.ranks:
                        if rank.connected:
                            rank.ack = (p.epoch, p.stable)
        require((epoch, stable) == (p.epoch, p.stable), "effects", f"{p.stable} is stable, but not queued")
        if "lost" not in event:
            require(p.recovery >= recovery, "recovery never falls", f"from {recovery} to {p.recovery}")
        names = [type(effect).__name__ for effect in effects]
        runs = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
        self.transitions.add((phase.value, event, p.phase.value, ", ".join(runs)))

    def _send(self, kind: str, epoch: int, step: int) -> None:
        for rank in self.ranks:
            if rank.connected:
                rank.inbox += ((kind, epoch, step),)

    def _free(self, step: int) -> None:
        for key, buffer in self.buffers.pop(step, {}).items():
            buffer.place = None
            if key[0] is Kind.GRAD:
                self.free[key[1]].append(buffer)

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
            oldest, newest = (p.first - 1, p.first - 1) if resuming else (p.stable, p.applied_step)
            require(oldest < step <= newest + RING_STEPS, "ring", f"step {step}, {oldest} to {newest}")
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
    kind = type(value)
    if kind is dict:
        return {key: _copy(item) for key, item in value.items()}
    if kind is set or kind is list:
        return kind(value)
    if kind is Slot:
        return Slot(*[_copy(getattr(value, name)) for name in SLOT])
    if kind is RangeSet:
        other = RangeSet()
        other._starts, other._stops = list(value._starts), list(value._stops)
        return other
    if isinstance(value, Partition):
        twin = object.__new__(kind)
        twin.__dict__.update({name: _copy(item) for name, item in value.__dict__.items()})
        return twin
    return value


SLOT = [field.name for field in fields(Slot)]


def _key(value: Any) -> Any:
    """A Partition's fields as something hashable. What is only for people, or never changes, is left out."""
    kind = type(value)
    if kind is dict:
        return frozenset([(key, _key(item)) for key, item in value.items()])
    if kind is set:
        return frozenset(value)
    if kind is Slot:
        return (frozenset(map(id, value.parts.values())), _key(value.ranges))  # the rest follows from these
    if kind is RangeSet:
        return (*value._starts, *value._stops)
    if isinstance(value, Partition):
        return tuple([_key(item) for name, item in value.__dict__.items() if name not in ("newest", "layout")])
    return value
