"""Agreement at one shadow for one incarnation: which steps are received, stable and applied, and in which epoch.

A pure state machine: headers and parts in, decisions and effects out. It holds no tensor bytes and knows no socket,
thread or clock; `run.Run` performs the effects. Its invariants stand in ``DESIGN.md`` beside this file::

    applied <= stable <= received        within one epoch
    recovery                             never falls while the shadow lives

    streaming --(a rank reports a gap, or the run asks)--> resuming
    resuming  --(all ranks stream)--> anchoring --(all blocks have their state)--> streaming
"""

from __future__ import annotations

from enum import Enum

from ..errors import ProtocolError
from ..layout import Layout
from ..wire.frames import Header, Kind
from ..wire.messages import Anchor, Part
from ..wire.ranges import RangeSet
from .effects import Acknowledge, Apply, AskAnchors, AskResume, Drop, Effect, Freeze
from .slot import Slot, key_of, listed_by
from .stories import disagreement, uncovered

#: How many steps beyond the applied one may be in memory, complete or not.
RING_STEPS = 3
#: Of a step, copies of so many updates are kept before a part lists them; of more, what is lacking then is repaired.
AHEAD_UPDATES = 16


class Phase(Enum):
    RESUMING = "resuming"  #: waiting until every rank streams in this epoch
    ANCHORING = "anchoring"  #: streaming, but some blocks have no state yet
    STREAMING = "streaming"  #: every block has its state: each stable step is a recovery point


class Verdict(Enum):
    TAKE = "take"  #: put the payload into its buffer
    DRAIN = "drain"  #: a duplicate, or of a step or epoch that no longer counts: read it and forget it
    WAIT = "wait"  #: the ring is full: do not read on before `applied` has moved


class Partition:
    """See the module. `phase` is where to begin:

    - STREAMING at `base`, a whole step that the replayer holds;
    - ANCHORING: no state yet, and step 0 comes first, with an anchor of every block (`base` is -1);
    - RESUMING: no state, and the ranks are somewhere in their training (`base` is -1).

    `gated` says that other replicas or partitions exist, so that stable comes from outside; a shadow alone gates on
    itself.
    """

    def __init__(self, layout: Layout, *, epoch: int, phase: Phase, base: int = -1, gated: bool = False) -> None:
        self.layout = layout
        self.epoch = epoch
        self.phase = phase
        self.received = self.stable = self.applied_step = self._floor = base
        self.frozen = -1  #: whole step kept from an earlier epoch of this incarnation, -1 if none
        self.newest: dict[int, int] = {}  #: per rank, newest step whose part is here, in any epoch
        self._gated = gated
        self._ranks = range(layout.world_size)
        self._slots: dict[int, Slot] = {}
        self._starts: dict[int, int] = {}  #: while resuming: per rank, the first step that it streams in this epoch
        self._unanchored: set[int] = set() if phase is Phase.STREAMING else set(range(len(layout.blocks)))
        self._whole_at = base  #: the state is whole once this step is applied; means something while streaming
        self._gap: tuple[int, str] | None = None  #: the first step that can never be complete, and why

    # ------------------------------------------------------------ what it knows

    @property
    def recovery(self) -> int:
        """Newest step that a restart would find, -1 if none."""
        return self.stable if self.phase is Phase.STREAMING and self.stable >= 0 else self.frozen

    @property
    def missing(self) -> list[str]:
        """For people: which ranks have not closed the step after `received`, and what they have closed."""
        if self.phase is Phase.RESUMING:
            return [f"rank {r} does not stream yet" for r in self._ranks if r not in self._starts]
        step = self.received + 1
        slot = self._slots.get(step)
        if slot is None:
            return []
        return [
            f"rank {r} has not closed step {step} (newest: {self.newest.get(r, 'none')})"
            for r in self._ranks
            if r not in slot.parts
        ]

    @property
    def first(self) -> int:
        """First step of this epoch; while resuming, the first that may be it."""
        return self._floor + 1

    def blocks_without_state(self) -> int:
        return len(self._unanchored)

    # ------------------------------------------------------------ frames

    def begin(self, header: Header) -> Verdict:
        """A frame's header is here: what to do with its payload."""
        self._check(header)
        if header.epoch != self.epoch:
            return Verdict.DRAIN
        verdict = self._place(header)
        if verdict is not Verdict.TAKE or header.kind is Kind.PART:
            return verdict
        slot, key = self._slots.setdefault(header.step, Slot()), key_of(header)
        if header.kind is Kind.ANCHOR:
            self.anchor(header)
        if header.rank in slot.parts and key not in slot.listed:
            raise ProtocolError(f"{header}: not listed in its part, which came before")
        start, stop, ranges = header.offset, header.offset + header.length, slot.ranges.get(key)
        if header.round or ranges is None or not ranges.overlaps(start, stop):
            return Verdict.TAKE  # of a repair, copies that came late may be here: `overhear` decides
        if not ranges.covers(start, stop):
            raise ProtocolError(f"{header}: cut in another way than when it came before")
        return Verdict.DRAIN

    def arrived(self, header: Header) -> list[Effect]:
        """The payload of a frame that was to be taken is in its buffer and its checksum holds."""
        if header.epoch != self.epoch or self._place(header) is Verdict.DRAIN:
            return []
        slot = self._slots.setdefault(header.step, Slot())
        slot.ranges.setdefault(key := key_of(header), RangeSet()).add(header.offset, header.offset + header.length)
        slot.note(key)
        return self._advance()

    def overhear(self, header: Header) -> bool:
        """Whether a frame of a round is wanted: one that the network has copied, or a repair.

        It may be late, repeated or of another attempt; no rank waits for it, and nothing is refused.
        """
        try:
            self._check(header)
        except ProtocolError:
            return False
        begun = self.phase is not Phase.RESUMING or header.rank in self._starts
        if header.kind is not Kind.GRAD or not header.round or header.epoch != self.epoch or not begun:
            return False
        if self._place(header) is not Verdict.TAKE:
            return False
        slot, key = self._slots.setdefault(header.step, Slot()), key_of(header)
        if header.rank in slot.parts and key not in slot.listed:
            return False
        name = header.update, header.block
        full = name not in slot.rounds and len(slot.rounds) >= AHEAD_UPDATES * len(self.layout.blocks)
        if full and key not in slot.listed:
            return False  # whoever forges frames must not fill the memory
        if header.round < (newest := slot.rounds.get(name, 0)) and key not in slot.listed:
            return False
        if header.round > newest:
            for rank in self._ranks if newest else ():  # the older round, which this one supersedes
                if (old := (Kind.GRAD, rank, header.update, header.block, 0, newest)) not in slot.listed:
                    slot.ranges.pop(old, None)
            slot.rounds[name] = header.round
        start, stop, ranges = header.offset, header.offset + header.length, slot.ranges.get(key)
        first, last = slot.listed.get(key, (0, stop))
        return first <= start and stop <= last and (ranges is None or not ranges.overlaps(start, stop))

    def owing(self) -> list[int]:
        """Steps that a rank has closed, but of which the network has not brought everything."""
        return [step for step, slot in self._slots.items() if any(key[5] for key in slot.owed)]

    def repairs(self, step: int) -> dict[int, list[tuple[int, int, int, int, int]]]:
        """Per rank, what of its shards of this step is missing: block, update, round, offset, bytes."""
        found: dict[int, list[tuple[int, int, int, int, int]]] = {}
        slot = self._slots[step]
        for key in slot.owed:
            _, rank, update, block, _, round_ = key
            if round_:
                gaps = slot.ranges.get(key, RangeSet()).missing(*slot.listed[key])
                found.setdefault(rank, []).extend((block, update, round_, a, b - a) for a, b in gaps)
        return found

    def part(self, part: Part) -> list[Effect]:
        """A rank has closed a step."""
        self.newest[part.rank] = max(part.step, self.newest.get(part.rank, -1))
        if part.epoch != self.epoch:
            return []
        if part.begins:
            return self._start(part.rank, part.step + 1)
        if self.phase is Phase.RESUMING and part.rank not in self._starts:
            raise ProtocolError(f"part of rank {part.rank}, step {part.step}: not begun in epoch {self.epoch}")
        if part.gap:
            return self._never(part.step, f"rank {part.rank} could not keep its gradients of step {part.step}")
        if part.step <= max(self._floor, self.received):
            return []
        slot = self._slots.setdefault(part.step, Slot())
        if part.rank in slot.parts:
            return []
        listed = listed_by(part, self.layout)
        mine = [key for key in slot.ranges if key[1] == part.rank and key not in listed]
        for key in mine:
            if key[5]:  # overheard: of a round that was not the last, or of a parameter without gradient
                del slot.ranges[key]
        if stray := [key for key in mine if not key[5]]:
            text = f"rank {part.rank} sent what its part of step {part.step} does not list: {stray}"
            return self._never(part.step, text)
        slot.listed |= listed
        slot.parts[part.rank] = part
        for key in listed:
            slot.note(key)
        return self._advance()

    def _place(self, header: Header) -> Verdict:
        if self.phase is Phase.RESUMING and header.rank not in self._starts:
            if header.kind is not Kind.PART:
                raise ProtocolError(f"{header}: not begun in epoch {self.epoch}")
            return Verdict.TAKE  # `begins` comes first
        if header.step <= max(self._floor, self.received):
            return Verdict.TAKE if header.kind is Kind.PART else Verdict.DRAIN
        return Verdict.TAKE if header.step <= max(self._floor, self.applied_step) + RING_STEPS else Verdict.WAIT

    def _check(self, header: Header) -> None:
        """A frame that no correct rank sends."""
        if header.rank not in self._ranks:
            raise ProtocolError(f"{header}: there are {self.layout.world_size} ranks")
        if header.kind is Kind.PART:
            return
        if header.kind not in (Kind.GRAD, Kind.ANCHOR):
            raise ProtocolError(f"{header} on a data connection")
        if header.block >= len(self.layout.blocks):
            raise ProtocolError(f"{header}: there are {len(self.layout.blocks)} blocks")
        if header.kind is Kind.GRAD:
            piece = self.layout.slices[header.rank].get(header.block)
            start, stop = header.offset, header.offset + header.length
            if self.layout.tap != "step":
                if stop > self.layout.blocks[header.block].nbytes:
                    raise ProtocolError(f"{header}: past the end of the block")
            elif piece is None or start < piece.offset or stop > piece.offset + piece.nbytes:
                raise ProtocolError(f"{header}: outside the slice of that rank, {piece}")

    def anchor(self, header: Header) -> tuple[Anchor, int]:
        """The anchor and the number of its entry that an ANCHOR frame belongs to. Its part must have come before."""
        part = self._slots[header.step].parts.get(header.rank)
        anchor = next((a for a in part.anchors if a.block == header.block), None) if part else None
        if anchor is None or header.entry >= len(anchor.entries):
            raise ProtocolError(f"{header}: entry {header.entry} is not listed in a part that came before")
        if header.offset + header.length > anchor.entries[header.entry].nbytes:
            raise ProtocolError(f"{header}: past the end of entry {header.entry}")
        return anchor, header.entry

    # ------------------------------------------------------------ progress

    def _start(self, rank: int, step: int) -> list[Effect]:
        """This rank streams from `step` on. Once all do, the epoch begins at the newest of their first steps."""
        if self.phase is not Phase.RESUMING:
            return []  # said again after a reconnection
        self._starts.setdefault(rank, step)
        self._floor = max(self._starts.values()) - 1
        void = [step for step in self._slots if step <= self._floor]
        for old in void:
            del self._slots[old]
        drops: list[Effect] = [Drop(old, void=True) for old in void]
        if len(self._starts) < len(self._ranks):
            return drops
        self.phase = Phase.ANCHORING
        self.received = self.stable = self.applied_step = self._floor
        return [*drops, AskAnchors(self.epoch, self.first), *self._advance(moved=True)]

    def _advance(self, moved: bool = False) -> list[Effect]:
        """Move `received` over every step that is complete now."""
        if self.phase is Phase.RESUMING:
            return []
        effects: list[Effect] = []
        while self._gap is None or self.received + 1 < self._gap[0]:
            step = self.received + 1
            slot = self._slots.get(step)
            if slot is None or len(slot.parts) < len(self._ranks) or slot.owed:
                break
            if (
                trouble := disagreement(step, slot.parts, self.layout) or uncovered(step, slot.parts, self.layout)
            ) is not None:
                effects.append(trouble)
                if trouble.fatal:
                    self._gap = (step, trouble.text)
                    break
            self.received, moved = step, True
            if not self._gated:
                effects += self._stabilise(step)
        return effects + self._settle(moved)

    def _never(self, step: int, reason: str) -> list[Effect]:
        """This step can never be complete: the epoch ends before it."""
        if self._gap is None or step < self._gap[0]:
            self._gap = (step, reason)
        return self._advance()

    def _settle(self, moved: bool) -> list[Effect]:
        """After all else: end the epoch if its last step is stable, or say how far it has moved.

        Steps that this shadow has acknowledged may have been called stable already: they wait for their `Stable`.
        """
        if self._gap is not None and self.stable >= self._gap[0] - 1:
            return self.end_epoch(self._gap[1])
        return [Acknowledge()] if moved else []

    def stabilise(self, epoch: int, step: int) -> list[Effect]:
        """Rank 0 says that every replica in the view has received `step`."""
        if epoch != self.epoch or not self._gated:
            return []
        if step > self.received:
            raise ProtocolError(f"step {step} called stable, but this replica has received only {self.received}")
        effects = self._stabilise(step)
        return effects + self._settle(moved=bool(effects))

    def _stabilise(self, step: int) -> list[Effect]:
        effects: list[Effect] = []
        while self.stable < step:
            self.stable += 1
            parts = self._slots.pop(self.stable).parts
            for part in parts.values():
                self._unanchored.difference_update(anchor.block for anchor in part.anchors)
            if self.phase is Phase.ANCHORING and not self._unanchored:
                self.phase, self._whole_at = Phase.STREAMING, self.stable
            effects.append(Apply(self.epoch, self.stable, parts))
        return effects

    def applied(self, epoch: int, step: int) -> list[Effect]:
        """The replayer has applied `step`."""
        if epoch != self.epoch:
            return [Drop(step)]
        assert step == self.applied_step + 1 <= self.stable, (step, self.applied_step, self.stable)
        self.applied_step = step
        if self.phase is Phase.STREAMING and step >= self._whole_at:
            self.frozen = -1
        return [Drop(step), Acknowledge()]

    def lost(self, epoch: int, kept: int, reason: str) -> list[Effect]:
        """A step of `epoch` could not be applied, and the state is of no step any more; `kept` is frozen (-1: none)."""
        effects: list[Effect] = [Acknowledge()]
        if epoch == self.epoch:
            effects = self.end_epoch(reason, keep=False)
        self.frozen = kept
        return effects

    def end_epoch(self, reason: str, epoch: int = 0, *, keep: bool = True) -> list[Effect]:
        """Stable steps stay; everything beyond is void; all ranks are asked to stream anew, as a later epoch."""
        keep = keep and self.phase is Phase.STREAMING
        if keep:
            self.frozen = self.stable
        void = list(self._slots)
        self._slots.clear()
        self._gap = None
        ended, self.epoch = self.epoch, max(self.epoch + 1, epoch)
        self.phase = Phase.RESUMING
        self._starts = {}
        self.received = self.stable = self.applied_step = self._floor = -1
        self._unanchored = set(range(len(self.layout.blocks)))
        effects: list[Effect] = [Drop(step, void=True) for step in void]
        return [*effects, Freeze(ended, keep), AskResume(self.epoch, reason), Acknowledge()]
