"""How a bucket of gradients is cut for the collective: shards, chunks, frames. Pure arithmetic, in bytes.

Every rank computes the same cuts, so nothing about them travels::

    bucket   | block 7      | 3 |      block 4       |   0   |    as DDP has laid it out
    shards   |------ of rank 0 -----|----- of rank 1 ------|      one per rank, of equal length
    chunks   |--------|--------|----|--------|--------|----|      what moves, is summed and is sent on as one
    frames   |--------|----|-|-|----|--------|----|---|----|      one per block in a chunk

A block belongs to no bucket by name: frames say which bytes of which block they hold, whatever the bucket is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from ..layout import CUT_BYTES
from ..wire.frames import MAX_BULK_BYTES

#: Of a shard, this much is received, summed and sent on at a time: small enough to stay in the cache meanwhile.
CHUNK_BYTES = 1 << 20
#: Block number in frames whose bytes are for the peers alone: of a gradient that is laid out unlike its block.
NO_BLOCK = 2**32 - 1


class Place(NamedTuple):
    """Where a block's gradient lies in a bucket. `block` may be `NO_BLOCK`."""

    block: int
    start: int
    nbytes: int


class Cut(NamedTuple):
    """Bytes ``[start, stop)`` of the bucket, which are those of `block` from `offset` on."""

    block: int
    offset: int
    start: int
    stop: int


class Chunk(NamedTuple):
    start: int
    stop: int
    frames: tuple[Cut, ...]


class Plan:
    """The cuts of one bucket of `nbytes` for `world` ranks; `places` are ascending and cover it from end to end."""

    def __init__(self, nbytes: int, world: int, places: Sequence[Place]) -> None:
        self.nbytes = nbytes
        self.places = tuple(places)
        self.bounds = bounds(nbytes, world)
        #: Per rank, the chunks of its shard.
        self.chunks = [list(_chunks(start, stop, self.places)) for start, stop in self.bounds]

    def frames(self, rank: int) -> dict[int, list[Cut]]:
        """The part of each block that lies in a rank's shard, as its frames, which follow each other."""
        found: dict[int, list[Cut]] = {}
        for cut in (cut for chunk in self.chunks[rank] for cut in chunk.frames if cut.block != NO_BLOCK):
            found.setdefault(cut.block, []).append(cut)
        return found


def bounds(nbytes: int, world: int) -> list[tuple[int, int]]:
    """The shard of each rank: equal but for the last ones, which may be shorter or empty."""
    each = -(-nbytes // (world * CUT_BYTES)) * CUT_BYTES
    return [(min(rank * each, nbytes), min((rank + 1) * each, nbytes)) for rank in range(world)]


def _chunks(start: int, stop: int, places: Sequence[Place]) -> list[Chunk]:
    ends = [*range(start + CHUNK_BYTES, stop, CHUNK_BYTES), stop]
    starts = range(start, stop, CHUNK_BYTES)
    return [Chunk(a, b, tuple(_cut(a, b, places))) for a, b in zip(starts, ends, strict=False)]


def _cut(start: int, stop: int, places: Sequence[Place]) -> list[Cut]:
    """Bytes ``[start, stop)`` of the bucket at the boundaries of blocks."""
    cuts = []
    for block, at, nbytes in islice(places, max(0, bisect_right(places, start, key=attrgetter("start")) - 1), None):
        if at >= stop:
            break
        first, last = max(start, at), min(stop, at + nbytes)
        if first < last:
            cuts.append(Cut(block, first - at, first, last))
    return cuts


assert CHUNK_BYTES <= MAX_BULK_BYTES
assert CHUNK_BYTES % CUT_BYTES == 0
