"""What `Channel` asks of a stream and gives to its callers, over TCP on loopback and over the in-memory twin alike."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from checkmate.errors import ProtocolError, Refused, Superseded, Unreachable
from checkmate.transport import memory
from checkmate.transport.base import Channel, Stream, call, greet
from checkmate.wire import messages
from checkmate.wire.auth import ServerGreeting
from checkmate.wire.frames import (
    HEADER_BYTES,
    MAX_BULK_BYTES,
    MAX_GREETING_BYTES,
    Frame,
    Header,
    Kind,
    encode,
    encode_header,
)
from checkmate.wire.messages import Challenge, Done, Ping, Pong, Refusal, Report

SEED = 20260

# ---------------------------------------------------------------- the transports


class Tcp:
    """Two sockets on loopback, with small buffers so that a writer soon has to wait."""

    def pair(self) -> tuple[Stream, Stream]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            a = socket.create_connection(listener.getsockname())
            b, _ = listener.accept()
        for sock in (a, b):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        return a, b

    def breaking_pair(self, after_bytes: int) -> tuple[Stream, Stream]:
        a, b = self.pair()
        return Breaking(a, after_bytes), b


class Breaking:
    """A socket that resets its connection once so many bytes have been written."""

    def __init__(self, sock: Any, after_bytes: int) -> None:
        self._sock, self._left = sock, after_bytes
        self._break_if_due()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendmsg(self, buffers: list[Any], *_: object) -> int:
        count = self._sock.send(b"".join(buffers)[: self._left])
        self._left -= count
        self._break_if_due()
        return count

    def _break_if_due(self) -> None:
        if self._left == 0:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._sock.close()


class Memory:
    faults: Any = staticmethod(lambda **changed: memory.Faults(seed=SEED, **changed))
    capacity_bytes = 1 << 16

    def pair(self) -> tuple[Stream, Stream]:
        return memory.pair(self.capacity_bytes, self.faults(), self.faults())

    def breaking_pair(self, after_bytes: int) -> tuple[Stream, Stream]:
        return memory.pair(self.capacity_bytes, self.faults(reset_at=after_bytes), self.faults())


class PoorMemory(Memory):
    """Short reads and writes, through a small buffer, to a reader that is slow now and then."""

    faults = staticmethod(lambda **changed: memory.Faults(seed=SEED, short=True, delay_s=0.0002, **changed))
    capacity_bytes = 3000


@pytest.fixture(params=[Tcp, Memory, PoorMemory], ids=["tcp", "memory", "poor-memory"])
def transport(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture
def streams(transport: Any) -> Iterator[tuple[Stream, Stream]]:
    a, b = transport.pair()
    for stream in (a, b):
        stream.settimeout(20.0)  # nothing in a test waits for ever
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def channels(streams: tuple[Stream, Stream]) -> tuple[Channel, Channel]:
    return Channel(streams[0], "b"), Channel(streams[1], "a")


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:
    """Runs a function in a thread of its own."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def received(channel: Channel, count: int) -> list[Frame]:
    frames = [channel.receive() for _ in range(count)]
    assert None not in frames
    return frames  # type: ignore[return-value]


def noise(count: int, seed: int = SEED) -> bytes:
    return random.Random(seed).randbytes(count)


def write_all(stream: Stream, data: bytes) -> None:
    while data:
        data = data[stream.sendmsg([data]) :]


def send_on_and_on(send: Callable[[], None]) -> None:
    for _ in range(100_000):
        send()


# ---------------------------------------------------------------- frames and messages


def test_bulk_lands_in_its_place_between_two_messages(
    channels: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    a, b = channels
    data, memory_of_block = noise(3 * MAX_BULK_BYTES // 2), bytearray(3 * MAX_BULK_BYTES // 2)
    pieces = [data[:MAX_BULK_BYTES], data[MAX_BULK_BYTES:]]
    headers = [Header(Kind.GRAD, len(p), offset=i * MAX_BULK_BYTES) for i, p in enumerate(pieces)]

    def send() -> None:
        a.send(Ping(1))
        a.send_frames(zip(headers, pieces, strict=True))
        a.send(Ping(2))

    sent = aside(send)
    assert b.message() == Ping(1)
    b.use_sink(lambda header: memoryview(memory_of_block)[header.offset : header.offset + header.length])
    assert [frame.header for frame in received(b, 2)] == headers
    b.limit_messages()
    assert b.message() == Ping(2)
    sent.result()
    assert memory_of_block == data
    assert b.bytes_received == a.bytes_sent == 4 * HEADER_BYTES + len(data) + 2 * len(messages.encode(Ping(1)))


def test_large_transfers_cross_in_both_directions(
    channels: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    data = noise(2 * MAX_BULK_BYTES)
    halves = [memoryview(data)[:MAX_BULK_BYTES], memoryview(data)[MAX_BULK_BYTES:]]
    frames = [(Header(Kind.STATE, len(half), block=i), half) for i, half in enumerate(halves)]
    sent = [aside(channel.send_frames, frames) for channel in channels]
    arrived = [aside(received, channel, 2) for channel in channels]
    for future in sent:
        future.result()
    for future in arrived:
        assert [(f.header, bytes(f.payload)) for f in future.result()] == [(h, bytes(p)) for h, p in frames]


def test_many_small_frames_keep_their_order(
    channels: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    a, b = channels
    payloads = [noise(size % 97, size) for size in range(500)]  # the empty payload among them
    sent = aside(a.send_frames, [(Header(Kind.GRAD, len(p), block=i), p) for i, p in enumerate(payloads)])
    frames = received(b, len(payloads))
    sent.result()
    assert [bytes(frame.payload) for frame in frames] == payloads
    assert [frame.header.block for frame in frames] == list(range(500))


def test_message_longer_than_its_first_memory_arrives(
    channels: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    a, b = channels
    message = messages.Sidecar({"rng": noise(300_000)})
    sent = aside(a.send, message)
    assert b.message() == message
    sent.result()


def test_message_beyond_the_limit_is_refused_at_its_header(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    b.limit_messages(100)
    write_all(a.stream, encode_header(Header(Kind.CONTROL, 101), 0))  # and its payload never comes
    with pytest.raises(ProtocolError, match="longer than the 100 bytes allowed here"):
        b.message()


def test_bulk_where_a_message_belongs_is_refused(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    a.send_frames([(Header(Kind.GRAD, 3), b"abc")])
    with pytest.raises(ProtocolError, match="GRAD of rank 0, step 0 block 0 at 0, 3 bytes where a control message"):
        b.message()


# ---------------------------------------------------------------- timeouts, ends, resets


def test_timeout_in_mid_frame_loses_nothing(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    b.stream.settimeout(0.02)
    report = Report("note", "x" * 300)
    body = messages.encode(report)
    data = encode(Header(Kind.CONTROL, len(body)), body)
    for start in range(0, len(data), 90):
        with pytest.raises(TimeoutError):
            b.message()
        write_all(a.stream, data[start : start + 90])
    b.stream.settimeout(5.0)
    assert b.message() == report


def test_end_between_frames_is_none(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    a.send(Pong())
    a.close()
    assert b.message() == Pong()
    assert b.message() is None


@pytest.mark.parametrize("count", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1])
def test_end_in_mid_frame_raises(channels: tuple[Channel, Channel], count: int) -> None:
    a, b = channels
    body = messages.encode(Done("much"))
    write_all(a.stream, encode(Header(Kind.CONTROL, len(body)), body)[:count])
    a.close()
    with pytest.raises(ConnectionResetError, match="a closed the connection in the middle of a frame"):
        b.message()


def test_reset_at_any_byte_leaves_whole_frames_only(transport: Any) -> None:
    sizes = [HEADER_BYTES + len(messages.encode(Ping(step))) for step in (1, 2)]
    for after in range(sum(sizes) + 1):
        a, b = (Channel(stream) for stream in transport.breaking_pair(after))
        b.stream.settimeout(5.0)
        with suppress(OSError):
            a.send(Ping(1))
            a.send(Ping(2))
            a.send(Ping(3))
        whole = (after >= sizes[0]) + (after >= sum(sizes))
        assert [b.message() for _ in range(whole)] == [Ping(1), Ping(2)][:whole]
        with pytest.raises(ConnectionResetError):
            b.message()
        a.close()
        b.close()


def test_reset_is_seen_by_the_writer(transport: Any) -> None:
    a, b = (Channel(stream) for stream in transport.breaking_pair(10))
    with pytest.raises(OSError):  # noqa: PT011 - which one, depends on how far the kernel got
        send_on_and_on(lambda: a.send(Ping(1)))
    a.close()
    b.close()


def test_answer_can_be_read_although_the_peer_closed_with_unread_input(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    a.stream.sendmsg([b"what b never reads"])
    time.sleep(0.05)
    b.send(Refusal("usage", "no"))
    b.close()
    assert a.message() == Refusal("usage", "no")
    with suppress(OSError):
        assert a.message() is None


def test_close_wakes_a_blocked_reader(channels: tuple[Channel, Channel], aside: Callable[..., Future[Any]]) -> None:
    a, _ = channels
    a.stream.settimeout(None)
    reading = aside(a.receive)
    time.sleep(0.05)
    a.close()
    with suppress(OSError):
        assert reading.result(5.0) is None


def test_close_wakes_a_blocked_writer(channels: tuple[Channel, Channel], aside: Callable[..., Future[Any]]) -> None:
    a, _ = channels
    a.stream.settimeout(None)
    data = bytes(MAX_BULK_BYTES)
    writing = aside(a.send_frames, [(Header(Kind.GRAD, len(data)), data)] * 64)
    time.sleep(0.1)
    assert not writing.done()
    a.close()
    with pytest.raises(OSError):  # noqa: PT011
        writing.result(5.0)


def test_a_closed_channel_raises_and_closes_again(channels: tuple[Channel, Channel]) -> None:
    a, _ = channels
    assert not a.closed
    a.close()
    a.close()
    assert a.closed
    for use in (a.message, lambda: a.send(Pong()), lambda: a.stream.settimeout(1.0)):
        with pytest.raises(OSError):  # noqa: PT011
            use()


def test_write_with_a_timeout_gives_up_when_nobody_reads(channels: tuple[Channel, Channel]) -> None:
    a, _ = channels
    a.stream.settimeout(0.05)
    data = bytes(MAX_BULK_BYTES)
    with pytest.raises(TimeoutError):
        a.send_frames([(Header(Kind.GRAD, len(data)), data)] * 64)


# ---------------------------------------------------------------- sending without waiting


def test_send_nowait_fails_at_once_when_nobody_reads(channels: tuple[Channel, Channel]) -> None:
    a, _ = channels
    a.stream.settimeout(None)
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        send_on_and_on(lambda: a.send_nowait(Report("note", "x" * 1000)))
    assert time.monotonic() - began < 10.0  # it would have waited for ever


def test_send_nowait_on_a_stream_with_a_timeout_waits_that_long(channels: tuple[Channel, Channel]) -> None:
    a, _ = channels
    a.stream.settimeout(0.1)
    with pytest.raises(OSError):  # noqa: PT011 - BlockingIOError where part of the message still went, else TimeoutError
        send_on_and_on(lambda: a.send_nowait(Report("note", "x" * 1000)))


def test_send_nowait_delivers_while_the_peer_reads(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    for step in range(20):
        data = messages.encode(Ping(step))
        if isinstance(a.stream, memory.MemoryStream) and a.stream._out.faults.short:
            write_all(a.stream, encode(Header(Kind.CONTROL, len(data)), data))  # it would take a part and be told so
        else:
            a.send_nowait(Ping(step))
        assert b.message() == Ping(step)


# ---------------------------------------------------------------- greeting and calls


def serve_greeting(channel: Channel, token: bytes | None) -> Any:
    greeting = ServerGreeting(token, "a server")
    while not greeting.done:
        message = channel.message()
        if message is None:
            return None
        channel.send(reply := greeting.answer(message))
        if isinstance(reply, Refusal):
            return reply
    return greeting.role


@pytest.mark.parametrize("token", [None, b"secret"])
def test_greeting_leaves_a_channel_ready_for_messages(
    channels: tuple[Channel, Channel], aside: Callable[..., Future[Any]], token: bytes | None
) -> None:
    a, b = channels
    served = aside(serve_greeting, b, token)
    greet(a, "reader", token)
    assert served.result() == "reader"
    long = messages.Sidecar({"more than a greeting may have": bytes(3 * MAX_GREETING_BYTES)})
    sent = aside(b.send, long)
    assert a.message() == long
    sent.result()


def test_wrong_token_is_refused_and_the_channel_closed(
    channels: tuple[Channel, Channel], aside: Callable[..., Future[Any]]
) -> None:
    a, b = channels
    served = aside(serve_greeting, b, b"theirs")
    with pytest.raises(Refused, match="did not prove that it has this token"):
        greet(a, "control", b"ours")
    assert a.closed
    assert served.result() is None


def test_greeting_gives_up_on_a_silent_server(channels: tuple[Channel, Channel]) -> None:
    a, _ = channels
    with pytest.raises(TimeoutError):
        greet(a, "control", None, 0.1)
    assert a.closed


def test_greeting_gives_up_on_a_server_that_never_comes_to_its_end(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    ended = threading.Event()
    challenge = messages.encode(Challenge(1, bytes(16)))

    def trickle() -> None:
        for byte in encode(Header(Kind.CONTROL, len(challenge)), challenge):
            if ended.wait(0.03):
                return
            with suppress(OSError):
                b.stream.sendmsg([bytes([byte])])

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        greet(a, "control", None, 0.3)
    assert time.monotonic() - began < 2.0  # every single byte came well within the timeout
    ended.set()
    thread.join()


def test_server_that_sends_too_much_before_it_has_proved_itself_is_refused(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    write_all(b.stream, encode_header(Header(Kind.CONTROL, MAX_GREETING_BYTES + 1), 0))
    with pytest.raises(ProtocolError, match="longer than the 4096 bytes"):
        greet(a, "control", None)


@pytest.mark.parametrize(
    ("answer", "raised", "match"),
    [
        (Refusal("missing", "no run 'x'"), Refused, "no run 'x'"),
        (Refusal("superseded", "attempt 1 is superseded"), Superseded, "attempt 1"),
        (None, ConnectionResetError, "b closed the connection"),
    ],
)
def test_call_raises_what_the_answer_says(
    channels: tuple[Channel, Channel], answer: Refusal | None, raised: type[Exception], match: str
) -> None:
    a, b = channels
    if answer is not None:
        b.send(answer)
    else:
        b.stream.shutdown(socket.SHUT_WR)
    with pytest.raises(raised, match=match):
        call(a, messages.GetStatus(), 5.0)


def test_call_names_what_was_not_answered(channels: tuple[Channel, Channel]) -> None:
    a, b = channels
    with pytest.raises(Unreachable, match=r"b did not answer GetStatus within 0\.1 s"):
        call(a, messages.GetStatus(), 0.1)
    assert b.message() == messages.GetStatus()
    b.send(Done("late"))
    assert a.message() == Done("late")  # nothing was lost, should the caller want to go on
