"""Frames, the unit on every transport: an 80-byte header and a payload. ``docs/wire.md`` shows them byte by byte.

`FrameReceiver` is the receiving half without any I/O. It says where the next bytes belong (`buffer`), the caller
puts them there (``recv_into``) and says how many came (`advance`). Payload bytes therefore land in their final place
without a copy: the *sink*, asked once per header, names that place.

    header  --sink-->  memoryview of the payload's final place  --checksum-->  Frame

A sink that answers None leaves the payload to the receiver, whose memory for it grows with the bytes that arrive.
A header or payload whose checksum fails raises `ProtocolError`; the caller closes the connection. Bytes written for
a payload that failed were never reported as arrived, so they change no state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest as xxh3

from ..errors import ProtocolError

MAGIC = b"CKMT"
VERSION = 1
_BODY = struct.Struct("<4sBBHII16sQIHHQHHIQ")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _BODY.size + _SUM.size  # 80

#: Longest payload of a frame with tensor bytes. Small enough to stay in cache between receiving and checksum.
MAX_BULK_BYTES = 1 << 20
#: Longest payload of a part, and of the sidecar that a reader gets: buffers of the model travel in them.
MAX_PART_BYTES = 1 << 30
#: Longest payload of any other control message.
MAX_MESSAGE_BYTES = 64 << 20
#: Longest message before the peer has been accepted.
MAX_GREETING_BYTES = 4096
#: Memory for a message before any of it has come. It doubles as bytes arrive: a header alone is no reason for 1 GiB.
FIRST_BYTES = 64 << 10


class Kind(IntEnum):
    GRAD = 1  #: a piece of a gradient slice: step, update, block, offset
    ANCHOR = 2  #: a piece of a block's state at the end of `step`: block, entry, offset
    PART = 3  #: closes `step` for `rank`; payload is a `messages.Part`
    CONTROL = 4  #: payload is a `messages.Control`
    STATE = 5  #: a piece of a block's state for a reader: block, entry, offset


_BULK = frozenset((Kind.GRAD, Kind.ANCHOR, Kind.STATE))


class Header(NamedTuple):
    """Everything about a payload. `length` and `offset` in bytes, `offset` from the start of the block or entry."""

    kind: Kind
    length: int
    incarnation: bytes = bytes(16)
    rank: int = 0
    epoch: int = 0
    step: int = 0
    block: int = 0
    update: int = 0
    entry: int = 0
    offset: int = 0
    round: int = 0

    def __str__(self) -> str:
        place = f" block {self.block} at {self.offset}" if self.kind in _BULK else ""
        return f"{self.kind.name} of rank {self.rank}, step {self.step}{place}, {self.length} bytes"


class Frame(NamedTuple):
    header: Header
    payload: memoryview


def encode_header(header: Header, payload_sum: int) -> bytes:
    body = _BODY.pack(
        MAGIC,
        VERSION,
        header.kind,
        0,
        header.rank,
        header.epoch,
        header.incarnation,
        header.step,
        header.block,
        header.update,
        header.entry,
        header.offset,
        header.round,
        0,
        header.length,
        payload_sum,
    )
    return body + _SUM.pack(xxh3(body))


def encode(header: Header, payload: bytes | memoryview) -> bytes:
    """Header followed by payload, for messages small enough to copy."""
    return encode_header(header, xxh3(payload)) + payload


def decode_header(data: bytes | bytearray | memoryview) -> tuple[Header, int]:
    """Parse and verify 80 bytes; returns the header and the payload's announced XXH3-64."""
    (
        magic,
        version,
        kind,
        flags,
        rank,
        epoch,
        inc,
        step,
        block,
        update,
        entry,
        offset,
        round_,
        zero,
        length,
        payload_sum,
    ) = _BODY.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"not a checkmate frame: starts with {bytes(magic)!r}")
    if version != VERSION:
        raise ProtocolError(f"frame version {version}, this side speaks {VERSION}")
    if _SUM.unpack_from(data, _BODY.size)[0] != xxh3(memoryview(data)[: _BODY.size]):
        raise ProtocolError("header checksum mismatch")
    if flags or zero:
        raise ProtocolError(f"reserved header fields are {flags:#x}, {zero:#x}, not zero")
    try:
        kind = Kind(kind)
    except ValueError:
        raise ProtocolError(f"unknown frame kind {kind}") from None
    header = Header(kind, length, inc, rank, epoch, step, block, update, entry, offset, round_)
    limit = MAX_BULK_BYTES if kind in _BULK else MAX_PART_BYTES
    if length > limit:
        raise ProtocolError(f"{header}: longer than the {limit} bytes allowed")
    return header, payload_sum


Sink = Callable[[Header], memoryview | None]


def into_new_memory(limit_bytes: int = MAX_MESSAGE_BYTES) -> Sink:
    """A sink that has each payload put into new memory, up to a limit."""

    def sink(header: Header) -> None:
        if header.length > limit_bytes:
            raise ProtocolError(f"{header}: longer than the {limit_bytes} bytes allowed here")

    return sink


class FrameReceiver:
    """One direction of one connection. Not thread-safe; of no use any more once it has raised ProtocolError."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._head = bytearray(HEADER_BYTES)
        self._expect_header()

    def _expect_header(self) -> None:
        self._header: Header | None = None
        self._target = memoryview(self._head)
        self._filled = 0

    def buffer(self) -> memoryview:
        """Where the next bytes from the peer belong. Never empty."""
        return self._target[self._filled :]

    @property
    def mid_frame(self) -> bool:
        """Whether the peer still owes bytes of a frame it has begun."""
        return self._header is not None or self._filled > 0

    def advance(self, count: int) -> Frame | None:
        """`count` bytes were put into `buffer()`; returns the frame that they complete, if they do."""
        self._filled += count
        if self._filled < len(self._target):
            return None
        if self._header is None:
            self._header, self._sum = decode_header(self._head)
            self._target, self._filled = self._place(self._header), 0
        elif self._filled < self._header.length:
            self._target = self._twice(self._header.length)
        if self._filled < self._header.length:
            return None
        frame = Frame(self._header, self._target)
        if xxh3(frame.payload) != self._sum:
            raise ProtocolError(f"{frame.header}: payload checksum mismatch")
        self._expect_header()
        return frame

    def _place(self, header: Header) -> memoryview:
        target = self.sink(header)
        if target is None:
            return memoryview(bytearray(min(header.length, FIRST_BYTES)))
        assert len(target) == header.length
        return target

    def _twice(self, length: int) -> memoryview:
        """More memory for a payload whose claim is beginning to come true."""
        target = memoryview(bytearray(min(length, 2 * self._filled)))
        target[: self._filled] = self._target
        return target
