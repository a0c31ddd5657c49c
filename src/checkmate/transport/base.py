"""What the rest asks of a connection, and frames and messages over it.

`Stream` is the part of ``socket.socket`` that is used, so a connected socket is one. `Channel` adds frames.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from socket import MSG_DONTWAIT, SHUT_RDWR
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest as xxh3

from ..errors import ProtocolError, Refused, Superseded, Unreachable
from ..wire import messages
from ..wire.auth import ClientGreeting
from ..wire.frames import (
    MAX_MESSAGE_BYTES,
    Frame,
    FrameReceiver,
    Header,
    Kind,
    encode_header,
    into_new_memory,
)

Buffer = bytes | bytearray | memoryview
#: Buffers handed to one ``sendmsg``: far below IOV_MAX, enough to make small frames cheap.
_BATCH = 128


class Stream(Protocol):
    """A reliable, ordered, two-way byte stream. Errors are ``OSError``; end of stream is a read of 0 bytes."""

    def recv_into(self, buffer: memoryview, /) -> int: ...
    def sendmsg(self, buffers: Sequence[Buffer], ancdata: Sequence[Any] = ..., flags: int = ..., /) -> int: ...
    def settimeout(self, value: float | None, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Channel:
    """Frames over a stream. One thread may send while another receives; each direction belongs to one thread."""

    def __init__(self, stream: Stream, peer: str = "peer") -> None:
        self.stream = stream
        self.peer = peer
        self.bytes_received = self.bytes_sent = 0
        self._receiver = FrameReceiver(into_new_memory())

    def use_sink(self, sink: Callable[[Header], memoryview]) -> None:
        """From the next frame on, ask `sink` where payloads belong."""
        self._receiver.sink = sink

    def limit_messages(self, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """From the next frame on, take payloads up to this length, each into new memory."""
        self._receiver.sink = into_new_memory(limit_bytes)

    # ------------------------------------------------------------ receiving

    def receive(self) -> Frame | None:
        """The next frame; None at the end of the stream. Raises ProtocolError, OSError; after TimeoutError go on."""
        while True:
            count = self.stream.recv_into(self._receiver.buffer())
            if count == 0:
                if self._receiver.mid_frame:
                    raise ConnectionResetError(f"{self.peer} closed the connection in the middle of a frame")
                return None
            self.bytes_received += count
            if (frame := self._receiver.advance(count)) is not None:
                return frame

    def message(self) -> messages.Control | None:
        """The next control message; None at the end of the stream."""
        frame = self.receive()
        if frame is None:
            return None
        if frame.header.kind is not Kind.CONTROL:
            raise ProtocolError(f"{frame.header} where a control message belongs")
        return messages.decode(frame.payload)

    # ------------------------------------------------------------ sending

    def send(self, message: messages.Control) -> None:
        payload = messages.encode(message)
        self.send_frames([(Header(Kind.CONTROL, len(payload)), payload)])

    def send_nowait(self, message: messages.Control) -> None:
        """Send a small message or fail: OSError if the peer has not read its last few hundred."""
        payload = messages.encode(message)
        data = encode_header(Header(Kind.CONTROL, len(payload)), xxh3(payload)) + payload
        if self.stream.sendmsg([data], (), MSG_DONTWAIT) < len(data):
            raise BlockingIOError(f"{self.peer} does not read its control messages")

    def send_frames(self, frames: Iterable[tuple[Header, Buffer]]) -> None:
        """Send frames without copying their payloads. Returns when the kernel has them, which is not delivery."""
        pending = iter(frames)
        while batch := list(islice(pending, _BATCH // 2)):
            buffers: list[Buffer] = []
            for header, payload in batch:
                buffers.append(encode_header(header, xxh3(payload)))
                if header.length:
                    buffers.append(payload)
            self._send_all(buffers)

    def _send_all(self, buffers: list[Buffer]) -> None:
        first = 0
        while first < len(buffers):
            count = self.stream.sendmsg(buffers[first:] if first else buffers)
            self.bytes_sent += count
            while first < len(buffers) and count >= len(buffers[first]):
                count -= len(buffers[first])
                first += 1
            if count:
                buffers[first] = memoryview(buffers[first])[count:]

    def close(self) -> None:
        """Close both directions, and wake whoever is blocked in either."""
        with contextlib.suppress(OSError):  # already gone
            self.stream.shutdown(SHUT_RDWR)
        self.stream.close()


def greet(channel: Channel, role: str, token: bytes | None) -> None:
    """Client side of the greeting. Raises Refused, ProtocolError or OSError; the channel is ready when it returns."""
    greeting = ClientGreeting(role, token)
    channel.send(greeting.hello)
    while not greeting.done:
        message = channel.message()
        if message is None:
            raise ConnectionResetError(f"{channel.peer} closed the connection during the greeting")
        if (reply := greeting.answer(message)) is not None:
            channel.send(reply)


def refused(message: messages.Refusal) -> Refused:
    return (Superseded if message.kind == "superseded" else Refused)(message.reason, message.kind)


def call(channel: Channel, request: messages.Control, timeout_s: float) -> messages.Control:
    """Send one message, return the answer. Raises Refused, Unreachable or OSError."""
    channel.stream.settimeout(timeout_s)
    channel.send(request)
    try:
        message = channel.message()
    except TimeoutError:
        raise Unreachable(f"{channel.peer} did not answer {type(request).__name__} within {timeout_s:.0f} s") from None
    if message is None:
        raise ConnectionResetError(f"{channel.peer} closed the connection")
    if isinstance(message, messages.Refusal):
        raise refused(message)
    return message
