"""One run: restarts, fences, leases, epochs, readers. Messages and frames are handed to it directly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkmate.errors import Mismatch, ProtocolError, StepNotFound, Superseded
from checkmate.shadow import run as module
from checkmate.shadow.partition import Phase
from checkmate.shadow.replay import Cut, State
from checkmate.shadow.run import Limits, NotTaken, Run
from checkmate.wire import messages as m

from .job import PATIENCE_S, Attempt, Call, Control


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    monkeypatch.setattr(module, "DRAIN_S", 0.2)
    run = Run("name", Limits())
    yield run
    run.remove(force=True)
    run.replayer.thread.join(PATIENCE_S)
    assert not run.replayer.thread.is_alive()


def until(run: Run, holds: Callable[[], bool]) -> None:
    with run.changed:
        for _ in range(int(PATIENCE_S / 0.01)):
            if holds():
                return
            run.changed.wait(0.01)  # not everything is worth a notification
    raise AssertionError("it does not come")


def until_waiting(run: Run, count: int) -> None:
    """Until so many threads, the replayer among them, wait for something of this run."""
    until(run, lambda: len(run.changed._waiters) >= count)  # type: ignore[attr-defined]


def expire(attempt: Attempt) -> None:
    """This attempt was last heard from long ago."""
    for control in [attempt.claim, *attempt.controls.values()]:
        control.member.heard -= 1000.0


def held(run: Run) -> list[torch.Tensor]:
    """Parameters, then momenta, of the step that a reader gets, as copies."""
    cut = run.lease(None)
    run.release(cut)
    return flat(cut)


def flat(cut: Cut) -> list[torch.Tensor]:
    """Copies of what the cut holds, parameters first."""
    entries = max(map(len, cut.tensors))
    return [tensors[e].clone() for e in range(entries) for tensors in cut.tensors if e < len(tensors)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------- prepare


def test_prepare_numbers_attempts_and_is_idempotent(run: Run) -> None:
    first = Attempt(run)
    prepared = first.prepare()
    assert prepared == m.Prepared(m.Incarnation(1, first.attempt.id), [])
    assert first.prepare() == prepared
    first.die()
    assert Attempt(run).prepare().incarnation.number == 2


def test_attempt_resumes_from_the_newest_step_bit_for_bit(run: Run) -> None:
    first = Attempt(run).begin()
    first.steps(3)
    first.die()
    second = Attempt(run)
    prepared = second.prepare()
    assert (prepared.steps, prepared.world_size, prepared.holder) == ([3], 2, first.incarnation)
    assert same(held(run), first.history[3])
    assert not same(held(run), first.history[2])


def test_live_attempt_is_not_displaced_and_is_named(run: Run) -> None:
    first = Attempt(run).begin()
    with pytest.raises(NotTaken, match=f"is being trained by process {first.attempt.pid} on host") as refused:
        Attempt(run).prepare()
    assert refused.value.kind == "live"
    first.steps(1)
    assert same(held(run), first.history[1])


def test_attempt_that_is_still_restoring_is_live(run: Run) -> None:
    Attempt(run).prepare()
    with pytest.raises(NotTaken, match="is being trained"):
        Attempt(run).prepare()


def test_attempt_whose_lease_has_run_out_is_displaced(run: Run) -> None:
    first = Attempt(run).begin()
    expire(first)
    second = Attempt(run)
    assert second.prepare().steps == [0]
    with pytest.raises(NotTaken) as refused:
        first.join(0)
    assert refused.value.kind == "superseded"


def test_attempt_that_speaks_up_in_time_is_live(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shadow that was suspended finds every lease run out, and what was sent meanwhile still unread."""
    monkeypatch.setattr(module, "GRACE_S", PATIENCE_S)
    first = Attempt(run).begin()
    expire(first)
    second = Call(Attempt(run).prepare)
    run.heard_from(first.controls[1].member, m.Ping(0))
    with pytest.raises(NotTaken, match="is being trained"):
        second.end()


@pytest.mark.parametrize(
    ("old", "job", "restarts", "displaces"),
    [("job", "job", 2, True), ("job", "job", 1, False), ("job", "other", 2, False), ("", "", 2, False)],
)
def test_same_job_with_a_higher_restart_count_displaces(
    run: Run, old: str, job: str, restarts: int, displaces: bool
) -> None:
    first = Attempt(run, old, 1).begin()
    for rank in (0, 1):
        first.detach(rank)
    second = Attempt(run, job, restarts)
    if displaces:
        assert second.prepare().incarnation.number == 2
        assert first.controls[0].ended()
    else:
        with pytest.raises(NotTaken, match="is being trained"):
            second.prepare()
        assert run.incarnation == first.incarnation


def test_two_prepares_of_one_attempt_at_once_get_one_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAIN_S", PATIENCE_S)
    first = Attempt(run).begin()
    for control in [first.claim, *first.controls.values()]:
        run.leave(control.member)
    second = Attempt(run)
    calls = [Call(second.prepare), Call(second.prepare)]
    until_waiting(run, 3)
    for rank in (0, 1):
        first.detach(rank)
    answers = [call.end() for call in calls]
    assert answers == [m.Prepared(m.Incarnation(2, second.attempt.id), [0], 2, first.incarnation)] * 2


def test_newer_of_two_attempts_that_prepare_at_once_holds_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAIN_S", PATIENCE_S)
    first = Attempt(run, "job", 0).begin()
    second, third = Attempt(run, "job", 1), Attempt(run, "job", 2)
    older = Call(second.prepare)
    until(run, lambda: run._draining)
    newer = Call(third.prepare)
    until_waiting(run, 3)
    for rank in (0, 1):
        first.detach(rank)
    older.end()
    newer.end()
    assert run.incarnation == third.incarnation
    assert third.incarnation.number > second.incarnation.number
    third.adopt(0)
    with pytest.raises(NotTaken, match="superseded"):
        second.adopt(0)


# ---------------------------------------------------------------- drain and fence


def test_what_dead_workers_kernels_still_deliver_counts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAIN_S", PATIENCE_S)
    first = Attempt(run).begin()
    for control in [first.claim, *first.controls.values()]:
        run.leave(control.member)
    second = Attempt(run)
    prepared = Call(second.prepare)
    until(run, lambda: run._draining)
    first.train()
    first.deliver()
    for rank in (0, 1):
        first.detach(rank)
    assert prepared.end().steps == [1]  # type: ignore[attr-defined]
    assert same(held(run), first.history[1])


def test_connection_that_waits_for_the_ring_does_not_hold_up_a_restart(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_S", PATIENCE_S)
    first = Attempt(run).begin()

    def run_ahead() -> None:
        try:
            for _ in range(9):
                first.train()
                first.send(0, [*first.grads(0), first.part(0)])
        finally:
            first.detach(0)

    ahead = Call(run_ahead)
    until(run, lambda: run.partition is not None and run.partition.newest[0] >= module.RING_STEPS)
    first.detach(1)
    for control in [first.claim, *first.controls.values()]:
        run.leave(control.member)
    assert Attempt(run).prepare().steps == [0]
    with pytest.raises(Superseded):
        ahead.end()
    assert not first.data[0].closed  # nobody had to


def test_connection_that_neither_sends_nor_ends_is_closed(run: Run) -> None:
    first = Attempt(run).begin()
    expire(first)
    assert Attempt(run).prepare().steps == [0]
    assert all(channel.closed for channel in first.data.values())


def test_older_attempt_that_wakes_up_is_fenced_and_writes_into_nothing(run: Run) -> None:
    first = Attempt(run).begin()
    first.train()
    frame = first.grads(0)[0]
    message = m.Attach(run.name, first.incarnation, 0, first.epoch)
    target = run.place(frame.header, message, first.data[0], memoryview(b""))
    assert target is not None
    expire(first)
    second = Attempt(run)
    second.prepare()
    for rank in (0, 1):
        first.detach(rank)  # their connections are closed by now
    second.begin()
    second.train()
    second.deliver()
    target[:] = bytes(len(target))
    with pytest.raises(Superseded):
        run.arrived(frame, message, first.data[0], False)
    with pytest.raises(Superseded):
        first.send(1, first.grads(1))
    stranger = Attempt(run)
    stranger.incarnation = m.Incarnation(second.incarnation.number, stranger.attempt.id)
    for other in (first, stranger):
        for late in (lambda: other.adopt(0), lambda: other.join(0), lambda: other.attach(0)):  # noqa: B023
            with pytest.raises(NotTaken, match="superseded"):
                late()
    second.await_applied()
    assert same(held(run), second.history[1])


# ---------------------------------------------------------------- adopt


def test_adopting_again_is_answered_alike_and_disturbs_nothing(run: Run) -> None:
    first = Attempt(run)
    first.prepare()
    adopted = first.adopt(None)
    assert first.adopt(None) == adopted
    first.connect()
    first.remember()
    for rank in (0, 1):
        first.send(rank, [first.part(rank, anchors=first.owned(rank)), *first.anchors(rank)])
    assert run.adopt(m.Adopt(run.name, first.incarnation, None, first.spec)) == adopted
    first.steps(2)
    assert same(held(run), first.history[2])


def test_adopt_is_refused_before_prepare_and_for_a_step_that_is_not_held(run: Run) -> None:
    early = Attempt(run)
    early.incarnation = m.Incarnation(1, early.attempt.id)
    with pytest.raises(NotTaken, match="has not prepared"):
        early.adopt(None)
    early.begin()
    early.die()
    second = Attempt(run)
    second.prepare()
    with pytest.raises(NotTaken, match="step 7 is not held here"):
        second.adopt(7)
    assert second.prepare().steps == [0]


@pytest.mark.parametrize("step", [0, None])
def test_refused_adoption_leaves_what_is_held(run: Run, step: int | None) -> None:
    first = Attempt(run).begin()
    first.die()
    second = Attempt(run)
    second.prepare()
    wrong = m.Spec(2, [[0, 1]], second.spec.blocks[:1], second.spec.optimizers, second.spec.fingerprint)
    with pytest.raises((Mismatch, ProtocolError)):
        run.adopt(m.Adopt(run.name, second.incarnation, step, wrong))
    assert second.prepare().steps == [0]
    assert same(held(run), first.history[0])


def test_run_that_does_not_fit_is_refused_with_the_numbers() -> None:
    run = Run("name", Limits(memory_bytes=1000))
    first = Attempt(run)
    first.prepare()
    with pytest.raises(NotTaken, match="may need 1,792 bytes here") as refused:
        first.adopt(None)
    assert refused.value.kind == "memory"
    other = Run("other", Limits(memory_bytes=1000))
    second = Attempt(other)
    second.incarnation = m.Incarnation(1, second.attempt.id)
    with pytest.raises(NotTaken, match="may need"):
        second.join(0, with_spec=True)
    assert other.incarnation is None
    Run("large", Limits(memory_bytes=1792)).remove(force=True)
    for each in (run, other):
        each.remove(force=True)


# ---------------------------------------------------------------- Promise 5: the last whole cut


def test_starting_over_keeps_the_old_cut_until_the_new_one_is_whole(run: Run) -> None:
    first = Attempt(run).begin()
    first.steps(3)
    first.die()
    second = Attempt(run)
    second.prepare()
    second.adopt(None)
    second.connect()
    second.send(0, [second.part(0, anchors=second.owned(0)), *second.anchors(0)])
    assert same(held(run), first.history[3])
    second.die()
    third = Attempt(run)
    assert third.prepare().steps == [3]
    assert same(held(run), first.history[3])
    third.adopt(None)
    third.connect()
    third.remember()
    for rank in (0, 1):
        third.send(rank, [third.part(rank, anchors=third.owned(rank)), *third.anchors(rank)])
    third.await_applied()
    assert same(held(run), third.history[0])
    assert run.replayer.frozen is None


def test_frozen_cut_survives_anchoring_that_fails_and_a_restart(run: Run) -> None:
    first = Attempt(run).begin()
    first.steps(2)
    for epoch in (2, 3):
        first.train()
        first.gap(1)
        resume = first.controls[0].hear(m.Resume)
        assert resume.epoch == epoch
        first.resume(epoch)
        first.train()
        first.send(0, [*first.grads(0), first.part(0, anchors=first.owned(0)), *first.anchors(0)])
        first.send(1, [*first.grads(1), first.part(1)])
        first.await_applied()
        assert run.partition is not None
        assert run.partition.phase is Phase.ANCHORING
        assert run.status()["recovery"] == 2
        assert same(held(run), first.history[2])
    first.die()
    assert Attempt(run).prepare().steps == [2]
    assert same(held(run), first.history[2])


def test_new_epoch_becomes_whole_and_frees_the_frozen_cut(run: Run) -> None:
    first = Attempt(run).begin()
    first.steps(2)
    first.train()
    first.gap(0)
    first.controls[0].hear(m.Resume)
    first.resume(2)
    assert first.controls[1].hear(m.Anchoring, lambda message: message.epoch == 2).step == 4
    first.train()
    first.deliver(anchored=True)
    first.steps(1)
    assert run.replayer.frozen is None
    assert same(held(run), first.history[5])
    assert not same(held(run), first.history[4])


def test_step_that_cannot_be_applied_is_no_longer_promised(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Attempt(run).begin()
    first.steps(1)
    memory = run.memory_bytes()
    original, delivered, tried = State.apply, threading.Event(), []

    def fails(state: State, step: int, *rest: Any) -> Any:
        tried.append(step)
        result = original(state, step, *rest)
        if step == 2:
            assert delivered.wait(PATIENCE_S)
            raise RuntimeError("out of memory")
        return result

    monkeypatch.setattr(State, "apply", fails)
    for _ in range(3):
        first.train()
        first.deliver(anchored=True)
    delivered.set()
    report = first.controls[0].hear(m.Report)
    assert "cannot apply step 2: out of memory" in report.text
    ack = first.controls[0].hear(m.Ack, lambda ack: ack.epoch == 2)
    assert ack.recovery == -1
    with pytest.raises(StepNotFound):
        run.lease(None)
    first.resume(2)
    first.train()
    first.deliver(anchored=True)
    first.steps(1)
    assert tried == [2, 5, 6]
    assert same(held(run), first.history[6])
    assert not run._buffers._steps
    assert run.memory_bytes() <= memory + 2 * 256


# ---------------------------------------------------------------- join


def test_shadow_that_has_lost_its_memory_asks_for_the_spec_and_a_later_epoch(run: Run) -> None:
    first = Attempt(run)
    first.incarnation, first.epoch, first.life = m.Incarnation(5, first.attempt.id), 3, 77
    assert not first.join(0).known
    joined = first.join(0, with_spec=True)
    assert (joined.epoch, joined.received, joined.known) == (4, -1, True)
    assert joined.life not in (0, 77)
    assert run.partition is not None
    assert run.partition.phase is Phase.RESUMING


@pytest.mark.parametrize(("theirs", "epoch"), [(1, 4), (3, 4), (4, 5), (6, 7)])
def test_no_two_lives_share_an_epoch(run: Run, theirs: int, epoch: int) -> None:
    """The ranks of a shadow that died may have heard of different epochs."""
    first = Attempt(run)
    first.incarnation, first.epoch, first.life = m.Incarnation(5, first.attempt.id), 3, 77
    first.join(0, with_spec=True)
    first.epoch = theirs
    assert first.join(1).epoch == epoch
    if epoch > 4:
        assert first.controls[0].hear(m.Resume).epoch == epoch
    first.epoch, first.life, first.step = epoch, run.life, 9
    for rank in (0, 1):
        assert first.join(rank).epoch == epoch
        first.attach(rank)
    first.resume(epoch)
    first.train()
    first.deliver(anchored=True)
    first.await_applied()
    assert same(held(run), first.history[10])


def test_attempt_that_had_displaced_another_takes_the_run_from_it_at_an_empty_shadow(run: Run) -> None:
    def known_from_before(number: int) -> Attempt:
        attempt = Attempt(run)
        attempt.incarnation, attempt.epoch, attempt.life = m.Incarnation(number, attempt.attempt.id), 3, 77
        return attempt

    def take(attempt: Attempt, step: int) -> None:
        attempt.step = step
        epoch = attempt.join(0, with_spec=True).epoch
        attempt.epoch, attempt.life = epoch, run.life
        for rank, channel in list(run._data.items()):
            assert channel.closed
            run.detach(rank, channel)
        for rank in (0, 1):
            assert attempt.join(rank).known
            attempt.attach(rank)
        attempt.resume(epoch)
        attempt.train()
        attempt.deliver(anchored=True)
        attempt.await_applied()

    hung, healthy = known_from_before(5), known_from_before(6)
    take(hung, 9)
    assert not healthy.join(0).known
    take(healthy, 20)
    assert same(held(run), healthy.history[21])
    with pytest.raises(NotTaken, match="superseded"):
        hung.join(0)
    third = Attempt(run)  # from here on, attempts have prepared, and numbers of other times mean nothing
    healthy.die()
    assert third.prepare().steps == [21]
    with pytest.raises(NotTaken, match="superseded"):
        known_from_before(99).join(0, with_spec=True)


def test_reconnecting_rank_hears_again_what_it_missed(run: Run) -> None:
    first = Attempt(run).begin()
    first.steps(1)
    wrong = m.Digest(1, "", 0, 64, 0)
    answer = run._audit(m.Audit(1, [wrong]))
    assert answer.differing == [wrong]
    first.join(1)
    assert first.controls[1].hear(m.Reanchor).blocks == [1]
    first.train()
    first.deliver(anchored=True)
    first.await_applied()
    first.join(1)
    assert isinstance(first.controls[1].channel.message(), m.Ack)
    first.train()
    first.gap(0)
    first.resume(2)
    first.join(1)
    assert first.controls[1].hear(m.Anchoring) == m.Anchoring(2, 4)


def test_newer_connections_of_a_rank_take_the_place_of_older_ones(run: Run) -> None:
    first = Attempt(run).begin()
    old_control, old_data = first.controls[1], first.data[1]
    first.join(1)
    assert old_control.ended()
    waiting = Call(lambda: first.attach(1))
    until(run, lambda: old_data.closed)
    run.detach(1, old_data)
    waiting.end()
    first.steps(1)
    assert same(held(run), first.history[1])


def test_second_data_connection_is_refused_while_the_first_does_not_end(run: Run) -> None:
    first = Attempt(run).begin()
    with pytest.raises(NotTaken, match="does not end"):
        first.attach(1)


def test_rank_whose_older_connection_waits_for_the_ring_reconnects_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_S", PATIENCE_S)
    first = Attempt(run).begin()
    frames = []
    for _ in range(module.RING_STEPS + 1):
        first.train()
        frames.append([[*first.grads(rank), first.part(rank)] for rank in (0, 1)])
    old = first.data[0]

    def run_ahead() -> None:
        try:
            for theirs, _ in frames:
                first.send(0, theirs)
        finally:
            run.detach(0, old)

    ahead = Call(run_ahead)
    until(run, lambda: run.partition is not None and run.partition.newest.get(0, 0) >= module.RING_STEPS)
    first.attach(0)
    with pytest.raises(Superseded):
        ahead.end()
    for theirs, others in frames:
        first.send(1, others)
        first.send(0, theirs)
    first.await_applied()
    assert same(held(run), first.history[module.RING_STEPS + 1])


# ---------------------------------------------------------------- readers


def test_readers_cut_stays_constant_while_steps_are_applied(run: Run) -> None:
    first = Attempt(run).begin()
    first.steps(1)
    cut = run.lease(1)
    assert (cut.step, cut.holder) == (1, first.incarnation)
    first.steps(3)
    first.train()
    first.deliver(anchored=True)
    first.await_applied()
    assert same(flat(cut), first.history[1])
    assert cut.sidecars[0] == {"rng": b"1"}
    another = run.lease(1)  # as long as somebody holds it
    run.release(cut)
    assert same(flat(another), first.history[1])
    run.release(another)
    assert not another.state.leased
    with pytest.raises(StepNotFound, match="step 1 is not held; the one step that is whole here is 5"):
        run.lease(1)
    assert same(held(run), first.history[5])


def test_readers_cut_outlives_the_epoch_and_the_attempt(run: Run) -> None:
    first = Attempt(run).begin()
    first.steps(1)
    cut = run.lease(None)
    first.train()
    first.gap(0)
    first.controls[0].hear(m.Resume)
    first.resume(2)
    first.train()
    first.deliver(anchored=True)
    first.await_applied()
    first.die()
    Attempt(run).prepare()
    assert same(flat(cut), first.history[1])
    run.release(cut)


def test_readers_cut_stays_constant_when_the_next_attempt_orders_its_parameters_differently(run: Run) -> None:
    first = Attempt(run).begin()
    first.steps(1)
    first.die()
    cut = run.lease(None)
    cut.state._own([0])  # one block has been written to since, the other has not
    second = Attempt(run, names="bw")
    second.prepare()
    second.adopt(1)
    second.connect()
    second.train()
    second.deliver()
    second.await_applied()
    assert same(flat(cut), first.history[1])
    run.release(cut)


# ---------------------------------------------------------------- memory, removal


def test_buffers_are_used_again(run: Run) -> None:
    first = Attempt(run).begin()
    first.steps(2)
    memory = run.memory_bytes()
    first.steps(20)
    assert run.memory_bytes() <= memory + 2 * 256
    assert same(held(run), first.history[22])


def test_run_in_use_is_removed_only_by_force(run: Run) -> None:
    first = Attempt(run).begin()
    with pytest.raises(NotTaken, match="is being trained"):
        run.remove(force=False)
    first.steps(1)
    run.remove(force=True)
    assert run.memory_bytes() == 0
    with pytest.raises(Superseded):
        first.send(0, [first.part(0)])
    with pytest.raises(StepNotFound):
        run.lease(None)
    for late in (first.prepare, lambda: first.join(0), lambda: first.adopt(None), lambda: first.attach(0)):
        with pytest.raises(NotTaken, match="was removed"):
            late()


def test_run_that_nobody_trains_is_removed(run: Run) -> None:
    first = Attempt(run).begin()
    first.die()
    run.remove(force=False)
    run.replayer.thread.join(PATIENCE_S)
    assert not run.replayer.thread.is_alive()


def test_prepare_ends_when_its_run_is_removed_under_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAIN_S", PATIENCE_S)
    first = Attempt(run).begin()
    for control in [first.claim, *first.controls.values()]:
        run.leave(control.member)
    waiting = Call(Attempt(run).prepare)
    until(run, lambda: run._draining)
    run.remove(force=True)
    for rank in (0, 1):
        first.detach(rank)
    with pytest.raises(NotTaken, match="was removed"):
        waiting.end()


def test_removal_while_a_step_is_applied_leaves_no_thread(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Attempt(run).begin()
    run._audit(m.Audit(0, [m.Digest(0, "", 0, 64, 0)]))
    original = State.apply

    def removed_meanwhile(state: State, *rest: Any) -> Any:
        run.remove(force=True)
        return original(state, *rest)

    monkeypatch.setattr(State, "apply", removed_meanwhile)
    first.train()
    first.deliver(anchored=True)
    run.replayer.thread.join(PATIENCE_S)
    assert not run.replayer.thread.is_alive()
    assert run.replayer.state is None


def test_member_that_does_not_read_loses_its_connection() -> None:
    control = Control()
    for _ in range(5000):
        control.member.send(m.Pong())
    assert control.member.closed
    assert control.member.channel.closed


# ---------------------------------------------------------------- reports


def test_reports_beyond_the_fifth_of_a_kind_reach_the_ranks_but_not_the_log(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = Attempt(run).begin()
    for step in range(module.REPORTS + 3):
        with run.changed:
            run._report(m.Report("differs", f"step {step}", step))
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(logged) == module.REPORTS
    assert logged[-1] == "run name: step 4; more of this kind are not logged"
    assert run.status()["last_error"] == "step 7"
    attempt.controls[0].hear(m.Report, lambda report: report.text == "step 7")


# ---------------------------------------------------------------- races


def test_of_two_data_connections_of_a_rank_the_later_one_stays(run: Run) -> None:
    class Connection:
        closed = False

        def close(self) -> None:
            self.closed = True

    first = Attempt(run).begin()
    assert first.incarnation is not None
    message = m.Attach("name", first.incarnation, 0, run.epoch)
    old = run._data[0]
    rivals: list[Any] = [Connection(), Connection()]
    calls = [Call(lambda rival=rival: run.attach(message, rival)) for rival in rivals]
    until_waiting(run, 3)
    run.detach(0, old)
    until(run, lambda: any(rival.closed for rival in rivals))
    (loser,) = (rival for rival in rivals if rival.closed)
    run.detach(0, loser)
    for call in calls:
        call.end()
    assert run._data[0] is not loser
    assert not run._data[0].closed
    run.detach(0, run._data[0])


def test_freeze_of_a_run_that_was_removed_is_nothing(run: Run) -> None:
    Attempt(run).begin()
    run.remove(force=True)
    run.replayer._freeze(module.Freeze(1, True))
    assert run.replayer.frozen is None
