"""The deterministic map: block -> slices -> sending rank, block -> rank that anchors it. Pure arithmetic.

Every rank and every shadow computes it from the same `Spec` and gets the same answer.

The blocks that one replica set shares are laid end to end, those with gradients first, and the row is cut into as
many pieces of equal length as the set has ranks. So a rank's slices are whole blocks but for the two at its ends::

    blocks   |   0   | 1 |      2      |  3  |
    ranks    |----- 0 -----|----- 1 -----|-- … |
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from .errors import Mismatch, ProtocolError
from .wire.messages import Block, Optimizer, Spec

#: Slices are cut at multiples of this many bytes: a cache line, and a multiple of every dtype's size.
CUT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes ``[offset, offset + nbytes)`` of a block, which `rank` sends."""

    block: int
    rank: int
    offset: int
    nbytes: int


def numbers(optimizers: Iterable[Optimizer]) -> dict[tuple[int, int], int]:
    """Where the optimizers of each lead stand in a spec: (rank, its own number) -> index."""
    seen: Counter[int] = Counter()
    found = {}
    for index, optimizer in enumerate(optimizers):
        found[optimizer.rank, seen[optimizer.rank]] = index
        seen[optimizer.rank] += 1
    return found


def alike(replica_sets: Iterable[Iterable[int]]) -> dict[frozenset[int], list[int]]:
    """Ranks, ascending, by the replica sets that they are in: those that hold the same blocks stand together."""
    sets: dict[int, set[int]] = {}
    for index, ranks in enumerate(replica_sets):
        for rank in ranks:
            sets.setdefault(rank, set()).add(index)
    found: dict[frozenset[int], list[int]] = {}
    for rank in sorted(sets):
        found.setdefault(frozenset(sets[rank]), []).append(rank)
    return found


def connected(replica_sets: Iterable[Iterable[int]]) -> list[list[int]]:
    """Ranks that share blocks, or share some with ranks that do: each rank once."""
    found: list[set[int]] = []
    for ranks in replica_sets:
        joined = set(ranks).union(*(group for group in found if not group.isdisjoint(ranks)))
        found = [group for group in found if group.isdisjoint(joined)] + [joined]
    return sorted(map(sorted, found))


def match_optimizers(spec: Spec, blocks: Sequence[Block], optimizers: Sequence[Optimizer]) -> list[int]:
    """For each optimizer of `spec`, the one of these that it goes on from: of its class, with its groups, maybe more.

    `blocks` are what the members of `optimizers` number. Ranks may have changed, and the order within a group. Raises
    Mismatch.
    """
    ours = [f"{o.module}.{o.name}" for o in spec.optimizers]
    theirs = [f"{o.module}.{o.name}" for o in optimizers]
    if sorted(ours) != sorted(theirs):
        raise Mismatch(f"the optimizers are {ours} here, {theirs} in the checkpoint")
    there = [[sorted(blocks[b].fqn for b in group) for group in o.members] for o in optimizers]
    left = list(range(len(optimizers)))
    for i, mine in enumerate(spec.optimizers):
        here = [sorted(spec.blocks[b].fqn for b in group) for group in mine.members]
        fitting = (j for j in left[i:] if theirs[j] == ours[i] and there[j][: len(here)] == here)
        if (found := next(fitting, None)) is None:
            why = _first_difference(here, there[i])
            raise Mismatch(f"optimizer {i} ({mine.name}) groups its parameters differently: {why}")
        left.remove(found)
        left.insert(i, found)
    return left


def _first_difference(here: list[list[str]], there: list[list[str]]) -> str:
    if len(here) > len(there):
        return f"{len(here)} groups here, {len(there)} in the checkpoint"
    for number, (a, b) in enumerate(zip(here, there, strict=False)):
        if a != b:
            return f"group {number} differs in {sorted(set(a) ^ set(b))[:3]}"
    return "no difference"


class Layout:
    """Slices and anchor owners of a `Spec`.

    Raises `ProtocolError` if the spec contradicts itself, for it may come from the wire.
    """

    def __init__(self, spec: Spec) -> None:
        self.blocks: Sequence[Block] = spec.blocks
        self.world_size = spec.world_size
        self.tap = spec.tap
        self.optimizers = numbers(spec.optimizers)  #: (lead, its own number) -> index in the spec
        self.replica_sets = [tuple(ranks) for ranks in spec.replica_sets]
        self._check(spec)
        self.slices: list[dict[int, Slice]] = [{} for _ in range(spec.world_size)]  #: per rank: block -> its slice
        self._of_block: list[list[Slice]] = [[] for _ in self.blocks]
        self.owners: list[int] = [-1] * len(self.blocks)  #: per block, the rank that anchors it
        load = [0] * spec.world_size
        members: list[list[int]] = [[] for _ in self.replica_sets]
        for i, block in enumerate(self.blocks):
            members[block.replicas].append(i)
        for ranks, of_set in zip(self.replica_sets, members, strict=True):
            for trainable in (True, False):
                self._cut([i for i in of_set if self.blocks[i].trainable is trainable], ranks)
            self._give(of_set, ranks, load)
        #: Ranks whose parts carry what is the same on every rank: the first of each replica set.
        self.leads = frozenset(ranks[0] for ranks in self.replica_sets) or frozenset((0,))
        #: Per rank, the ranks that hold the same blocks as it, ascending.
        self.alike = [[rank] for rank in range(spec.world_size)]
        for together in alike(self.replica_sets).values():
            for rank in together:
                self.alike[rank] = together

    def _check(self, spec: Spec) -> None:
        seen = set()
        for ranks in self.replica_sets:
            if not ranks or list(ranks) != sorted(set(ranks)) or ranks[-1] >= spec.world_size:
                raise ProtocolError(f"replica set {ranks} is not an ascending list of ranks below {spec.world_size}")
        for i, block in enumerate(self.blocks):
            if block.replicas >= len(self.replica_sets):
                raise ProtocolError(
                    f"block {i} ({block.fqn}) names replica set {block.replicas} of {len(self.replica_sets)}"
                )
            if len(block.offsets) != len(block.sizes) or len(block.global_sizes) != len(block.sizes):
                raise ProtocolError(f"block {i} ({block.fqn}) has offsets, sizes and global sizes of different lengths")
            if (key := (block.fqn, tuple(block.offsets), tuple(block.sizes))) in seen:
                raise ProtocolError(f"block {i} ({block.fqn}) appears twice")
            seen.add(key)
        for optimizer in spec.optimizers:
            for number in (number for group in optimizer.members for number in group):
                if number >= len(self.blocks):
                    raise ProtocolError(f"{optimizer.name} has block {number} of {len(self.blocks)}")
                if self.lead(number) != optimizer.rank:
                    raise ProtocolError(
                        f"{optimizer.name} of rank {optimizer.rank} has block {number}, which rank {self.lead(number)} "
                        "leads"
                    )

    def _cut(self, members: list[int], ranks: tuple[int, ...]) -> None:
        total = sum(self.blocks[i].nbytes for i in members)
        cuts = [total * k // len(ranks) for k in range(len(ranks) + 1)]
        start = 0
        for i in members:
            nbytes = self.blocks[i].nbytes

            def inside(cut: int, start: int = start, nbytes: int = nbytes) -> int:
                return nbytes if cut >= start + nbytes else max(0, cut - start) // CUT_BYTES * CUT_BYTES

            k = bisect_right(cuts, start) - 1  # the first rank whose piece of the row goes on after `start`
            while k < len(ranks) and cuts[k] < start + nbytes:
                first, last = inside(cuts[k]), inside(cuts[k + 1])
                if first < last:
                    piece = Slice(i, ranks[k], first, last - first)
                    self.slices[ranks[k]][i] = piece
                    self._of_block[i].append(piece)
                k += 1
            start += nbytes

    def _give(self, members: list[int], ranks: tuple[int, ...], load: list[int]) -> None:
        """Give each block, the largest first, to the rank that anchors fewest bytes so far, the lowest of several."""
        queue = [(load[rank], rank) for rank in ranks]
        heapify(queue)
        for i in sorted(members, key=lambda i: (-self.blocks[i].nbytes, i)):
            owner = queue[0][1]
            self.owners[i] = owner
            load[owner] += self.blocks[i].nbytes
            heapreplace(queue, (load[owner], owner))

    def lead(self, block: int) -> int:
        """The rank whose parts say how this block's optimizer steps."""
        return self.replica_sets[self.blocks[block].replicas][0]

    def of_block(self, block: int) -> list[Slice]:
        """All slices of a block, ascending; together they are the block, each byte once."""
        return self._of_block[block]
