"""What the rest asks of a connection, and frames and messages over it.

`Stream` is the part of ``socket.socket`` that is used, so a connected socket is one. `Channel` adds frames.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from socket import MSG_DONTWAIT, SHUT_RDWR
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest as xxh3

from ..errors import ProtocolError, Refused, Superseded, Unreachable
from ..wire import messages
from ..wire.auth import GREETING_S, ClientGreeting
from ..wire.frames import (
    MAX_GREETING_BYTES,
    MAX_MESSAGE_BYTES,
    Frame,
    FrameReceiver,
    Header,
    Kind,
    Sink,
    encode_header,
    into_new_memory,
)  # fmt: skip

Buffer = bytes | bytearray | memoryview
#: Buffers handed to one ``sendmsg``: far below IOV_MAX, enough to make small frames cheap.
_BATCH = 128
#: And no more bytes than stay in the cache between their checksum and their copy into the kernel.
_BATCH_BYTES = 1 << 20


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
        self.closed = False  #: by this side
        self._deadline: float | None = None
        self._receiver = FrameReceiver(into_new_memory())

    def use_sink(self, sink: Sink) -> None:
        """From the next frame on, ask `sink` where payloads belong."""
        self._receiver.sink = sink

    def limit_messages(self, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """From the next frame on, take payloads up to this length, each into new memory."""
        self._receiver.sink = into_new_memory(limit_bytes)

    @contextlib.contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """Inside, receiving ends after so many seconds in all, however bytes trickle in; sending, each wait does."""
        self.stream.settimeout(timeout_s)
        self._deadline = time.monotonic() + timeout_s
        try:
            yield
        finally:
            self._deadline = None
            with contextlib.suppress(OSError):  # closed meanwhile
                self.stream.settimeout(timeout_s)

    # ------------------------------------------------------------ receiving

    def receive(self) -> Frame | None:
        """The next frame; None at the end of the stream. Raises ProtocolError, OSError; after TimeoutError go on."""
        while True:
            if self._deadline is not None:
                self._wait_no_longer_than(self._deadline)
            count = self.stream.recv_into(self._receiver.buffer())
            if count == 0:
                if self._receiver.mid_frame:
                    raise ConnectionResetError(f"{self.peer} closed the connection in the middle of a frame")
                return None
            self.bytes_received += count
            if (frame := self._receiver.advance(count)) is not None:
                return frame

    def _wait_no_longer_than(self, deadline: float) -> None:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self.stream.settimeout(left)

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
        """Send a small message or fail: OSError if the peer has not read its last few hundred. Then close the channel.

        On a stream with a timeout that failure may take as long as the timeout.
        """
        payload = messages.encode(message)
        data = encode_header(Header(Kind.CONTROL, len(payload)), xxh3(payload)) + payload
        if self.stream.sendmsg([data], (), MSG_DONTWAIT) < len(data):
            raise BlockingIOError(f"{self.peer} does not read its control messages")

    def send_frames(self, frames: Iterable[tuple[Header, Buffer]]) -> None:
        """Send frames without copying their payloads. Returns when the kernel has them, which is not delivery.

        Once this has raised, a frame may have left in part: close the channel.
        """
        buffers: list[Buffer] = []
        nbytes = 0
        for header, payload in frames:
            buffers.append(encode_header(header, xxh3(payload)))
            if header.length:
                buffers.append(payload)
            nbytes += header.length
            if nbytes >= _BATCH_BYTES or len(buffers) >= _BATCH:
                self._send_all(buffers)
                buffers, nbytes = [], 0
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
        self.closed = True
        with contextlib.suppress(OSError):  # already gone
            self.stream.shutdown(SHUT_RDWR)
        self.stream.close()


def greet(channel: Channel, role: str, token: bytes | None, timeout_s: float = GREETING_S) -> None:
    """Client side of the greeting. The channel is ready when it returns, and closed when it raises.

    Raises Refused, ProtocolError, or OSError: TimeoutError when it has not come to an end within `timeout_s`.
    """
    greeting = ClientGreeting(role, token)
    channel.limit_messages(MAX_GREETING_BYTES)
    try:
        with channel.within(timeout_s):
            channel.send(greeting.hello)
            while not greeting.done:
                message = channel.message()
                if message is None:
                    raise ConnectionResetError(f"{channel.peer} closed the connection during the greeting")
                if (reply := greeting.answer(message)) is not None:
                    channel.send(reply)
    except BaseException:
        channel.close()
        raise
    channel.limit_messages()


def refused(message: messages.Refusal) -> Refused:
    return (Superseded if message.kind == "superseded" else Refused)(message.reason, message.kind)


def call(channel: Channel, request: messages.Control, timeout_s: float) -> messages.Control:
    """Send one message, return the answer. Raises Refused, Unreachable or OSError."""
    try:
        with channel.within(timeout_s):
            channel.send(request)
            message = channel.message()
    except TimeoutError:
        raise Unreachable(f"{channel.peer} did not answer {type(request).__name__} within {timeout_s:.3g} s") from None
    if message is None:
        raise ConnectionResetError(f"{channel.peer} closed the connection")
    if isinstance(message, messages.Refusal):
        raise refused(message)
    return message
