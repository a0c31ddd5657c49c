"""Blocks to slices to ranks: every byte once, in equal shares, the same for everyone; contradictions are refused."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.errors import Mismatch, ProtocolError
from checkmate.layout import CUT_BYTES, Layout, Slice, connected, match_optimizers
from checkmate.wire.messages import Block, Fingerprint, Optimizer, Spec, decode, encode

FINGERPRINT = Fingerprint("2.13.0", "AVX2", 1, False, "cpu")


def block(name: str, count: int, replicas: int = 0, *, itemsize: int = 4, trainable: bool = True) -> Block:
    return Block(name, "float32", itemsize, [0], [count], [count], replicas, trainable)


def spec(world_size: int, blocks: list[Block], sets: list[list[int]] | None = None, **more: Any) -> Spec:
    return Spec(world_size, sets or [list(range(world_size))], blocks, more.pop("optimizers", []), FINGERPRINT, **more)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    world_size = draw(st.integers(1, 6))
    ranks = st.lists(st.integers(0, world_size - 1), min_size=1, unique=True).map(sorted)
    sets = draw(st.lists(ranks, min_size=1, max_size=3))
    kinds = st.tuples(
        st.sampled_from([0, 1, 15, 16, 17, 100, 999, 5000]), st.integers(0, len(sets) - 1),
        st.sampled_from([1, 2, 4, 8, 16]), st.booleans(),
    )  # fmt: skip
    blocks = [
        block(f"p{i}", count, replicas, itemsize=itemsize, trainable=trainable)
        for i, (count, replicas, itemsize, trainable) in enumerate(draw(st.lists(kinds, max_size=12)))
    ]
    return spec(world_size, blocks, sets)


def test_worked_example() -> None:
    layout = Layout(spec(3, [block("a", 100), block("b", 10), block("c", 190), block("d", 20, trainable=False)]))
    assert layout.of_block(0) == [Slice(0, 0, 0, 400)]
    assert layout.of_block(1) == [Slice(1, 1, 0, 40)]  # cut 0 falls on the border of a and b
    assert layout.of_block(2) == [Slice(2, 1, 0, 320), Slice(2, 2, 320, 440)]  # byte 360, down to a multiple of 64
    assert layout.of_block(3) == [Slice(3, 2, 0, 80)]  # too small to be cut
    assert layout.owners == [1, 2, 0, 2]


@given(specs())
def test_every_byte_of_every_block_is_sent_exactly_once(given_spec: Spec) -> None:
    layout = Layout(given_spec)
    for number, described in enumerate(given_spec.blocks):
        end = 0
        for piece in layout.of_block(number):
            assert piece.offset == end
            assert piece.nbytes > 0
            end += piece.nbytes
        assert end == described.nbytes


@given(specs())
def test_slices_begin_at_multiples_of_a_cache_line_and_go_to_replicas_of_their_block(given_spec: Spec) -> None:
    layout = Layout(given_spec)
    for number, described in enumerate(given_spec.blocks):
        for piece in layout.of_block(number):
            assert piece.offset % CUT_BYTES == 0
            assert piece.rank in given_spec.replica_sets[described.replicas]
            assert layout.slices[piece.rank][number] is piece
    assert sum(map(len, layout.slices)) == sum(len(layout.of_block(i)) for i in range(len(given_spec.blocks)))


@given(specs())
def test_owner_holds_its_block_and_every_block_has_one(given_spec: Spec) -> None:
    layout = Layout(given_spec)
    for owner, described in zip(layout.owners, given_spec.blocks, strict=True):
        assert owner in given_spec.replica_sets[described.replicas]


@given(specs())
def test_everyone_computes_the_same_layout(given_spec: Spec) -> None:
    again = msgpack_round_trip(given_spec)
    ours, theirs = Layout(given_spec), Layout(again)
    assert ours.slices == theirs.slices
    assert (ours.owners, ours.leads) == (theirs.owners, theirs.leads)


def msgpack_round_trip(given_spec: Spec) -> Spec:
    from checkmate.wire.messages import Adopt, Incarnation

    adopt = decode(encode(Adopt("r", Incarnation(1, bytes(16)), None, given_spec)))
    assert isinstance(adopt, Adopt)
    return adopt.spec


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_shares_are_equal_to_one_percent_above_a_megabyte(num_ranks: int) -> None:
    sizes = [7, 65_536, 3, 120_001, 999, 1, 80_000, 0, 33]
    layout = Layout(spec(num_ranks, [block(f"p{i}", size) for i, size in enumerate(sizes)]))
    shares = [sum(piece.nbytes for piece in layout.slices[rank].values()) for rank in range(num_ranks)]
    assert sum(shares) == 4 * sum(sizes)
    assert max(shares) - min(shares) <= 0.01 * sum(shares) / num_ranks


def test_blocks_without_a_gradient_do_not_upset_the_shares_of_those_with_one() -> None:
    frozen = [block(f"frozen{i}", 100_000, trainable=False) for i in range(3)]
    layout = Layout(spec(2, [frozen[0], block("a", 1000), frozen[1], block("b", 1000), frozen[2]]))
    assert layout.of_block(1) == [Slice(1, 0, 0, 4000)]
    assert layout.of_block(3) == [Slice(3, 1, 0, 4000)]


def test_anchors_are_shared_out_by_bytes_the_largest_first() -> None:
    layout = Layout(spec(2, [block("a", 10), block("b", 40), block("c", 30), block("d", 10)]))
    assert layout.owners == [1, 0, 1, 0]


def test_load_of_a_rank_counts_over_all_its_replica_sets() -> None:
    layout = Layout(spec(2, [block("all", 100, 0), block("own", 50, 1), block("more", 60, 0)], [[0, 1], [0]]))
    assert layout.owners == [0, 0, 1]
    layout = Layout(spec(2, [block("own", 50, 0), block("all", 10, 1)], [[0], [0, 1]]))
    assert layout.owners == [0, 1]


def test_leads_are_the_first_of_each_replica_set() -> None:
    assert Layout(spec(4, [block("a", 1, 1)], [[0, 2], [1, 3]])).leads == {0, 1}
    assert Layout(Spec(2, [], [], [], FINGERPRINT)).leads == {0}


def test_ranks_that_hold_the_same_blocks_are_alike() -> None:
    layout = Layout(spec(5, [block("a", 1, 0), block("b", 1, 1), block("both", 1, 2)], [[0, 2], [1, 3], [0, 1, 2, 3]]))
    assert layout.alike == [[0, 2], [1, 3], [0, 2], [1, 3], [4]]
    assert [layout.lead(number) for number in range(3)] == [0, 1, 0]


def test_ranks_that_share_blocks_are_connected_also_through_others() -> None:
    assert connected([[0, 1], [2, 3]]) == [[0, 1], [2, 3]]
    assert connected([[0], [1, 3], [0, 2], [2, 5], [4]]) == [[0, 2, 5], [1, 3], [4]]


def test_optimizers_are_numbered_by_lead_and_follow_their_blocks_to_other_ranks() -> None:
    sgd = [Optimizer("torch.optim", "SGD", b"", [[i]], rank) for i, rank in enumerate((0, 2, 2))]
    blocks = [block("a", 1, 0), block("b", 1, 1), block("c", 1, 1)]
    ours = spec(3, blocks, [[0, 1], [2]], optimizers=sgd)
    assert Layout(ours).optimizers == {(0, 0): 0, (2, 0): 1, (2, 1): 2}
    there = [Optimizer("torch.optim", "SGD", b"", [[i], []], 0) for i in (1, 2, 0)]
    assert match_optimizers(ours, blocks, there) == [2, 0, 1]
    with pytest.raises(Mismatch, match=r"optimizer 1 \(SGD\) groups its parameters differently: group 0 differs in"):
        match_optimizers(ours, blocks, [there[2], there[1], there[1]])
    with pytest.raises(Mismatch, match="the optimizers are"):
        match_optimizers(ours, blocks, there[:2])


def test_more_ranks_than_bytes() -> None:
    layout = Layout(spec(5, [block("a", 1), block("b", 0)]))
    assert sum(piece.nbytes for piece in layout.of_block(0)) == 4
    assert layout.of_block(1) == []
    assert Counter(layout.owners)[-1] == 0


def test_thousands_of_ranks_and_blocks_are_laid_out_soon() -> None:
    began = time.process_time()
    Layout(spec(4000, [block(f"p{i}", 10_000) for i in range(4000)]))
    assert time.process_time() - began < 2.0  # 16 million pairs would take a minute


# ---------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (spec(2, [], [[]]), r"replica set \(\) is not an ascending list of ranks below 2"),
        (spec(2, [], [[1, 0]]), r"replica set \(1, 0\) is not"),
        (spec(2, [], [[0, 0]]), r"replica set \(0, 0\) is not"),
        (spec(2, [], [[0, 2]]), r"replica set \(0, 2\) is not an ascending list of ranks below 2"),
        (spec(1, [block("w", 1, 1)]), r"block 0 \(w\) names replica set 1 of 1"),
        (spec(1, [Block("w", "float32", 4, [0], [1, 2], [1, 2])]), r"block 0 \(w\) has offsets, sizes and"),
        (spec(1, [Block("w", "float32", 4, [0, 0], [1, 2], [2])]), r"block 0 \(w\) has offsets, sizes and"),
        (spec(1, [block("w", 1), block("w", 1)]), r"block 1 \(w\) appears twice"),
        (spec(1, [block("w", 1)], optimizers=[Optimizer("torch.optim", "SGD", b"", [[0], [1]])]), "SGD has block 1 of"),
        (
            spec(2, [block("w", 1, 1)], [[0], [1]], optimizers=[Optimizer("torch.optim", "SGD", b"", [[0]])]),
            "SGD of rank 0 has block 0, which rank 1 leads",
        ),
    ],
)  # fmt: skip
def test_spec_that_contradicts_itself_is_refused(bad: Spec, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        Layout(bad)


def test_two_boxes_of_one_parameter_are_two_blocks() -> None:
    halves = [Block("w", "float32", 4, [start], [5], [10], i) for i, start in enumerate((0, 5))]
    layout = Layout(spec(2, halves, [[0], [1]]))
    assert layout.of_block(0) == [Slice(0, 0, 0, 20)]
    assert layout.of_block(1) == [Slice(1, 1, 0, 20)]
