"""Reliable multicast, on a network in memory: any schedule of drops, duplicates, reordering and delays, from a seed."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from checkmate.wire.datagrams import DATAGRAM_HEADER_BYTES, Answer, Missing, Packer, Pieces, split
from checkmate.wire.multicast import Burst, Question, Receiver, Sender

from .network import Faults, Network, message


def job(network: Network, seed: int, messages: int, most_frames: int = 6, most_bytes: int = 3000):
    """Every rank sends so many messages to all; returns what a shadow should hear, and what each rank sent."""
    random = Random(seed + 1)
    heard, sent = {}, {}
    for rank in network.ranks:
        sent[rank.number], block = [], 0
        for _ in range(messages):
            sizes = [random.randint(1, most_bytes) for _ in range(random.randint(1, most_frames))]
            table, payload, frames = message(random, rank.number, block, sizes)
            block += len(sizes)
            heard |= frames
            sent[rank.number].append(payload)
            rank.put(table, payload)
            for other in network.ranks:
                if other is not rank:
                    other.expect(rank.number, len(table), len(payload))
    return heard, sent


def check(network: Network, sent) -> None:
    """Every rank has every byte of every other, and every sender knows it."""
    for rank in network.ranks:
        assert rank.sender.idle
        assert rank.delivered == len(sent[rank.number])
        for other, got in rank.got.items():
            assert rank.whole[other] == len(sent[other])
            assert [array.tobytes() for array in got] == sent[other]


shares = st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3])


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    ranks=st.integers(2, 8), shadows=st.integers(0, 3), seed=st.integers(0, 2**32), messages=st.integers(1, 6),
    size=st.sampled_from([256, 304, 1440]), batch=st.integers(1, 12), window=st.sampled_from([512, 4096, 1 << 20]),
    drop=shares, twice=shares, late=shares, damage=shares, shadow_drop=shares,
)  # fmt: skip
def test_any_schedule(ranks, shadows, seed, messages, size, batch, window, drop, twice, late, damage, shadow_drop):
    note(f"seed {seed}")
    network = Network(
        ranks, shadows, seed, Faults(drop, twice, late, damage=damage), Faults(shadow_drop, twice, late),
        size=size, batch=batch, window_bytes=window, deadline_s=30.0,
    )  # fmt: skip
    heard, sent = job(network, seed, messages)
    network.run()
    check(network, sent)
    for rank in network.ranks:
        assert rank.most_in_flight < window + size
    for shadow in network.shadows:
        shadow.end()
        assert shadow.frames.items() <= heard.items()
        if not (shadow_drop or late):
            assert shadow.frames == heard
        for stream in shadow.streams.values():
            assert len(stream._open) == 0


def test_without_loss_every_byte_goes_out_once():
    network = Network(4, 1, 1, Faults(), Faults(), window_bytes=1 << 16)
    heard, sent = job(network, 1, 20)
    network.run()
    check(network, sent)
    assert network.shadows[0].streams.keys() == {0, 1, 2, 3}
    assert network.shadows[0].frames == heard
    assert all(rank.sender.resent_bytes == 0 for rank in network.ranks)
    assert network.sent["again"] == 0


def test_a_peer_that_is_gone_ends_it_within_the_deadline():
    network = Network(3, 1, 2, Faults(), Faults(), deadline_s=5.0)
    job(network, 2, 4)
    network.gone.add(2)
    began = network.clock.now
    with pytest.raises(TimeoutError, match=r"ranks \[2\] of the group have not acknowledged in 5 s"):
        network.run()
    assert network.clock.now - began < 5.5


def test_a_shadow_that_hears_nothing_costs_nothing():
    networks = [Network(3, shadows, 3, Faults(), Faults(drop=1.0), window_bytes=1 << 16) for shadows in (0, 3)]
    for network in networks:
        _, sent = job(network, 3, 10)
        network.run()
        check(network, sent)
    assert networks[0].sent == networks[1].sent
    assert networks[0].clock.now == networks[1].clock.now


def sender(peers=(1, 2, 3), **options) -> Sender:
    return Sender(peers, **({"size": 256, "batch": 64, "window_bytes": 1 << 20, "deadline_s": 5.0} | options))


def array(nbytes: int) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


def sent(of: Sender, now: float) -> list[Burst | Question]:
    found = []
    while (action := of.next(now)) is not None:
        found.append(action)
    return found


def test_what_one_misses_goes_to_it_alone_and_what_several_miss_to_all():
    one = sender()
    one.put(array(80), array(2560), lambda: None)
    *bursts, question = sent(one, 1.0)
    assert [(b.to, b.first, b.stop) for b in bursts] == [(None, 0, 1), (None, 1, 11)]
    one.heard(1, Answer(question.serial, 0, (Missing(0, 2, 4), Missing(0, 7, 8))), 1.001)
    one.heard(2, Answer(question.serial, 0, (Missing(0, 3, 4),)), 1.001)
    assert one.next(1.0011) is None  # rank 3 has not answered yet
    one.heard(3, Answer(question.serial, 1), 1.0012)
    again = sent(one, 1.0013)
    assert [(b.to, b.first, b.stop) for b in again[:-1]] == [(None, 3, 4), (1, 2, 3), (1, 7, 8)]
    assert isinstance(again[-1], Question)


def test_what_is_repaired_is_not_sent_once_all_have_it():
    one = sender(peers=(1, 2))
    one.put(array(80), array(256 * 300), lambda: None)
    question = sent(one, 1.0)[-1]
    for peer in (1, 2):
        one.heard(peer, Answer(question.serial, 0, tuple(Missing(0, n, n + 1) for n in range(1, 100, 2))), 1.001)
    assert isinstance(one.next(1.002), Burst)
    for peer in (1, 2):
        one.heard(peer, Answer(question.serial, 1), 1.003)
    assert sent(one, 1.003) == []


def test_an_answer_to_an_old_question_repairs_nothing_twice():
    one = sender(peers=(1,))
    one.put(array(80), array(2560), lambda: None)
    first = sent(one, 1.0)[-1]
    one.heard(1, Answer(first.serial, 0, (Missing(0, 2, 4),)), 1.001)
    again = sent(one, 1.001)
    assert [type(action) for action in again] == [Burst, Question]
    one.heard(1, Answer(first.serial, 0, (Missing(0, 2, 4),)), 1.002)
    assert sent(one, 1.01) == []
    one.heard(1, Answer(again[-1].serial, 0, (Missing(0, 3, 4),)), 1.02)
    assert [(b.first, b.stop) for b in sent(one, 1.02)[:-1]] == [(3, 4)]


def test_a_question_is_repeated_until_all_have_answered():
    one = sender(peers=(1, 2))
    done = []
    one.put(array(80), array(2560), lambda: done.append(1))
    question = sent(one, 1.0)[-1]
    one.heard(1, Answer(question.serial, 1), 1.001)
    assert sent(one, one.due(1.001) - 1e-6) == []
    (again,) = sent(one, one.due(1.001))
    assert (again.number, again.first) == (1, 0)
    one.heard(2, Answer(again.serial, 1), 1.1)
    one.heard(1, Answer(again.serial, 1), 1.1)
    assert done == [1]
    assert one.idle
    assert one.in_flight == 0
    assert one.due(1.2) == float("inf")


@pytest.mark.parametrize(
    "answer",
    [Answer(99, 1), Answer(0, 1), Answer(1, 2), Answer(1, 0, (Missing(5, 0, 9),)), Answer(1, 0, (Missing(0, 9, 3),))],
)
def test_what_can_be_no_answer_changes_nothing(answer):
    one = sender(peers=(1,))
    done = []
    one.put(array(80), array(2560), lambda: done.append(1))
    assert sent(one, 1.0)[-1].serial == 1
    one.heard(1, answer, 1.001)
    one.heard(7, Answer(1, 1), 1.001)
    assert sent(one, 1.001) == []
    assert not done
    one.heard(1, Answer(1, 1), 1.002)
    assert done


def test_pacing_keeps_to_the_rate():
    one = sender(peers=(1,), batch=16, rate_bytes_s=1e6)
    one.put(array(80), array(1_000_000), lambda: None)
    now, nbytes, gone = 0.0, 0, []
    while now < 0.5:
        for action in sent(one, now):
            if isinstance(action, Burst):
                nbytes += len(action.message.bytes_of(action.first, action.stop))
                gone.append(action)
            else:
                one.heard(1, Answer(action.serial, 0), now)
        now = max(now + 1e-4, min(one.due(now), 0.6))
    assert 0.8 * 0.5e6 < nbytes - (128 << 10) < 1.2 * 0.5e6


def test_the_window_shrinks_by_half_the_share_that_was_lost():
    one = sender(peers=(1, 2), window_bytes=1 << 20)
    one.put(array(80), array(256 * 1000), lambda: None)
    question = sent(one, 1.0)[-1]
    before = one.window_bytes
    one.heard(1, Answer(question.serial, 0, (Missing(0, 1, 101),)), 1.001)
    one.heard(2, Answer(question.serial, 1), 1.001)
    assert one.window_bytes == pytest.approx(before * 0.95, rel=0.01)


def test_a_message_that_is_not_what_it_should_be_is_asked_for_anew():
    one, other = sender(peers=(1,)), Receiver(256)
    payload = np.arange(2560, dtype=np.uint8)
    results = iter([False, True])
    one.put(array(80), payload, lambda: None)
    other.expect(array(80), target := array(2560), lambda: next(results))
    packer = Packer(0, 7, 256, 64)
    now = 1.0
    while not one.idle:
        assert now < 2
        for action in sent(one, now):
            if isinstance(action, Question):
                one.heard(1, other.answer(action.serial, action.number, action.first), now)
                continue
            message = action.message
            data = message.bytes_of(action.first, action.stop)
            packed = packer.pack(data, 0, action.first, message.count, message.tables)
            for _, pieces in split(packed[None], len(packed), 256 + DATAGRAM_HEADER_BYTES):
                assert isinstance(pieces, Pieces)
                other.take(pieces)
        now = max(now + 1e-3, min(one.due(now), 3))
    assert other.refused == 1
    assert np.array_equal(target, payload)
