"""Datagrams of the multicast gather: a 32-byte header, and a piece of a message. ``docs/wire.md`` shows them.

A *message* is one chunk of a rank's sum as frames: first the headers of all its frames (with their trailers), the
*table*, then all their payloads. It is cut into pieces of one size, table and payloads each beginning a new piece, so
that a receiver who knows what to expect can put payloads where they belong as they come::

    table     | header | trailer | header | trailer |     pieces 0 … tables - 1, the last one as short as it is
    payloads  |    block 7    |3|     block 4       |     pieces tables … total - 1

Why not 80 bytes, as each frame has: a frame has up to 1 MiB and a datagram what an Ethernet packet holds. So frames
stay what is verified and named, and datagrams are only numbered, by the sender's `session`, which nobody can guess who
has not heard it, the `number` of the message and the number of its `first` piece.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as xxh3

from ..errors import ProtocolError, UsageError

Bytes = npt.NDArray[np.uint8]

MAGIC = b"CKMD"
VERSION = 1
_HEADER = struct.Struct("<4sBBHQQHHHH")
DATAGRAM_HEADER_BYTES = _HEADER.size  # 32
#: The same for many datagrams at once. All numbers are little-endian, as are the machines that this runs on.
COLUMNS = np.dtype(
    [("fixed", "V16"), ("number", "<u8"), ("first", "<u2"), ("total", "<u2"), ("tables", "<u2"), ("size", "<u2")]
)

#: Where groups are taken from if nobody says otherwise: addresses for use within one site (RFC 2365).
GROUPS = "239.77.0.0/24"
#: The UDP port of all groups.
GROUP_PORT = 7079
#: Multicast is an answer for some peers that all hear each other; each acknowledges.
MOST_RANKS = 16

#: IPv4 and UDP.
IP_BYTES = 20 + 8
#: The longest UDP payload, and how many datagrams the kernel cuts one send into at most (older ones: 64).
MOST_BYTES, MOST_DATAGRAMS = 65507, 64
#: No piece is longer: where packets may be larger, one of them holds one piece.
MOST_PIECE_BYTES = 60 << 10


class What(IntEnum):
    DATA = 1  #: a piece of a message
    ASK = 2  #: what of the messages up to here have you got?
    ACK = 3  #: the answer; unicast
    PROBE = 4  #: before anything else: who hears me?
    ECHO = 5  #: I do; unicast


class Datagram(NamedTuple):
    """A header. `sender` is the rank in its group; what the other fields mean depends on `what`."""

    what: What
    sender: int
    session: int
    number: int = 0
    first: int = 0
    total: int = 0
    tables: int = 0
    size: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, *self)


_WHATS = {what.value: what for what in What}


def decode(data: bytes | bytearray | memoryview) -> Datagram | None:
    """The header of a datagram; None for what is none of ours."""
    if len(data) < DATAGRAM_HEADER_BYTES:
        return None
    magic, version, number, *rest = _HEADER.unpack_from(data)
    what = _WHATS.get(number)
    return None if what is None or magic != MAGIC or version != VERSION else Datagram(what, *rest)


def piece_bytes(mtu: int) -> int:
    """The size of a message's pieces where packets have up to `mtu` bytes: a multiple of 16."""
    size = min(mtu - IP_BYTES - DATAGRAM_HEADER_BYTES, MOST_PIECE_BYTES) & -16
    if size < 256:
        raise UsageError(f"an MTU of {mtu} bytes is too small for tap='multicast'")
    return size


# ---------------------------------------------------------------- what a receiver says


class Missing(NamedTuple):
    """Pieces ``[first, stop)`` of a message."""

    number: int
    first: int
    stop: int


class Answer(NamedTuple):
    """To the asker's question `serial`: every message before `number` is here, and of the others all but `missing`.

    Nothing is said of messages after the one that was asked about.
    """

    serial: int
    number: int
    missing: tuple[Missing, ...] = ()


SERIAL, _MISSING = struct.Struct("<Q"), struct.Struct("<QHH")
_SUM = struct.Struct("<Q")
#: Ranges in one answer. If more is missing, the rest is said next time.
MOST_MISSING = 96


def encode_answer(sender: int, session: int, answer: Answer) -> bytes:
    head = Datagram(What.ACK, sender, session, answer.number, total=len(answer.missing)).encode()
    body = head + SERIAL.pack(answer.serial) + b"".join(_MISSING.pack(*missing) for missing in answer.missing)
    return body + _SUM.pack(xxh3(body))


def decode_answer(head: Datagram, data: bytes | memoryview) -> Answer:
    """Raises ProtocolError for one that is damaged."""
    at = DATAGRAM_HEADER_BYTES + SERIAL.size
    end = at + head.total * _MISSING.size
    if head.total > MOST_MISSING or len(data) != end + _SUM.size or _SUM.unpack_from(data, end)[0] != xxh3(data[:end]):
        raise ProtocolError("an acknowledgement is damaged")
    missing = tuple(Missing(*row) for row in _MISSING.iter_unpack(data[at:end]))
    return Answer(SERIAL.unpack_from(data, DATAGRAM_HEADER_BYTES)[0], head.number, missing)


# ---------------------------------------------------------------- which group


def group_range(groups: str) -> ipaddress.IPv4Network:
    """Raises UsageError for what is no range of IPv4 multicast addresses."""
    try:
        found = ipaddress.IPv4Network(groups)
    except ValueError as error:
        raise UsageError(f"groups {groups!r}: {error}; write a range such as {GROUPS}") from None
    if not found.is_multicast:
        raise UsageError(f"groups {groups!r} are no multicast addresses; those are in 224.0.0.0/4, such as {GROUPS}")
    if found.overlaps(ipaddress.IPv4Network("224.0.0.0/24")):
        raise UsageError(f"groups {groups!r}: switches send 224.0.0.0/24 to everybody; take a range such as {GROUPS}")
    return found


def group_of(groups: str, run: str, partition: int = 0, partitions: int = 1) -> str:
    """The group of one partition of a run. Runs that share one by chance ignore each other's datagrams."""
    found = group_range(groups)
    if found.num_addresses < partitions:
        raise UsageError(f"groups {groups!r} hold {found.num_addresses} addresses, for {partitions} partitions")
    return str(found[xxh3(run.encode()) % (found.num_addresses - partitions + 1) + partition])


# ---------------------------------------------------------------- many pieces at once


class Pieces(NamedTuple):
    """Pieces of one message that came together: ``first, first + 1, …``; `rows` holds all but their headers."""

    number: int
    first: int
    total: int
    tables: int
    size: int
    rows: list[Bytes]  #: each two-dimensional, one row per piece; of several, the last may be shorter

    @property
    def stop(self) -> int:
        return self.first + sum(map(len, self.rows))


class Packer:
    """Writes pieces of a sender as datagrams, `most` at once, one behind the other: who sends them cuts them.

    That is a copy. To name header and piece to the kernel, each for itself, takes longer.
    """

    def __init__(self, sender: int, session: int, size: int, most: int) -> None:
        self._size, self._each = size, DATAGRAM_HEADER_BYTES + size
        self._rows = np.zeros((most, self._each), np.uint8)
        self._flat = self._rows.reshape(-1)
        head = Datagram(What.DATA, sender, session, size=size).encode()
        self._rows[:, :DATAGRAM_HEADER_BYTES] = np.frombuffer(head, np.uint8)
        self._heads = self._rows[:, :DATAGRAM_HEADER_BYTES].view(COLUMNS)[:, 0]
        self._counting = np.arange(most, dtype=np.uint16)

    def pack(self, data: Bytes, number: int, first: int, total: int, tables: int) -> Bytes:
        """Pieces ``first, …`` of a message, which are `data`. Valid until the next call."""
        whole, rest = divmod(len(data), self._size)
        pieces = whole + bool(rest)
        heads = self._heads[:pieces]
        heads["number"], heads["total"], heads["tables"] = number, total, tables
        np.add(self._counting[:pieces], first, out=heads["first"], casting="unsafe")
        self._rows[:whole, DATAGRAM_HEADER_BYTES:] = data[: whole * self._size].reshape(whole, self._size)
        end = whole * self._each
        if rest:
            end += DATAGRAM_HEADER_BYTES + rest
            self._flat[end - rest : end] = data[whole * self._size :]
        return self._flat[:end]


def split(data: Bytes, nbytes: int, each: int) -> Iterator[tuple[Datagram, Pieces | memoryview]]:
    """What is in datagrams of `each` bytes, of which the kernel has joined `nbytes` in each row of `data`.

    The last of a row may be shorter. All are of one sender, which is not to say that none is missing between them.
    Pieces that follow each other come together, any other datagram alone, as its bytes. What is none of ours is left
    out.
    """
    if each < DATAGRAM_HEADER_BYTES:
        return
    whole, rest = divmod(nbytes, each)
    per = whole + (rest >= DATAGRAM_HEADER_BYTES)
    total = len(data) * per
    if not total:
        return
    heads = np.ndarray((len(data), per, 4), np.uint64, data, 0, (data.strides[0], each, 8)).tobytes()
    for start, stop in _runs(heads, total):
        head = decode(heads[start * DATAGRAM_HEADER_BYTES : (start + 1) * DATAGRAM_HEADER_BYTES])
        if head is None:
            continue
        if head.what is What.DATA:
            yield head, Pieces(*head[3:], list(_rows(data, nbytes, each, per, start, stop)))
            continue
        for row, at in (divmod(number, per) for number in range(start, stop)):
            yield head, memoryview(data[row, at * each : min((at + 1) * each, nbytes)])  # type: ignore[arg-type]


def _rows(data: Bytes, nbytes: int, each: int, per: int, start: int, stop: int) -> Iterator[Bytes]:
    """What is behind the headers of datagrams ``[start, stop)``."""
    whole = nbytes // each
    for row in range(start // per, -(-stop // per)):
        first, last = max(start - row * per, 0), min(stop - row * per, per)
        if first < (end := min(last, whole)):
            yield data[row, first * each : end * each].reshape(end - first, each)[:, DATAGRAM_HEADER_BYTES:]
        if last > whole:
            yield data[row, whole * each + DATAGRAM_HEADER_BYTES : nbytes][None]


#: What headers of pieces that follow each other differ by, as four words each: `first` is in the last one's low bits.
_COUNTING = np.zeros((2048, 4), np.uint64)
_COUNTING[:, 3] = np.arange(len(_COUNTING))


def _runs(heads: bytes, total: int) -> list[tuple[int, int]]:
    """Which of these headers are of pieces that follow each other."""
    words = np.frombuffer(heads, np.uint64).reshape(total, 4)
    if total == 1 or (words[0] + _COUNTING[:total]).tobytes() == heads:  # nearly always
        return [(0, total)]
    alike = ((words[1:] - words[:-1]) == _COUNTING[1]).all(1)
    ends = [*(np.flatnonzero(~alike) + 1).tolist(), total]
    return list(zip([0, *ends], ends, strict=False))
