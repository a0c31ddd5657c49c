"""From pieces that came as datagrams to messages, and from those to frames. Sans-I/O.

    pieces --Assembly: each into its place--> message --Overhearing: find and verify frames--> take()

A peer knows what it is sent: its `Assembly` has the bucket itself as memory. A shadow does not and never says a word:
`Messages` keeps a few messages that are arriving, and hands over every frame that is whole and whose checksum holds, of
a message with holes as well; what is missing is repaired by other ways.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as xxh3

from ..errors import ProtocolError
from .datagrams import Missing, Pieces
from .frames import HEADER_BYTES, MAX_BULK_BYTES, decode_header
from .reassembly import DEADLINE_S, Take

Bytes = npt.NDArray[np.uint8]

#: Messages of one sender that are kept while they arrive: as many as a retransmission may be late.
OPEN_MESSAGES = 8
#: No message is longer. It has at most `MAX_BULK_BYTES` of payload, and of frames, which name it, often less.
MAX_MESSAGE_BYTES = 32 << 20
#: Memory of so many bytes at most is kept for the next message.
SPARE_BYTES = 2 << 20


def runs(which: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where it is true: from, and up to."""
    edges = np.flatnonzero(np.diff(which, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class Assembly:
    """One message, whose `tables` first pieces are its table. `table` and `payload` are memory, as long as those are.

    `loose`: or longer, for nobody knows it yet. Nothing counts twice, and nothing is put past the end. Complete when
    `left` is 0.
    """

    def __init__(
        self, count: int, tables: int, size: int, table: Bytes, payload: Bytes, loose: bool = False
    ) -> None:  # fmt: skip
        self._loose = loose
        self.count, self.tables, self.size = count, tables, size
        self.left = count
        self.lengths = [len(table), len(payload)]  #: corrected by the last piece of each
        self._areas = (table, payload)
        self._have = np.zeros(count, np.bool_)

    def put(self, pieces: Pieces) -> int:
        """Copy pieces into their places; returns how many of them are new. Those that do not fit are left out."""
        if (pieces.total, pieces.tables, pieces.size) != (self.count, self.tables, self.size):
            return 0
        at, new = pieces.first, 0
        for rows in pieces.rows:
            while len(rows) and at < self.count:
                area, base, stop = (0, 0, self.tables) if at < self.tables else (1, self.tables, self.count)
                few = rows[: stop - at]
                new += self._put(area, at - base, stop - base, few, self._have[at : at + len(few)])
                rows, at = rows[len(few) :], at + len(few)
        self.left -= new
        return new

    def _put(self, area: int, first: int, pieces: int, rows: Bytes, have: npt.NDArray[np.bool_]) -> int:
        """`rows` are pieces ``first, …`` of an area that has so many."""
        number, width = rows.shape
        start, size, ends = first * self.size, self.size, first + number == pieces
        stop = start + (number - 1) * size + width
        new: int = number - int(np.count_nonzero(have))
        length = len(self._areas[area])
        if not new or stop > length or (ends and stop < length and not self._loose):
            return 0
        if width == size:
            self._areas[area][start:stop].reshape(number, size)[:] = rows
        elif ends and number == 1 and 0 < width < size:
            self._areas[area][start:stop] = rows[0]
        else:
            return 0
        if ends:
            self.lengths[area] = stop
        have[:] = True
        return new

    def covers(self, start: int, stop: int) -> bool:
        """Whether all bytes ``[start, stop)`` of the payload are here."""
        first, last = self.tables + start // self.size, self.tables + -(-stop // self.size)
        return bool(self._have[first:last].all())

    def missing(self, number: int, before: int) -> list[Missing]:
        """Runs of pieces before this one that are not here."""
        return [Missing(number, first, stop) for first, stop in runs(~self._have[:before])]

    def whole_tables(self) -> int:
        """Bytes of the table up to its first missing piece."""
        absent = np.flatnonzero(~self._have[: self.tables])
        return int(absent[0]) * self.size if len(absent) else self.lengths[0]

    def forget(self) -> None:
        """As if nothing had come."""
        self._have[:] = False
        self.left = self.count


class Messages:
    """What one sender tells everybody, as a shadow hears it. Not thread-safe; `now` is any clock in seconds.

    Memory is bounded: `OPEN_MESSAGES` messages, each with what its pieces announce, at most `MAX_MESSAGE_BYTES`.
    """

    def __init__(self, take: Take, trailer_bytes: int = 0) -> None:
        self.take = take
        self.pieces = 0
        self.duplicates = 0  #: pieces that were here, or came too late
        self.unfit = 0  #: pieces of no message that there can be
        self.holes = 0  #: messages that were given up with pieces missing
        self.frames = 0
        self.bad_frames = 0  #: whose checksum fails, of header or payload
        self.torn_frames = 0  #: with a piece missing
        self._entry_bytes = HEADER_BYTES + trailer_bytes
        self._open: dict[int, tuple[Assembly, Bytes, Bytes]] = {}
        self._moved: dict[int, float] = {}
        self._over: deque[int] = deque(maxlen=4 * OPEN_MESSAGES)  #: numbers of messages that are over
        self._spare: list[Bytes] = []

    def feed(self, pieces: Pieces, now: float) -> None:
        """Calls `take` for all frames of the message that they complete."""
        number, count = pieces.number, sum(map(len, pieces.rows))
        if (found := self._open.get(number)) is None:
            if number in self._over:
                self.duplicates += count
                return
            if (found := self._begin(pieces)) is None:
                self.unfit += count
                return
        assembly = found[0]
        new = assembly.put(pieces)
        self.pieces += new
        self.duplicates += count - new
        if new:
            self._moved[number] = now
        if not assembly.left:
            self._end(number)
        while len(self._open) > OPEN_MESSAGES:
            self._end(min(self._open))

    def expire(self, now: float) -> None:
        """Give up messages of which nothing has come for a while. To be called every now and then."""
        for number in [number for number, at in self._moved.items() if at + DEADLINE_S <= now]:
            self._end(number)

    def _begin(self, pieces: Pieces) -> tuple[Assembly, Bytes, Bytes] | None:
        count, tables, size = pieces.total, pieces.tables, pieces.size
        if not 0 < tables < count or not size or count * size > MAX_MESSAGE_BYTES:
            return None
        table, payload = self._memory(tables * size), self._memory((count - tables) * size)
        found = self._open[pieces.number] = Assembly(count, tables, size, table, payload, loose=True), table, payload
        return found

    def _memory(self, nbytes: int) -> Bytes:
        at = next((i for i, memory in enumerate(self._spare) if nbytes <= len(memory) <= 2 * nbytes + 4096), None)
        return np.empty(nbytes, np.uint8) if at is None else self._spare.pop(at)

    def _end(self, number: int) -> None:
        assembly, table, payload = self._open.pop(number)
        self._moved.pop(number, None)
        self._over.append(number)
        self.holes += assembly.left > 0
        self._frames(assembly, memoryview(table), memoryview(payload))  # type: ignore[arg-type]
        small = [memory for memory in (table, payload) if len(memory) <= SPARE_BYTES]
        self._spare = [*self._spare, *small][-2 * OPEN_MESSAGES :]

    def _frames(self, assembly: Assembly, table: memoryview, payload: memoryview) -> None:
        """All frames that are whole, as far as it is known where they are."""
        start = 0
        for at in range(0, assembly.whole_tables() - self._entry_bytes + 1, self._entry_bytes):
            head = table[at : at + HEADER_BYTES]
            try:
                header, announced = decode_header(head)
            except ProtocolError:
                self.bad_frames += 1
                return
            stop = start + header.length
            if header.length > MAX_BULK_BYTES or stop > len(payload):
                self.bad_frames += 1
                return
            if not assembly.covers(start, stop):
                self.torn_frames += 1
            elif xxh3(payload[start:stop]) != announced:
                self.bad_frames += 1
            else:
                self.frames += 1
                self.take(header, head, payload[start:stop], table[at + HEADER_BYTES : at + self._entry_bytes])
            start = stop
