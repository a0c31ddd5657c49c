"""Which partition holds what: a spec divided into specs of its own, one for each partition. Pure arithmetic.

Whatever is of one *kind* (optimizer class and dtype) costs alike per byte, to hold and to replay. The blocks of a kind
are laid end to end in the order of the spec, and the row is cut into as many pieces of equal length as there are
partitions; so each partition gets its share of the bytes and of the work of every kind::

    blocks       |   0   | 1 |      2      |  3  |
    partitions   |----- 0 -----|----- 1 -----|-- … |

A block is cut between two rows, and only where that changes no bit: for optimizers of the table in `invariant`, and at
multiples of a cache line, because fused kernels round the odd elements at the end of a tensor otherwise than the rest.
Blocks that must stay whole go first, the largest to the partition that has least, and the others fill up the rest. An
optimizer that is not torch's own may compute across its parameters, so one partition has all of them.

Every rank and every shadow divides the same `Spec` and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from msgspec.structs import replace

from .errors import UsageError
from .invariant import DTYPES, INVARIANT
from .layout import CUT_BYTES
from .wire.messages import Block, Optimizer, Spec

#: A block is not cut for less than this part of what a partition shall have of its kind.
TOLERANCE = 0.01

Kind = tuple[str, str, str]  #: module and class of the optimizer, dtype


@dataclass(frozen=True, order=True, slots=True)
class Rows:
    """Rows ``[first, first + count)`` of a block of the whole spec: all of its first dimension, if it is not cut."""

    block: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one partition holds. Block i of its `spec` is ``rows[i]`` of the whole spec."""

    spec: Spec
    rows: Sequence[Rows]


def divide(spec: Spec, partitions: int) -> list[Share]:
    """The spec's blocks, spread over so many partitions; each has all ranks, replica sets and optimizers.

    Raises UsageError if there is not something for each partition.
    """
    if partitions < 1:
        raise UsageError(f"{partitions} partitions: there is at least one")
    held: list[list[Rows]] = [[] for _ in range(partitions)]
    loads = [0] * partitions  #: bytes of the kinds so far
    for kind, members in _kinds(spec).items():
        for partition, rows in list(_spread(spec.blocks, kind, members, loads)):
            held[partition].append(rows)
            loads[partition] += _nbytes(spec.blocks[rows.block], rows.count)
    if empty := [partition for partition, rows in enumerate(held) if not rows]:
        raise UsageError(
            f"{len(spec.blocks)} parameters cannot be spread over {partitions} partitions: nothing is left for "
            f"partition {empty[0]}; use fewer partitions, and the other shadows as replicas"
        )
    return [_share(spec, sorted(rows)) for rows in held]


def _kinds(spec: Spec) -> dict[Kind, list[int]]:
    """Blocks by what they cost alike, in the order of the spec."""
    owner = {b: o for o in spec.optimizers for group in o.members for b in group}
    found: dict[Kind, list[int]] = {}
    for number, block in enumerate(spec.blocks):
        found.setdefault(_kind(owner.get(number), block), []).append(number)
    return found


def _kind(optimizer: Optimizer | None, block: Block) -> Kind:
    if optimizer is None:
        return ("", "", block.dtype)
    foreign = optimizer.module != "torch.optim"
    return (optimizer.module, optimizer.name, "" if foreign else block.dtype)


def _spread(blocks: Sequence[Block], kind: Kind, members: list[int], loads: list[int]) -> Iterator[tuple[int, Rows]]:
    """The partitions to which the rows of one kind go. `loads` is what each has of other kinds."""
    module, name, dtype = kind
    if module not in ("", "torch.optim"):
        least = min(range(len(loads)), key=lambda p: (loads[p], p))
        yield from ((least, Rows(number, 0, _num_rows(blocks[number]))) for number in members)
        return
    invariant = not module or (name in INVARIANT and dtype in DTYPES)
    whole, cut = list[int](), list[int]()
    for number in members:
        (cut if invariant and _num_rows(blocks[number]) > _unit(blocks[number]) else whole).append(number)
    mine = [0] * len(loads)
    for number in sorted(whole, key=lambda n: (-blocks[n].nbytes, n)):
        least = min(range(len(loads)), key=lambda p: (mine[p], loads[p], p))
        mine[least] += blocks[number].nbytes
        yield least, Rows(number, 0, _num_rows(blocks[number]))
    yield from _fill(blocks, cut, _rooms(mine, sum(blocks[n].nbytes for n in cut)))


def _fill(blocks: Sequence[Block], members: list[int], rooms: list[int]) -> Iterator[tuple[int, Rows]]:
    """Lay these blocks end to end, and cut the row so that each partition gets as many bytes as it has room for."""
    ends = list(accumulate(rooms))
    tolerance = TOLERANCE * max(rooms)
    partition = at = 0
    for number in members:
        first, rows = 0, _num_rows(blocks[number])
        while first < rows:
            left = _nbytes(blocks[number], rows - first)
            while ends[partition] - at < min(tolerance, left / 2) and partition < len(ends) - 1:
                partition += 1
            count = rows - first
            if at + left > ends[partition] + tolerance and partition < len(ends) - 1:
                unit = _unit(blocks[number])
                count = min(count, unit * max(1, round((ends[partition] - at) * count / left / unit)))
            yield partition, Rows(number, first, count)
            first += count
            at += _nbytes(blocks[number], count)


def _rooms(loads: list[int], total: int) -> list[int]:
    """`total` bytes more, given out so that all come to have equally much, or those that have more get nothing."""
    order = sorted(range(len(loads)), key=lambda p: (loads[p], p))
    rooms, below = [0] * len(loads), 0
    for count, p in enumerate(order, 1):
        below += loads[p]
        level, rest = divmod(total + below, count)
        if count == len(order) or level <= loads[order[count]]:
            for place, q in enumerate(order[:count]):
                rooms[q] = level - loads[q] + (place < rest)
            break
    return rooms


def _num_rows(block: Block) -> int:
    """Along the first dimension; what has none, or nothing in it, is one row."""
    return block.sizes[0] if block.sizes and block.nbytes else 1


def _unit(block: Block) -> int:
    """After so many rows, and multiples of it, a block may be cut."""
    return CUT_BYTES // gcd(CUT_BYTES, _nbytes(block, 1))


def _nbytes(block: Block, num_rows: int) -> int:
    return block.nbytes * num_rows // _num_rows(block)


def _share(spec: Spec, rows: list[Rows]) -> Share:
    place: dict[int, list[int]] = {}
    for number, piece in enumerate(rows):
        place.setdefault(piece.block, []).append(number)
    optimizers = [
        replace(o, members=[[number for b in group for number in place.get(b, [])] for group in o.members])
        for o in spec.optimizers
    ]
    return Share(replace(spec, blocks=[_box(spec.blocks[r.block], r) for r in rows], optimizers=optimizers), rows)


def _box(block: Block, rows: Rows) -> Block:
    if rows.count == _num_rows(block):
        return block
    offsets = [block.offsets[0] + rows.first, *block.offsets[1:]]
    return replace(block, offsets=offsets, sizes=[rows.count, *block.sizes[1:]])
