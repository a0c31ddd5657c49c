"""A shadow's ear for multicast: real datagrams on loopback, and what becomes of them."""

from __future__ import annotations

import itertools
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest as xxh3

from checkmate.errors import UsageError
from checkmate.shadow.listening import Listening
from checkmate.transport.group import Outlet, sender
from checkmate.wire.datagrams import DATAGRAM_HEADER_BYTES, GROUP_PORT, Packer
from checkmate.wire.frames import Header, Kind, encode_header
from checkmate.wire.packets import Flow

SIZE = 1440
NUMBERS = itertools.count(1)


class Worker:
    """One sender to a group. Frames are of 1000 to 5000 bytes."""

    def __init__(self, group: str, rank: int) -> None:
        self._socket = sender("127.0.0.1", 1)
        self._outlet = Outlet(self._socket, SIZE + DATAGRAM_HEADER_BYTES)
        self._target = (group, GROUP_PORT)
        self._packer, self._random, self._numbers = Packer(rank, 9, SIZE, 99), random.Random(rank), 0
        self.rank = rank
        self.flow = Flow(*self._socket.getsockname(), *self._target, 0)

    def message(self, frames: int = 3) -> tuple[list[bytes], list[bytes]]:
        """Its datagrams, and the payloads of its frames."""
        payloads = [self._random.randbytes(self._random.randint(1000, 5000)) for _ in range(frames)]
        table = b"".join(
            encode_header(Header(Kind.GRAD, len(p), rank=self.rank, block=i, round=1), xxh3(p))
            for i, p in enumerate(payloads)
        )
        content, number, self._numbers = b"".join(payloads), self._numbers, self._numbers + 1
        total = 1 - (-len(content) // SIZE)
        datagrams = []
        for area, first in ((table, 0), (content, 1)):
            packed = self._packer.pack(np.frombuffer(area, np.uint8), number, first, total, 1).tobytes()
            each = SIZE + DATAGRAM_HEADER_BYTES
            datagrams += [packed[at : at + each] for at in range(0, len(packed), each)]
        return datagrams, payloads

    def send(self, datagrams: list[bytes]) -> None:
        for datagram in datagrams:
            self._outlet.say(datagram, self._target)

    def close(self) -> None:
        self._socket.close()


class Heard:
    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.ticks = 0
        self.raises: Exception | None = None

    def frame(self, flow: Flow, header: Header, head: memoryview, payload: memoryview, trailer: memoryview) -> None:
        if self.raises is not None:
            raise self.raises
        self.frames.append((header.rank, bytes(payload)))

    def tick(self, now: float) -> None:
        self.ticks += 1


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def listening(heard: Heard) -> Iterator[Listening]:
    made = Listening("lo", heard.frame, heard.tick)
    yield made
    made.close()


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []
    group = f"239.77.11.{next(NUMBERS)}"

    def make(rank: int = 0, other: str = group) -> Worker:
        made.append(Worker(other, rank))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 5
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_frames_of_all_senders_are_heard_once(
    listening: Listening, heard: Heard, worker: Callable[..., Worker]
) -> None:
    workers = [worker(rank) for rank in range(3)]
    listening.set_flows([one.flow for one in workers])
    expected = []
    for one in workers * 4:
        datagrams, payloads = one.message()
        one.send(datagrams + datagrams[1:3])
        expected += [(one.rank, payload) for payload in payloads]
    until(lambda: len(heard.frames) >= len(expected))
    assert sorted(heard.frames) == sorted(expected)
    status = listening.status()
    assert (status["frames"], status["holes"], status["torn_frames"], status["foreign"]) == (36, 0, 0, 0)
    assert status["groups"] == [f"{workers[0].flow.target}:{GROUP_PORT}"]


def test_of_a_message_with_a_hole_the_whole_frames_count(
    listening: Listening, heard: Heard, worker: Callable[..., Worker]
) -> None:
    one = worker()
    listening.set_flows([one.flow])
    datagrams, payloads = one.message(frames=6)
    del datagrams[3]  # bytes 2 * SIZE to 3 * SIZE
    one.send(datagrams[::-1])  # and in any order
    until(lambda: listening.status()["holes"] == 1)
    start, whole = 0, []
    for payload in payloads:
        if start + len(payload) <= 2 * SIZE or start >= 3 * SIZE:
            whole.append(payload)
        start += len(payload)
    assert [payload for _, payload in heard.frames] == whole
    assert 0 < len(whole) < 6
    assert listening.status()["torn_frames"] == 6 - len(whole)


def test_without_the_first_headers_nothing_counts(
    listening: Listening, heard: Heard, worker: Callable[..., Worker]
) -> None:
    one = worker()
    listening.set_flows([one.flow])
    one.send(one.message()[0][1:])
    until(lambda: listening.status()["holes"] == 1)
    assert heard.frames == []


def test_damage_costs_its_frame(listening: Listening, heard: Heard, worker: Callable[..., Worker]) -> None:
    one = worker()
    listening.set_flows([one.flow])
    datagrams, payloads = one.message()
    datagrams[1] = datagrams[1][:-1] + bytes([datagrams[1][-1] ^ 1])
    one.send(datagrams)
    until(lambda: listening.status()["bad_frames"] >= 1)
    assert {payload for _, payload in heard.frames} < set(payloads)


def test_who_was_not_announced_is_counted_and_no_more(
    listening: Listening, heard: Heard, worker: Callable[..., Worker]
) -> None:
    one, stranger = worker(0), worker(1)
    listening.set_flows([one.flow])
    stranger.send(stranger.message()[0])
    until(lambda: listening.status()["foreign"] > 0)
    assert heard.frames == []


def test_groups_are_joined_and_left(listening: Listening, heard: Heard, worker: Callable[..., Worker]) -> None:
    one, two = worker(0), worker(1, f"239.77.11.{next(NUMBERS)}")
    listening.set_flows([one.flow, two.flow])
    for number, each in enumerate((one, two), 1):
        each.send(each.message(frames=1)[0])
        until(lambda number=number: len(heard.frames) == number)  # type: ignore[misc]
    listening.set_flows([two.flow])
    one.send(one.message(frames=1)[0])
    two.send(two.message(frames=1)[0])
    until(lambda: len(heard.frames) == 3)
    assert [rank for rank, _ in heard.frames] == [0, 1, 1]
    assert listening.status()["frames"] == 3
    ticks = heard.ticks
    until(lambda: heard.ticks > ticks)
    listening.close()
    assert listening.status()["groups"] == []


def test_what_a_callback_raises_costs_that_frame(
    listening: Listening, heard: Heard, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    one = worker()
    listening.set_flows([one.flow])
    heard.raises = KeyError("planted")
    with caplog.at_level(logging.ERROR):
        one.send(one.message()[0])
        until(lambda: listening.status()["frames"] == 3)
    assert [record.getMessage().count("planted") for record in caplog.records] == [1]
    heard.raises = None
    one.send(one.message()[0])
    until(lambda: len(heard.frames) == 3)


def test_a_group_that_cannot_be_joined_is_logged(
    listening: Listening, worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    one = worker()
    with socket.socket(type=socket.SOCK_DGRAM) as blocker, caplog.at_level(logging.ERROR):
        blocker.bind((one.flow.target, GROUP_PORT))  # without SO_REUSEADDR: the port is its own
        listening.set_flows([one.flow])
    assert "cannot join" in caplog.text
    assert listening.status()["groups"] == []


def test_an_interface_that_is_not_there_is_refused(heard: Heard) -> None:
    with pytest.raises(UsageError, match="interface 'nope0' has no IPv4 address"):
        Listening("nope0", heard.frame, heard.tick)
