"""One rank's link to one shadow: a data connection with a thread that sends, a control connection with one that
listens.

The training thread only appends to a list (`put`) and reads what the control thread has learnt. What it has put is kept
until the shadow calls it stable, and sent again after a reconnection. A link never gives up and never raises into
training; `state` and `ack` say where it stands.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable

from ..errors import CheckmateError, ProtocolError, Refused, Unsupported
from ..transport.base import Channel, greet, refused
from ..transport.tcp import Address, connect
from ..wire.messages import (
    Ack,
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
    Reanchor,
    Refusal,
    Repair,
    Report,
    Resume,
    Spec,
)  # fmt: skip
from ..wire.packets import Flow
from .staging import Batch, Pool

log = logging.getLogger("checkmate")

CONNECT_S = 5.0
PING_S = 2.0
BACKOFF_S = (0.05, 2.0)
_jitter = random.Random()  # not the global generator, which belongs to the training loop
#: Refusals that trying again will not change.
FINAL = frozenset(("superseded", "token", "version", "memory", "unsupported"))
#: A shadow takes so many steps beyond the one that it has applied (`partition.RING_STEPS`), and reads no further.
RING_STEPS = 3
#: A shadow that could not apply so many steps, and the last within so many of the first, will not learn it.
FAILURES, FAILURES_STEPS = 3, 1000


class Link:
    """See the module. `epoch`, `life` and `step` are where this rank stands as it connects first."""

    def __init__(
        self, address: Address, run: str, attempt: Attempt, incarnation: Incarnation, rank: int, spec: Spec, pool: Pool,
        *, epoch: int, life: int, step: int, token: bytes | None = None, flow: Flow | None = None,
    ) -> None:  # fmt: skip
        self.address, self.run, self.incarnation, self.rank = address, run, incarnation, rank
        self.attempt = attempt
        self.spec, self.pool, self.token, self.flow = spec, pool, token, flow
        self.changed = threading.Condition()  # guards what follows; never held while sending
        self.ack: Ack | None = None  #: the newest, of the present connection
        self.streaming = False  #: both connections stand
        self.wanted = epoch  #: the epoch that the shadow wants; training takes it up at its next step
        self.wanted_reason = ""
        self.anchoring = (-1, 0)  #: epoch in which anchors may be sent, and at which steps: from this one on
        self.begun = (-1, -1)  #: epoch, and the step after which this rank began to stream in it
        self._reanchor: set[int] = set()
        self.audited: Audited | None = None
        self.fatal: CheckmateError | None = None  #: refused for good: this attempt goes on unprotected
        self.trouble = ""  #: why there is no connection at present
        self.reports: deque[Report] = deque(maxlen=100)
        self.step = step
        self.bytes_sent = 0
        self.bytes_repaired = 0  #: of these, because the network had not brought them
        self._failed: deque[int] = deque(maxlen=FAILURES)  #: the newest steps that the shadow could not apply
        self._life = life
        self._unsent: deque[Batch] = deque()
        self._sent: deque[Batch] = deque()
        self._sending: Batch | None = None
        self._sending_control = threading.Lock()  # pings and audits come from two threads
        self._data: Channel | None = None
        self._control: Channel | None = None
        self._closed = False
        self._threads = [
            threading.Thread(target=self._listen, name="checkmate control", daemon=True),
            threading.Thread(target=self._send, name="checkmate sender", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------ for the training thread

    def put(self, batch: Batch) -> None:
        """Queue a batch. One of an epoch that is over is dropped at once."""
        with self.changed:
            if batch.epoch < self.wanted or self.fatal is not None or self._closed:
                batch.free(self.pool)
                return
            self._unsent.append(batch)
            self.changed.notify_all()

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until something that the control thread sets makes `predicate` true."""
        with self.changed:
            return self.changed.wait_for(predicate, timeout_s)

    def take_reanchor(self) -> set[int]:
        """Blocks that the shadow asked to have anchored anew, since the last call."""
        with self.changed:
            blocks, self._reanchor = self._reanchor, set()
        return blocks

    def audit(self, request: Audit, timeout_s: float) -> Audited | None:
        """Ask for a comparison at the newest step; None if no answer came."""
        with self.changed:
            self.audited = None
            control = self._control
        if control is None or not self.streaming:
            return None
        try:
            with self._sending_control:
                control.send(request)  # of any size, so it may have to wait for the shadow to read
        except OSError:
            control.close()  # where half a message may have left; the control thread makes the next
            return None
        return self.audited if self.wait_for(lambda: self.audited is not None, timeout_s) else None

    @property
    def backlog(self) -> int:
        """Batches whose memory is not free yet: not sent, being sent, or not known to be stable."""
        return len(self._unsent) + (self._sending is not None) + len(self._sent)

    def close(self, timeout_s: float = 1.0) -> None:
        """End both connections; what is not sent by now is lost. The threads end too, if later, then by themselves."""
        with self.changed:
            self._closed = True
            channels = [c for c in (self._data, self._control) if c is not None]
            self.changed.notify_all()
        for channel in channels:
            channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.05, min(1.0, timeout_s)))

    # ------------------------------------------------------------ sender

    def _send(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._closed or (self._data is not None and self._sendable()))
                if self._closed:
                    return
                channel, batch = self._data, self._unsent.popleft()
                assert channel is not None
                self._sending = batch
            try:
                before = channel.bytes_sent
                channel.send_frames(batch.frames(self.incarnation.id, self.rank))
                sent = True
            except Exception as error:
                sent = False
                self._lost(channel, f"sending failed: {error}")
                if not isinstance(error, (OSError, ValueError)):  # ValueError: the socket was closed under us
                    log.exception("checkmate: step %d cannot be sent", batch.step)
                    self.give_up(CheckmateError(f"step {batch.step} cannot be sent: {error!r}"))
            with self.changed:
                self.bytes_sent += channel.bytes_sent - before
                self._sending = None
                void = self.ack is not None and batch.void(self.ack.epoch, self.ack.stable)
                if batch.source is not None:
                    self._repaired(batch, channel.bytes_sent - before)
                elif not batch.repairs and (void or batch.epoch < self.wanted or self.fatal is not None):
                    batch.free(self.pool)
                elif sent and channel is self._data:
                    self._sent.append(batch)
                else:
                    self._unsent.appendleft(batch)
                self.changed.notify_all()

    def _sendable(self) -> bool:
        """Whether the next batch may leave. A repair must never stand behind what the shadow does not read yet.

        It may wait for that very repair before it reads on. So with a flow nothing leaves before there is room for it.
        """
        if not self._unsent or self.flow is None or self._unsent[0].source is not None:
            return bool(self._unsent)
        if (ack := self.ack) is None:
            return False
        batch = self._unsent[0]
        applied = ack.applied if ack.epoch == batch.epoch else -1
        begun = self.begun[1] if self.begun[0] == batch.epoch else -1
        return batch.step <= max(applied, begun) + RING_STEPS

    def _repair(self, message: Repair) -> None:
        """Send pieces of a step before all else. If they are lost on the way, the shadow asks again."""
        sending = () if self._sending is None else (self._sending,)
        for batch in (*self._sent, *sending, *self._unsent):
            if batch.kept and (batch.epoch, batch.step) == (message.epoch, message.step):
                self._unsent.extendleft(batch.repair(message.items))

    def _repaired(self, repair: Batch, nbytes: int) -> None:
        assert repair.source is not None
        repair.source.repairs -= 1
        self.bytes_repaired += nbytes

    def _forget(self, void: Callable[[Batch], bool]) -> None:
        """Free every batch that is void, but for the one that is being sent, and those that repairs are sent from."""
        for name in ("_sent", "_unsent"):
            kept: deque[Batch] = deque()
            for batch in getattr(self, name):
                if batch.source is not None and void(batch):
                    batch.source.repairs -= 1
                elif void(batch) and not batch.repairs:
                    batch.free(self.pool)
                else:
                    kept.append(batch)
            setattr(self, name, kept)

    def _lost(self, channel: Channel, why: str) -> None:
        """This data connection is of no use any more; the control thread makes the next."""
        with self.changed:
            if self._data is not channel:
                return  # the control thread was faster
            self._data = None
            self.streaming = False
            self.trouble = why
            control = self._control
        channel.close()
        if control is not None:
            control.close()

    def _watch(self, channel: Channel) -> None:
        """Sending alone would notice the end of a data connection late, and never where all is sent."""
        try:
            message = channel.message()
            why = message.reason if isinstance(message, Refusal) else "the shadow closed the data connection"
        except (OSError, ValueError, CheckmateError) as error:
            why = f"the data connection broke: {error}"
        self._lost(channel, why)

    # ------------------------------------------------------------ control

    def _listen(self) -> None:
        backoff = BACKOFF_S[0]
        while not self._closed and self.fatal is None:
            try:
                began, connected = time.monotonic(), False
                self._connect()
                connected = True
                self._hear()
            except Refused as error:
                if error.kind in FINAL:
                    self.give_up(error)
                self.trouble = str(error)
            except (OSError, ValueError, CheckmateError) as error:
                if self.streaming or not connected:  # else `_lost` has said why
                    self.trouble = str(error)
            except Exception as error:
                log.exception("checkmate: the link to %s fails", self.address)
                self.trouble = repr(error)
            self._disconnect()
            if time.monotonic() - began > 5.0:
                backoff = BACKOFF_S[0]
            with self.changed:
                self.changed.wait_for(lambda: self._closed, backoff * _jitter.uniform(0.7, 1.3))
            backoff = min(2 * backoff, BACKOFF_S[1])

    def give_up(self, error: CheckmateError) -> None:
        """This attempt goes on unprotected, for this reason."""
        with self.changed:
            self.fatal = error
            self._forget(lambda batch: True)
            self.changed.notify_all()

    def _disconnect(self) -> None:
        with self.changed:
            channels = [c for c in (self._data, self._control) if c is not None]
            self._data = self._control = None
            self.streaming = False
            self.ack = None
            self.changed.notify_all()
        for channel in channels:
            channel.close()

    def _open(self, role: str) -> Channel:
        channel = connect(self.address, CONNECT_S)
        greet(channel, role, self.token, CONNECT_S)
        return channel

    def _connect(self) -> None:
        control = self._open("control")
        with self.changed:
            self._control = control
        joined = self._join(control, None)
        if not joined.known:
            joined = self._join(control, self.spec)
        data = self._open("data")
        try:
            data.send(Attach(self.run, self.incarnation, self.rank, joined.epoch))
            data.stream.settimeout(None)
            control.stream.settimeout(PING_S)
        except OSError:
            data.close()
            raise
        with self.changed:
            self.changed.wait_for(lambda: self._sending is None)  # it goes back to its place in the order first
            self._life = joined.life
            self._want(joined.epoch, "the shadow has lost its state")
            self._unsent = self._sent + self._unsent
            self._sent = deque()
            self._forget(lambda batch: batch.void(joined.epoch, joined.received))
            if self._closed:
                data.close()
                raise ConnectionAbortedError("closed")
            self._data = data
            threading.Thread(target=self._watch, args=(data,), name="checkmate data", daemon=True).start()
            self.streaming = True
            self.trouble = ""
            self.changed.notify_all()

    def _join(self, control: Channel, spec: Spec | None) -> Joined:
        attempt = None if spec is None else self.attempt
        where = (self.wanted, self._life, self.step)
        control.send(Join(self.run, self.incarnation, self.rank, *where, spec, attempt, self.flow))
        while True:
            match self._next(control):
                case Joined() as joined:
                    return joined
                case Ack() | Report() | Resume() | Anchoring():
                    continue  # on their way before the shadow saw Join; it sends them again
                case message:
                    raise ProtocolError(f"{type(message).__name__} in answer to Join")

    def _next(self, control: Channel) -> Control:
        message = control.message()
        if message is None:
            raise ConnectionResetError(f"{self.address} closed the control connection")
        if isinstance(message, Refusal):
            raise refused(message)
        return message

    def _hear(self) -> None:
        control = self._control
        assert control is not None
        pinged = time.monotonic()
        while self.fatal is None:
            if time.monotonic() - pinged >= PING_S:
                with self._sending_control:
                    control.send_nowait(Ping(self.step))
                pinged = time.monotonic()
            try:
                message = self._next(control)
            except TimeoutError:
                continue
            with self.changed:
                self._take(message)
                self.changed.notify_all()

    def _take(self, message: Control) -> None:
        match message:
            case Ack():
                self.ack = message
                self._forget(lambda batch: batch.void(message.epoch, message.stable))
            case Resume(epoch, reason):
                self._want(epoch, reason)
            case Anchoring(epoch, step):
                self.anchoring = (epoch, step)
            case Repair():
                self._repair(message)
            case Reanchor(_, blocks, _):
                self._reanchor.update(blocks)
            case Report():
                self.reports.append(message)
                if message.kind == "refused" and message.fatal:
                    self._refused(message)
            case Audited():
                self.audited = message
            case Pong():
                pass
            case _:
                raise ProtocolError(f"{type(message).__name__} from a shadow to a rank")

    def _refused(self, report: Report) -> None:
        """One refused step costs an epoch, and the next may do better. Not again and again."""
        self._failed.append(report.step)
        if len(self._failed) == FAILURES and report.step - self._failed[0] <= FAILURES_STEPS:
            self.give_up(Unsupported(report.text))

    def _want(self, epoch: int, reason: str) -> None:
        if epoch > self.wanted:
            self.wanted, self.wanted_reason = epoch, reason
            self._forget(lambda batch: batch.epoch < epoch)
