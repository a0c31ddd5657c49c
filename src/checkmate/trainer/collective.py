"""The all-reduce whose packets the network replicates: a direct exchange over TCP, in blocking sockets on threads.

Every rank sends the shard of rank j to rank j, which adds them up in the order of ranks and sends the sum to all. So
sums depend neither on timing nor on where in a bucket a gradient lies. A shard moves in chunks, and a chunk's sum
leaves as soon as it is there::

    reduce-scatter    rank i ── chunk of shard j ──> rank j: divides by N, adds in the order of ranks
    all-gather        rank j ── its sum ───────────> all others; to one of them on the *tagged* connection

The tagged connection carries nothing but frames, in packets with a DSCP mark: each shard passes there exactly once, and
what the network replicates is one gradient. A worker's N - 1 untagged streams and its tagged one share its link, so N
tagged streams together come to about the rate of one link, which is what the shadow's port can take.

With a `Gather` there is no tagged connection: the sum leaves once, by multicast to all others and to the shadows.

One thread per connection and direction; all memory that they fill or empty belongs to one operation. A peer that is
gone, or an operation that takes longer than the process group's timeout, ends the collective: every rank raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_64_intdigest as xxh3

from ..errors import ProtocolError
from ..tensors import bytes_of
from ..wire.frames import HEADER_BYTES, Header, Kind, decode_header, encode_header
from ..wire.seal import TRAILER_BYTES, Seal, counter_of
from .ending import call_at_exit
from .gather import Gather
from .shards import CHUNK_BYTES, Chunk, Cut, Plan

log = logging.getLogger("checkmate")

Memory = bytes | bytearray | memoryview

#: Chunks of one peer that may be here before the other peers' are. They stay in the cache.
AHEAD = 4
#: Before each chunk on an untagged connection: what it is, the operation's number, first byte in the bucket, length.
_PREFIX = struct.Struct("<4sQQI")
_SCATTER, _GATHER = b"CKMs", b"CKMg"
#: The last word of a rank that ends in good order, with the number of operations that it has done: all of each.
_FAREWELL = b"CKMe"
#: Buffers handed to one system call; Linux takes 1024.
_IOV = 512


class Label(NamedTuple):
    """What the frames of one bucket say about themselves."""

    incarnation: bytes = bytes(16)
    epoch: int = 0
    step: int = 0
    update: int = 0
    round: int = 1


UNLABELLED = Label()


class Peer(NamedTuple):
    """The connections with one other rank. `tagged_out` goes to one rank only, `tagged_in` comes from one only."""

    plain: socket.socket
    tagged_out: socket.socket | None = None
    tagged_in: socket.socket | None = None


class Operation:
    """One bucket on its way. `done` is a future of it, averaged over all ranks, in place.

    Then nothing of it is on its way any more, and `shard` holds this rank's sum as it was sent.
    """

    def __init__(
        self, number: int, bucket: torch.Tensor, plan: Plan, rank: int, label: Label, shard: memoryview, copies: int
    ) -> None:
        """This rank's sum is sent in so many copies."""
        self.number, self.plan, self.label = number, plan, label
        self.first, stop = plan.bounds[rank]
        self.done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.began = time.monotonic()
        self.bucket, self.shard = bucket, shard[: stop - self.first]
        self.memory = bytes_of(bucket)
        self.sums = torch.frombuffer(self.shard, dtype=bucket.dtype) if self.shard else bucket[:0]
        self.chunks: Sequence[Chunk] = plan.chunks[rank]
        #: Chunks of all shards whose sum is not in the bucket yet, and sums of this one that are not sent yet.
        self.unfinished = sum(map(len, plan.chunks)) + len(self.chunks) * copies
        self.digests: dict[Cut, int] = {}  #: XXH3-64 of the frames of this rank's shard that have left


class Collective:
    """See the module. `peers` is by rank, None for this rank. Operations are begun in the same order on every rank."""

    def __init__(
        self, rank: int, peers: Sequence[Peer | None], timeout_s: float, seal: Callable[[bytes], Seal] | None = None,
        global_rank: int | None = None, gather: Gather | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.world = rank, len(peers)
        self._multicast = gather
        self._pid = os.getpid()
        self._global_rank = rank if global_rank is None else global_rank  #: what frames say
        self.timeout_s = timeout_s
        self.bytes_tagged = 0  #: sent on the tagged connection, or by multicast, for the first time; headers and all
        self._seal_for = seal
        self._seals: dict[bytes, Seal] = {}
        self._sealed = 0  #: counts the trailers, for their nonces
        #: What peers believe by multicast: whatever a frame says of itself, it is of this session, and has this number.
        self._proof = None if seal is None or gather is None else seal(gather.session)
        self._gone, self._coming = 0, [0] * self.world  #: messages by multicast, from here and from each rank
        self._lock = threading.RLock()  #: `hang_up` may come from a garbage collection, anywhere
        self._error: Exception | None = None
        self._closed = False
        self._leaving = False  #: in good order; then who sends on a connection ends it
        self._left: list[int] = []  #: peers that have
        self._operations: deque[Operation] = deque()  #: not finished yet, oldest first
        self._begun: dict[int, Operation] = {}
        self._numbers = 0
        self._chunks: deque[tuple[Operation, Chunk]] = deque()  #: of this rank's shards, to be summed in this order
        self._arrived: deque[int] = deque()  #: how many peers' contributions are here, of the chunks from `_summed` on
        self._summed = 0
        self._summing = False
        others = [peer for peer in peers if peer is not None]
        tagged_to = (r for r, peer in enumerate(peers) if peer is not None and peer.tagged_out is not None)
        self._tagged_to = next(tagged_to, -1)  # none by multicast
        self._inbox = {
            r: torch.empty(AHEAD * CHUNK_BYTES, dtype=torch.uint8) for r, peer in enumerate(peers) if peer is not None
        }
        #: A place in the inbox that is free again; None: there is nothing to wait for any more.
        self._room: dict[int, queue.SimpleQueue[int | None]] = {r: queue.SimpleQueue() for r in self._inbox}
        for place, room in product(range(AHEAD), self._room.values()):
            room.put(place)
        self._outbox: dict[int, queue.SimpleQueue[_Outgoing | None]] = {r: queue.SimpleQueue() for r in self._inbox}
        self._tagged: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._expected: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()  #: by the tagged receiver
        self._begun_now: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()  #: of which all may be here already
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()  #: awaited by the clock
        #: On what threads wait; None ends each wait. Simple ones, for those may be put to from a garbage collection.
        self._waited: list[queue.SimpleQueue[Any]] = [self._tagged, self._expected, self._begun_now, self._over]
        self._waited += [*self._outbox.values(), *self._room.values()]
        #: What each peer says of its contribution in that place: operation, first byte in the bucket, length.
        self._claims = {r: [(0, 0, 0)] * AHEAD for r in self._inbox}
        self._sockets = [s for peer in others for s in peer if s is not None]
        self._threads: list[threading.Thread] = []
        for other, peer in enumerate(peers):
            if peer is None:
                continue
            self._thread("send", self._send, peer.plain, self._outbox[other])
            self._thread("receive", self._receive, peer.plain, other)
            if peer.tagged_out is not None:
                self._thread("tagged send", self._send, peer.tagged_out, self._tagged)
            if peer.tagged_in is not None:
                self._thread("tagged receive", self._receive_frames, peer.tagged_in, other)
        if gather is not None:
            gather.fail = self.fail
        self._thread("sum", self._catch_up)
        self._thread("clock", self._watch_time)
        call_at_exit(self.close)

    def _thread(self, name: str, work: Callable[..., None], *args: object) -> None:
        def run() -> None:
            try:
                work(*args)
            except Exception as error:
                self.fail(error)

        thread = threading.Thread(target=run, name=f"checkmate {name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def bytes_resent(self) -> int:
        """By multicast, for peers that missed it."""
        return 0 if self._multicast is None else self._multicast.sender.resent_bytes

    # ------------------------------------------------------------ for the training thread

    def begin(self, bucket: torch.Tensor, plan: Plan, shard: memoryview, label: Label = UNLABELLED) -> Operation:
        """Average `bucket` (one-dimensional, contiguous, on the CPU) over all ranks, in place. Returns at once.

        `shard` is memory for this rank's sum.
        """
        with self._lock:
            copies = self.world - 1 if self._multicast is None else 1
            operation = Operation(self._numbers, bucket, plan, self.rank, label, shard, copies)
            self._numbers += 1
            if self._error is not None or self._closed:
                _fail(operation, self._error or ConnectionError("this collective is closed"))
                return operation
            if not operation.unfinished:
                operation.done.set_result(bucket)
                return operation
            self._operations.append(operation)
            self._begun[operation.number] = operation
            self._chunks.extend((operation, chunk) for chunk in operation.chunks)
            self._expected.put(operation)
        if self._left:  # asked once the operation is known: else a farewell at this moment would find none that it ends
            self.fail(_left(self._left[0]))
            return operation
        for step in range(1, self.world):
            other = (self.rank + step) % self.world
            buffers: list[Memory] = []
            for chunk in plan.chunks[other]:
                start, stop, _ = chunk
                buffers += (
                    _PREFIX.pack(_SCATTER, operation.number, start, stop - start),
                    operation.memory[start:stop],
                )
                if self._multicast is not None and self._seal_for is None:
                    self._expect(operation, chunk, other, self._multicast)
                elif self._multicast is not None:  # before it is sent, nobody may write there what is not verified yet
                    expect = partial(self._expect, operation, chunk, other, self._multicast)
                    self._outbox[other].put(_Outgoing(buffers, sent=expect))
                    buffers = []
            self._outbox[other].put(_Outgoing(buffers))
        self._begun_now.put(operation)
        return operation

    def fail(self, error: Exception) -> None:
        """The collective is over, here and by the end of its connections everywhere."""
        with self._lock:
            if self._error is not None or self._closed:
                return
            self._error = error
            unfinished = list(self._operations)
            self._operations.clear()
            self._begun.clear()
        self._disconnect()
        if unfinished:  # torch tells the training loop of it in words of its own
            log.error("checkmate: the gradient collective is over: %s", error)
        for operation in unfinished:
            _fail(operation, error)

    def hang_up(self) -> None:
        """End all connections, and with them the threads. What is under way fails.

        If nothing is, peers are told: that they still wait for one another is no reason for them to fail.
        """
        if os.getpid() != self._pid:  # a child has the objects, but neither threads nor connections
            return
        with self._lock:
            if not (self._operations or self._error or self._closed):
                self._leaving = True
                for outgoing in self._outbox.values():
                    outgoing.put(_Outgoing([_PREFIX.pack(_FAREWELL, self._numbers, 0, 0)]))
        self.fail(ConnectionError("the collective was closed"))
        with self._lock:
            self._closed = True
        self._disconnect()

    def close(self) -> None:
        """`hang_up`, and wait for the threads."""
        if os.getpid() != self._pid:
            return
        self.hang_up()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
        if self._multicast is not None:
            self._multicast.wait_closed()

    def _ended(self, other: int, number: int) -> None:
        """A peer has ended in good order, after so many operations."""
        with self._lock:
            self._left.append(other)
            missed = any(operation.number >= number for operation in self._operations)
        if missed:
            self.fail(_left(other))
        elif self._multicast is not None:
            self._multicast.leave(other)

    def _disconnect(self) -> None:
        for sock in () if self._leaving else self._sockets:
            _end(sock)
        if self._multicast is not None:
            self._multicast.close()
        for waited in self._waited:
            waited.put(None)

    # ------------------------------------------------------------ summing

    def _contribution(self, sequence: int) -> None:
        """A peer's contribution to the chunk with this number is here."""
        with self._lock:
            at = sequence - self._summed
            while len(self._arrived) <= at:
                self._arrived.append(0)
            self._arrived[at] += 1
        self._reduce()

    def _catch_up(self) -> None:
        """Where the peers were faster than this rank, nobody else may come to sum: the training thread does not."""
        while self._begun_now.get() is not None:
            self._reduce()

    def _reduce(self) -> None:
        """Sum every chunk that is complete, in order. One thread does, whichever comes first."""
        while True:
            with self._lock:
                ready = self._chunks and self._arrived and self._arrived[0] == self.world - 1
                if self._summing or not ready or self._error is not None:
                    return
                self._summing = True
                operation, chunk = self._chunks.popleft()
                self._arrived.popleft()
                place = self._summed % AHEAD
                self._summed += 1
            try:
                self._sum(operation, chunk, place)
                for room in self._room.values():
                    room.put(place)
                self._gather(operation, chunk)
            except Exception as error:
                self.fail(error)
                return
            with self._lock:
                self._summing = False
            self._finished(operation)

    def _sum(self, operation: Operation, chunk: Chunk, place: int) -> None:
        expected = (operation.number, chunk.start, chunk.stop - chunk.start)
        for other, claims in self._claims.items():
            if claims[place] != expected:
                raise ConnectionError(f"rank {other} reduces another bucket than rank {self.rank}")
        size = operation.bucket.element_size()
        dtype, count = operation.bucket.dtype, (chunk.stop - chunk.start) // size
        first = place * CHUNK_BYTES
        own = operation.bucket[chunk.start // size : chunk.stop // size]
        at = (chunk.start - operation.first) // size
        total = operation.sums[at : at + count]
        values = [
            own if rank == self.rank else self._inbox[rank][first : first + count * size].view(dtype)
            for rank in range(self.world)
        ]
        if _divides_last(self.world, dtype):
            torch.add(values[0], values[1], out=total)
            for value in values[2:]:
                total.add_(value)
            total.mul_(1 / self.world)
        else:
            torch.div(values[0], self.world, out=total)
            for value in values[1:]:
                total.add_(value.div_(self.world))
        own.copy_(total)

    def _gather(self, operation: Operation, chunk: Chunk) -> None:
        """Send this rank's sum, in frames: to all at once, or tagged to one rank, and as it is to the others."""
        shard, first = operation.shard, operation.first
        frames: list[tuple[bytes, memoryview, bytes]] = []
        for cut in chunk.frames:
            payload = shard[cut.start - first : cut.stop - first]
            digest = xxh3(payload)
            operation.digests[cut] = digest
            header = self._header(operation.label, cut.block, cut.offset, len(payload), digest)
            frames.append((header, payload, self._trailer(operation.label, header, payload)))
        self.bytes_tagged += sum(len(buffer) for frame in frames for buffer in frame)
        sums = shard[chunk.start - first : chunk.stop - first]
        if self._multicast is not None:
            table = b"".join(header + trailer for header, _, trailer in frames)
            if self._proof is not None:
                table += self._proof.trailer(self.rank, self._gone, table, sums)
                self.bytes_tagged += TRAILER_BYTES
            self._gone += 1
            self._multicast.put(table, sums, lambda: self._finished(operation))
            return
        self._tagged.put(_Outgoing([buffer for frame in frames for buffer in frame if buffer], operation))
        prefix = _PREFIX.pack(_GATHER, operation.number, chunk.start, len(sums))
        for step in range(1, self.world):
            if (other := (self.rank + step) % self.world) != self._tagged_to:
                self._outbox[other].put(_Outgoing([prefix, sums], operation))

    def _expect(self, operation: Operation, chunk: Chunk, other: int, gather: Gather) -> None:
        """Another rank's sum, by multicast."""
        entry, proof = (HEADER_BYTES, 0) if self._proof is None else (HEADER_BYTES + TRAILER_BYTES, TRAILER_BYTES)
        table = bytearray(entry * len(chunk.frames) + proof)
        payload = operation.memory[chunk.start : chunk.stop]
        number, self._coming[other] = self._coming[other], self._coming[other] + 1
        gather.expect(other, table, payload, partial(self._gathered, operation, chunk, other, number, table, entry))

    def _gathered(
        self, operation: Operation, chunk: Chunk, other: int, number: int, table: bytearray, entry: int
    ) -> bool:
        """A peer's sum is in the bucket. False: it is damaged, or whoever sent it does not have the token."""
        content = memoryview(table)[: entry * len(chunk.frames)]
        if self._proof is not None:
            proof, payload = table[len(content) :], operation.memory[chunk.start : chunk.stop]
            if counter_of(proof) != number or not self._proof.holds(other, content, payload, proof):
                return False
        try:
            for at, cut in zip(range(0, len(content), entry), chunk.frames, strict=True):
                self._check_frame(content[at : at + HEADER_BYTES], cut, other)
        except ProtocolError:
            return False
        self._finished(operation)
        return True

    def _check_frame(self, head: memoryview, cut: Cut, other: int) -> None:
        header, _ = decode_header(head)
        if (header.block, header.offset, header.length) != (cut.block, cut.offset, cut.stop - cut.start):
            raise ConnectionError(f"rank {other} reduces another bucket than rank {self.rank}: {header}")

    def _header(self, label: Label, block: int, offset: int, length: int, digest: int) -> bytes:
        header = Header(
            Kind.GRAD, length, label.incarnation, self._global_rank, label.epoch, label.step, block, label.update,
            offset=offset, round=label.round,
        )  # fmt: skip
        return encode_header(header, digest)

    def _trailer(self, label: Label, header: bytes, payload: memoryview) -> bytes:
        if self._seal_for is None:
            return b""
        if label.incarnation == UNLABELLED.incarnation:  # of no attempt: there is no key of its own
            return bytes(TRAILER_BYTES)
        if (seal := self._seals.get(label.incarnation)) is None:
            seal = self._seals[label.incarnation] = self._seal_for(label.incarnation)
        self._sealed += 1
        return seal.trailer(self._global_rank, self._sealed, header, payload)

    def _finished(self, operation: Operation) -> None:
        """One more chunk of the bucket holds its sum, or one more sum is sent."""
        with self._lock:
            operation.unfinished -= 1
            if operation.unfinished or self._begun.pop(operation.number, None) is None:
                return
            self._operations.remove(operation)
        operation.done.set_result(operation.bucket)

    # ------------------------------------------------------------ connections

    def _send(self, sock: socket.socket, outgoing: queue.SimpleQueue[_Outgoing | None]) -> None:
        while (message := outgoing.get()) is not None:
            buffers, first = message.buffers, 0
            while first < len(buffers):
                count = sock.sendmsg(buffers[first : first + _IOV])
                while first < len(buffers) and count >= len(buffers[first]):
                    count -= len(buffers[first])
                    first += 1
                if count:
                    buffers[first] = memoryview(buffers[first])[count:]
            if message.operation is not None:
                self._finished(message.operation)
            if message.sent is not None:
                message.sent()
        if self._leaving:
            _end(sock)

    def _receive(self, sock: socket.socket, other: int) -> None:
        prefix, sequence = bytearray(_PREFIX.size), 0
        inbox = bytes_of(self._inbox[other])
        while True:
            _fill(sock, memoryview(prefix), other)
            kind, number, start, nbytes = _PREFIX.unpack(prefix)
            if kind == _SCATTER and nbytes <= CHUNK_BYTES:
                if (place := self._room[other].get()) is None:
                    raise ConnectionError("the collective is over")
                first = place * CHUNK_BYTES
                self._claims[other][place] = (number, start, nbytes)
                _fill(sock, inbox[first : first + nbytes], other)
                self._contribution(sequence)
                sequence += 1
            elif kind == _GATHER and (operation := self._begun.get(number)) is not None:
                _fill(sock, operation.memory[start : start + nbytes], other)
                self._finished(operation)
            elif kind == _FAREWELL:
                return self._ended(other, number)
            else:
                raise ConnectionError(f"rank {other} sent what no rank sends; the ranks reduce different buckets")

    def _receive_frames(self, sock: socket.socket, other: int) -> None:
        """What a tagged connection brings: the same frames that the shadow sees."""
        head = bytearray(HEADER_BYTES)
        trailer = memoryview(bytearray(TRAILER_BYTES if self._seal_for is not None else 0))
        while (operation := self._expected.get()) is not None:
            for chunk in operation.plan.chunks[other]:
                for cut in chunk.frames:
                    _fill(sock, memoryview(head), other)
                    self._check_frame(memoryview(head), cut, other)
                    _fill(sock, operation.memory[cut.start : cut.stop], other)
                    if trailer:
                        _fill(sock, trailer, other)
                self._finished(operation)
        _end(sock)

    def _watch_time(self) -> None:
        left = 1.0
        while True:
            with contextlib.suppress(queue.Empty):
                return self._over.get(timeout=min(left, 1.0))
            with self._lock:
                oldest = self._operations[0] if self._operations else None
            left = 1.0 if oldest is None else oldest.began + self.timeout_s - time.monotonic()
            if left <= 0:
                return self.fail(TimeoutError(f"no answer within the process group's timeout of {self.timeout_s:g} s"))


def _divides_last(world: int, dtype: torch.dtype) -> bool:
    """Not as DDP, which divides each contribution: it takes less time.

    Where dividing is exact and the sum fits, the bits are the same.
    """
    return world & (world - 1) == 0 and dtype is not torch.float16


def _fail(operation: Operation, error: Exception) -> None:
    operation.done.set_exception(error)  # type: ignore[arg-type]  # torch says so


def _left(other: int) -> ConnectionError:
    return ConnectionError(f"rank {other} has ended its collective, and takes part no more")


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class _Outgoing(NamedTuple):
    """One message of one connection. Its memory belongs to the operation, if it names one."""

    buffers: list[Memory]
    operation: Operation | None = None
    sent: Callable[[], None] | None = None  #: called once it is


def _fill(sock: socket.socket, target: memoryview, other: int) -> None:
    """Receive until `target` is full."""
    while target:
        count = sock.recv_into(target, len(target), socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError(f"rank {other} closed its connection")
        target = target[count:]
