"""What has come of one step, and what its parts say must come. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ProtocolError
from ..layout import Layout, Slice
from ..wire.frames import Header, Kind
from ..wire.messages import Part
from ..wire.ranges import RangeSet

#: What ranks send of a step, told apart: kind, rank, update, block, entry, round.
Key = tuple[Kind, int, int, int, int, int]


@dataclass(slots=True)
class Slot:
    """What has come of one step. Of each key, no more can arrive than its part lists."""

    parts: dict[int, Part] = field(default_factory=dict)
    listed: dict[Key, tuple[int, int]] = field(default_factory=dict)  #: by the parts that are here: first byte, stop
    ranges: dict[Key, RangeSet] = field(default_factory=dict)  #: that have arrived
    owed: dict[Key, int] = field(default_factory=dict)  #: bytes listed that have not arrived, where there are any
    rounds: dict[tuple[int, int], int] = field(default_factory=dict)  #: newest overheard, of update and block

    def note(self, key: Key) -> None:
        """Bytes of `key` have arrived, or it is listed now."""
        if (listed := self.listed.get(key)) is None:
            return
        arrived = self.ranges.get(key)
        owed = sum(b - a for a, b in arrived.missing(*listed)) if arrived else listed[1] - listed[0]
        if owed:
            self.owed[key] = owed
        else:
            self.owed.pop(key, None)


def key_of(header: Header) -> Key:
    return (header.kind, header.rank, header.update, header.block, header.entry, header.round)


def listed_by(part: Part, layout: Layout) -> dict[Key, tuple[int, int]]:
    """What this part says that its rank sends: first byte and stop. Raises ProtocolError for what no rank can say."""
    name = f"part of rank {part.rank}, step {part.step}"
    mine, found = layout.slices[part.rank], dict[Key, tuple[int, int]]()
    for number, update in enumerate(part.updates):
        if update.blocks != sorted(set(update.blocks)) or max(update.blocks, default=-1) >= len(layout.blocks):
            raise ProtocolError(f"{name}, update {number}: no ascending list of blocks: {update.blocks}")
        if (layout.tap != "step") is (update.shards is None):
            raise ProtocolError(f"{name}, update {number}: says nothing of its shards, or has none to speak of")
        for shard in update.shards or ():
            stop = shard.offset + shard.nbytes
            if shard.block not in update.blocks or stop > layout.blocks[shard.block].nbytes:
                raise ProtocolError(f"{name}, update {number}: {shard} is of no gradient of it")
            key = (Kind.GRAD, part.rank, shard.update if shard.round else number, shard.block, 0, shard.round)
            if found.setdefault(key, (shard.offset, stop)) != (shard.offset, stop):
                raise ProtocolError(f"{name}, update {number}: {shard} is listed twice, differently")
        if update.shards is None:
            for block in (b for b in update.blocks if b in mine):
                found[Kind.GRAD, part.rank, number, block, 0, 0] = _range(mine[block])
    for anchor in part.anchors:
        block = anchor.block
        if block >= len(layout.blocks) or layout.owners[block] != part.rank:
            raise ProtocolError(f"{name} anchors block {block}, not its own")
        if not anchor.entries or anchor.entries[0].nbytes != layout.blocks[block].nbytes:
            raise ProtocolError(f"{name}, anchor of block {block}: entry 0 is not the whole block")
        if (Kind.ANCHOR, part.rank, 0, block, 0, 0) in found:
            raise ProtocolError(f"{name} anchors block {block} twice")
        for i, entry in enumerate(anchor.entries):
            found[Kind.ANCHOR, part.rank, 0, block, i, 0] = (0, entry.nbytes)
    return found


def _range(piece: Slice) -> tuple[int, int]:
    return piece.offset, piece.offset + piece.nbytes
