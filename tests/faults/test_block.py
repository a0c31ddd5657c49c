"""With ``on_lag="block"`` training waits for the shadow, says so, and goes on with it, or in the end without it."""

from __future__ import annotations

import time

import pytest

from tests.faults.faults import SMALL, STEP_S, USER_TIMEOUT_MS, BlackHoled, Fault, Killed, Slow, Stalled, Stopped
from tests.faults.helpers import Lab

pytestmark = pytest.mark.processes

RUN = {"step_s": STEP_S, "user_timeout_ms": USER_TIMEOUT_MS, "on_lag": "block", "staging_bytes": SMALL}
WAITS, GOES_ON, WITHOUT = "training waits for", "training goes on after", "training goes on without it"


@pytest.mark.parametrize("fault_class", [Killed, Stopped, BlackHoled, Stalled])
def test_training_waits_for_the_shadow_and_goes_on_by_itself(lab: Lab, fault_class: type[Fault]) -> None:
    fault = fault_class(lab)
    trainer = lab.trainer(fault.address, block_timeout=50.0, **RUN)
    trainer.tell("train 100000")
    trainer.await_whole(20, lag=1)
    fault.begin()
    trainer.line(WAITS)
    waiting_at = trainer.last_step
    time.sleep(0.5)
    assert trainer.last_step == waiting_at
    fault.end()
    trainer.line(GOES_ON)
    trainer.await_whole(waiting_at + 30, lag=1)
    stopped = trainer.stop_training()
    lab.check_steps(trainer, slowest_s=50.0)
    lags = [step["stats"]["lag_steps"] for step in trainer.steps]
    if fault_class is not Killed:
        assert max(lag for lag in lags if lag is not None) <= 1
    assert trainer.count(WAITS) == trainer.count(GOES_ON) == 1, trainer.transcript()
    assert trainer.count(WITHOUT) == 0
    trainer.kill()
    lab.restart(fault.address, stopped["stats"]["recovery_step"])


def test_training_takes_the_pace_of_a_slow_shadow(lab: Lab) -> None:
    fault = Slow(lab)
    fault.begin()
    trainer = lab.trainer(fault.address, block_timeout=50.0, **RUN)
    trainer.tell("train 60")
    trainer.await_step(60)
    lab.check_steps(trainer, slowest_s=50.0)
    assert all(step["stats"]["lag_steps"] <= 1 for step in trainer.steps)
    assert trainer.steps[-1]["stats"]["gaps"] == 0


def test_after_block_timeout_training_goes_on_without_the_shadow(lab: Lab) -> None:
    fault = Stopped(lab)
    trainer = lab.trainer(fault.address, block_timeout=1.5, **RUN)
    trainer.tell("train 100000")
    for round in range(2):  # it is patient again once the shadow has caught up
        trainer.await_whole(trainer.last_step + 20, lag=1)
        waited_s = trainer.steps[-1]["stats"]["waited_s"]
        fault.begin()
        trainer.await_(WITHOUT, lambda round=round: trainer.count(WITHOUT) == round + 1)
        alone_from = trainer.last_step + 1
        trainer.await_step(alone_from + 60)
        fault.end()
        alone = [step for step in trainer.steps if alone_from < step["step"] <= alone_from + 60]
        assert max(step["took"] for step in alone) < 1.0
        assert 1.0 < alone[-1]["stats"]["waited_s"] - waited_s < 10.0
    trainer.await_whole(trainer.last_step)
    assert trainer.count(WAITS) == 1  # and not one per step
    lab.check_steps(trainer, slowest_s=10.0)
    trainer.kill()
    lab.restart(fault.address, trainer.claim)
