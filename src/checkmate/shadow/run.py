"""One run at one shadow: its memory, its replayer, and the attempts that feed it.

Data connections put bytes into this run's buffers, `Partition` decides what they mean, and one replayer thread applies
stable steps. Everything but the replayer's own state is guarded by `changed`, which is notified whenever a step moves.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ProtocolError, Refused, Superseded
from ..layout import Layout
from ..tensors import differs, fingerprint
from ..transport.base import Channel
from ..wire.frames import Frame, Header, Kind
from ..wire.messages import (
    LEASE_S,
    Ack,
    Adopt,
    Adopted,
    Anchoring,
    Attach,
    Attempt,
    Audit,
    Audited,
    Control,
    Digest,
    Incarnation,
    Join,
    Joined,
    Ping,
    Pong,
    Prepare,
    Prepared,
    Reanchor,
    Refusal,
    Repair,
    Report,
    Resume,
    Spec,
    Stable,
    decode_part,
)  # fmt: skip
from ..wire.packets import Flow
from .buffers import Buffers
from .effects import Acknowledge, Apply, AskAnchors, AskResume, Drop, Effect, Freeze, Tell
from .members import Member, Members
from .partition import RING_STEPS, Partition, Phase, Verdict
from .repairs import PATIENCE_S, Repairs
from .replay import Cut, check_part, state_multiple
from .replayer import Replayer, Work

log = logging.getLogger("checkmate.shadow")

#: How long `prepare` lets connections of dead workers deliver what their kernels still hold.
DRAIN_S = 5.0
#: How long an attempt whose lease has run out may take to speak up when another claims the run.
GRACE_S = 2.5
#: An attempt that has prepared says nothing while it loads its state.
CLAIM_LEASE_S = 300.0
#: So many reports of one kind are logged per attempt; the ranks hear all, and `status` shows the last.
REPORTS = 5
#: So long, and of so many gradients in a row, the network brings nothing before it is said.
DEAF_S, DEAF_STEPS = 5.0, 3
DEAF = (
    f"the network has brought nothing to this shadow for {DEAF_S:.0f} s, and all of {DEAF_STEPS} steps' gradients "
    "and more was sent to it instead: `checkmate doctor` says which rule, mark or interface is at fault"
)
UNHEARD = (
    "the shadow was started without --capture (for tap='mirror') or without --multicast (for tap='multicast'): it "
    "hears nothing of what the network brings, and all of the gradient is sent to it besides, as with tap='step'"
)


def check_flow(flow: Flow | None) -> None:
    """Raises ProtocolError for addresses or ports that are none."""
    try:
        if flow is not None and not (flow.key and 0 <= flow.dscp <= 63):
            raise ValueError(f"{flow}: a mark is 0 to 63")
    except (ValueError, struct.error) as error:
        raise ProtocolError(f"a flow that cannot be: {error}") from None


class NotTaken(Refused):
    """A refusal with its kind for the wire."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason, kind)
        self.message = Refusal(kind, reason)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a shadow was started with."""

    memory_bytes: int | None = None
    threads: int | None = None
    allowed: tuple[str, ...] = ()
    idle_s: float | None = None  #: forget runs that nobody has trained or read for so long
    captures: bool = False  #: copies of the ranks' packets come in through the network,
    joins: bool = False  #: or the ranks' datagrams, by multicast

    def hears(self, flow: Flow) -> bool:
        """Whether what comes as this flow can be heard here."""
        return self.joins if flow.multicast else self.captures


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
        self.partition: Partition | None = None
        self.epoch = 0
        self.life = 0
        self.last_error = ""
        self.bytes_in = 0
        self.heard = time.monotonic()
        self._used = self.heard
        self._recent: deque[list[int]] = deque(maxlen=10)
        self._members = Members()
        self._data: dict[int, Channel] = {}
        self._buffers = Buffers()
        # Without a capture there is nothing to wait for.
        self._patience_s = PATIENCE_S if limits.captures or limits.joins else 0.0
        self._repairs = Repairs(self._patience_s)
        self.overheard_bytes = self.repaired_bytes = 0
        self._deaf_bytes = 0  #: repaired since the network last brought a frame, wanted or not,
        self._deaf_since = 0.0  #: which began then
        self._reports: Counter[str] = Counter()  #: by kind
        self.suspects: dict[int, str] = {}  #: blocks that an audit found different, until they are anchored anew
        self._draining = False
        self._unprepared = False  #: the attempt was taken at its word, by a shadow that knew of none
        self._ended = False  #: removed: its replayer is gone, and nobody new finds it
        self.replayer = Replayer(name, self.changed, self, limits.allowed, limits.threads)

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
                old, self._members.claim, self.attempt = self.incarnation, member, message.attempt
                self._drain()
                self._check_not_ended()
                number = (old.number if old else 0) + 1
                self.incarnation, self._unprepared = Incarnation(number, message.attempt.id), False
                self._fence()
                if old is not None:
                    log.info("run %s: attempt %s displaces %s", self.name, self.incarnation, old)
            self._members.claim = member
            assert self.incarnation is not None
            held = self.replayer.recoverable()
            if held is None:
                return Prepared(self.incarnation, [])
            return Prepared(self.incarnation, [held.step], held.spec.world_size, held.holder)

    def _check_displaceable(self, attempt: Attempt) -> None:
        old = self.attempt
        if old is None or self._members.closed:
            return
        if old.job and old.job == attempt.job and attempt.restarts > old.restarts:
            return
        # A shadow that was itself suspended has not read yet what the healthy attempt sent meanwhile.
        if self.changed.wait_for(lambda: self._members.live or self.attempt is not old, GRACE_S):
            holder = self.attempt or old
            raise NotTaken(
                "live",
                f"run {self.name!r} is being trained by process {holder.pid} on {holder.host} "
                f"(heard {self._members.silent_s:.1f} s ago); stop that job, or choose another run name",
            )

    def _drain(self) -> None:
        """Dead workers' kernels still deliver: wait for their connections to end, then for the replayer."""
        self._draining = True
        self.changed.notify_all()
        self.changed.wait_for(lambda: not self._data, DRAIN_S)
        for channel in self._data.values():
            channel.close()
        self.changed.wait_for(lambda: not self._data, DRAIN_S)
        self.changed.wait_for(lambda: self.replayer.idle)
        self._draining = False
        self.changed.notify_all()

    def _fence(self) -> None:
        """Nothing of an older attempt counts from here on; what was not whole is gone, what was whole stays."""
        self._members.fence()
        self.partition = None
        self._buffers.clear()
        self.suspects.clear()
        self._reports.clear()
        self.replayer.drop_unfinished()

    def adopt(self, message: Adopt) -> Adopted:
        """Go on from the step chosen. Idempotent: an attempt adopts once; asking again, it hears the same."""
        with self.replayer.between_steps, self.changed:
            self._check_current(message.incarnation)
            if self.incarnation is None:
                raise NotTaken("usage", f"run {self.name!r}: attempt {message.incarnation} has not prepared")
            if self.partition is not None:
                return Adopted(self.epoch, self.life, fingerprint())
            layout = Layout(message.spec)
            if message.step is None:
                self._check_memory(message.spec)
                self.replayer.begin(message.spec, message.incarnation)
                self._begin(layout, Phase.ANCHORING, -1)
            elif self.replayer.adopt(message.step, message.spec, message.incarnation):
                self._begin(layout, Phase.STREAMING, message.step)
            else:
                raise NotTaken("missing", f"run {self.name!r}: step {message.step} is not held here")
            return Adopted(self.epoch, self.life, fingerprint())

    def _begin(self, layout: Layout, phase: Phase, base: int, epoch: int = 0) -> None:
        self.epoch = max(self.epoch + 1, epoch)
        self.life = secrets.randbits(62) + 1
        self.partition = Partition(layout, epoch=self.epoch, phase=phase, base=base)
        self._repairs = Repairs(self._patience_s)

    def _check_not_ended(self) -> None:
        if self._ended:
            raise NotTaken("busy", f"run {self.name!r} was removed at this moment; try again")

    def _check_current(self, incarnation: Incarnation) -> None:
        self._check_not_ended()
        if self.incarnation is not None and incarnation != self.incarnation:
            held = self.replayer.recoverable()
            holds = f"step {held.step}" if held else "no whole step yet"
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
        gradients = RING_STEPS * (2 if spec.tap != "step" else 1)  # what was copied, and what is sent in its stead
        need = 2 * model * (1 + multiple) + gradients * model
        others = self._elsewhere()
        if others + need > self.limits.memory_bytes:
            raise NotTaken(
                "memory",
                f"run {self.name!r} may need {need:,} bytes here (parameters {model:,} and optimizer state "
                f"{multiple * model:,}, both twice while they are anchored anew, and {gradients} gradients), other "
                f"runs {others:,}, and this shadow may use {self.limits.memory_bytes:,}: raise its --memory-limit, or "
                "remove a run",
            )
        self.need_bytes = need

    def join(self, message: Join, member: Member) -> bool:
        """A rank begins or goes on streaming. False: this run is unknown here, and the spec must come along."""
        with self.changed:
            self._check_not_ended()
            if self.incarnation is None or self._outlived_by(message.incarnation):
                if message.spec is None:
                    member.send(Joined(0, 0, -1, known=False))
                    return False
                self._begin_joined(message, message.spec)
            self._check_current(message.incarnation)
            if self.partition is None:
                raise NotTaken("usage", f"run {self.name!r}: attempt {message.incarnation} has not adopted a step")
            if message.rank >= self.partition.layout.world_size:
                raise NotTaken("usage", f"rank {message.rank} of {self.partition.layout.world_size}")
            check_flow(message.flow)
            if message.life != self.life and message.epoch >= self.epoch:
                self._perform(self.partition.end_epoch("the shadow was restarted", message.epoch + 1))
            self._members.admit(message.rank, member)
            member.step, member.flow = message.step, message.flow
            self._repairs.forget_asked()
            member.send(Joined(self.epoch, self.life, self.partition.received))
            if self.partition.phase is Phase.ANCHORING:
                member.send(Anchoring(self.epoch, self.partition.first))
            if self.suspects:  # asked for while this rank may have been away
                member.send(Reanchor(self.epoch, sorted(self.suspects), "audit"))
            member.send(self._ack())
            if message.flow is not None and not self.limits.hears(message.flow):
                member.send(Report("note", UNHEARD))
            return True

    def _outlived_by(self, incarnation: Incarnation) -> bool:
        """Whether an old attempt, which has woken up, found this shadow empty before the one that had displaced it."""
        return self._unprepared and self.incarnation is not None and incarnation.number > self.incarnation.number

    def _begin_joined(self, message: Join, spec: Spec) -> None:
        """A run that this shadow does not know, or no more, goes on here under an epoch later than all."""
        self._check_memory(spec)
        layout = Layout(spec)
        self.incarnation, self._unprepared = message.incarnation, True
        self.attempt = message.attempt or Attempt(message.incarnation.id, "unknown host", 0)
        for channel in self._data.values():
            channel.close()
        self._fence()
        self.changed.wait_for(lambda: self.replayer.idle)
        self._check_current(message.incarnation)
        self.replayer.begin(spec, message.incarnation)
        self._begin(layout, Phase.RESUMING, -1, message.epoch + 1)
        log.info("run %s: begun anew by attempt %s at step %d", self.name, message.incarnation, message.step)

    def leave(self, member: Member) -> None:
        with self.changed:
            member.closed = True
            self.changed.notify_all()

    def remove(self, force: bool) -> None:
        """Forget everything. Refused while the run is trained, unless forced."""
        with self.changed:
            if self._members.live and not force:
                raise NotTaken("live", f"run {self.name!r} is being trained; stop it first, or force")
            self.incarnation = None
            self._fence()
            for channel in self._data.values():
                channel.close()
            self.replayer.forget()
            self._end()

    def remove_if_empty(self) -> bool:
        """End this run if nobody is about to train it and it holds nothing: it was asked for, and no more."""
        with self.changed:
            nobody = self._members.closed and not self._data
            if nobody and not self._ended and self.partition is None and self.replayer.recoverable() is None:
                self._end()
            return self._ended

    def _end(self) -> None:
        self._ended = True
        self.replayer.end()
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
        differing = self.replayer.differing(message.step, message.digests, LEASE_S)
        if differing is None:
            return Audited(message.step, 0, [], moved=True)
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
                if self._draining and self.replayer.idle:
                    raise Superseded(f"{header} waits for a step that cannot come any more")
                self.changed.wait(1.0)
            if header.kind is Kind.PART or header.round:
                return None
            if verdict is Verdict.DRAIN:
                return scratch[: header.length]
            return self._buffers.place(partition, header)

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
                self._repairs.moved(part.step, self.heard)
                self._perform(partition.part(part))
                self._repair(self.heard)
            elif header.round:
                self._repaired(partition, header, frame.payload)
            elif not drained:
                self._perform(partition.arrived(header))

    # ------------------------------------------------------------ what the network copies

    @property
    def flows(self) -> list[Flow]:
        """The tagged connections of the ranks that have joined."""
        with self.changed:
            return self._members.flows

    def overheard(self, header: Header, payload: memoryview, now: float) -> bool:
        """A frame that the network has copied to this shadow; its checksum holds, and its seal. False: not wanted."""
        with self.changed:
            if self.partition is None or self.incarnation is None or header.incarnation != self.incarnation.id:
                return False
            self._deaf_bytes = 0
            kept = self._keep(self.partition, header, payload)
            if kept:  # what anybody may send again, or forge, is no news of its step
                self._repairs.moved(header.step, now)
                self.overheard_bytes += header.length
            if header.rank < self.partition.layout.world_size:
                self._repairs.overheard(header.rank, header.step)
            return kept

    def _keep(self, partition: Partition, header: Header, payload: memoryview) -> bool:
        """Copy a whole frame of a round into its place, where nothing unverified has ever been."""
        if not partition.overhear(header):
            return False
        self._buffers.place(partition, header)[:] = payload
        self._perform(partition.arrived(header))
        return True

    def _repaired(self, partition: Partition, header: Header, payload: memoryview) -> None:
        """A frame that was asked for."""
        if not self._keep(partition, header, payload):
            return
        now = time.monotonic()
        self._repairs.answered(header.step, header.rank, now)
        self.repaired_bytes += header.length
        if not self._deaf_bytes:
            self._deaf_since = now
        self._deaf_bytes += header.length
        enough = DEAF_STEPS * sum(block.nbytes for block in partition.layout.blocks)
        if self._patience_s and self._deaf_bytes > enough and now - self._deaf_since > DEAF_S:
            self._deaf_bytes = 0
            self._report(Report("note", DEAF))

    def repair(self, now: float) -> None:
        """Ask the ranks for what the network has not brought. Called every few milliseconds."""
        with self.changed:
            self._repair(now)

    def _repair(self, now: float) -> None:
        partition = self.partition
        if partition is None or partition.layout.tap == "step":
            return
        self._repairs.done(partition.received)
        for step in partition.owing():
            for rank, items in partition.repairs(step).items():
                if self._repairs.due(step, rank, now):
                    self._members.tell_one(rank, Repair(partition.epoch, step, items))

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

    # ------------------------------------------------------------ effects

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Apply(step=step):
                    assert self.partition is not None
                    self.replayer.put(Work(effect, self.partition, self._buffers.of(step)))
                case Freeze():
                    self.replayer.put(effect)
                case Drop(step, void):
                    self._buffers.drop(step, void)
                case Acknowledge():
                    self._members.tell(self._ack())
                case AskResume(epoch, reason):
                    self.epoch = epoch
                    self._repairs = Repairs(self._patience_s)
                    log.warning("run %s: epoch %d begins: %s", self.name, epoch, reason)
                    self._members.tell(Resume(epoch, reason))
                case AskAnchors(epoch, step):
                    self._members.tell(Anchoring(epoch, step))
                case Tell(kind, text, step, fatal):
                    self._report(Report(kind, text, step, fatal))
        if effects:
            self.changed.notify_all()

    def _ack(self) -> Ack:
        p = self.partition
        assert p is not None
        return Ack(p.epoch, p.received, p.stable, p.applied_step, p.recovery)

    def _report(self, report: Report) -> None:
        self.last_error = report.text
        self._reports[report.kind] += 1
        if self._reports[report.kind] <= REPORTS:
            more = "; more of this kind are not logged" if self._reports[report.kind] == REPORTS else ""
            log.warning("run %s: %s%s", self.name, report.text, more)
        self._members.tell(report)

    def _suspect(self, step: int, differing: list[Digest]) -> None:
        """Ask the owners of these blocks to anchor them anew."""
        new = {d.block: d.key for d in differing if d.block not in self.suspects}
        if not new or self.partition is None:
            return
        for block, key in new.items():
            name = self.partition.layout.blocks[block].fqn
            self.suspects[block] = (
                f"audit at step {step}: {name}{' ' + key if key else ''} differs between trainer and shadow"
            )
            self.last_error = self.suspects[block]
        self._members.tell(Reanchor(self.epoch, sorted(new), "audit"))

    # ------------------------------------------------------------ what the replayer tells

    def frozen(self) -> None:
        self.suspects.clear()  # every block comes anew

    def applied(self, work: Work, distances: dict[int, float], differing: list[Digest]) -> None:
        if self.partition is not work.partition:
            return  # removed meanwhile
        step = work.apply.step
        for block, largest in distances.items():
            text = f"{self.suspects.pop(block)} by up to {largest:g}; anchored anew at step {step}"
            self._report(Report("differs", text, step))
        self._suspect(step, differing)
        self._perform(work.partition.applied(work.apply.epoch, step))

    def failed(self, work: Work, error: Exception) -> None:
        """A step that this shadow cannot apply: its state is of no step any more, so begin again from anchors."""
        if self.partition is not work.partition:
            return  # removed meanwhile
        step = work.apply.step
        if self._reports["refused"] < REPORTS:
            log.error("run %s: step %d cannot be applied", self.name, step, exc_info=error)
        self._report(Report("refused", f"the shadow cannot apply step {step}: {error}", step, fatal=True))
        drops: list[Effect] = [Drop(step, void=True) for step in self.replayer.void(work)]
        kept = self.replayer.frozen.step if self.replayer.frozen is not None else -1
        self._perform(drops + work.partition.lost(work.apply.epoch, kept, str(error)))

    # ------------------------------------------------------------ reading

    def lease(self, step: int | None) -> Cut:
        """Hold one whole step for a reader, until `release`."""
        cut = self.replayer.lease(step)
        self._used = time.monotonic()
        return cut

    def release(self, cut: Cut) -> None:
        self.replayer.release(cut)

    @property
    def idle_s(self) -> float:
        """Seconds since this run was trained or read, 0 while it is."""
        with self.changed:
            in_use = self._members.live or self.replayer.leased
            return 0.0 if in_use else time.monotonic() - max(self.heard, self._used)

    def status(self) -> dict[str, Any]:
        with self.changed:
            p, state, held = self.partition, self.replayer.state, self.replayer.recoverable()
            applied = state.step if state else -1
            newest = max([p.received, *p.newest.values(), *self._members.steps]) if p else -1
            return {
                "run": self.name,
                "incarnation": str(self.incarnation) if self.incarnation else "",
                "live": self._members.live,
                "epoch": self.epoch,
                "phase": p.phase.value if p else "idle",
                "world_size": p.layout.world_size if p else 0,
                "received": p.received if p else applied,
                "stable": p.stable if p else applied,
                "applied": p.applied_step if p else applied,
                "recovery": p.recovery if p else (held.step if held else -1),
                "newest": newest,
                "lag": max(0, newest - p.received) if p else 0,
                "waiting_for": p.missing if p else [],
                "blocks_without_state": p.blocks_without_state() if p else 0,
                "mode": self._mode(),
                "bytes_in": self.bytes_in,
                "bytes_overheard": self.overheard_bytes,
                "bytes_repaired": self.repaired_bytes,
                "bytes_in_per_s": self._rate(),
                "memory_bytes": self.memory_bytes(),
                "silent_s": round(time.monotonic() - self.heard, 3),
                "last_error": self.last_error,
            }

    def _mode(self) -> str:
        if self.replayer.state is None:
            return ""
        spec = self.replayer.state.spec
        return "drift" if spec.replay == "fast" or differs(spec.fingerprint, fingerprint()) else "exact"

    def memory_bytes(self) -> int:
        """Tensor bytes held: states, gradients and anchors."""
        with contextlib.suppress(RuntimeError):  # the replayer may add to a state while it is counted
            return self._buffers.nbytes + self.replayer.nbytes
        return -1
