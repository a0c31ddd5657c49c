"""The in-memory twin's faults: they come from the seed, and from nothing else."""

from __future__ import annotations

import socket
import time

import pytest

from checkmate.transport.memory import Faults, MemoryStream, pair


def read(stream: MemoryStream, count: int) -> bytes:
    buffer = bytearray(count)
    return bytes(buffer[: stream.recv_into(memoryview(buffer))])


def cuts(seed: int) -> list[int]:
    """Into what pieces 1000 bytes fall, written and then read."""
    a, b = pair(there=Faults(seed, short=True))
    sizes = []
    while sum(sizes) < 1000:
        sizes.append(a.sendmsg([bytes(1000 - sum(sizes))]))
    while sum(sizes) < 2000:
        sizes.append(len(read(b, 1000)))
    return sizes


def test_same_seed_makes_the_same_cuts_and_another_seed_others() -> None:
    assert cuts(1) == cuts(1)
    assert cuts(1) != cuts(2)
    assert len(cuts(1)) > 4


def test_delay_holds_bytes_back_and_keeps_their_order() -> None:
    a, b = pair(there=Faults(3, delay_s=0.05))
    began = time.monotonic()
    for byte in b"ordered":
        a.sendmsg([bytes([byte])])
    b.settimeout(1.0)
    assert b"".join(read(b, 1) for _ in range(7)) == b"ordered"
    assert time.monotonic() - began > 0.05  # 7 draws of up to 0.05 s


def test_delayed_bytes_outlast_a_timeout() -> None:
    a, b = pair(there=Faults(1, delay_s=10.0))
    a.sendmsg([b"late"])
    b.settimeout(0.01)
    with pytest.raises(TimeoutError):
        read(b, 4)
    b._in.faults = Faults()
    assert read(b, 4) == b"late"


def test_writer_takes_what_fits_and_then_waits() -> None:
    a, b = pair(10)
    a.settimeout(0)
    assert a.sendmsg([b"1234", b"5678", b"90ab"]) == 10
    with pytest.raises(BlockingIOError):
        a.sendmsg([b"c"])
    assert read(b, 100) == b"1234567890"
    assert a.sendmsg([b"c"]) == 1


def test_one_direction_can_end_before_the_other() -> None:
    a, b = pair()
    a.sendmsg([b"last"])
    a.shutdown(socket.SHUT_WR)
    assert [read(b, 9), read(b, 9)] == [b"last", b""]
    b.sendmsg([b"answer"])
    assert read(a, 9) == b"answer"
    with pytest.raises(BrokenPipeError):
        a.sendmsg([b"more"])


def test_writing_to_who_has_gone_fails() -> None:
    a, b = pair()
    b.close()
    with pytest.raises(BrokenPipeError):
        a.sendmsg([b"x"])
    assert read(a, 1) == b""


def test_reset_at_zero_comes_before_anything() -> None:
    a, b = pair(there=Faults(reset_at=0))
    for use in (lambda: a.sendmsg([b"x"]), lambda: read(a, 1), lambda: read(b, 1)):
        with pytest.raises(ConnectionResetError):
            use()
