"""Host memory that keeps what a step sends until it is stable: a pool of buffers that grows with lag, up to a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..tensors import bytes_of
from ..wire.frames import MAX_BULK_BYTES, Header, Kind

#: Pieces begin at multiples of this many bytes, which suits every dtype and a cache line.
ALIGN_BYTES = 64


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def part_of(grad: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """These bytes of a gradient, in row-major order; the whole keeps its shape."""
    size = grad.element_size()
    if nbytes == grad.numel() * size:
        return grad
    return grad.reshape(-1)[offset // size : (offset + nbytes) // size]


class Buffer:
    """A piece of host memory, page-locked where a GPU copies into it."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.memory = bytes_of(self.tensor)
        self._views: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.memory)

    def views(self, key: Hashable, make: Callable[[torch.Tensor], Any]) -> Any:
        """What `make` made of this memory for `key`, made once: hundreds of views cost more than filling them."""
        if key not in self._views:
            if len(self._views) > 8:  # parameters come and go: do not collect their views for ever
                self._views.clear()
            self._views[key] = make(self.tensor)
        return self._views[key]


class Pool:
    """Buffers by size, and whatever else is charged. `take` never waits: None says that the limit is reached."""

    def __init__(self, limit_bytes: int, pinned: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.charged_bytes = 0  #: of these, what is no buffer
        self.used_bytes = 0
        self._pinned = pinned
        self._free: list[Buffer] = []
        self._lock = threading.Lock()  # held for a few list operations, never while anything is sent

    def take(self, nbytes: int) -> Buffer | None:
        """A buffer of at least `nbytes`."""
        with self._lock:
            fitting = [b for b in self._free if nbytes <= len(b) <= 2 * nbytes + 4096]
            if fitting:
                buffer = min(fitting, key=len)
                self._free.remove(buffer)
                self.used_bytes += len(buffer)
                return buffer
            if not self._count(nbytes):
                return None
        try:
            return Buffer(nbytes, self._pinned)
        except RuntimeError:  # the system has no memory, or locks no more of it
            with self._lock:
                self.allocated_bytes -= nbytes
                self.used_bytes -= nbytes
            return None

    def charge(self, nbytes: int) -> bool:
        """Count memory that is not a buffer of this pool, until `discharge`. False: the limit is reached."""
        with self._lock:
            counted = self._count(nbytes)
            self.charged_bytes += nbytes if counted else 0
            return counted

    def discharge(self, nbytes: int) -> None:
        with self._lock:
            self.charged_bytes -= nbytes
            self.allocated_bytes -= nbytes
            self.used_bytes -= nbytes

    def _count(self, nbytes: int) -> bool:
        while self._free and self.allocated_bytes + nbytes > self.limit_bytes:
            self.allocated_bytes -= len(self._free.pop())
        if self.allocated_bytes + nbytes > self.limit_bytes:
            return False
        self.allocated_bytes += nbytes
        self.used_bytes += nbytes
        return True

    def has_room(self, nbytes: int) -> bool:
        """Whether `take` would give a buffer of that size, or `charge` count so many bytes."""
        with self._lock:
            return self.used_bytes + nbytes <= self.limit_bytes

    def clear(self) -> None:
        """Return to the system what is not in use."""
        with self._lock:
            self.allocated_bytes -= sum(map(len, self._free))
            self._free.clear()

    def give(self, buffer: Buffer) -> None:
        with self._lock:
            self._free.append(buffer)
            self.used_bytes -= len(buffer)


class Kept(NamedTuple):
    """A piece of a gradient that left through the collective, kept in case that the shadow has not overheard it."""

    block: int
    offset: int
    memory: memoryview
    update: int
    round: int


@dataclass(slots=True)
class Batch:
    """Something to send, kept until its step is stable: pieces of tensors, then the part, then pieces of anchors."""

    step: int
    epoch: int
    update: int = 0
    round: int = 0
    pieces: list[tuple[int, int, memoryview]] = field(default_factory=list)  #: gradient: block, offset in it, bytes
    part: bytes = b""
    anchors: list[tuple[int, int, memoryview]] = field(default_factory=list)  #: block, entry, bytes
    buffers: list[Buffer] = field(default_factory=list)
    charged: int = 0  #: bytes of the part that count as staging memory; 0 for one that must be sent in any case
    ready: Callable[[], None] | None = None  #: waits until the device has filled the buffers
    gap: bool = False  #: says that the step was not kept, which must be heard although later steps may count already
    kept: list[Kept] = field(default_factory=list)  #: sent only if asked for
    repairs: int = 0  #: batches on their way that send from this one's memory
    source: Batch | None = None  #: the batch whose memory this repair sends; it is sent once, and not kept

    def void(self, epoch: int, step: int) -> bool:
        """Whether a shadow that has all up to `step` of `epoch` has no use for this any more."""
        return self.epoch < epoch or (self.epoch == epoch and self.step <= step and not self.gap)

    def free(self, pool: Pool) -> None:
        """Give back what this holds of `pool`."""
        for buffer in self.buffers:
            pool.give(buffer)
        pool.discharge(self.charged)
        self.buffers, self.charged = [], 0

    def repair(self, items: Sequence[tuple[int, int, int, int, int]]) -> list[Batch]:
        """What to send for these: block, update, round, offset, bytes. What is not kept here is left out."""
        found: dict[tuple[int, int], list[tuple[int, int, memoryview]]] = {}
        kept = {(k.block, k.update, k.round): k for k in self.kept}
        for block, update, round_, offset, nbytes in items:
            if (piece := kept.get((block, update, round_))) is None:
                continue
            first, last = max(offset, piece.offset), min(offset + nbytes, piece.offset + len(piece.memory))
            if first < last:
                memory = piece.memory[first - piece.offset : last - piece.offset]
                found.setdefault((update, round_), []).append((block, first, memory))
        self.repairs += len(found)
        return [
            Batch(self.step, self.epoch, update, round_, pieces, source=self)
            for (update, round_), pieces in found.items()
        ]

    def frames(self, incarnation: bytes, rank: int) -> Iterator[tuple[Header, memoryview]]:
        """All frames of this batch, in the order in which they must leave."""
        if self.ready is not None:
            self.ready()

        def header(kind: Kind, piece: memoryview, block: int = 0, entry: int = 0, offset: int = 0) -> Header:
            place = (block, self.update, entry, offset, self.round)
            return Header(kind, len(piece), incarnation, rank, self.epoch, self.step, *place)

        for block, offset, memory in self.pieces:
            for start in range(0, len(memory), MAX_BULK_BYTES):
                piece = memory[start : start + MAX_BULK_BYTES]
                yield header(Kind.GRAD, piece, block, 0, offset + start), piece
        if self.part:
            yield header(Kind.PART, memoryview(self.part)), memoryview(self.part)
        for block, entry, memory in self.anchors:
            for start in range(0, len(memory), MAX_BULK_BYTES):
                piece = memory[start : start + MAX_BULK_BYTES]
                yield header(Kind.ANCHOR, piece, block, entry, start), piece
