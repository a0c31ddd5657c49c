"""What `Partition` makes of one event after another. Every order of them is tried in `test_partition_exhaustive`."""

from __future__ import annotations

import re

import pytest

from checkmate.errors import ProtocolError
from checkmate.layout import Layout
from checkmate.shadow.effects import Acknowledge, Apply, AskAnchors, AskResume, Drop, Effect, Freeze, Tell
from checkmate.shadow.partition import RING_STEPS, Partition, Phase, Verdict
from checkmate.wire.frames import Header, Kind
from checkmate.wire.messages import Anchor, Block, Digest, Entry, Fingerprint, Part, Spec, Update

from .ranks import CELL, layout

LAYOUT = layout(2, 1)  # rank 0 sends half of block 0 and owns it; rank 1 sends the rest and owns block 1
SLICES = [(0, 0, 1), (1, 0, 1), (1, 1, 1)]  # rank, block, cells
TAKE, DRAIN, WAIT = Verdict.TAKE, Verdict.DRAIN, Verdict.WAIT


def streaming(*, gated: bool = False) -> Partition:
    return Partition(LAYOUT, epoch=1, phase=Phase.STREAMING, base=0, gated=gated)


def grad(rank: int, step: int, block: int = 0, *, epoch: int = 1, update: int = 0, cells: int = 1) -> Header:
    offset = LAYOUT.slices[rank][block].offset
    return Header(Kind.GRAD, cells * CELL, b"", rank, epoch, step, block, update, 0, offset)


def part(rank: int, step: int, epoch: int = 1, *updates: Update, **more: object) -> Part:
    return Part(rank, step, epoch, updates=list(updates) or [Update(0, [0, 1], 7)], **more)  # type: ignore[arg-type]


def anchor(block: int, *more: Entry) -> Anchor:
    nbytes = LAYOUT.blocks[block].nbytes
    return Anchor(block, 0, [Entry("", "uint8", [nbytes], nbytes), *more], b"")


def put(partition: Partition, header: Header) -> list[Effect]:
    assert partition.begin(header) is TAKE
    return partition.arrived(header)


def close(partition: Partition, step: int, epoch: int = 1, ranks: tuple[int, ...] = (0, 1)) -> list[Effect]:
    """These ranks send all of a step; the effects of the last thing that comes."""
    effects: list[Effect] = []
    for rank in ranks:
        for owner, block, cells in SLICES:
            if owner == rank:
                effects = put(partition, grad(rank, step, block, epoch=epoch, cells=cells))
        effects = partition.part(part(rank, step, epoch))
    return effects


def end_epoch(partition: Partition) -> None:
    partition.part(Part(0, partition.received + 1, partition.epoch, gap=True))
    assert partition.phase is Phase.RESUMING


def kinds(effects: list[Effect]) -> list[type]:
    return [type(effect) for effect in effects]


# ---------------------------------------------------------------- received


def test_step_is_received_with_its_last_part_and_queued_before_it_is_acknowledged() -> None:
    partition = streaming()
    assert close(partition, 1, ranks=(1,)) == []
    assert (partition.received, partition.stable) == (0, 0)
    apply, acknowledge = close(partition, 1, ranks=(0,))
    assert isinstance(apply, Apply)
    assert (apply.epoch, apply.step, sorted(apply.parts)) == (1, 1, [0, 1])
    assert isinstance(acknowledge, Acknowledge)
    assert (partition.received, partition.stable, partition.applied_step) == (1, 1, 0)
    assert partition.applied(1, 1) == [Drop(1), Acknowledge()]
    assert partition.applied_step == 1


def test_step_is_received_with_its_last_byte() -> None:
    partition = streaming()
    close(partition, 1, ranks=(0,))
    put(partition, grad(1, 1, 0))
    half = grad(1, 1, 1)._replace(length=CELL // 2)
    assert put(partition, half) == []
    assert partition.part(part(1, 1)) == []
    assert partition.begin(half) is DRAIN
    assert kinds(put(partition, half._replace(offset=CELL // 2))) == [Apply, Acknowledge]


def test_later_steps_wait_for_an_earlier_one_and_follow_it_at_once() -> None:
    partition = streaming()
    close(partition, 2)
    close(partition, 3)
    assert partition.received == 0
    assert kinds(close(partition, 1)) == [Apply, Apply, Apply, Acknowledge]


def test_step_without_an_update_needs_parts_only() -> None:
    partition = streaming()
    partition.part(Part(0, 1, 1))
    assert kinds(partition.part(Part(1, 1, 1))) == [Apply, Acknowledge]


def test_steps_with_several_updates_keep_their_gradients_apart() -> None:
    partition = streaming()
    for rank in (0, 1):
        put(partition, grad(rank, 1, 0, update=0))
        put(partition, grad(rank, 1, 0, update=1))
    assert partition.part(part(0, 1, 1, Update(0, [0], 7), Update(0, [0], 7))) == []
    effects = partition.part(part(1, 1, 1, Update(0, [0], 7), Update(0, [0], 7)))
    assert kinds(effects) == [Apply, Acknowledge]


def test_what_comes_twice_counts_once() -> None:
    partition = streaming()
    put(partition, grad(0, 1))
    assert partition.begin(grad(0, 1)) is DRAIN
    partition.part(part(0, 1))
    assert partition.part(part(0, 1)) == []
    close(partition, 1, ranks=(1,))
    assert partition.received == 1
    assert partition.begin(grad(0, 1)) is DRAIN
    assert partition.begin(Header(Kind.PART, 1, rank=0, epoch=1, step=1)) is TAKE
    assert partition.part(part(0, 1)) == []


def test_frame_whose_epoch_ends_while_it_arrives_changes_nothing() -> None:
    partition = streaming()
    assert partition.begin(grad(0, 1)) is TAKE
    end_epoch(partition)
    assert partition.arrived(grad(0, 1)) == []
    assert partition.begin(grad(0, 1)) is DRAIN
    assert partition.part(part(0, 1)) == []


def test_ring_holds_three_steps_beyond_the_applied_one() -> None:
    partition = streaming()
    close(partition, 1)
    assert partition.begin(grad(0, RING_STEPS)) is TAKE
    assert partition.begin(grad(0, RING_STEPS + 1)) is WAIT
    assert partition.begin(Header(Kind.PART, 1, rank=0, epoch=1, step=RING_STEPS + 1)) is WAIT
    partition.applied(1, 1)
    assert partition.begin(grad(0, RING_STEPS + 1)) is TAKE


def test_missing_names_ranks_and_what_they_have_closed() -> None:
    partition = streaming()
    assert partition.missing == []
    close(partition, 1)
    close(partition, 2, ranks=(0,))
    assert partition.missing == ["rank 1 has not closed step 2 (newest: 1)"]
    end_epoch(partition)
    partition.part(Part(1, 4, 2, begins=True))
    assert partition.missing == ["rank 0 does not stream yet"]


# ---------------------------------------------------------------- what no correct rank sends


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (grad(0, 1)._replace(rank=2), "there are 2 ranks"),
        (grad(0, 1)._replace(block=2), "there are 2 blocks"),
        (grad(0, 1)._replace(block=1), "outside the slice"),
        (grad(0, 1)._replace(offset=CELL), "outside the slice"),
        (grad(0, 1, cells=2), "outside the slice"),
        (grad(0, 1)._replace(kind=Kind.STATE), "on a data connection"),
        (grad(0, 1)._replace(kind=Kind.ANCHOR), "not listed in a part that came before"),
    ],
)
def test_frame_is_refused(header: Header, why: str) -> None:
    partition = streaming()
    with pytest.raises(ProtocolError, match=why):
        partition.begin(header)
    assert kinds(close(partition, 1)) == [Apply, Acknowledge]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (part(0, 1, 1, Update(0, [2], 7)), "no ascending list"),
        (part(0, 1, 1, Update(0, [1, 0], 7)), "no ascending list"),
        (part(0, 1, 1, Update(0, [0, 0], 7)), "no ascending list"),
        (part(0, 1, anchors=[anchor(1)]), "not its own"),
        (part(0, 1, anchors=[anchor(0), anchor(0)]), "twice"),
        (part(0, 1, anchors=[Anchor(0, 0, [], b"")]), "entry 0"),
        (part(0, 1, anchors=[Anchor(0, 0, [Entry("", "uint8", [1], 1)], b"")]), "entry 0"),
    ],
)
def test_part_is_refused(wrong: Part, why: str) -> None:
    partition = streaming()
    with pytest.raises(ProtocolError, match=why):
        partition.part(wrong)
    assert kinds(close(partition, 1)) == [Apply, Acknowledge]


def test_piece_cut_in_another_way_is_refused() -> None:
    partition = streaming()
    put(partition, grad(0, 1)._replace(length=32))
    with pytest.raises(ProtocolError, match="cut in another way"):
        partition.begin(grad(0, 1))


def test_anchor_past_its_entry_is_refused() -> None:
    partition = streaming()
    partition.part(part(0, 1, anchors=[anchor(0)]))
    whole = Header(Kind.ANCHOR, 2 * CELL, b"", 0, 1, 1, 0)
    for wrong in (whole._replace(offset=1), whole._replace(entry=1)):
        with pytest.raises(ProtocolError, match=r"past the end|not listed"):
            partition.begin(wrong)
    assert partition.begin(whole) is TAKE


def test_bytes_that_the_part_before_does_not_list_are_refused() -> None:
    partition = streaming()
    put(partition, grad(0, 1))
    partition.part(part(0, 1))
    with pytest.raises(ProtocolError, match="not listed in its part"):
        partition.begin(grad(0, 1, update=1))


def test_bytes_that_the_part_after_does_not_list_end_the_epoch() -> None:
    """They lie in the step's memory and cannot be taken back; a new epoch begins with a clean one."""
    partition = streaming()
    put(partition, grad(0, 1))
    effects = partition.part(part(0, 1, 1, Update(0, [1], 7)))
    assert kinds(effects) == [Drop, Freeze, AskResume, Acknowledge]
    assert "does not list" in effects[2].reason  # type: ignore[union-attr]


def test_nobody_streams_in_an_epoch_that_it_has_not_begun() -> None:
    partition = streaming()
    end_epoch(partition)
    with pytest.raises(ProtocolError, match="not begun"):
        partition.begin(grad(0, 2, epoch=2))
    with pytest.raises(ProtocolError, match="not begun"):
        partition.part(part(0, 2, 2))
    partition.part(Part(0, 1, 2, begins=True))
    assert partition.begin(grad(0, 2, epoch=2)) is TAKE


# ---------------------------------------------------------------- ranks that contradict each other


def test_different_updates_end_the_epoch_and_are_reported() -> None:
    partition = streaming()
    put(partition, grad(0, 1, 0))
    partition.part(part(0, 1, 1, Update(0, [0], 7)))
    effects = partition.part(Part(1, 1, 1))
    assert kinds(effects) == [Tell, Drop, Freeze, AskResume, Acknowledge]
    assert effects[0].fatal  # type: ignore[union-attr]
    assert "ranks 0 and 1 took different optimizer steps in step 1: 1 and 0 updates" in effects[0].text  # type: ignore[union-attr]
    assert partition.recovery == 0


def told(sets: list[list[int]], replicas: list[int], updates: list[list[Update]]) -> list[str]:
    """What is reported of a step in which each rank took these updates, where ranks hold different blocks."""
    blocks = [Block(f"p{i}", "uint8", 1, [0], [0], [0], number) for i, number in enumerate(replicas)]
    spec = Spec(len(updates), sets, blocks, [], Fingerprint("", "", 1, False, "cpu"))
    partition = Partition(Layout(spec), epoch=1, phase=Phase.STREAMING, base=0)
    effects = [e for r, mine in enumerate(updates) for e in partition.part(Part(r, 1, 1, updates=mine))]
    return [effect.text for effect in effects if isinstance(effect, Tell)]


def test_stages_may_differ_in_updates_and_hyper_parameters_but_not_replicas() -> None:
    stages = [[0, 1], [2, 3]]
    first, second = [Update(0, [0], 7)], [Update(0, [1], 8), Update(1, [], 9)]
    assert told(stages, [0, 1], [first, first, second, second]) == []
    assert told(stages, [0, 1], [first, first, second, second[:1]]) == [
        "ranks 2 and 3 took different optimizer steps in step 1: 2 and 1 updates, or gradients for different parameters"
    ]
    other = [Update(0, [1], 88), second[1]]
    assert told(stages, [0, 1], [first, first, second, other]) == [
        "ranks 2 and 3 used different hyper-parameters in step 1"
    ]


def test_ranks_that_share_some_blocks_must_agree_on_these() -> None:
    sets, replicas = [[0], [0, 1], [1]], [0, 1, 2]
    assert told(sets, replicas, [[Update(0, [0, 1], 7)], [Update(0, [1, 2], 8)]]) == []
    assert told(sets, replicas, [[Update(0, [0], 7)], [Update(0, [2], 8)]]) == []
    assert told(sets, replicas, [[Update(0, [0, 1], 7)], [Update(0, [2], 8), Update(0, [1], 8)]]) == [
        "ranks 0 and 1 took different optimizer steps in step 1 with the parameters that both hold"
    ]


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (part(1, 1, 1, Update(0, [], 8)), "ranks 0 and 1 used different hyper-parameters in step 1"),
        (
            part(1, 1, 1, Update(0, [], 7), gradients=[Digest(1, "grad", 0, 64, 2)]),
            "ranks 0 and 1 hold different gradients of b1 in step 1",
        ),
    ],
)
def test_smaller_contradictions_are_reported_and_the_step_counts(theirs: Part, text: str) -> None:
    partition = streaming()
    partition.part(part(0, 1, 1, Update(0, [], 7), gradients=[Digest(1, "grad", 0, 64, 1)]))
    effects = partition.part(theirs)
    assert kinds(effects) == [Tell, Apply, Acknowledge]
    assert effects[0] == Tell("replicas", text, 1)


# ---------------------------------------------------------------- epochs


def test_gap_ends_the_epoch_once_every_earlier_step_is_received() -> None:
    partition = streaming()
    close(partition, 1, ranks=(0,))
    assert partition.part(Part(0, 2, 1, gap=True)) == []
    effects = close(partition, 1, ranks=(1,))
    assert kinds(effects) == [Apply, Freeze, AskResume, Acknowledge]
    assert effects[1] == Freeze(1, keep=True)
    assert effects[2] == AskResume(2, "rank 0 could not keep its gradients of step 2")
    assert (partition.epoch, partition.phase, partition.recovery) == (2, Phase.RESUMING, 1)


def test_earliest_of_two_gaps_counts() -> None:
    partition = streaming()
    partition.part(Part(0, 3, 1, gap=True))
    assert partition.part(Part(1, 1, 1, gap=True))[1] == AskResume(2, "rank 1 could not keep its gradients of step 1")


def test_end_of_an_epoch_voids_what_is_beyond_and_keeps_what_is_stable() -> None:
    partition = streaming()
    close(partition, 1)
    close(partition, 3, ranks=(0,))
    effects = partition.part(Part(1, 2, 1, gap=True))
    assert effects[0] == Drop(3, void=True)
    assert (partition.recovery, partition.frozen) == (1, 1)
    assert partition.applied(1, 1) == [Drop(1)]
    assert partition.recovery == 1


def test_epoch_begins_at_the_newest_of_the_first_steps_and_older_ones_are_dropped() -> None:
    partition = streaming()
    end_epoch(partition)
    partition.part(Part(0, 3, 2, begins=True))
    close(partition, 4, 2, ranks=(0,))
    close(partition, 6, 2, ranks=(0,))
    assert partition.begin(grad(0, 7, epoch=2)) is WAIT
    effects = partition.part(Part(1, 5, 2, begins=True))
    assert effects == [Drop(4, void=True), AskAnchors(2, 6), Acknowledge()]
    assert (partition.phase, partition.first, partition.received) == (Phase.ANCHORING, 6, 5)
    assert partition.begin(grad(0, 5, epoch=2)) is DRAIN
    assert partition.begin(grad(0, 7, epoch=2)) is TAKE
    assert kinds(close(partition, 6, 2, ranks=(1,))) == [Apply, Acknowledge]


def test_beginning_again_after_a_reconnection_changes_nothing() -> None:
    partition = streaming()
    end_epoch(partition)
    partition.part(Part(0, 3, 2, begins=True))
    partition.part(Part(0, 9, 2, begins=True))
    partition.part(Part(1, 3, 2, begins=True))
    assert partition.first == 4
    assert partition.part(Part(0, 9, 2, begins=True)) == []
    assert partition.first == 4


def test_gap_from_before_the_first_step_ends_the_epoch_as_it_begins() -> None:
    partition = streaming()
    end_epoch(partition)
    partition.part(Part(0, 3, 2, begins=True))
    assert partition.part(Part(0, 4, 2, gap=True)) == []
    effects = partition.part(Part(1, 7, 2, begins=True))
    assert kinds(effects) == [AskAnchors, Freeze, AskResume, Acknowledge]
    assert (partition.epoch, partition.recovery) == (3, 0)


def test_recovery_stays_at_the_frozen_step_until_every_block_has_its_anchor() -> None:
    partition = streaming()
    end_epoch(partition)
    partition.part(Part(0, 1, 2, begins=True))
    partition.part(Part(1, 1, 2, begins=True))
    assert partition.blocks_without_state() == 2
    for rank, step in ((0, 2), (1, 3)):
        other = Part(1 - rank, step, 2)
        partition.part(other)
        partition.part(Part(rank, step, 2, anchors=[anchor(rank)]))
        assert partition.received == step - 1
        header = Header(Kind.ANCHOR, LAYOUT.blocks[rank].nbytes, b"", rank, 2, step, rank)
        assert kinds(put(partition, header)) == [Apply, Acknowledge]
        assert (partition.phase, partition.recovery) == ((Phase.ANCHORING, 0), (Phase.STREAMING, 3))[rank]
    partition.applied(2, 2)
    assert partition.frozen == 0
    partition.applied(2, 3)
    assert (partition.frozen, partition.recovery) == (-1, 3)


def test_epoch_that_ends_before_it_is_whole_leaves_the_frozen_step() -> None:
    partition = streaming()
    end_epoch(partition)
    partition.part(Part(0, 1, 2, begins=True))
    partition.part(Part(1, 1, 2, begins=True))
    effects = partition.part(Part(1, 2, 2, gap=True))
    assert effects[0] == Freeze(2, keep=False)
    assert partition.recovery == 0


def test_epoch_may_be_ended_as_a_later_one() -> None:
    partition = streaming()
    assert partition.end_epoch("the shadow was restarted", 7)[1] == AskResume(7, "the shadow was restarted")
    assert partition.end_epoch("again", 3)[1] == AskResume(8, "again")


@pytest.mark.parametrize("kept", [-1, 0])
def test_lost_state_is_not_promised(kept: int) -> None:
    partition = streaming()
    close(partition, 1)
    assert partition.recovery == 1
    assert kinds(partition.lost(1, kept, "no memory")) == [Freeze, AskResume, Acknowledge]
    assert partition.recovery == kept
    assert partition.lost(1, -1, "late") == [Acknowledge()]
    assert (partition.epoch, partition.recovery) == (2, -1)


# ---------------------------------------------------------------- gate


def test_gated_steps_are_applied_only_when_the_outside_calls_them_stable() -> None:
    partition = streaming(gated=True)
    assert close(partition, 1) == [Acknowledge()]
    assert (partition.received, partition.stable, partition.recovery) == (1, 0, 0)
    assert kinds(partition.stabilise(1, 1)) == [Apply, Acknowledge]
    assert partition.stabilise(1, 1) == []
    assert partition.recovery == 1


def test_stable_of_another_epoch_or_without_a_gate_changes_nothing() -> None:
    partition = streaming(gated=True)
    close(partition, 1)
    assert partition.stabilise(2, 1) == []
    assert streaming().stabilise(1, 9) == []


def test_stable_before_received_is_refused() -> None:
    with pytest.raises(ProtocolError, match=re.escape("step 1 called stable, but this replica has received only 0")):
        streaming(gated=True).stabilise(1, 1)


def test_gated_epoch_waits_for_what_may_have_been_called_stable() -> None:
    partition = streaming(gated=True)
    close(partition, 1)
    assert partition.part(Part(0, 2, 1, gap=True)) == []
    assert kinds(partition.stabilise(1, 1)) == [Apply, Freeze, AskResume, Acknowledge]
    assert partition.recovery == 1
