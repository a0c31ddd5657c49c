"""Reliable multicast of messages to a few peers that all need them. Sans-I/O: time is an argument.

    Sender     put() ─▶ next() says what goes out: pieces to all, pieces to one, a question to all
    Receiver   expect() says where a message belongs, take() puts pieces there, answer() says what is missing

The sender asks, every half window and whenever it has no more to send; each peer answers once, with everything that it
has (cumulative) and what is missing before the place that was asked about. A piece that several peers miss is sent to
all again, one that a single peer misses to that one. A question carries a serial number, and every piece the serial of
the first question after it: an answer says nothing about pieces that were sent after it was asked for.

What is in flight, sent and not answered for by every peer, is bounded by a window. It grows while nothing is lost
and shrinks by half the share that was (as DCTCP does, Alizadeh et al., SIGCOMM 2010), for a sender shares its link and
the queues of the switch with others, while random loss alone must not slow it down. Nobody who merely listens is ever
waited for. What cannot be delivered within the deadline raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .assembly import Assembly, Bytes, runs
from .datagrams import MOST_MISSING, Answer, Missing, Pieces

#: A window in the beginning, and never below, unless the peers' buffers are smaller still.
FIRST_WINDOW_BYTES, LEAST_WINDOW_BYTES = 1 << 20, 128 << 10
#: What a window grows by when all of it has arrived, once something was lost for the first time; before, it doubles.
GROWTH_BYTES = 64 << 10
#: How long the other peers' answers are waited for before what one peer misses is sent to it alone.
TOGETHER_S = 0.001
#: A question that is not answered is asked again after twice the usual time, within these limits; then twice as late.
SOONEST_S, LATEST_S = 0.01, 0.25
#: With pacing, so much may go out at once.
BURST_BYTES = 128 << 10


class Burst(NamedTuple):
    """Send pieces ``[first, stop)`` of a message, which are all table or all payload: to all (None), or to one peer."""

    to: int | None
    message: Outgoing
    first: int
    stop: int


class Question(NamedTuple):
    """Ask all: what is here of the messages before `number`, and of the `first` pieces of that?

    It goes to the group as the pieces do, and so is behind them; what was sent to one peer alone it may overtake.
    """

    serial: int
    number: int
    first: int


class Outgoing:
    """A message on its way. Its memory must not change until `done` is called."""

    def __init__(self, number: int, table: Bytes, payload: Bytes, size: int, done: Callable[[], None]) -> None:
        self.number, self.size, self.done = number, size, done
        self.areas = (table, payload)
        self.tables = -(-len(table) // size)
        self.count = self.tables - (-len(payload) // size)
        self.began = 0.0  #: when its first piece went out
        self.sent = 0
        self.owed: set[int] = set()  #: peers that do not have all of it
        self.serials = np.zeros(self.count, np.uint64)  #: of the first question after each piece
        self.lacking: dict[int, npt.NDArray[np.bool_]] = {}  #: by peer: what it misses and is to be sent again
        self.lacked = (0.0, 0)  #: since when, and said in answer to which question

    def bytes_of(self, first: int, stop: int) -> Bytes:
        """What is in these pieces."""
        area, base = (0, 0) if first < self.tables else (1, self.tables)
        return self.areas[area][(first - base) * self.size : (stop - base) * self.size]


class _Peer:
    def __init__(self) -> None:
        self.answered = 0  #: serial of the newest question
        self.whole = 0  #: number of the first message that it does not have
        self.lost_bytes = 0  #: since the window was last looked at


class Sender:
    """What one rank sends to its peers. Not thread-safe.

    `window_bytes` bounds what is in flight, `rate_bytes_s` paces it, `batch` is how many pieces go out at once.
    """

    def __init__(
        self, peers: Collection[int], size: int, batch: int, window_bytes: int, deadline_s: float,
        rate_bytes_s: float | None = None,
    ) -> None:  # fmt: skip
        self.size, self.batch, self.deadline_s = size, batch, deadline_s
        self.resent_bytes = 0
        self.in_flight = 0  #: bytes
        self.window_bytes = min(FIRST_WINDOW_BYTES, window_bytes)
        self._least, self._most = min(LEAST_WINDOW_BYTES, window_bytes), window_bytes
        self._starting = True  #: nothing was lost yet
        self._peers = {peer: _Peer() for peer in peers}
        self._messages: dict[int, Outgoing] = {}  #: not with every peer yet; ascending
        self._begun: deque[int] = deque()  #: of those, begun to be sent
        self._fresh: deque[Outgoing] = deque()  #: not sent to the end yet
        self._numbers = 0
        self._serial = 0  #: of the newest question
        self._since = 0  #: bytes that have gone out since
        self._asked: dict[int, tuple[int, float]] = {}  #: not answered by all: bytes that went out before it, and when
        self._again_at = float("inf")
        self._patience_s = SOONEST_S
        self._usual_s = SOONEST_S / 2
        self._repairs: deque[Burst] = deque()
        self._lackings = False  #: whether peers miss what is not among those yet
        self._rate = rate_bytes_s
        self._allowed, self._allowed_at = float(BURST_BYTES), 0.0

    @property
    def idle(self) -> bool:
        """Whether everything that was put is with every peer."""
        return not self._messages

    @property
    def more(self) -> bool:
        """Whether there is something to send, now or when the window allows."""
        return bool(self._fresh or self._repairs or self._lackings)

    def put(self, table: Bytes, payload: Bytes, done: Callable[[], None]) -> None:
        """Send this message after all others. `done` is called by `heard`, once every peer has it."""
        message = Outgoing(self._numbers, table, payload, self.size, done)
        message.owed = set(self._peers)
        self._numbers += 1
        self._messages[message.number] = message
        self._fresh.append(message)

    def next(self, now: float) -> Burst | Question | None:
        """What goes out now; None: nothing before `due`, or before something is put or heard.

        Raises TimeoutError, naming the peers, if a message is not with every peer in time.
        """
        if (oldest := next(iter(self._messages.values()), None)) is None:
            return None
        if oldest.sent and now - oldest.began > self.deadline_s:
            raise TimeoutError(
                f"ranks {sorted(oldest.owed)} of the group have not acknowledged in {self.deadline_s:g} s what was "
                "sent to all by multicast"
            )
        if self._rate is not None:
            gained = (now - self._allowed_at) * self._rate
            self._allowed, self._allowed_at = min(BURST_BYTES, self._allowed + gained), now
        if self._rate is None or self._allowed >= self.size:
            self._find_repairs(now)
            while self._repairs and self._repairs[0].message.number not in self._messages:
                self._repairs.popleft()  # they have it by now, and its memory may be used otherwise
            room = min(self.window_bytes - self.in_flight, max(1, self.window_bytes // 2) - self._since)
            if self._rate is not None:
                room = min(room, int(self._allowed))
            if room > 0 and (self._repairs or (self._fresh and self._within_span())):
                most = max(1, min(self.batch, room // self.size))
                return self._burst(self._next_repair(most) if self._repairs else self._next_pieces(now, most))
            if self._since:
                return self._ask(now)
        if now >= self._again_at and self._asked:
            self._patience_s = min(2 * self._patience_s, LATEST_S)
            return self._ask(now)
        return None

    def due(self, now: float) -> float:
        """When `next` has something to say again, if nothing happens until then."""
        if (oldest := next(iter(self._messages.values()), None)) is None:
            return float("inf")  # whoever has not answered has everything
        found = self._again_at
        if self._rate is not None and self._allowed < self.size and (self._repairs or self._fresh or self._since):
            found = min(found, now + (self.size - self._allowed) / self._rate)
        if self._lacking():
            found = min(found, now + TOGETHER_S)
        if oldest.sent:
            found = min(found, oldest.began + self.deadline_s + 0.001)
        return found

    def heard(self, rank: int, answer: Answer, now: float) -> None:
        """A peer has answered. What cannot be an answer changes nothing."""
        peer = self._peers.get(rank)
        if peer is None or not 0 < answer.serial <= self._serial or answer.number > self._numbers:
            return
        for missing in answer.missing:
            self._note(rank, peer, missing, answer.serial, now)
        for number in range(peer.whole, answer.number):
            if (message := self._messages.get(number)) is None:
                continue
            if message.sent < message.count:  # nobody can have it
                return
            self._has(rank, message)
        peer.whole = max(peer.whole, answer.number)
        if answer.serial > peer.answered:
            peer.answered = answer.serial
            if (asked := self._asked.get(answer.serial)) is not None:
                self._usual_s += (now - asked[1] - self._usual_s) / 8
            self._settle()

    def gone(self, rank: int) -> None:
        """A peer needs nothing any more, neither what was put nor what will be, and answers no more."""
        self._peers.pop(rank, None)
        for message in list(self._messages.values()):
            self._has(rank, message)
        if self._peers:
            self._settle()

    def _has(self, rank: int, message: Outgoing) -> None:
        message.owed.discard(rank)
        message.lacking.pop(rank, None)
        if not message.owed:
            del self._messages[message.number]
            if message.sent:
                self._begun.remove(message.number)
            message.done()

    # ------------------------------------------------------------ what goes out

    def _within_span(self) -> bool:
        """However slow one peer is, this bounds what has been begun and must be kept."""
        return not self._begun or self._fresh[0].sent > 0 or self._fresh[0].number - self._begun[0] < self._span

    @property
    def _span(self) -> int:
        return max(2, 2 * self._most // (1 << 20))

    def _next_repair(self, most: int) -> Burst:
        burst = self._repairs.popleft()
        if burst.stop - burst.first > most:
            self._repairs.appendleft(burst._replace(first=burst.first + most))
            burst = burst._replace(stop=burst.first + most)
        self.resent_bytes += len(burst.message.bytes_of(burst.first, burst.stop))
        return burst

    def _next_pieces(self, now: float, most: int) -> Burst:
        message = self._fresh[0]
        if not message.sent:
            message.began = now
            self._begun.append(message.number)
        end = message.tables if message.sent < message.tables else message.count
        burst = Burst(None, message, message.sent, min(end, message.sent + most))
        message.sent = burst.stop
        if message.sent == message.count:
            self._fresh.popleft()
        return burst

    def _burst(self, burst: Burst) -> Burst:
        burst.message.serials[burst.first : burst.stop] = self._serial + 1
        nbytes = len(burst.message.bytes_of(burst.first, burst.stop))
        self._since += nbytes
        self.in_flight += nbytes
        self._allowed -= nbytes
        return burst

    def _ask(self, now: float) -> Question:
        self._serial += 1
        self._asked[self._serial] = self._since, now
        self._since = 0
        self._again_at = now + self._patience_s
        if self._fresh and self._fresh[0].sent:
            return Question(self._serial, self._fresh[0].number, self._fresh[0].sent)
        return Question(self._serial, self._fresh[0].number if self._fresh else self._numbers, 0)

    # ------------------------------------------------------------ what comes back

    def _note(self, rank: int, peer: _Peer, missing: Missing, serial: int, now: float) -> None:
        message = self._messages.get(missing.number)
        if message is None or rank not in message.owed:
            return
        stop = min(missing.stop, message.sent)
        told = message.serials[missing.first : stop] <= serial
        if not told.any():
            return
        lacking = message.lacking.setdefault(rank, np.zeros(message.count, np.bool_))[missing.first : stop]
        peer.lost_bytes += self.size * int(np.count_nonzero(told & ~lacking))
        lacking |= told
        self._lackings = True
        if not message.lacked[1]:
            message.lacked = now, serial

    def _lacking(self) -> list[Outgoing]:
        if not self._lackings:
            return []
        found = [self._messages[number] for number in self._begun if self._messages[number].lacking]
        self._lackings = bool(found)
        return found

    def _find_repairs(self, now: float) -> None:
        """Turn what peers miss into pieces to send, once all have said what they miss."""
        for message in self._lacking() if not self._repairs else ():
            since, serial = message.lacked
            if now - since < TOGETHER_S and any(self._peers[rank].answered < serial for rank in message.owed):
                continue
            rows = np.array(list(message.lacking.values()))
            several = rows.sum(0) >= min(2, len(self._peers))  # to a single peer the group is as good, and behind it
            self._resend(None, message, several)
            for rank, lacking in message.lacking.items():
                self._resend(rank, message, lacking & ~several)
            message.lacking, message.lacked = {}, (0.0, 0)
            return

    def _resend(self, to: int | None, message: Outgoing, which: npt.NDArray[np.bool_]) -> None:
        for first, stop in runs(which):
            middle = min(max(first, message.tables), stop)
            for start, end in ((first, middle), (middle, stop)):
                if start < end:
                    self._repairs.append(Burst(to, message, start, end))

    def _settle(self) -> None:
        """All peers have answered some more questions: what went out before those is not in flight any more."""
        slowest = min(peer.answered for peer in self._peers.values())
        arrived = 0
        for serial in [serial for serial in self._asked if serial <= slowest]:
            arrived += self._asked.pop(serial)[0]
        if not self._asked:
            self._again_at = float("inf")
        self._patience_s = min(max(SOONEST_S, 2 * self._usual_s), LATEST_S)
        if not arrived:
            return
        self.in_flight -= arrived
        lost = min(1.0, max(peer.lost_bytes for peer in self._peers.values()) / arrived)
        if lost:
            self._starting = False
            self.window_bytes = max(self._least, int(self.window_bytes * (1 - lost / 2)))
        else:
            growth = arrived if self._starting else GROWTH_BYTES * arrived // self.window_bytes
            self.window_bytes = min(self._most, self.window_bytes + growth)
        for peer in self._peers.values():
            peer.lost_bytes = 0


class Receiver:
    """What one rank receives from one of its peers. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.duplicates = 0
        self.refused = 0  #: messages that were whole and not what they should have been
        self._whole = 0  #: number of the first message that is not here
        self._numbers = 0
        self._expected: dict[int, tuple[Assembly, Callable[[], bool]]] = {}

    def expect(self, table: Bytes, payload: Bytes, done: Callable[[], bool]) -> None:
        """The next message belongs here. `done` is called by `take` once it is; if False, it is asked for anew."""
        tables, payloads = (-(-len(area) // self.size) for area in (table, payload))
        assembly = Assembly(tables + payloads, tables, self.size, table, payload)
        self._expected[self._numbers] = assembly, done
        self._numbers += 1

    def take(self, pieces: Pieces) -> None:
        if (found := self._expected.get(pieces.number)) is None:
            self.duplicates += pieces.stop - pieces.first
            return
        assembly, done = found
        new = assembly.put(pieces)
        self.duplicates += pieces.stop - pieces.first - new
        if assembly.left:
            return
        if not done():
            self.refused += 1
            assembly.forget()
            return
        del self._expected[pieces.number]
        while self._whole < self._numbers and self._whole not in self._expected:
            self._whole += 1

    def answer(self, serial: int, number: int, first: int) -> Answer:
        """To a question for what is here up to piece `first` of a message."""
        missing: list[Missing] = []
        for asked in range(self._whole, number + 1):
            if len(missing) >= MOST_MISSING:
                break
            before = first if asked == number else (1 << 16) - 1
            if (found := self._expected.get(asked)) is not None:
                missing += found[0].missing(asked, before)
            elif asked >= self._numbers and before:
                missing.append(Missing(asked, 0, before))  # nobody knows yet where it belongs
        return Answer(serial, self._whole, tuple(islice(missing, MOST_MISSING)))
