"""Specs divided: every row in one partition, in equal shares, the same for everyone; cut only where no bit changes."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.errors import UsageError
from checkmate.layout import Layout
from checkmate.partitions import Rows, Share, divide
from checkmate.wire.messages import Block, Fingerprint, Optimizer, Spec

FINGERPRINT = Fingerprint("2.13.0", "AVX2", 1, False, "cpu")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float64": 8}
TORCH = "torch.optim"


def block(name: str, *sizes: int, dtype: str = "float32") -> Block:
    return Block(name, dtype, ITEMSIZE[dtype], [0] * len(sizes), list(sizes), list(sizes))


def spec(blocks: list[Block], *optimizers: tuple[str, str, list[int]]) -> Spec:
    """Two ranks; each optimizer with one group of these blocks."""
    described = [Optimizer(module, name, b"", [members]) for module, name, members in optimizers]
    return Spec(2, [[0, 1]], blocks, described, FINGERPRINT)


def adamw(blocks: list[Block]) -> Spec:
    return spec(blocks, (TORCH, "AdamW", list(range(len(blocks)))))


def gpt(num_layers: int, width: int, vocabulary: int) -> list[Block]:
    blocks = [block("embedding", vocabulary, width)]
    for i in range(num_layers):
        blocks += [block(f"{i}.norm", width), block(f"{i}.qkv", 3 * width, width), block(f"{i}.proj", width, width)]
        blocks += [block(f"{i}.up", 4 * width, width), block(f"{i}.up.bias", 4 * width)]
        blocks += [block(f"{i}.down", width, 4 * width), block(f"{i}.down.bias", width)]
    return [*blocks, block("norm", width)]


def nbytes(share: Share) -> int:
    return sum(block.nbytes for block in share.spec.blocks)


def unbalance(values: list[int]) -> float:
    return max(values) * len(values) / sum(values) - 1


KINDS = [(TORCH, "AdamW"), (TORCH, "SGD"), (TORCH, "Muon"), (TORCH, "Adafactor"), ("lion", "Lion"), None]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    sizes = st.lists(st.sampled_from([0, 1, 2, 3, 7, 64, 1000]), max_size=3)
    drawn = draw(
        st.lists(st.tuples(sizes, st.sampled_from(list(ITEMSIZE)), st.integers(0, 5)), min_size=1, max_size=10)
    )
    blocks = [block(f"p{i}", *s, dtype=dtype) for i, (s, dtype, _) in enumerate(drawn)]
    members = {
        kind: [i for i, (_, _, number) in enumerate(drawn) if KINDS[number] == kind]
        for kind in KINDS
        if kind is not None
    }
    return spec(blocks, *((*kind, numbers) for kind, numbers in members.items() if numbers))


def divided(given_spec: Spec, partitions: int) -> list[Share]:
    try:
        return divide(given_spec, partitions)
    except UsageError:
        return []


def test_worked_example() -> None:
    shares = divide(adamw([block("a", 100, 16), block("b", 80), block("c", 200, 16), block("d", 160)]), 3)
    assert [share.rows for share in shares] == [
        [Rows(0, 0, 100), Rows(1, 0, 80)],
        [Rows(2, 0, 105)],
        [Rows(2, 105, 95), Rows(3, 0, 160)],
    ]
    last = shares[2].spec
    assert [(b.fqn, b.offsets, b.sizes, b.global_sizes) for b in last.blocks] == [
        ("c", [105, 0], [95, 16], [200, 16]),
        ("d", [0], [160], [160]),
    ]
    assert last.optimizers[0].members == [[0, 1]]


@given(specs())
def test_one_partition_has_the_spec_as_it_is(given_spec: Spec) -> None:
    (share,) = divide(given_spec, 1)
    assert share.spec == given_spec


@given(specs(), st.integers(1, 5))
def test_every_row_is_in_one_partition(given_spec: Spec, partitions: int) -> None:
    shares = divided(given_spec, partitions)
    for number, whole in enumerate(given_spec.blocks if shares else ()):
        pieces = sorted(
            (rows.first, rows.count, box)
            for share in shares
            for rows, box in zip(share.rows, share.spec.blocks, strict=True)
            if rows.block == number
        )
        assert sum(box.nbytes for _, _, box in pieces) == whole.nbytes
        assert pieces[0][0] == 0
        assert all(first + count == second for (first, count, _), (second, _, _) in pairwise(pieces))
        for first, count, box in pieces:
            assert (box.fqn, box.dtype, box.global_sizes) == (whole.fqn, whole.dtype, whole.global_sizes)
            assert box == whole or (box.offsets[0], box.sizes[0], box.sizes[1:]) == (first, count, whole.sizes[1:])
            assert prod(box.sizes) > 0 or box == whole


@given(specs(), st.integers(1, 5))
def test_every_share_is_a_spec_of_its_own_with_all_optimizers(given_spec: Spec, partitions: int) -> None:
    for share in divided(given_spec, partitions):
        Layout(share.spec)
        assert len(share.spec.optimizers) == len(given_spec.optimizers)
        for ours, whole in zip(share.spec.optimizers, given_spec.optimizers, strict=True):
            for mine, group in zip(ours.members, whole.members, strict=True):
                assert {share.rows[b].block for b in mine} == {r.block for r in share.rows} & set(group)


@given(specs(), st.integers(2, 5))
def test_only_what_is_invariant_is_cut(given_spec: Spec, partitions: int) -> None:
    owner = {b: o for o in given_spec.optimizers for group in o.members for b in group}
    shares = divided(given_spec, partitions)
    for share in shares:
        for rows, box in zip(share.rows, share.spec.blocks, strict=True):
            whole, optimizer = given_spec.blocks[rows.block], owner.get(rows.block)
            if box != whole and optimizer is not None:
                assert optimizer.module == TORCH
                assert optimizer.name in ("AdamW", "SGD")
                assert box.dtype != "bfloat16"
                row = prod(box.sizes[1:]) * box.itemsize
                assert box.offsets[0] * row % 64 == 0, "fused kernels count from a cache line on"
    for optimizer in given_spec.optimizers if shares else ():
        if optimizer.module != TORCH:
            holders = [s for s in shares if {r.block for r in s.rows} & set(optimizer.members[0])]
            assert len(holders) == 1, "an optimizer that is not torch's may compute across its parameters"


@given(specs(), st.integers(1, 5))
def test_same_for_everyone_who_is_told_the_spec(given_spec: Spec, partitions: int) -> None:
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(given_spec), type=Spec)
    assert divided(told, partitions) == divided(given_spec, partitions)


@pytest.mark.parametrize("partitions", [2, 3, 4, 7])
def test_bytes_are_balanced_within_five_percent(partitions: int) -> None:
    for blocks in (gpt(2, 64, 500), gpt(12, 768, 50257), [block("table", 10_000_000, 64)]):
        shares = divide(adamw(blocks), partitions)
        assert unbalance([nbytes(share) for share in shares]) <= 0.05
        cut = sum(len(share.rows) for share in shares) - len(blocks)
        assert cut < partitions, "no more cuts than there are borders"


@pytest.mark.parametrize("partitions", [2, 3, 4])
def test_work_is_balanced_where_optimizers_cost_differently(partitions: int) -> None:
    """Muon, whose matrices stay whole, beside AdamW for all else: each of the two within five percent."""
    blocks = gpt(24, 128, 5000)
    matrices = [i for i, b in enumerate(blocks) if len(b.sizes) == 2 and i]
    rest = [i for i in range(len(blocks)) if i not in matrices]
    shares = divide(spec(blocks, (TORCH, "Muon", matrices), (TORCH, "AdamW", rest)), partitions)
    for members in (matrices, rest):
        held = [sum(b.nbytes for r, b in zip(s.rows, s.spec.blocks, strict=True) if r.block in members) for s in shares]
        assert unbalance(held) <= 0.05
    for share in shares:
        assert not [
            r
            for r, b in zip(share.rows, share.spec.blocks, strict=True)
            if r.block in matrices and b != blocks[r.block]
        ]


def test_blocks_that_cannot_be_cut_go_where_least_is() -> None:
    sizes = [90, 50, 40, 30, 20, 10]
    shares = divide(spec([block(f"p{n}", n, 1) for n in sizes], (TORCH, "Adafactor", list(range(6)))), 3)
    assert [nbytes(share) // 4 for share in shares] == [90, 80, 70]


def test_what_cannot_be_spread_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"cannot be spread over 3 partitions.*use fewer partitions"):
        divide(adamw([block("scale"), block("row", 1, 100)]), 3)
    with pytest.raises(UsageError, match="at least one"):
        divide(adamw([block("scale")]), 0)
