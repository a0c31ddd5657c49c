"""The interpreter ends when it is told to, whatever the shadow does."""

from __future__ import annotations

import signal
import time

import pytest

from tests.faults.faults import STEP_S
from tests.faults.helpers import Lab, Process, black_hole

pytestmark = pytest.mark.processes

CLOSE_S = 1.0  #: the default of close(timeout=…) in these tests; it is 5 s otherwise
SLACK_S = 3.0  #: for a busy machine


def seconds_held_up(process: Process) -> float:
    """How long the exit of this process, which has been told to end, waited for Checkmate."""
    process.join()
    took: float = process.event("exit")["took"]
    return took


@pytest.mark.parametrize("how", ["end", "raise"])
def test_exit_waits_no_longer_than_close_for_a_stopped_shadow(lab: Lab, how: str) -> None:
    shadow = lab.shadow()
    trainer = lab.trainer(shadow.address, step_s=STEP_S, close_s=CLOSE_S)
    trainer.tell("train 100000")
    trainer.await_whole(10)
    shadow.stop()
    trainer.await_step(trainer.last_step + 10)
    trainer.tell(how)
    assert seconds_held_up(trainer) < CLOSE_S + SLACK_S
    assert trainer.status == (0 if how == "end" else 1)


def test_close_keeps_to_its_timeout_and_exit_adds_nothing(lab: Lab) -> None:
    shadow = lab.shadow()
    trainer = lab.trainer(shadow.address, step_s=STEP_S, close_s=CLOSE_S)
    trainer.tell("train 100000")
    trainer.await_whole(10)
    shadow.stop()
    trainer.await_step(trainer.last_step + 10)
    trainer.stop_training()
    assert trainer.call("close", 0.5)["took"] < 0.5 + SLACK_S
    trainer.tell("end")
    assert seconds_held_up(trainer) < 1.0
    assert trainer.status == 0


def test_exit_without_a_shadow_is_immediate(lab: Lab) -> None:
    with black_hole() as address:
        trainer = lab.trainer(address, restore={"timeout": 0.5, "missing_ok": True}, step_s=STEP_S, close_s=CLOSE_S)
        trainer.event("restored")
        trainer.tell("train 100000")
        trainer.await_step(5)
        trainer.tell("end")
        assert seconds_held_up(trainer) < SLACK_S
        assert trainer.status == 0


def test_exit_delivers_the_last_step(lab: Lab) -> None:
    shadow = lab.shadow()
    trainer = lab.trainer(shadow.address)
    trainer.event("restored")
    trainer.tell("train 30")
    trainer.await_step(30)
    trainer.tell("end")
    assert trainer.join() == 0
    assert lab.restart(shadow.address, 30).last_step == 30


def test_a_shadow_that_replays_ends_at_sigterm(lab: Lab) -> None:
    for _ in range(3):
        shadow = lab.shadow()
        trainer = lab.trainer(shadow.address, width=400)
        trainer.tell("train 100000")
        trainer.await_whole(5)
        time.sleep(lab.random.uniform(0.0, 0.1))
        shadow.signal(signal.SIGTERM)
        assert shadow.join() == 0, shadow.transcript()  # torch aborts processes whose threads outlive the interpreter
        trainer.kill()


def interrupted(process: Process) -> bool:
    process.signal(signal.SIGINT)
    assert seconds_held_up(process) < CLOSE_S + SLACK_S
    return process.status == -signal.SIGINT


def test_ctrl_c_in_restore(lab: Lab) -> None:
    shadow = lab.shadow()
    shadow.stop()
    with black_hole() as address:
        for where in (address, shadow.address):
            trainer = lab.trainer(where)
            trainer.event("attached")
            time.sleep(lab.random.uniform(0.0, 0.5))
            assert interrupted(trainer), trainer.transcript()


@pytest.mark.parametrize("on_lag", ["degrade", "block"])
def test_ctrl_c_in_a_step(lab: Lab, on_lag: str) -> None:
    shadow = lab.shadow()
    trainer = lab.trainer(shadow.address, step_s=STEP_S, close_s=CLOSE_S, on_lag=on_lag)
    trainer.tell("train 100000")
    trainer.await_whole(5, lag=1)
    if on_lag == "block":
        shadow.stop()
        trainer.line("training waits")
    time.sleep(lab.random.uniform(0.0, 0.1))
    assert interrupted(trainer), trainer.transcript()
    shadow.cont()
    lab.restart(shadow.address, trainer.claim)


@pytest.mark.parametrize("verb", ["wait 60", "close 60"])
def test_ctrl_c_in_wait_and_close(lab: Lab, verb: str) -> None:
    shadow = lab.shadow()
    trainer = lab.trainer(shadow.address, step_s=STEP_S, close_s=CLOSE_S)
    trainer.tell("train 100000")
    trainer.await_whole(5)
    shadow.stop()
    trainer.await_step(trainer.last_step + 10)
    trainer.tell(verb)
    trainer.event("calling")
    time.sleep(lab.random.uniform(0.0, 0.3))
    assert interrupted(trainer), trainer.transcript()
