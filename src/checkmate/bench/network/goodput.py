"""How much of what the network could carry to a group our reliable multicast brings there."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from xxhash import xxh3_64_intdigest as xxh3

from ...lab import Lab
from ...lab.plan import DATA
from ...trainer.multicast import Group, join_group
from ...trainer.peers import local_address
from ...trainer.shards import CHUNK_BYTES
from ...transport import group
from ...wire.datagrams import DATAGRAM_HEADER_BYTES, GROUP_PORT, GROUPS, MOST_BYTES, MOST_DATAGRAMS
from ...wire.frames import HEADER_BYTES
from ..common import TIMEOUT_S, BenchmarkFailed, Crew, Figure, at_least, median
from .hosts import crew
from .rank import join

#: What is asked of the share.
TARGET = 0.8
#: What the kernel keeps of the raw datagrams: all of a round, so that none is lost.
QUEUE_BYTES = 512 << 20
OURS, RAW = "ours", "raw UDP_SEGMENT"
_UDP_SEGMENT, _UDP_GRO = 103, 104
#: Ends of a raw round are sent so often, and so far apart; nothing for so long is the end as well.
ENDS, APART_S, SILENCE_S = 20, 0.005, 1.0


class Took(NamedTuple):
    """Payload bytes sent or received, and when that began (at the sender) or was over (at a receiver)."""

    nbytes: int
    at: float


class Talker:
    """One rank: the first one sends, by our multicast or raw, and the others receive."""

    def __init__(self, rank: int, world: int, master: str) -> None:
        join(rank, world, master)
        self._rank = rank
        everybody: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        self._gather = join_group(everybody, Group(GROUPS, "bench", 1), DATA[0], TIMEOUT_S)
        name, address = self._gather.group[0], local_address(DATA[0])
        self._each = DATAGRAM_HEADER_BYTES + self._gather.size
        self._target = name, GROUP_PORT + 1
        self._socket = group.sender(address, 1) if rank == 0 else group.join(*self._target, address)
        group.enlarge(self._socket, QUEUE_BYTES)
        if rank:
            self._socket.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(SILENCE_S), 0))

    def prepare(self, nbytes: int) -> None:
        self._memory = np.random.default_rng(self._rank).integers(0, 256, nbytes, np.uint8)

    def digest(self) -> int:
        return xxh3(memoryview(self._memory))  # type: ignore[arg-type]

    def ours(self) -> Took:
        """The sender is done when everybody has all, and has said so: then is `at`, at a receiver too."""
        table, view = bytes(HEADER_BYTES), memoryview(self._memory)  # type: ignore[arg-type]
        chunks = [view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)]
        left, over = iter(range(len(chunks) - 1, -1, -1)), threading.Event()

        def done() -> None:
            if next(left) == 0:
                over.set()

        def right() -> bool:
            done()
            return True

        if self._rank:
            for chunk in chunks:
                self._gather.expect(0, bytearray(table), chunk, right)
        dist.barrier()
        began = time.perf_counter()
        if not self._rank:
            for chunk in chunks:
                self._gather.put(table, chunk, done)
        if not over.wait(TIMEOUT_S):
            raise BenchmarkFailed("our multicast does not bring everything")
        ended = time.perf_counter()
        dist.barrier()
        return Took(len(view), began if not self._rank else ended)

    def raw(self) -> Took:
        """At a receiver, whatever came until a datagram of another length."""
        if not self._rank:
            return self._send()
        memory, nbytes, each = bytearray(MOST_BYTES + 1), 0, self._each
        with contextlib.suppress(BlockingIOError):
            while True:  # what is left of the round before
                self._socket.recv_into(memory, 0, socket.MSG_DONTWAIT)
        dist.barrier()
        ended, receive, places, room = time.perf_counter(), self._socket.recvmsg_into, [memory], socket.CMSG_SPACE(4)
        with contextlib.suppress(BlockingIOError):
            while True:
                count = receive(places, room)[0]
                if whole := count - count % each:
                    nbytes, ended = nbytes + whole, time.perf_counter()
                if whole != count:
                    break
        return Took(nbytes // each * self._gather.size, ended)

    def _send(self) -> Took:
        count, batch = len(self._memory) // self._each, min(MOST_DATAGRAMS, MOST_BYTES // self._each)
        view, ancillary = memoryview(self._memory), [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("H", self._each))]  # type: ignore[arg-type]
        step, end = batch * self._each, count * self._each
        dist.barrier()
        began = time.perf_counter()
        for at in range(0, end, step):
            self._socket.sendmsg([view[at : min(at + step, end)]], ancillary, 0, self._target)
        for _ in range(ENDS):
            time.sleep(APART_S)
            self._socket.sendto(b"\0", self._target)
        return Took(count * self._gather.size, began)


def multicast_goodput(quick: bool, rate: str) -> Iterator[Figure]:
    """One rank sends messages of 1 MiB to all others, which put them where they belong; it is over when all have
    acknowledged all. The limit: the same rank sends datagrams of the same size to the same group, 64 KiB by one call,
    and the same others receive as much by one call, and do nothing with it. Only what has arrived counts, at the
    slowest one. That nothing is lost, the kernel may keep all of it there; so the sender need not be held back. On
    links of MTU 1500 with offloads. The two take turns; payload bytes without any header.
    """
    nbytes, rounds = (4 << 20, 2) if quick else (128 << 20, 11)
    for num_workers in (2,) if quick else (2, 4):
        with Lab(num_workers, 0, multicast=True) as lab, crew(lab, Talker) as ranks:
            ranks.call("prepare", nbytes)
            rates: dict[str, list[float]] = defaultdict(list)
            lost: list[float] = []
            for number in range(rounds):
                for kind in (OURS, RAW) if number % 2 == 0 else (RAW, OURS):
                    found, missing = _round(ranks, "ours" if kind == OURS else "raw")
                    rates[kind].append(found)
                    if kind == RAW:
                        lost.append(missing)
            if len(set(ranks.call("digest"))) != 1:
                raise BenchmarkFailed("our multicast does not bring what was sent")
            name = f"multicast-goodput: 1 to {num_workers - 1}: "
            for kind in (OURS, RAW):
                yield Figure(f"{name}{kind}", median(rates[kind]) / 1e9, "GB/s")
            yield Figure(f"{name}lost of the raw datagrams, at worst", max(lost) * 100, "%")
            shares = [ours / raw for ours, raw in zip(rates[OURS], rates[RAW], strict=True)]
            yield at_least(f"{name}share of the raw rate", median(shares), TARGET)


def _round(ranks: Crew, method: str) -> tuple[float, float]:
    """Bytes per second at the slowest receiver, and the share that it has lost."""
    sent, *received = ranks.call(method)
    return min(got.nbytes / (got.at - sent.at) for got in received), 1 - min(
        got.nbytes for got in received
    ) / sent.nbytes
