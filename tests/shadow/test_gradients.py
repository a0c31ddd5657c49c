"""Gradients that are put together from what the network has copied and what was sent."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from checkmate.layout import Layout
from checkmate.shadow.buffers import Buffers, Key
from checkmate.shadow.effects import Apply, Drop, Effect
from checkmate.shadow.gradients import Gradients
from checkmate.shadow.partition import Partition, Phase, Verdict
from checkmate.wire.frames import Header, Kind
from checkmate.wire.messages import Block, Fingerprint, Part, Shard, Spec, Update

NUMEL = 48  #: of float32
SEED = random.SystemRandom().randrange(1 << 32)

Shards = list[list[Shard]]  #: of one update: by rank


def made(updates: list[Shards], tensors: dict[Key, torch.Tensor], dtype: str = "float32") -> Gradients:
    """Of one block of `NUMEL`; `updates` as the ranks' parts name their shards."""
    size = {"float32": 4, "bfloat16": 2}[dtype]
    ranks = len(updates[0])
    block = Block("w", dtype, size, [0], [NUMEL], [NUMEL])
    layout = Layout(Spec(ranks, [list(range(ranks))], [block], [], Fingerprint("", "", 1, False, "cpu"), tap="mirror"))
    parts = {
        rank: Part(rank, 1, 1, updates=[Update(0, [0], 7, shards=shards[rank]) for shards in updates])
        for rank in range(ranks)
    }
    return Gradients(layout, parts, tensors)


def values(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(SEED + seed))


def copied(update: int = 0) -> Key:
    return (Kind.GRAD, 0, update, True)


def sent(update: int = 0) -> Key:
    return (Kind.GRAD, 0, update, False)


def shard(first: int, stop: int, update: int, round: int, factor: float = 1.0, size: int = 4) -> Shard:
    """Of elements [first, stop)."""
    return Shard(0, size * first, size * (stop - first), update, round, factor)


def test_shards_of_two_ranks_are_one_gradient_and_need_no_copy() -> None:
    tensor = values(0)
    gradients = made([[[shard(0, 16, 0, 1)], [shard(16, NUMEL, 0, 1)]]], {copied(): tensor})
    assert gradients(0, 0) is tensor
    assert torch.equal(tensor, values(0))


def test_what_was_sent_besides_takes_its_place_in_what_was_copied() -> None:
    print(f"seed {SEED}")
    gradients = made(
        [[[shard(0, 16, 0, 2)], [shard(16, NUMEL, 0, 0)]]], {copied(): values(0), sent(): values(1)}
    )  # fmt: skip
    found = gradients(0, 0)
    assert torch.equal(found, torch.cat([values(0)[:16], values(1)[16:]]))
    assert not torch.equal(found, torch.cat([values(1)[:16], values(0)[16:]]))  # the negative control


def test_what_was_sent_alone_is_taken_as_it_is() -> None:
    tensor = values(1)
    gradients = made([[[shard(0, 16, 0, 0)], [shard(16, NUMEL, 0, 0)]]], {sent(): tensor})
    assert gradients(0, 0) is tensor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_shard_has_its_factor(dtype: str) -> None:
    print(f"seed {SEED}")
    size, kind = (4, torch.float32) if dtype == "float32" else (2, torch.bfloat16)
    tensor = values(0).to(kind)
    shards = [[shard(0, 16, 0, 1, 0.3, size)], [shard(16, NUMEL, 0, 1, 0.7, size)]]
    found = made([shards], {copied(): tensor.clone()}, dtype)(0, 0)
    expected = torch.cat([tensor[:16].mul(0.3), tensor[16:].mul(0.7)])
    assert torch.equal(found, expected)
    assert not torch.equal(found, tensor.mul(0.3))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_two_updates_may_use_one_round_in_any_order_each_with_its_factors(order: list[int]) -> None:
    print(f"seed {SEED}")
    plain = [[shard(0, 16, 0, 1, 0.5)], [shard(16, NUMEL, 0, 1, 0.5)]]
    mixed = [[shard(0, 16, 0, 1, 0.25)], [shard(16, NUMEL, 1, 0)]]
    gradients = made([plain, mixed], {copied(): values(0), sent(1): values(1)})
    found = {}
    for number in order:
        found[number] = gradients(number, 0)
        found[number].add_(0.0)  # the replayer may write into what it is given
    assert torch.equal(found[0], values(0).mul(0.5))
    assert torch.equal(found[1], torch.cat([values(0)[:16].mul(0.25), values(1)[16:]]))
    assert not torch.equal(found[0], found[1])


def test_a_gradient_that_is_written_into_leaves_the_one_of_another_update_alone() -> None:
    both = [[shard(0, 16, 0, 1)], [shard(16, NUMEL, 0, 1)]]
    gradients = made([both, both, both], {copied(): values(0)})
    for number in (1, 0, 2):
        gradient = gradients(number, 0)
        assert torch.equal(gradient, values(0)), number
        gradient.zero_()


def test_rounds_of_several_updates_are_kept_apart() -> None:
    first, second = [[shard(0, NUMEL, 0, 1)], []], [[shard(0, NUMEL, 1, 2)], []]
    gradients = made([first, second], {copied(0): values(0), copied(1): values(1)})
    assert torch.equal(gradients(1, 0), values(1))
    assert torch.equal(gradients(0, 0), values(0))


def test_memory_of_a_void_step_is_not_used_again_for_a_connection_may_still_fill_it() -> None:
    """Else the rest of a frame that counts no more would land in a gradient that was verified before."""
    spec = Spec(
        2, [[0, 1]], [Block("b", "uint8", 1, [0], [256], [256])], [], Fingerprint("", "", 1, False, "cpu"), tap="mirror"
    )
    partition, buffers = Partition(Layout(spec), epoch=1, phase=Phase.STREAMING, base=0), Buffers()
    applied: list[Any] = []

    def do(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Drop):
                buffers.drop(effect.step, effect.void)
            elif isinstance(effect, Apply):
                applied.append((effect.parts, dict(buffers.of(effect.step))))

    def header(rank: int, offset: int, round_: int, step: int) -> Header:
        return Header(Kind.GRAD, 128, b"", rank, 2, step, 0, 0, 0, offset, round_)

    do(partition.part(Part(1, 1, 1, gap=True)))
    do(partition.part(Part(0, 1, 2, begins=True)))  # rank 0 streams from step 2
    sent = header(0, 0, 0, 2)
    assert partition.begin(sent) is Verdict.TAKE
    target = buffers.place(partition, sent)  # half of it is here
    do(partition.part(Part(1, 2, 2, begins=True)))  # rank 1 streams from step 3: step 2 is void
    for rank, offset in ((0, 0), (1, 128)):
        copied = header(rank, offset, 1, 3)
        assert partition.overhear(copied)
        buffers.place(partition, copied)[:] = bytes([1 + rank]) * 128
        do(partition.arrived(copied))
    target[:] = b"\xee" * 128  # the rest comes
    do(partition.arrived(sent))
    for rank, offset in ((0, 0), (1, 128)):
        do(partition.part(Part(rank, 3, 2, updates=[Update(0, [0], 7, shards=[Shard(0, offset, 128, 0, 1)])])))
    ((parts, tensors),) = applied
    assert Gradients(partition.layout, parts, tensors)(0, 0).tolist() == [1] * 128 + [2] * 128
