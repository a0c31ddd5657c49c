"""One run at one shadow: its memory, its replayer, and the attempts that feed it.

Data connections put bytes into this run's buffers, `Partition` decides what they mean, and one replayer thread applies
stable steps. Everything but the replayer's own state is guarded by `changed`, which is notified whenever a step moves.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ProtocolError, Refused, StepNotFound, Superseded
from ..layout import Layout
from ..tensors import bytes_of, differs, dtype_of, fingerprint
from ..transport.base import Channel
from ..wire.frames import Frame, Header, Kind
from ..wire.messages import (
    LEASE_S,
    Ack,
    Adopt,
    Adopted,
    Anchor,
    Anchoring,
    Attach,
    Attempt,
    Audit,
    Audited,
    Control,
    Incarnation,
    Join,
    Joined,
    Ping,
    Pong,
    Prepare,
    Prepared,
    Reanchor,
    Refusal,
    Report,
    Resume,
    Spec,
    Stable,
    decode_part,
)  # fmt: skip
from .partition import (
    RING_STEPS,
    Acknowledge,
    Apply,
    AskAnchors,
    AskResume,
    Drop,
    Effect,
    Freeze,
    Partition,
    Phase,
    Tell,
    Verdict,
)  # fmt: skip
from .replay import Cut, State, check_part, empty_like, state_multiple

log = logging.getLogger("checkmate.shadow")

#: How long `prepare` lets connections of dead workers deliver what their kernels still hold.
DRAIN_S = 5.0
#: How long an attempt whose lease has run out may take to speak up when another claims the run.
GRACE_S = 2.5
#: An attempt that has prepared says nothing while it loads its state.
CLAIM_LEASE_S = 300.0
#: So many reports of one kind are logged per attempt; the ranks hear all, and `status` shows the last.
REPORTS = 5


class NotTaken(Refused):
    """A refusal with its kind for the wire."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason, kind)
        self.message = Refusal(kind, reason)


@dataclass(slots=True)
class Member:
    """The control connection of one rank."""

    channel: Channel
    heard: float = field(default_factory=time.monotonic)
    lease_s: float = field(default_factory=lambda: LEASE_S)
    step: int = -1  #: newest that this rank says it has closed
    closed: bool = False

    @property
    def live(self) -> bool:
        return not self.closed and time.monotonic() - self.heard < self.lease_s

    def send(self, message: Control) -> None:
        if self.closed:
            return
        try:
            self.channel.send_nowait(message)
        except OSError as error:
            log.warning("control connection to %s is closed: %s", self.channel.peer, error)
            self.closed = True
            self.channel.close()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a shadow was started with."""

    memory_bytes: int | None = None
    threads: int | None = None
    allowed: tuple[str, ...] = ()
    idle_s: float | None = None  #: forget runs that nobody has trained or read for so long


class Run:
    """See the module."""

    def __init__(self, name: str, limits: Limits, elsewhere: Callable[[], int] = lambda: 0) -> None:
        self.name = name
        self.limits = limits
        self.need_bytes = 0  #: what this run was admitted with, if there is a limit
        self._elsewhere = elsewhere  #: the needs of all other runs together
        self.changed = threading.Condition()
        self.attempt: Attempt | None = None
        self.incarnation: Incarnation | None = None
        self.state: State | None = None
        self.holder: Incarnation | None = None  #: the attempt that wrote `state` last
        self.frozen: tuple[State, Incarnation] | None = None
        self.partition: Partition | None = None
        self.epoch = 0
        self.life = 0
        self.last_error = ""
        self.bytes_in = 0
        self.heard = time.monotonic()
        self._used = self.heard
        self._recent: deque[list[int]] = deque(maxlen=10)
        self._members: dict[int, Member] = {}
        self._claim: Member | None = None
        self._data: dict[int, Channel] = {}
        self._buffers: dict[int, dict[tuple[Kind, int, int], torch.Tensor]] = {}
        self._free: dict[int, list[torch.Tensor]] = {}
        self._reports: Counter[str] = Counter()  #: by kind
        self._suspects: dict[int, str] = {}  #: blocks that an audit found different, until they are anchored anew
        self._queue: deque[Apply | Freeze | None] = deque()
        self._between_steps = threading.Lock()  #: held by the replayer while `state` changes
        self._idle = True
        self._draining = False
        self._ended = False  #: removed: its replayer is gone, and nobody new finds it
        self._replayer = threading.Thread(target=self._replay, name=f"replay {name}", daemon=True)
        self._replayer.start()

    # ------------------------------------------------------------ restart: prepare, adopt, join

    def prepare(self, message: Prepare, member: Member) -> Prepared:
        """Fence everything older, let it drain, and report what can be adopted. Idempotent per attempt."""
        with self.changed:
            self.changed.wait_for(lambda: not self._draining)  # for another attempt, or another connection of this one
            self._check_not_ended()
            again = self.attempt is not None and self.attempt.id == message.attempt.id
            member.lease_s = CLAIM_LEASE_S
            if not again:
                self._check_displaceable(message.attempt)
                old, self._claim, self.attempt = self.incarnation, member, message.attempt
                self._drain()
                self._check_not_ended()
                number = (old.number if old else 0) + 1
                self.incarnation = Incarnation(number, message.attempt.id)
                self._fence()
                if old is not None:
                    log.info("run %s: attempt %s displaces %s", self.name, self.incarnation, old)
            self._claim = member
            assert self.incarnation is not None
            held = self._recoverable()
            steps = [held[0].step] if held else []
            world = held[0].spec.world_size if held else 0
            return Prepared(self.incarnation, steps, world, held[1] if held else None)

    def _check_displaceable(self, attempt: Attempt) -> None:
        old = self.attempt
        if old is None or all(member.closed for member in self._all_members()):
            return
        if old.job and old.job == attempt.job and attempt.restarts > old.restarts:
            return
        # A shadow that was itself suspended has not read yet what the healthy attempt sent meanwhile.
        if self.changed.wait_for(lambda: self._live() or self.attempt is not old, GRACE_S):
            holder = self.attempt or old
            raise NotTaken(
                "live",
                f"run {self.name!r} is being trained by process {holder.pid} on {holder.host} "
                f"(heard {self._silence():.1f} s ago); stop that job, or choose another run name",
            )

    def _live(self) -> bool:
        return any(member.live for member in self._all_members())

    def _all_members(self) -> list[Member]:
        return [*self._members.values(), *([self._claim] if self._claim else [])]

    def _silence(self) -> float:
        return time.monotonic() - max((m.heard for m in self._all_members() if not m.closed), default=0.0)

    def _drain(self) -> None:
        """Dead workers' kernels still deliver: wait for their connections to end, then for the replayer."""
        self._draining = True
        self.changed.notify_all()
        self.changed.wait_for(lambda: not self._data, DRAIN_S)
        for channel in self._data.values():
            channel.close()
        self.changed.wait_for(lambda: not self._data, DRAIN_S)
        self.changed.wait_for(lambda: self._idle and not self._queue)
        self._draining = False
        self.changed.notify_all()

    def _fence(self) -> None:
        """Nothing of an older attempt counts from here on; what was not whole is gone, what was whole stays."""
        for old in self._members.values():
            if old is not self._claim:
                old.closed = True
                old.channel.close()
        self._members.clear()
        self.partition = None
        self._buffers.clear()
        self._free.clear()
        self._suspects.clear()
        self._reports.clear()
        if self.state is not None and not self.state.whole:
            self.state, self.holder = self.frozen or (None, None)
            self.frozen = None

    def _recoverable(self) -> tuple[State, Incarnation] | None:
        if self.state is not None and self.state.whole and self.holder is not None:
            return self.state, self.holder
        return self.frozen

    def adopt(self, message: Adopt) -> Adopted:
        """Go on from the step chosen. Idempotent: an attempt adopts once; asking again, it hears the same."""
        with self._between_steps, self.changed:
            self._check_current(message.incarnation)
            if self.incarnation is None:
                raise NotTaken("usage", f"run {self.name!r}: attempt {message.incarnation} has not prepared")
            if self.partition is not None:
                return Adopted(self.epoch, self.life, fingerprint())
            layout = Layout(message.spec)
            if message.step is None:
                self._check_memory(message.spec)
                state = State(message.spec, self.limits.allowed)
                if (held := self._recoverable()) is not None:
                    self.frozen = held
                self.state = state
                self._begin(layout, Phase.ANCHORING, -1)
            else:
                if self.state is None or not self.state.whole or self.state.step != message.step:
                    raise NotTaken("missing", f"run {self.name!r}: step {message.step} is not held here")
                self.state.respec(message.spec)
                self._begin(layout, Phase.STREAMING, message.step)
            self.holder = message.incarnation
            return Adopted(self.epoch, self.life, fingerprint())

    def _begin(self, layout: Layout, phase: Phase, base: int, epoch: int = 0) -> None:
        self.epoch = max(self.epoch + 1, epoch)
        self.life = secrets.randbits(62) + 1
        self.partition = Partition(layout, epoch=self.epoch, phase=phase, base=base)

    def _check_not_ended(self) -> None:
        if self._ended:
            raise NotTaken("busy", f"run {self.name!r} was removed at this moment; try again")

    def _check_current(self, incarnation: Incarnation) -> None:
        self._check_not_ended()
        if self.incarnation is not None and incarnation != self.incarnation:
            held = self._recoverable()
            holds = f"step {held[0].step}" if held else "no whole step yet"
            raise NotTaken(
                "superseded",
                f"run {self.name!r} is that of attempt {self.incarnation} here, with {holds}, which stays untouched; "
                f"attempt {incarnation} is superseded, or has never restored it: restart to go on from there",
            )

    def _check_memory(self, spec: Spec) -> None:
        if self.limits.memory_bytes is None:
            return
        model = sum(block.nbytes for block in spec.blocks)
        multiple = max((state_multiple(o, self.limits.allowed) for o in spec.optimizers), default=0)
        need = 2 * model * (1 + multiple) + RING_STEPS * model
        others = self._elsewhere()
        if others + need > self.limits.memory_bytes:
            raise NotTaken(
                "memory",
                f"run {self.name!r} may need {need:,} bytes here (parameters {model:,} and optimizer state "
                f"{multiple * model:,}, both twice while they are anchored anew, and {RING_STEPS} gradients), other "
                f"runs {others:,}, and this shadow may use {self.limits.memory_bytes:,}: raise its --memory-limit, or "
                "remove a run",
            )
        self.need_bytes = need

    def join(self, message: Join, member: Member) -> bool:
        """A rank begins or goes on streaming. False: this run is unknown here, and the spec must come along."""
        with self.changed:
            self._check_not_ended()
            if self.incarnation is None:
                if message.spec is None:
                    member.send(Joined(0, 0, -1, known=False))
                    return False
                self._check_memory(message.spec)
                layout, state = Layout(message.spec), State(message.spec, self.limits.allowed)
                self.incarnation = self.holder = message.incarnation
                self.attempt = message.attempt or Attempt(message.incarnation.id, "unknown host", 0)
                self.state = state
                self._begin(layout, Phase.RESUMING, -1, message.epoch + 1)
                log.info(
                    "run %s: begun anew by attempt %s at step %d",
                    self.name,
                    message.incarnation,
                    message.step,
                )
            self._check_current(message.incarnation)
            if self.partition is None:
                raise NotTaken("usage", f"run {self.name!r}: attempt {message.incarnation} has not adopted a step")
            if message.rank >= self.partition.layout.world_size:
                raise NotTaken("usage", f"rank {message.rank} of {self.partition.layout.world_size}")
            if message.life != self.life and message.epoch >= self.epoch:
                self._perform(self.partition.end_epoch("the shadow was restarted", message.epoch + 1))
            if (old := self._members.get(message.rank)) is not None and old is not member:
                old.closed = True
                old.channel.close()
            self._members[message.rank] = member
            member.step = message.step
            if self._claim is member:
                self._claim = None
            member.send(Joined(self.epoch, self.life, self.partition.received))
            if self.partition.phase is Phase.ANCHORING:
                member.send(Anchoring(self.epoch, self.partition.first))
            if self._suspects:  # asked for while this rank may have been away
                member.send(Reanchor(self.epoch, sorted(self._suspects), "audit"))
            member.send(self._ack())
            return True

    def leave(self, member: Member) -> None:
        with self.changed:
            member.closed = True
            self.changed.notify_all()

    def remove(self, force: bool) -> None:
        """Forget everything. Refused while the run is trained, unless forced."""
        with self.changed:
            if self._live() and not force:
                raise NotTaken("live", f"run {self.name!r} is being trained; stop it first, or force")
            self.incarnation = None
            self._fence()
            for channel in self._data.values():
                channel.close()
            self.state = self.frozen = self.holder = None
            self._end()

    def remove_if_empty(self) -> bool:
        """End this run if nobody is about to train it and it holds nothing: it was asked for, and no more."""
        with self.changed:
            nobody = all(member.closed for member in self._all_members()) and not self._data
            if nobody and not self._ended and self.partition is None and self._recoverable() is None:
                self._end()
            return self._ended

    def _end(self) -> None:
        self._ended = True
        self._queue.clear()
        self._queue.append(None)
        self.changed.notify_all()

    # ------------------------------------------------------------ messages of a joined rank

    def heard_from(self, member: Member, message: Control) -> None:
        member.heard = time.monotonic()
        match message:
            case Ping(step):
                with self.changed:
                    member.step = step
                    member.send(Pong())
                    self.changed.notify_all()
            case Stable(epoch, step):
                with self.changed:
                    if self.partition is not None:
                        self._perform(self.partition.stabilise(epoch, step))
            case Audit():
                audited = self._audit(message)
                with self.changed:
                    member.send(audited)
            case _:
                raise ProtocolError(f"{type(message).__name__} from a rank that has joined")

    def _audit(self, message: Audit) -> Audited:
        deadline = time.monotonic() + LEASE_S
        with self.changed:
            self.changed.wait_for(
                lambda: self.state is None or self.state.step >= message.step or not self.partition,
                deadline - time.monotonic(),
            )
            state = self.state
        with self._between_steps:
            if state is None or state.step != message.step:
                return Audited(message.step, 0, [], moved=True)
            differing = state.differing(message.digests)
        with self.changed:
            self._suspect(message.step, differing)
        return Audited(message.step, len(message.digests), differing)

    # ------------------------------------------------------------ data connections

    def attach(self, message: Attach, channel: Channel) -> None:
        """The data connection of a rank takes the place of its older one, which must have ended first."""
        with self.changed:
            self._check_current(message.incarnation)
            if self.partition is None or message.rank >= self.partition.layout.world_size:
                raise NotTaken("usage", f"rank {message.rank} has not joined run {self.name!r}")
            while (old := self._data.get(message.rank)) is not None:  # again, if another one was faster
                old.close()
                self.changed.notify_all()  # it may be waiting for the ring
                if not self.changed.wait_for(functools.partial(self._detached, message.rank, old), DRAIN_S):
                    raise NotTaken("busy", f"an older data connection of rank {message.rank} does not end")
            self._data[message.rank] = channel

    def _detached(self, rank: int, channel: Channel) -> bool:
        return self._data.get(rank) is not channel

    def detach(self, rank: int, channel: Channel) -> None:
        with self.changed:
            if self._data.get(rank) is channel:
                del self._data[rank]
            self.changed.notify_all()

    def place(self, header: Header, message: Attach, channel: Channel, scratch: memoryview) -> memoryview | None:
        """Where the payload of this frame belongs; None: in new memory.

        Blocks while the ring is full: then TCP holds the worker's sender.
        """
        if header.incarnation != message.incarnation.id or header.rank != message.rank:
            raise ProtocolError(f"{header}: of another attempt or rank than its connection")
        with self.changed:
            while True:
                partition = self._partition_of(message, channel)
                verdict = partition.begin(header)
                if verdict is not Verdict.WAIT:
                    break
                if self._draining and self._idle and not self._queue:
                    raise Superseded(f"{header} waits for a step that cannot come any more")
                self.changed.wait(1.0)
            if header.kind is Kind.PART:
                return None
            if verdict is Verdict.DRAIN:
                return scratch[: header.length]
            return self._buffer(partition, header)[header.offset : header.offset + header.length]

    def arrived(self, frame: Frame, message: Attach, channel: Channel, drained: bool) -> None:
        """A frame is whole and its checksum holds."""
        header = frame.header
        part = decode_part(frame.payload) if header.kind is Kind.PART else None
        if part is not None and (part.rank != header.rank or part.step != header.step or part.epoch != header.epoch):
            raise ProtocolError(f"{header} holds the part of rank {part.rank}, step {part.step}")
        with self.changed:
            partition = self._partition_of(message, channel)
            self.bytes_in += header.length
            self._count(header.length)
            self.heard = time.monotonic()
            if part is not None:
                check_part(part, partition.layout)
                self._perform(partition.part(part))
            elif not drained:
                self._perform(partition.arrived(header))

    def _count(self, nbytes: int) -> None:
        """Bytes per second of the clock, for the last ten."""
        now = int(time.monotonic())
        if not self._recent or self._recent[-1][0] != now:
            self._recent.append([now, 0])
        self._recent[-1][1] += nbytes

    def _rate(self) -> float:
        since = int(time.monotonic()) - 10
        return sum(nbytes for second, nbytes in self._recent if second >= since) / 10

    def _partition_of(self, message: Attach, channel: Channel) -> Partition:
        # While `prepare` drains, the claim is new but the old partition still takes what the old attempt had sent.
        if (
            self.partition is None
            or self.incarnation != message.incarnation
            or self._data.get(message.rank) is not channel
            or channel.closed
        ):
            raise Superseded(f"rank {message.rank} of attempt {message.incarnation} is fenced")
        return self.partition

    def _buffer(self, partition: Partition, header: Header) -> memoryview:
        key = (header.kind, header.block, header.update if header.kind is Kind.GRAD else header.entry)
        buffers = self._buffers.setdefault(header.step, {})
        if (tensor := buffers.get(key)) is None:
            if header.kind is Kind.GRAD:
                free = self._free.get(header.block)
                tensor = free.pop() if free else empty_like(partition.layout.blocks[header.block])
            else:
                tensor = self._anchor_buffer(partition.anchor(header))
            buffers[key] = tensor
        return bytes_of(tensor)

    @staticmethod
    def _anchor_buffer(found: tuple[Anchor, int]) -> torch.Tensor:
        anchor, entry = found
        described = anchor.entries[entry]
        tensor = torch.empty(described.sizes, dtype=dtype_of(described.dtype))
        if tensor.numel() * tensor.element_size() != described.nbytes:
            raise ProtocolError(f"anchor of block {anchor.block}: entry {entry} is not {described.nbytes} bytes")
        return tensor

    # ------------------------------------------------------------ effects

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Apply() | Freeze():
                    self._queue.append(effect)
                case Drop(step):
                    for (kind, block, _), tensor in self._buffers.pop(step, {}).items():
                        if kind is Kind.GRAD:
                            self._free.setdefault(block, []).append(tensor)
                case Acknowledge():
                    self._tell_all(self._ack())
                case AskResume(epoch, reason):
                    self.epoch = epoch
                    log.warning("run %s: epoch %d begins: %s", self.name, epoch, reason)
                    self._tell_all(Resume(epoch, reason))
                case AskAnchors(epoch, step):
                    self._tell_all(Anchoring(epoch, step))
                case Tell(kind, text, step, fatal):
                    self._report(Report(kind, text, step, fatal))
        if effects:
            self.changed.notify_all()

    def _ack(self) -> Ack:
        p = self.partition
        assert p is not None
        return Ack(p.epoch, p.received, p.stable, p.applied_step, p.recovery)

    def _tell_all(self, message: Control) -> None:
        for member in self._members.values():
            if not member.closed:
                member.send(message)

    def _report(self, report: Report) -> None:
        self.last_error = report.text
        self._reports[report.kind] += 1
        if self._reports[report.kind] <= REPORTS:
            more = "; more of this kind are not logged" if self._reports[report.kind] == REPORTS else ""
            log.warning("run %s: %s%s", self.name, report.text, more)
        self._tell_all(report)

    def _suspect(self, step: int, differing: list[Any]) -> None:
        """Ask the owners of these blocks to anchor them anew."""
        new = {d.block: d.key for d in differing if d.block not in self._suspects}
        if not new or self.partition is None:
            return
        for block, key in new.items():
            name = self.partition.layout.blocks[block].fqn
            self._suspects[block] = (
                f"audit at step {step}: {name}{' ' + key if key else ''} differs between trainer and shadow"
            )
            self.last_error = self._suspects[block]
        self._tell_all(Reanchor(self.epoch, sorted(new), "audit"))

    # ------------------------------------------------------------ the replayer's thread

    def _replay(self) -> None:
        while True:
            with self.changed:
                self._idle = True
                self.changed.notify_all()
                self.changed.wait_for(lambda: self._queue)
                work = self._queue.popleft()
                if work is None:
                    self.changed.notify_all()
                    return
                self._idle = False
                partition, state, buffers = self.partition, self.state, self._buffers
            if isinstance(work, Freeze):
                self._freeze(work)
            elif partition is not None and state is not None:
                self._apply(work, partition, state, buffers.get(work.step, {}))

    def _freeze(self, work: Freeze) -> None:
        with self._between_steps, self.changed:
            if self.state is None or self.holder is None:
                return  # removed meanwhile
            if work.keep and self.state.whole:
                self.frozen = (self.state, self.holder)
            self._suspects.clear()
            self.state = State(self.state.spec, self.limits.allowed)

    def _apply(
        self,
        work: Apply,
        partition: Partition,
        state: State,
        buffers: dict[tuple[Kind, int, int], torch.Tensor],
    ) -> None:
        def gradient(update: int, block: int) -> torch.Tensor:
            found = buffers.get((Kind.GRAD, block, update))
            return found if found is not None else empty_like(partition.layout.blocks[block])

        anchors = {a.block: a for part in work.parts.values() for a in part.anchors}

        def anchored(block: int, entry: int) -> torch.Tensor:
            found = buffers.get((Kind.ANCHOR, block, entry))
            return found if found is not None else self._anchor_buffer((anchors[block], entry))

        with self._between_steps:
            try:
                self._set_numerics(state.spec)
                differences = state.apply(
                    work.step, work.parts, partition.layout.leads, gradient, anchored, self._suspects
                )
                digests = [d for part in work.parts.values() for d in part.audits]
                differing = state.differing(digests) if state.whole else []
            except Exception as error:  # whatever a part may ask for: the replayer goes on
                self._broken(work, partition, state.spec, error)
                return
        with self.changed:
            if self.partition is not partition:
                return  # removed meanwhile
            for block, largest in differences.items():
                text = f"{self._suspects.pop(block)} by up to {largest:g}; anchored anew at step {work.step}"
                self._report(Report("differs", text, work.step))
            self._suspect(work.step, differing)
            if state.whole and self.frozen is not None:
                self.frozen = None
            self._perform(partition.applied(work.epoch, work.step))

    def _set_numerics(self, spec: Spec) -> None:
        threads = spec.fingerprint.threads if spec.replay == "match" else self.limits.threads
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        torch.set_flush_denormal(spec.fingerprint.flush_denormal)

    def _broken(self, work: Apply, partition: Partition, spec: Spec, error: Exception) -> None:
        """A step that this shadow cannot apply: its state is of no step any more, so begin again from anchors.

        Called between steps, so that no reader takes a cut of that state.
        """
        with self.changed:
            if self.partition is not partition:
                return  # removed meanwhile
            if self._reports["refused"] < REPORTS:
                log.error("run %s: step %d cannot be applied", self.name, work.step, exc_info=error)
            self.state = State(spec, self.limits.allowed)
            self._report(Report("refused", f"the shadow cannot apply step {work.step}: {error}", work.step, fatal=True))
            void = [work, *(w for w in self._queue if isinstance(w, Apply) and w.epoch == work.epoch)]
            self._queue = deque(w for w in self._queue if w not in void)
            drops: list[Effect] = [Drop(w.step) for w in void]
            kept = self.frozen[0].step if self.frozen is not None else -1
            self._perform(drops + partition.lost(work.epoch, kept, str(error)))

    # ------------------------------------------------------------ reading

    def lease(self, step: int | None) -> tuple[State, Cut, Incarnation]:
        """Hold one whole step for a reader."""
        with self._between_steps, self.changed:
            held = self._recoverable()
            if held is None:
                raise StepNotFound(f"run {self.name!r} has no whole step yet")
            state, holder = held
            if step is not None and step != state.step:
                raise StepNotFound(
                    f"run {self.name!r}: step {step} is not held; the one step that is whole here is {state.step}"
                )
            self._used = time.monotonic()
            return state, state.cut(), holder

    def release(self, state: State, cut: Cut) -> None:
        with self._between_steps:
            state.release(cut)

    @property
    def idle_s(self) -> float:
        """Seconds since this run was trained or read, 0 while it is."""
        with self.changed:
            held = (self.state, self.frozen[0] if self.frozen else None)
            in_use = self._live() or any(state.leased for state in held if state is not None)
            return 0.0 if in_use else time.monotonic() - max(self.heard, self._used)

    def status(self) -> dict[str, Any]:
        with self.changed:
            p, state = self.partition, self.state
            told = [member.step for member in self._members.values()]
            newest = max([p.received, *p.newest.values(), *told]) if p else -1
            return {
                "run": self.name,
                "incarnation": str(self.incarnation) if self.incarnation else "",
                "live": self._live(),
                "epoch": self.epoch,
                "phase": p.phase.value if p else "idle",
                "world_size": p.layout.world_size if p else 0,
                "received": p.received if p else (state.step if state else -1),
                "stable": p.stable if p else (state.step if state else -1),
                "applied": p.applied_step if p else (state.step if state else -1),
                "recovery": p.recovery if p else (held[0].step if (held := self._recoverable()) else -1),
                "newest": newest,
                "lag": max(0, newest - p.received) if p else 0,
                "waiting_for": p.missing if p else [],
                "blocks_without_state": p.blocks_without_state() if p else 0,
                "mode": self._mode(),
                "bytes_in": self.bytes_in,
                "bytes_in_per_s": self._rate(),
                "memory_bytes": self.memory_bytes(),
                "silent_s": round(time.monotonic() - self.heard, 3),
                "last_error": self.last_error,
            }

    def _mode(self) -> str:
        spec = self.state.spec if self.state is not None else None
        if spec is None:
            return ""
        return "drift" if spec.replay == "fast" or differs(spec.fingerprint, fingerprint()) else "exact"

    def memory_bytes(self) -> int:
        """Tensor bytes held: states, gradients and anchors."""
        tensors = [t for step in self._buffers.values() for t in step.values()] + [
            t for f in self._free.values() for t in f
        ]
        held = [state for state in (self.state, self.frozen[0] if self.frozen else None) if state is not None]
        with contextlib.suppress(RuntimeError):  # the replayer may add to a state while it is counted
            return sum(t.numel() * t.element_size() for t in tensors) + sum(state.nbytes() for state in held)
        return -1
