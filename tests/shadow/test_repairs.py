"""When the shadow asks for what the network has not brought. Time is an argument, so nothing here waits."""

from __future__ import annotations

import pytest

from checkmate.shadow.repairs import AGAIN_S, PATIENCE_S, Repairs

NOW = 1000.0
SOON = NOW + 0.9 * PATIENCE_S
LATE = NOW + 1.1 * PATIENCE_S


def test_packets_may_be_on_their_way_for_a_while() -> None:
    repairs = Repairs()
    repairs.moved(5, NOW)
    assert not repairs.due(5, 0, SOON)
    assert repairs.due(5, 0, LATE)


def test_news_of_a_step_makes_it_patient_again_but_not_with_another_step() -> None:
    repairs = Repairs()
    for step in (5, 6):
        repairs.moved(step, NOW)
    repairs.moved(5, SOON)
    repairs.overheard(1, 5)
    assert not repairs.due(5, 0, LATE)
    assert repairs.due(6, 0, LATE)
    assert repairs.due(5, 0, SOON + 1.1 * PATIENCE_S)


def test_later_frames_of_a_rank_say_that_what_is_missing_is_lost() -> None:
    repairs = Repairs()
    repairs.moved(5, NOW)
    repairs.overheard(1, 6)
    assert repairs.due(5, 1, NOW)
    assert not repairs.due(5, 0, NOW)  # of that rank nothing later has come
    assert not repairs.due(6, 1, NOW)
    repairs.overheard(1, 4)  # late: no news of where the rank is
    repairs.moved(7, NOW)
    assert repairs.due(5, 1, NOW + AGAIN_S)


def test_it_is_asked_for_once_and_again_after_a_while_by_rank_and_step() -> None:
    repairs = Repairs()
    repairs.moved(5, NOW)
    assert [repairs.due(5, rank, LATE) for rank in (0, 0, 1, 1)] == [True, False, True, False]
    assert not repairs.due(5, 0, LATE + 0.9 * AGAIN_S)
    assert repairs.due(5, 0, LATE + AGAIN_S)
    assert not repairs.due(5, 0, LATE + 1.9 * AGAIN_S)


def test_a_rank_that_comes_back_is_asked_again() -> None:
    repairs = Repairs()
    repairs.moved(5, NOW)
    assert repairs.due(5, 0, LATE)
    repairs.forget_asked()
    assert repairs.due(5, 0, LATE)
    assert not repairs.due(5, 0, LATE)


def test_a_step_of_which_there_was_no_news_is_waited_for_from_now_on() -> None:
    repairs = Repairs()
    assert not repairs.due(5, 0, NOW)
    assert repairs.due(5, 0, LATE)


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_capture_there_is_nothing_to_wait_for(rank: int) -> None:
    repairs = Repairs(patience_s=0.0)
    repairs.moved(5, NOW)
    assert repairs.due(5, rank, NOW)
    assert not repairs.due(5, rank, NOW)


def test_complete_steps_are_forgotten() -> None:
    repairs = Repairs()
    for step in range(100):
        repairs.moved(step, NOW)
        repairs.moved(step, NOW)
        repairs.overheard(0, step)
        repairs.due(step, 0, LATE)
        repairs.done(step)
    assert not repairs._news
    assert not repairs._asked
    assert repairs._newest == {0: 99}
