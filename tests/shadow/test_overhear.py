"""What `Partition` makes of copies and repairs, which may come in any order, late, twice or never.

The property test at the end plays honest ranks, and a network that does what it likes, against bytes in memory.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.errors import ProtocolError
from checkmate.layout import Layout
from checkmate.shadow.effects import Acknowledge, Apply, AskResume, Drop, Effect, Freeze, Tell
from checkmate.shadow.partition import AHEAD_UPDATES, RING_STEPS, Partition, Phase, Verdict
from checkmate.shadow.slot import Slot
from checkmate.wire.frames import Header, Kind
from checkmate.wire.messages import Block, Fingerprint, Part, Shard, Spec, Update
from checkmate.wire.ranges import RangeSet

SIZE = 256  #: bytes of each block
overhear = Partition.overhear


def layout(ranks: int = 2, blocks: int = 2) -> Layout:
    spec = Spec(
        ranks, [list(range(ranks))], [Block(f"b{i}", "uint8", 1, [0], [SIZE], [SIZE]) for i in range(blocks)], [],
        Fingerprint("", "", 1, False, "cpu"), tap="mirror",
    )  # fmt: skip
    return Layout(spec)


def streaming(**options: Any) -> Partition:
    return Partition(layout(**options), epoch=1, phase=Phase.STREAMING, base=0)


def frame(
    rank: int, start: int, stop: int, *, block: int = 0, round: int = 1, step: int = 1, epoch: int = 1, update: int = 0
) -> Header:
    return Header(Kind.GRAD, stop - start, b"", rank, epoch, step, block, update, 0, start, round)


def copy(partition: Partition, header: Header) -> bool:
    """The network brings a frame. Whether it was taken."""
    taken = partition.overhear(header)
    if taken:
        partition.arrived(header)
    return taken


def repair(partition: Partition, header: Header) -> list[Effect]:
    """As `Run` takes a frame of a round that comes on a data connection."""
    assert partition.begin(header) is not Verdict.WAIT
    return partition.arrived(header) if partition.overhear(header) else []


def part(rank: int, *shards: Shard, step: int = 1, blocks: tuple[int, ...] = (0,)) -> Part:
    return Part(rank, step, 1, updates=[Update(0, list(blocks), 7, shards=list(shards))])


def shard(start: int, stop: int, round: int = 1, block: int = 0, update: int = 0) -> Shard:
    return Shard(block, start, stop - start, update, round)


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


# ---------------------------------------------------------------- copies


def test_step_is_received_when_the_last_copy_is_here_and_owed_until_then() -> None:
    partition = streaming()
    assert copy(partition, frame(0, 0, 128))
    partition.part(part(0, shard(0, 128)))
    assert partition.owing() == []
    partition.part(part(1, shard(128, 256)))
    assert partition.owing() == [1]
    assert partition.repairs(1) == {1: [(0, 0, 1, 128, 128)]}
    assert copy(partition, frame(1, 128, 200))
    assert partition.repairs(1) == {1: [(0, 0, 1, 200, 56)]}
    assert partition.received == 0
    assert partition.overhear(last := frame(1, 200, 256))
    assert kinds(partition.arrived(last)) == [Apply, Acknowledge]
    assert partition.owing() == []


def test_a_copy_that_is_not_of_this_moment_is_not_wanted_and_changes_nothing() -> None:
    partition = streaming()
    assert copy(partition, frame(0, 0, 128))
    for wrong in (
        frame(0, 0, 128),  # here already
        frame(0, 64, 192),  # of which part is here
        frame(0, 0, 64, epoch=0),
        frame(0, 0, 64, epoch=2),
        frame(0, 0, 64, step=0),
        frame(0, 0, 64, step=RING_STEPS + 1),
        frame(2, 0, 64),
        frame(0, 0, 64, block=2),
        frame(0, 192, 320),
        frame(0, 128, 192, round=0),
        frame(0, 128, 192)._replace(kind=Kind.ANCHOR),
        frame(0, 128, 192)._replace(kind=Kind.PART),
        frame(0, 128, 192)._replace(kind=Kind.STATE),
    ):
        assert not copy(partition, wrong), wrong
    assert partition.part(part(0, shard(0, 128))) == []
    partition.part(part(1, shard(128, 256)))
    assert partition.repairs(1) == {1: [(0, 0, 1, 128, 128)]}


def test_copies_of_a_rank_that_has_not_begun_the_epoch_are_not_wanted() -> None:
    partition = streaming()
    partition.part(Part(0, 1, 1, gap=True))
    assert not copy(partition, frame(0, 0, 128, step=2, epoch=2))
    partition.part(Part(0, 1, 2, begins=True))
    assert copy(partition, frame(0, 0, 128, step=2, epoch=2))
    assert not copy(partition, frame(1, 128, 256, step=2, epoch=2))


@pytest.mark.parametrize("first", ["copy", "part"])
def test_copies_that_the_part_does_not_list_are_neither_kept_nor_an_error(first: str) -> None:
    partition = streaming()
    unlisted = frame(0, 0, 64, block=1)
    if first == "copy":
        assert copy(partition, unlisted)
    partition.part(part(0, shard(0, 256)))
    assert copy(partition, unlisted) is False
    partition.part(part(1))
    assert partition.repairs(1) == {0: [(0, 0, 1, 0, 256)]}
    assert kinds(repair(partition, frame(0, 0, 256))) == [Apply, Acknowledge]


def test_only_listed_bytes_of_a_listed_round_are_wanted() -> None:
    partition = streaming()
    partition.part(part(0, shard(0, 128)))
    assert not copy(partition, frame(0, 64, 192))
    assert copy(partition, frame(0, 64, 128))


# ---------------------------------------------------------------- rounds


def test_a_later_round_voids_the_earlier_ones_of_its_block_alone() -> None:
    partition = streaming()
    for rank, start in ((0, 0), (1, 128)):
        for block in (0, 1):
            assert copy(partition, frame(rank, start, start + 128, block=block))
    assert copy(partition, frame(0, 0, 64, round=2))  # DDP may cut a later round in another way
    for late in (frame(0, 0, 128), frame(1, 128, 256)):
        assert not copy(partition, late)
    for rank, start, stop in ((0, 0, 64), (1, 64, 256)):
        other = shard(128 * rank, 128 * rank + 128, block=1)
        partition.part(part(rank, shard(start, stop, 2), other, blocks=(0, 1)))
    assert partition.repairs(1) == {1: [(0, 0, 2, 64, 192)]}
    assert kinds(repair(partition, frame(1, 64, 256, round=2))) == [Apply, Acknowledge]


def test_rounds_of_different_updates_do_not_void_each_other() -> None:
    partition = streaming()
    assert copy(partition, frame(0, 0, 256))
    assert copy(partition, frame(0, 0, 256, round=2, update=1))
    updates = [Update(0, [0], 7, shards=[shard(0, 256)]), Update(0, [0], 7, shards=[shard(0, 256, 2, update=1)])]
    partition.part(Part(0, 1, 1, updates=updates))
    effects = partition.part(Part(1, 1, 1, updates=[Update(0, [0], 7, shards=[]), Update(0, [0], 7, shards=[])]))
    assert kinds(effects) == [Apply, Acknowledge]


def test_copies_of_very_many_updates_are_not_kept_before_a_part_lists_them() -> None:
    partition = streaming()
    most = AHEAD_UPDATES * len(partition.layout.blocks)
    taken = [update for update in range(3 * most) if copy(partition, frame(0, 0, 8, update=update))]
    assert taken == list(range(most))
    updates = [Update(0, [0], 7, shards=[]) for _ in range(most)]
    updates.append(Update(0, [0], 7, shards=[shard(0, 256, update=most)]))
    partition.part(Part(0, 1, 1, updates=updates))
    assert partition.owing() == [1]
    assert copy(partition, frame(0, 0, 256, update=most))
    assert partition.owing() == []


def test_a_round_that_no_part_speaks_of_does_not_keep_a_step_from_being_whole() -> None:
    """Whatever such a frame is, if it holds its checksum: what the parts list can be had by a repair."""
    partition = streaming()
    assert copy(partition, frame(0, 0, 128))
    partition.part(part(0, shard(0, 128)))
    assert copy(partition, frame(1, 192, 256, round=9))
    assert not copy(partition, frame(1, 128, 256))
    partition.part(part(1, shard(128, 256)))
    assert partition.repairs(1) == {1: [(0, 0, 1, 128, 128)]}  # what rank 0 lists has arrived, and stays
    assert kinds(repair(partition, frame(1, 128, 256))) == [Apply, Acknowledge]


# ---------------------------------------------------------------- repairs


def test_repair_that_comes_after_a_late_copy_of_some_of_it_is_no_error() -> None:
    partition = streaming()
    partition.part(part(0, shard(0, 256)))
    partition.part(part(1))
    assert partition.repairs(1) == {0: [(0, 0, 1, 0, 256)]}
    assert copy(partition, frame(0, 64, 128))  # late: the repair is on its way
    assert repair(partition, frame(0, 0, 256)) in ([], [Apply, Acknowledge])
    while gaps := partition.repairs(1) if partition.owing() else {}:
        for block, update, round_, offset, nbytes in gaps[0]:
            repair(partition, frame(0, offset, offset + nbytes, block=block, round=round_, update=update))
    assert partition.received == 1


def test_repair_that_comes_twice_or_after_its_step_is_no_error() -> None:
    partition = streaming()
    partition.part(part(0, shard(0, 128)))
    repair(partition, frame(0, 0, 128))
    assert repair(partition, frame(0, 0, 128)) == []
    assert repair(partition, frame(0, 0, 64)) == []
    partition.part(part(1, shard(128, 256)))
    assert kinds(repair(partition, frame(1, 128, 256))) == [Apply, Acknowledge]
    assert repair(partition, frame(1, 128, 256)) == []


def test_repair_of_an_epoch_that_is_over_is_no_error() -> None:
    partition = streaming()
    partition.part(part(0, shard(0, 128)))
    partition.part(Part(1, 1, 1, gap=True))
    assert partition.epoch == 2
    assert repair(partition, frame(0, 0, 128)) == []


def test_what_was_sent_besides_is_owed_by_its_connection_and_not_asked_for() -> None:
    partition = streaming()
    copy(partition, frame(0, 0, 128))
    partition.part(part(0, shard(0, 128)))
    partition.part(part(1, shard(128, 256, 0)))
    assert partition.owing() == []
    assert partition.received == 0
    direct = frame(1, 128, 256, round=0)
    assert partition.begin(direct) is Verdict.TAKE
    assert kinds(partition.arrived(direct)) == [Apply, Acknowledge]


# ---------------------------------------------------------------- parts that contradict


@pytest.mark.parametrize(
    ("zero", "one"),
    [
        ([shard(0, 128)], [shard(192, 256)]),
        ([shard(0, 128)], []),
        ([shard(0, 192)], [shard(128, 256)]),
        ([shard(0, 256)], [shard(0, 256)]),
        ([shard(0, 256)], [shard(128, 256, 0)]),
    ],
    ids=["a hole", "no end", "an overlap", "twice", "copied and sent"],
)
def test_shards_that_are_not_the_whole_gradient_once_end_the_epoch(zero: list[Shard], one: list[Shard]) -> None:
    partition = streaming()
    effects: list[Effect] = []
    for rank, shards in enumerate((zero, one)):
        effects += partition.part(part(rank, *shards))
    for rank, shards in enumerate((zero, one)):
        for each in shards:
            header = frame(rank, each.offset, each.offset + each.nbytes, round=each.round)
            if each.round:
                effects += partition.arrived(header) if partition.overhear(header) else []
            elif partition.begin(header) is Verdict.TAKE:
                effects += partition.arrived(header)
    assert [kind for kind in kinds(effects) if kind is not Drop] == [Tell, Freeze, AskResume, Acknowledge]
    told = next(effect for effect in effects if isinstance(effect, Tell))
    assert told.fatal
    assert told.text == "the ranks' shards of the gradient of b0 in step 1 are not the whole gradient once"
    assert partition.recovery == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (part(0, shard(0, 128), shard(128, 256)), "listed twice, differently"),
        (part(0, shard(0, 128, block=1)), "is of no gradient of it"),
        (part(0, shard(0, 257)), "is of no gradient of it"),
        (Part(0, 1, 1, updates=[Update(0, [0], 7)]), "says nothing of its shards"),
    ],
)
def test_part_with_impossible_shards_is_refused(wrong: Part, why: str) -> None:
    partition = streaming()
    with pytest.raises(ProtocolError, match=re.escape(why)):
        partition.part(wrong)
    copy(partition, frame(0, 0, 256))
    partition.part(part(0, shard(0, 256)))
    assert kinds(partition.part(part(1))) == [Apply, Acknowledge]


# ---------------------------------------------------------------- any order


class Network:
    """Honest ranks that close one step, and memory as `Buffers` keeps it. `chance` decides about everything else."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.ranks, self.blocks = chance.randint(2, 3), chance.randint(1, 2)
        self.partition = streaming(ranks=self.ranks, blocks=self.blocks)
        self.memory: dict[tuple[int, int, bool], bytearray] = {}
        self.taken: dict[tuple[int, ...], list[int]] = {}  #: how often each byte came into its place, by rank and round
        self.copies: list[Header] = []
        self.streams: list[list[Header | Part]] = [[] for _ in range(self.ranks)]
        updates: list[list[Update]] = [[] for _ in range(self.ranks)]
        last: dict[int, tuple[int, int]] = {}  #: by block: the newest update and round that brought its gradient
        self.sources: list[dict[int, tuple[int, int]]] = []
        cuts: dict[tuple[int, int], list[int]] = {}
        rounds = 0
        for number in range(chance.randint(1, 3)):
            for _ in range(chance.randint(0 if number else 1, 3)):
                rounds += 1
                for block in range(self.blocks):
                    last[block] = (number, rounds)
                    cuts[block, rounds] = bounds = self._bounds()
                    self._copy(number, rounds, block, bounds)
            used = sorted(chance.sample(range(self.blocks), chance.randint(1, self.blocks)))
            self.sources.append({block: last[block] for block in used})
            shards: list[list[Shard]] = [[] for _ in range(self.ranks)]
            for block in used:
                update, round_ = last[block]
                for rank, (start, stop) in enumerate(_pairs(cuts[block, round_])):
                    if start == stop:
                        continue
                    if chance.random() < 0.2:  # this rank sends its shard besides
                        shards[rank].append(Shard(block, start, stop - start, number, 0))
                        self.streams[rank] += self._pieces(number, 0, block, rank, start, stop)
                    else:
                        shards[rank].append(Shard(block, start, stop - start, update, round_))
            for rank in range(self.ranks):
                updates[rank].append(Update(0, used, 7, shards=shards[rank]))
        self.parts = [Part(rank, 1, 1, updates=updates[rank]) for rank in range(self.ranks)]
        for rank in range(self.ranks):
            self.streams[rank].append(self.parts[rank])

    def _bounds(self) -> list[int]:
        inner = sorted(self.chance.choices(range(0, SIZE + 1, 32), k=self.ranks - 1))
        return [0, *inner, SIZE]

    def _copy(self, update: int, round_: int, block: int, bounds: list[int]) -> None:
        for rank, (start, stop) in enumerate(_pairs(bounds)):
            self.copies += self._pieces(update, round_, block, rank, start, stop)

    def _pieces(self, update: int, round_: int, block: int, rank: int, start: int, stop: int) -> Iterator[Header]:
        chunk = self.chance.choice([32, 96, 256])
        for at in range(start, stop, chunk):
            yield frame(rank, at, min(stop, at + chunk), block=block, round=round_, update=update)

    @staticmethod
    def content(block: int, update: int, round_: int) -> int:
        """The value of all bytes of a gradient."""
        return 1 + 100 * block + 25 * update + round_

    def put(self, header: Header) -> None:
        """A payload goes into its place."""
        place = self.memory.setdefault((header.block, header.update, header.round > 0), bytearray(SIZE))
        here = slice(header.offset, header.offset + header.length)
        place[here] = bytes([self.content(header.block, header.update, header.round)]) * header.length
        times = self.taken.setdefault((header.rank, header.update, header.block, header.round), [0] * SIZE)
        times[here] = [n + 1 for n in times[here]]

    def hear(self, header: Header) -> None:
        if self.partition.overhear(header):
            self.put(header)
            self.partition.arrived(header)

    def receive(self, message: Header | Part) -> None:
        """From a data connection, as `Run` does it."""
        if isinstance(message, Part):
            self.partition.part(message)
            return
        verdict = self.partition.begin(message)
        assert verdict is not Verdict.WAIT
        if message.round:
            self.hear(message)
        elif verdict is Verdict.TAKE:
            self.put(message)
            self.partition.arrived(message)

    def check(self) -> None:
        """What is owed is exactly what has not come; what counts has come once."""
        if self.partition.received:
            self.check_whole()
            return
        here = self.partition._slots[1].parts if 1 in self.partition._slots else {}
        owed = self.partition.repairs(1) if self.partition.owing() else {}
        missing = {
            (rank, block, update, round_, at)
            for rank, items in owed.items()
            for block, update, round_, offset, nbytes in items
            for at in range(offset, offset + nbytes)
        }
        expected = set()
        for rank in here:
            for each in (each for update in self.parts[rank].updates for each in update.shards or ()):
                times = self.taken.get((rank, each.update, each.block, each.round), [0] * SIZE)
                listed = range(each.offset, each.offset + each.nbytes)
                assert all(times[at] <= 1 for at in listed)
                if each.round:
                    expected |= {(rank, each.block, each.update, each.round, at) for at in listed if not times[at]}
        assert missing == expected

    def check_whole(self) -> None:
        """The step was received, so each gradient is what the ranks had."""
        for number, used in enumerate(self.sources):
            for block, (update, round_) in used.items():
                for rank in range(self.ranks):
                    for each in self.parts[rank].updates[number].shards or ():
                        if each.block != block:
                            continue
                        found = self.memory[block, each.update, each.round > 0][each.offset : each.offset + each.nbytes]
                        value = self.content(block, *((update, round_) if each.round else (number, 0)))
                        assert set(found) <= {value}, (rank, each)


def _pairs(bounds: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(bounds))


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
@settings(max_examples=300)
def test_in_any_order_each_gradient_is_there_once_or_owed(seed: int, lost: float) -> None:
    play(random.Random(seed), lost)


def play(chance: random.Random, lost: float, twice: float = 0.2) -> None:
    """One step, from the first copy to the last that comes when all is over."""
    network = Network(chance)
    copies = [header for header in network.copies if chance.random() >= lost]
    copies += [header for header in copies if chance.random() < twice]
    chance.shuffle(copies)
    streams = [stream[::-1] for stream in network.streams]
    while any(streams) or (copies and chance.random() < 0.9):
        if copies and (not any(streams) or chance.random() < 0.5):
            network.hear(copies.pop())
        else:
            network.receive(chance.choice([stream for stream in streams if stream]).pop())
        network.check()
    for _ in range(40):  # what is left of the copies is late, and meets the repairs
        if not network.partition.owing():
            break
        asked = [(rank, *item) for rank, items in network.partition.repairs(1).items() for item in items]
        for rank, block, update, round_, offset, nbytes in asked:
            for header in network._pieces(update, round_, block, rank, offset, offset + nbytes):
                while copies and chance.random() < 0.4:
                    network.hear(copies.pop())
                network.receive(header)
                network.check()
    assert network.partition.received == 1
    network.check()
    for header in copies:
        network.hear(header)
    network.check_whole()


def voids_nothing(self: Partition, header: Header) -> bool:
    """What came of an older round counts as of the newer one."""
    slot = self._slots.setdefault(header.step, Slot())
    before = {key: list(ranges) for key, ranges in slot.ranges.items() if key[5]}
    taken = overhear(self, header)
    for key in before.keys() - slot.ranges.keys():
        for start, stop in before[key]:
            slot.ranges.setdefault((*key[:5], header.round), RangeSet()).add(start, stop)
    return taken


def takes_older_rounds(self: Partition, header: Header) -> bool:
    if (slot := self._slots.get(header.step)) is not None:
        slot.rounds.clear()
    return overhear(self, header)


def takes_what_is_here(self: Partition, header: Header) -> bool:
    return overhear(self, header) or (header.step > self.received and bool(self._slots[header.step].ranges))


def fails(seed: int) -> bool:
    try:
        play(random.Random(seed), 0.1)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("mutant", [voids_nothing, takes_older_rounds, takes_what_is_here])
def test_mutant_is_found(monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    """The negative control."""
    monkeypatch.setattr(Partition, "overhear", mutant)
    assert any(fails(seed) for seed in range(300))
