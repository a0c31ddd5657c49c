"""The all-gather by multicast: each rank's sums leave once, and the network delivers them to all peers and shadows.

One thread sends, one receives what is sent to the group, one what is sent to this rank alone: answers, and pieces that
only it has missed. They drive the state machines of `wire.multicast`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import ProtocolError
from ..transport.group import Inlet, Outlet, interface_of, link_bytes_per_s, only_from_others, skip_own_host
from ..transport.tcp import not_in_children
from ..wire.datagrams import (
    DATAGRAM_HEADER_BYTES,
    SERIAL,
    Datagram,
    Packer,
    Pieces,
    What,
    decode_answer,
    encode_answer,
    piece_bytes,
    split,
)
from ..wire.multicast import Burst, Question, Receiver, Sender
from ..wire.packets import Flow

log = logging.getLogger("checkmate")

#: Every peer echoes a probe within so long, if the network forwards the group at all.
PROBE_S = 10.0
_AGAIN_S = 0.05
#: Pieces that go out with one call: nearly a message.
BATCH = 704
#: So late at most a thread notices that all is closed.
_LATE_S = 0.25

Address = tuple[str, int]


class Member(NamedTuple):
    """What a rank says of itself."""

    address: Address
    mtu: int
    buffer_bytes: int


class Gather:
    """One rank's part. `members` are by rank. `fail` is called once, from a thread of ours, when it is over."""

    def __init__(
        self, rank: int, members: Sequence[Member], session: int, group: Address, joined: socket.socket,
        alone: socket.socket, timeout_s: float,
    ) -> None:  # fmt: skip
        self.rank, self.group = rank, group
        self._members, self._session = members, session
        self._sockets = (joined, alone)
        self.size = piece_bytes(min(member.mtu for member in members))
        self._each = DATAGRAM_HEADER_BYTES + self.size
        self._outlet = Outlet(alone, self._each)
        peers = [peer for peer in range(len(members)) if peer != rank]
        # All peers' windows at once; the kernel doubles the buffer, to have room for its records of small packets.
        window = min(member.buffer_bytes for member in members) // len(peers)
        rate = link_bytes_per_s(interface_of(members[rank].address[0]))
        self.sender = Sender(peers, self.size, BATCH, window, timeout_s, None if rate is None else rate / len(members))
        self._packer = Packer(rank, session, self.size, BATCH)
        hosts = [member.address[0] for member in members]
        if hosts.count(hosts[rank]) == 1 and not hosts[rank].startswith("127."):
            skip_own_host(alone)
        self._receivers = {peer: Receiver(self.size) for peer in peers}
        self._addresses = {peer: members[peer].address for peer in peers}
        self._changed = threading.Condition()  # over the sender
        self._receiving = threading.RLock()
        self._echoed: set[int] = set()
        self._closed = self._told = False
        self.fail: Callable[[Exception], None] = lambda _: None
        self._threads = [
            threading.Thread(target=self._run, args=(work, *args), name=f"checkmate multicast {name}", daemon=True)
            for name, work, *args in (
                ("send", self._send), ("receive", self._receive, joined), ("answers", self._receive, alone),
            )
        ]  # fmt: skip
        for sock in self._sockets:
            only_from_others(sock, rank, session)
            not_in_children(sock)
        for thread in self._threads:
            thread.start()

    @property
    def segments(self) -> bool:
        """Whether the kernel cuts what is sent into datagrams (``UDP_SEGMENT``)."""
        return self._outlet.segments

    @property
    def session(self) -> bytes:
        """16 bytes, as an incarnation's id, that no other group of ranks has had."""
        return b"session\0" + self._session.to_bytes(8, "little")

    @property
    def flow(self) -> Flow:
        """By which a shadow knows this rank's datagrams."""
        return Flow(*self._members[self.rank].address, *self.group, 0)

    def put(self, table: bytes, payload: memoryview, done: Callable[[], None]) -> None:
        """Send a message to all peers. `done` is called once all have it; until then its memory must not change."""
        with self._changed:
            self.sender.put(np.frombuffer(table, np.uint8), np.frombuffer(payload, np.uint8), done)
            self._changed.notify()

    def expect(self, peer: int, table: bytearray, payload: memoryview, done: Callable[[], bool]) -> None:
        """The next message of a peer belongs here. `done` is called once it is, and says whether it is right."""
        with self._receiving:
            self._receivers[peer].expect(np.frombuffer(table, np.uint8), np.frombuffer(payload, np.uint8), done)

    def probe(self, timeout_s: float = PROBE_S) -> list[int]:
        """The peers that have not echoed within so long what this rank sends to the group."""
        deadline = time.monotonic() + timeout_s
        head = Datagram(What.PROBE, self.rank, self._session, size=self.size).encode()
        probes = np.frombuffer(head.ljust(self._each, b"\0") * 2, np.uint8)
        while len(self._echoed) < len(self._receivers) and (left := deadline - time.monotonic()) > 0:
            if left < timeout_s / 2:
                self._outlet.segments = False  # something on the way may not take what the kernel makes of them
            try:
                self._outlet.send(probes, self.group)
            except OSError:
                if not self._outlet.segments:
                    raise
                self._outlet.segments = False
                continue
            with self._changed:
                self._changed.wait_for(lambda: len(self._echoed) == len(self._receivers), _AGAIN_S)
        return sorted(self._receivers.keys() - self._echoed)

    def leave(self, peer: int) -> None:
        """A peer has ended in good order: it has all that it needs."""
        with self._changed:
            self.sender.gone(peer)

    def close(self) -> None:
        """End the threads. What is under way is lost."""
        self._closed = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes up
        if self._changed.acquire(blocking=False):  # its holder may be waiting for whom this garbage collection stopped
            self._changed.notify_all()
            self._changed.release()

    def wait_closed(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
        if not any(thread.is_alive() for thread in self._threads):  # else they use the number of the descriptor
            for sock in self._sockets:
                sock.close()

    # ------------------------------------------------------------ threads

    def _run(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception as error:
            if not self._closed:
                self.fail(error)

    def _send(self) -> None:
        while True:
            with self._changed:
                while (action := None if self._closed else self.sender.next(now := time.monotonic())) is None:
                    if self._closed:
                        return
                    self._changed.wait(max(0.0, min(self.sender.due(now) - now, _LATE_S)))
            match action:
                case Burst(to, message, first, stop):
                    data = message.bytes_of(first, stop)
                    packed = self._packer.pack(data, message.number, first, message.count, message.tables)
                    where = self.group if to is None else self._addresses[to]
                    self._try(self._outlet.send, packed, where)
                case Question(serial, number, first):
                    head = Datagram(What.ASK, self.rank, self._session, number, first)
                    self._try(self._outlet.say, head.encode() + SERIAL.pack(serial), self.group)

    def _try(self, send: Callable[..., None], *what: Any) -> None:
        try:
            send(*what)
        except OSError as error:  # as if it had been lost on the way: it is repaired, or the deadline ends it
            if not (self._told or self._closed):
                self._told = True
                log.warning("checkmate: multicast to %s: %s (`ip route get %s`)", self.group[0], error, self.group[0])

    def _receive(self, sock: socket.socket) -> None:
        inlet = Inlet(sock)
        while not self._closed:
            for arrival in inlet.receive():
                for head, found in split(arrival.data, arrival.nbytes, arrival.each):
                    if head.session == self._session and head.sender in self._receivers:
                        self._take(head, found)

    def _take(self, head: Datagram, found: Pieces | memoryview) -> None:
        peer = head.sender
        if isinstance(found, Pieces):
            with self._receiving:
                self._receivers[peer].take(found)
        elif head.what is What.ASK and len(found) == DATAGRAM_HEADER_BYTES + SERIAL.size:
            (serial,) = SERIAL.unpack_from(found, DATAGRAM_HEADER_BYTES)
            with self._receiving:
                answer = self._receivers[peer].answer(serial, head.number, head.first)
            self._try(self._outlet.say, encode_answer(self.rank, self._session, answer), self._addresses[peer])
        elif head.what is What.ACK:
            with contextlib.suppress(ProtocolError):  # damaged: as if it had been lost
                answer = decode_answer(head, found)
                with self._changed:
                    self.sender.heard(peer, answer, time.monotonic())
                    if self.sender.more:
                        self._changed.notify()
        elif head.what is What.PROBE and len(found) == self._each:
            self._try(self._outlet.say, Datagram(What.ECHO, self.rank, self._session).encode(), self._addresses[peer])
        elif head.what is What.ECHO:
            with self._changed:
                self._echoed.add(peer)
                self._changed.notify_all()
