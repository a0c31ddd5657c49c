"""Every byte of a gradient leaves one rank, once, in a frame that says truly which byte of which block it is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.trainer import shards
from checkmate.trainer.shards import NO_BLOCK, Place, Plan, bounds


@st.composite
def buckets(draw: st.DrawFn) -> tuple[int, list[Place]]:
    """Elements of one size, blocks of any length in any order, with holes between them that belong to no block."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    counts = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
    blocks = draw(st.permutations(range(len(counts))))
    places, at = [], 0
    for block, count in zip(blocks, counts, strict=True):
        places.append(Place(NO_BLOCK if draw(st.integers(0, 9)) == 0 else block, at, count * itemsize))
        at += count * itemsize
    return at, places


@given(bucket=buckets(), world=st.integers(1, 16), chunk=st.sampled_from([64, 640, 4096, 512 << 10]))
def test_each_byte_of_each_block_leaves_one_rank_once(bucket: tuple[int, list[Place]], world: int, chunk: int) -> None:
    nbytes, places = bucket
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "CHUNK_BYTES", chunk)
        plan = Plan(nbytes, world, places)
    of_bucket = bytearray(nbytes)  # how often each byte leaves
    of_block = {place.block: bytearray(place.nbytes) for place in places if place.block != NO_BLOCK}
    start_of = {place.block: place.start for place in places}
    for rank, (first, stop) in enumerate(plan.bounds):
        assert [c.start for c in plan.chunks[rank]] == list(range(first, stop, chunk))
        for piece in plan.chunks[rank]:
            assert piece.start < piece.stop <= min(piece.start + chunk, stop)
            assert [piece.start, *(cut.stop for cut in piece.frames)] == [
                *(cut.start for cut in piece.frames),
                piece.stop,
            ], "frames follow each other and fill the chunk"
            for cut in piece.frames:
                for at in range(cut.start, cut.stop):
                    of_bucket[at] += 1
                if cut.block != NO_BLOCK:
                    assert cut.offset == cut.start - start_of[cut.block]
                    for at in range(cut.offset, cut.offset + cut.stop - cut.start):
                        of_block[cut.block][at] += 1
    assert of_bucket == b"\1" * nbytes
    assert all(set(counts) == {1} for counts in of_block.values())


@given(bucket=buckets(), world=st.integers(1, 16))
def test_a_rank_has_one_range_of_a_block(bucket: tuple[int, list[Place]], world: int) -> None:
    nbytes, places = bucket
    plan = Plan(nbytes, world, places)
    for place in places:
        if place.block == NO_BLOCK:
            continue
        cuts = [cut for rank in range(world) for cut in plan.frames(rank).get(place.block, [])]
        assert [0, *(cut.offset + cut.stop - cut.start for cut in cuts)] == [*(c.offset for c in cuts), place.nbytes]
        assert all(before.stop == after.start for before, after in pairwise(cuts))


@given(nbytes=st.integers(0, 10**6), world=st.integers(1, 16))
def test_shards_are_shares_of_one_nth(nbytes: int, world: int) -> None:
    lengths = [stop - start for start, stop in bounds(nbytes, world)]
    assert sum(lengths) == nbytes
    assert max(lengths) < nbytes / world + shards.CUT_BYTES
