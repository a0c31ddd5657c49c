"""From TCP segments that somebody else exchanges to frames, without a word to either side. Sans-I/O.

    segments --Stream: order by sequence number, give up holes--> bytes --Scanner: find and verify frames--> take()

A passive receiver cannot ask for what it missed. So everything here ends in one of two ways: a frame whose checksums
hold is handed to `take`, or what stands in its place is counted (holes, bad frames, skipped bytes); repairing is for
others. Memory is bounded: a stream has that of one frame, and `limit_bytes` for segments that wait behind a hole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from xxhash import xxh3_64_intdigest as xxh3

from ..errors import ProtocolError
from .frames import HEADER_BYTES, MAGIC, MAX_BULK_BYTES, Header, decode_header
from .packets import SYN

#: header, its 80 bytes, payload, trailer. The views lie one behind the other in memory and last until `take` returns.
Take = Callable[[Header, memoryview, memoryview, memoryview], None]

#: Segments wait so long for one before them that is missing. Reordering takes microseconds, a retransmission longer.
DEADLINE_S = 0.05
#: And at most so many bytes of them, each counted with what it costs to keep.
LIMIT_BYTES = 4 << 20
SEGMENT_COST_BYTES = 128
#: Sequence numbers further away than this belong to no retransmission and to no hole worth waiting for.
NEAR_BYTES = 64 << 20

_MASK = 0xFFFFFFFF
_HALF = 1 << 31


class Scanner:
    """Frames in a byte stream of which parts may be missing.

    One memory holds the frame that is arriving, so a hole in it only moves the place where the next bytes belong: the
    frame is lost, and the next one begins where it would have. Only a hole at the end of a frame or later leads to a
    search for the next header.
    """

    def __init__(self, take: Take, trailer_bytes: int = 0) -> None:
        self.take = take
        self.trailer_bytes = trailer_bytes
        self.frames = 0
        self.bad_frames = 0  #: with a checksum that fails, of header or payload
        self.torn_frames = 0  #: with a hole in them, known because their header was there
        self.skipped_bytes = 0  #: passed over in search of a header
        self._memory = memoryview(bytearray(HEADER_BYTES + MAX_BULK_BYTES + trailer_bytes))
        self._begin(searching=True)

    def restart(self, searching: bool) -> None:
        """What comes next is a header, or else, `searching`, anything. A frame that has begun is given up."""
        if self._header is not None:
            self.torn_frames += 1
        else:
            self.skipped_bytes += self._filled
        self._begin(searching)

    def _begin(self, searching: bool) -> None:
        self._header: Header | None = None
        self._sum = 0
        self._filled = 0  # bytes of `_memory`; while searching they are the beginning of what may be a header
        self._need = 0 if searching else HEADER_BYTES  # 0 while searching
        self._torn = False

    def put(self, data: memoryview) -> None:
        """The next bytes of the stream."""
        stop = self._filled + len(data)
        if stop < self._need:
            self._memory[self._filled : stop] = data
            self._filled = stop
        else:
            self._put(data)

    def _put(self, data: memoryview) -> None:
        while data:
            if not self._need:
                data = self._search(data)
                continue
            stop = min(self._filled + len(data), self._need)
            count = stop - self._filled
            self._memory[self._filled : stop] = data[:count]
            self._filled = stop
            data = data[count:]
            if stop == self._need:
                self._reached()

    def skip(self, count: int) -> None:
        """`count` bytes of the stream are missing."""
        if self._header is None or self._filled + count > self._need:
            self.restart(searching=True)
            return
        self._torn = True
        self._filled += count
        if self._filled == self._need:
            self._reached()

    def _reached(self) -> None:
        """Memory is filled up to where a decision is due."""
        if self._header is None:
            if not self._accept(self._memory[:HEADER_BYTES]):
                self.bad_frames += 1
                rest = memoryview(bytes(self._memory[1:HEADER_BYTES]))
                self.skipped_bytes += 1
                self._begin(searching=True)
                self._put(rest)
                return
            if self._filled < self._need:
                return
        header, torn, announced = self._header, self._torn, self._sum
        assert header is not None
        self._begin(searching=False)
        middle = HEADER_BYTES + header.length
        payload = self._memory[HEADER_BYTES:middle]
        if torn:
            self.torn_frames += 1
        elif xxh3(payload) != announced:
            self.bad_frames += 1
        else:
            self.frames += 1
            trailer = self._memory[middle : middle + self.trailer_bytes]
            self.take(header, self._memory[:HEADER_BYTES], payload, trailer)

    def _accept(self, data: memoryview) -> bool:
        """Take 80 bytes as the header of the frame that begins, if they are one."""
        try:
            header, announced = decode_header(data)
        except ProtocolError:
            return False
        if header.length > MAX_BULK_BYTES:
            return False
        self._header, self._sum, self._torn = header, announced, False
        self._need = HEADER_BYTES + header.length + self.trailer_bytes
        return True

    def _search(self, data: memoryview) -> memoryview:
        """Look for a header in what was kept and `data`; returns what of `data` comes after it."""
        window = bytes(self._memory[: self._filled]) + data
        at = window.find(MAGIC)
        while at >= 0 and len(window) - at >= HEADER_BYTES:
            if self._accept(memoryview(window)[at : at + HEADER_BYTES]):
                self._memory[:HEADER_BYTES] = window[at : at + HEADER_BYTES]
                self._filled = HEADER_BYTES
                self.skipped_bytes += at
                if self._filled == self._need:
                    self._reached()
                return memoryview(window)[at + HEADER_BYTES :]
            at = window.find(MAGIC, at + 1)
        if at < 0:
            at = max(len(window) - len(MAGIC) + 1, 0)  # what may be the beginning of the magic
        self.skipped_bytes += at
        self._filled = len(window) - at
        self._memory[: self._filled] = window[at:]
        return data[:0]


class Stream:
    """One direction of a TCP connection, as seen from outside. Not thread-safe; `now` is any clock in seconds.

    Invariants: `_waiting` is sorted by position, and its first segment begins behind `_position`. `_expected` is the
    sequence number that continues the stream, -1 while segments wait or before the first one.
    """

    def __init__(
        self, take: Take, trailer_bytes: int = 0, deadline_s: float = DEADLINE_S, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.scanner = Scanner(take, trailer_bytes)
        self.segments = 0  #: with payload
        self.duplicate_bytes = 0
        self.holes = 0
        self.hole_bytes = 0
        self.jumps = 0  #: holes of unknown length, to somewhere else in the sequence
        self._deadline_s = deadline_s
        self._limit_bytes = limit_bytes
        self._put = self.scanner.put
        self._expected = -1
        self._position = -1  # of the next byte: a sequence number, but without wrapping around. -1 in the beginning
        self._first = 0  # payload_bytes = _position - _first - hole_bytes
        self._syn = -1  # sequence number of the SYN that began this connection
        self._far = -1  # sequence number behind a segment that was far away
        self._waiting: list[tuple[int, float, bytes]] = []  # position, time of arrival, bytes
        self._waiting_bytes = 0

    @property
    def payload_bytes(self) -> int:
        """Bytes that were put in order, each once."""
        return max(self._position, 0) - self._first - self.hole_bytes

    @property
    def waiting_bytes(self) -> int:
        """Memory in use for segments behind a hole."""
        return self._waiting_bytes

    def feed(self, seq: int, flags: int, payload: memoryview, now: float) -> None:
        """A segment was seen. Calls `take` for each frame that it completes."""
        if seq == self._expected and not flags & SYN:
            count = len(payload)
            self.segments += 1
            self._expected = (seq + count) & _MASK
            self._position += count
            scanner = self.scanner  # as `Scanner.put`, without a call: nearly every packet comes this way
            start = scanner._filled
            stop = start + count
            if stop < scanner._need:
                scanner._memory[start:stop] = payload
                scanner._filled = stop
            else:
                scanner._put(payload)
            return
        self._feed(seq, flags, payload, now)
        self._expected = -1 if self._waiting or self._position < 0 else self._position & _MASK

    def _feed(self, seq: int, flags: int, payload: memoryview, now: float) -> None:
        if flags & SYN:
            if seq != self._syn:
                self._syn = seq
                self._restart((seq + 1) & _MASK, searching=False)
            seq = (seq + 1) & _MASK
        if not payload:
            return
        self.segments += 1
        if self._position < 0:
            self._restart(seq, searching=True)
        distance = ((seq - self._position + _HALF) & _MASK) - _HALF
        if -NEAR_BYTES <= distance <= NEAR_BYTES:
            self._arrange(self._position + distance, payload, now)
        elif seq == self._far:  # two in a row: the connection has gone on without us
            self.jumps += 1
            self._restart(seq, searching=True)
            self._arrange(self._position, payload, now)
        else:
            self._far = (seq + len(payload)) & _MASK

    def expire(self, now: float) -> None:
        """Give up holes in front of segments that have waited long enough. To be called every now and then."""
        while self._waiting and self._waiting[0][1] + self._deadline_s <= now:
            self._give_up()
        if self._expected < 0 <= self._position and not self._waiting:
            self._expected = self._position & _MASK

    def _restart(self, seq: int, searching: bool) -> None:
        """Begin anew at a sequence number; what waits is behind a hole that nothing closes any more."""
        while self._waiting:
            self._give_up()
        self._first += seq - max(self._position, 0)
        self._position = seq
        self._far = -1
        self.scanner.restart(searching)

    def _arrange(self, position: int, payload: memoryview, now: float) -> None:
        old = self._position - position
        if old >= len(payload):
            self.duplicate_bytes += len(payload)
        elif old >= 0:
            self.duplicate_bytes += old
            self._deliver(payload[old:])
            self._drain()
        else:
            self._keep(position, payload, now)
            while self._waiting_bytes > self._limit_bytes:
                self._give_up()

    def _keep(self, position: int, payload: memoryview, now: float) -> None:
        """A copy for later, for the caller's memory is reused."""
        waiting = self._waiting
        at = len(waiting)
        if at and position <= waiting[-1][0]:
            at = bisect_left(waiting, (position,))
            if waiting[at][0] == position:
                if len(waiting[at][2]) >= len(payload):
                    self.duplicate_bytes += len(payload)
                    return
                now = waiting[at][1]
                self.duplicate_bytes += len(waiting[at][2])
                self._forget(at, at + 1)
        waiting.insert(at, (position, now, bytes(payload)))
        self._waiting_bytes += len(payload) + SEGMENT_COST_BYTES

    def _forget(self, start: int, stop: int) -> None:
        gone = self._waiting[start:stop]
        del self._waiting[start:stop]
        self._waiting_bytes -= sum(len(data) + SEGMENT_COST_BYTES for _, _, data in gone)

    def _give_up(self) -> None:
        """The bytes before the first waiting segment will not come."""
        missing = self._waiting[0][0] - self._position
        self.holes += 1
        self.hole_bytes += missing
        self._position += missing
        self.scanner.skip(missing)
        self._drain()

    def _drain(self) -> None:
        """Deliver what has waited for its turn and now has it."""
        count = 0
        for position, _, data in self._waiting:
            if position > self._position:
                break
            count += 1
            old = self._position - position
            self.duplicate_bytes += min(old, len(data))
            if old < len(data):
                self._deliver(memoryview(data)[old:])
        if count:
            self._forget(0, count)

    def _deliver(self, data: memoryview) -> None:
        self._position += len(data)
        self._put(data)
