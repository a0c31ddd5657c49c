"""Ranks that multicast to each other and shadows that listen, on a network in memory whose faults come from a seed."""

from __future__ import annotations

import heapq
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from random import Random

import numpy as np
from xxhash import xxh3_64_intdigest as xxh3

from checkmate.errors import ProtocolError
from checkmate.wire.assembly import Messages
from checkmate.wire.datagrams import (
    DATAGRAM_HEADER_BYTES,
    Datagram,
    Packer,
    Pieces,
    What,
    decode_answer,
    encode_answer,
    split,
)
from checkmate.wire.frames import Header, Kind, encode_header
from checkmate.wire.multicast import Burst, Question, Receiver, Sender

SESSION = 0x1234_5678_9ABC


@dataclass(frozen=True)
class Faults:
    """Of what travels to anybody. Shares of datagrams; delays in seconds."""

    drop: float = 0.0
    twice: float = 0.0
    late: float = 0.0  #: of those, each comes up to `delay_s` later than those sent after it
    delay_s: float = 0.002
    damage: float = 0.0  #: of acknowledgements


class Clock:
    now = 100.0


class Network:
    """`step` moves time to the next event. Datagrams to one listener may be joined, as UDP_GRO does."""

    def __init__(self, ranks: int, shadows: int, seed: int, workers: Faults, listeners: Faults, **options) -> None:
        self.random, self.clock = Random(seed), Clock()
        self.workers, self.listeners = workers, listeners
        self.size = options.pop("size", 256)
        self.batch = options.pop("batch", 8)
        self.events: list = []
        self.ties = count()
        self.sent = Counter()
        self.ranks = [Rank(self, rank, ranks, **options) for rank in range(ranks)]
        self.shadows = [Shadow() for _ in range(shadows)]
        self.gone: set[int] = set()

    def run(self, until=lambda: False, limit_s=60.0) -> None:
        """Until nothing happens any more, or `until` says so. Raises what a sender raises."""
        end = self.clock.now + limit_s
        while not until():
            for rank in self.ranks:
                if rank.number not in self.gone:
                    rank.send()
            due = [r.sender.due(self.clock.now) for r in self.ranks if r.number not in self.gone]
            soonest = min([self.events[0][0] if self.events else float("inf"), *due])
            if soonest == float("inf"):
                return
            assert soonest < end, "it goes on and on"
            self.clock.now = max(self.clock.now, soonest) + 1e-9
            while self.events and self.events[0][0] <= self.clock.now:
                _, _, who, data, each = heapq.heappop(self.events)
                who.hear(data, each, self.clock.now)

    def multicast(self, sender: int, datagrams: list[bytes]) -> None:
        for rank in self.ranks:
            if rank.number != sender:
                self.deliver(rank, datagrams, self.workers)
        for shadow in self.shadows:
            self.deliver(shadow, datagrams, self.listeners)

    def unicast(self, to: int, datagrams: list[bytes]) -> None:
        self.deliver(self.ranks[to], datagrams, self.workers)

    def deliver(self, who, datagrams: list[bytes], faults: Faults) -> None:
        if isinstance(who, Rank) and who.number in self.gone:
            return
        at = self.clock.now + 50e-6
        joined: list[bytes] = []
        for datagram in datagrams:
            copies = (self.random.random() >= faults.drop) + (self.random.random() < faults.twice)
            for _ in range(copies):
                if self.random.random() < faults.late:
                    self._at(at + self.random.uniform(0, faults.delay_s), who, [datagram])
                else:
                    joined.append(datagram)
        # The kernel joins what has one length, and one shorter one at the end.
        group: list[bytes] = []
        for datagram in joined:
            if group and (len(group[-1]) < len(group[0]) or len(datagram) > len(group[0])):
                self._at(at, who, group)
                group = []
            group.append(datagram)
        if group:
            self._at(at, who, group)

    def _at(self, when: float, who, group: list[bytes]) -> None:
        data = b"".join(group)
        if self.random.random() < self.workers.damage and group[0][5] == What.ACK:
            where = self.random.randrange(DATAGRAM_HEADER_BYTES, len(data))
            data = data[:where] + bytes([data[where] ^ 0x55]) + data[where + 1 :]
        heapq.heappush(self.events, (when, next(self.ties), who, data, len(group[0])))


class Rank:
    def __init__(self, network: Network, number: int, ranks: int, window_bytes=8192, deadline_s=5.0, rate=None) -> None:
        self.network, self.number = network, number
        others = [rank for rank in range(ranks) if rank != number]
        self.sender = Sender(others, network.size, network.batch, window_bytes, deadline_s, rate)
        self.packer = Packer(number, SESSION, network.size, network.batch)
        self.receivers = {rank: Receiver(network.size) for rank in others}
        self.delivered = 0
        self.got: dict[int, list[np.ndarray]] = {rank: [] for rank in others}
        self.whole: Counter[int] = Counter()
        self.most_in_flight = self.most_begun = 0

    def put(self, table: bytes, payload: bytes) -> None:
        def done() -> None:
            self.delivered += 1

        self.sender.put(np.frombuffer(table, np.uint8), np.frombuffer(payload, np.uint8), done)

    def expect(self, sender: int, table_bytes: int, payload_bytes: int) -> None:
        table, payload = np.zeros(table_bytes, np.uint8), np.zeros(payload_bytes, np.uint8)
        self.got[sender].append(payload)

        def done() -> bool:
            self.whole[sender] += 1
            return True

        self.receivers[sender].expect(table, payload, done)

    def send(self) -> None:
        while (action := self.sender.next(self.network.clock.now)) is not None:
            self.most_in_flight = max(self.most_in_flight, self.sender.in_flight)
            match action:
                case Burst(to, message, first, stop):
                    data = message.bytes_of(first, stop)
                    packed = self.packer.pack(data, message.number, first, message.count, message.tables).tobytes()
                    each = message.size + DATAGRAM_HEADER_BYTES
                    datagrams = [packed[at : at + each] for at in range(0, len(packed), each)]
                    self.network.sent["again" if to is not None else "all"] += len(data)
                case Question(serial, number, first):
                    to = None
                    head = Datagram(What.ASK, self.number, SESSION, number, first)
                    datagrams = [head.encode() + serial.to_bytes(8, "little")]
            if to is None:
                self.network.multicast(self.number, datagrams)
            else:
                self.network.unicast(to, datagrams)

    def hear(self, data: bytes, each: int, now: float) -> None:
        for head, found in split(np.frombuffer(data, np.uint8)[None], len(data), each):
            if isinstance(found, Pieces):
                self.receivers[head.sender].take(found)
            elif head.what is What.ASK:
                serial = int.from_bytes(found[DATAGRAM_HEADER_BYTES:], "little")
                answer = self.receivers[head.sender].answer(serial, head.number, head.first)
                self.network.unicast(head.sender, [encode_answer(self.number, SESSION, answer)])
            elif head.what is What.ACK:
                with suppress(ProtocolError):
                    self.sender.heard(head.sender, decode_answer(head, found), now)


class Shadow:
    def __init__(self) -> None:
        self.frames: dict[tuple[int, int], bytes] = {}
        self.streams: dict[int, Messages] = {}

    def hear(self, data: bytes, each: int, now: float) -> None:
        for head, found in split(np.frombuffer(data, np.uint8)[None], len(data), each):
            if isinstance(found, Pieces):
                self.streams.setdefault(head.sender, Messages(self._take)).feed(found, now)

    def end(self) -> None:
        for stream in self.streams.values():
            stream.expire(float("inf"))

    def _take(self, header: Header, head: memoryview, payload: memoryview, trailer: memoryview) -> None:
        key = header.rank, header.block
        assert self.frames.setdefault(key, bytes(payload)) == payload


def message(random: Random, rank: int, first_block: int, sizes: list[int]) -> tuple[bytes, bytes, dict]:
    """A message of frames with these lengths; and what a shadow should make of it."""
    payloads = [random.randbytes(size) for size in sizes]
    table = b"".join(
        encode_header(Header(Kind.GRAD, len(p), bytes(16), rank, block=first_block + i, round=1), xxh3(p))
        for i, p in enumerate(payloads)
    )
    return table, b"".join(payloads), {(rank, first_block + i): p for i, p in enumerate(payloads)}
