"""With ``on_lag="degrade"`` no fault of the shadow holds training up, changes it, or makes ``stats()`` untrue."""

from __future__ import annotations

import time

import pytest

from tests.faults.faults import FAULTS, SMALL, STEP_BYTES, STEP_S, USER_TIMEOUT_MS, Fault, Killed, Reset, Slow, Stopped
from tests.faults.helpers import Lab, median

pytestmark = pytest.mark.processes

RUN = {"step_s": STEP_S, "user_timeout_ms": USER_TIMEOUT_MS}
LOST, WHOLE = r"Training goes on\.$", r"whole again"


@pytest.mark.parametrize(
    ("fault_class", "staging"), [*((fault, SMALL) for fault in FAULTS), (Stopped, None), (Reset, None)]
)
def test_training_goes_on_as_if_alone(lab: Lab, fault_class: type[Fault], staging: int | None) -> None:
    fault = fault_class(lab)
    trainer = lab.trainer(fault.address, staging_bytes=staging, **RUN)
    trainer.tell("train 100000")
    trainer.await_whole(20)
    before = trainer.last_step
    fault.begin()
    time.sleep(fault.lasts_s)
    during = trainer.last_step
    fault.end()
    trainer.await_whole(during + 1)
    if trainer.count(LOST):
        trainer.line(WHOLE)
    assert trainer.call("wait", 10)["error"] is None
    stopped = trainer.stop_training()
    lab.check_steps(trainer)
    times = [step["took"] for step in trainer.steps]
    alone, faulty = median(times[5:before]), median(times[before:during])
    print(f"median step {alone * 1e3:.2f} ms before, {faulty * 1e3:.2f} ms during {fault_class.__name__}")
    assert trainer.count(LOST) == trainer.count(WHOLE) <= 1, trainer.transcript()
    trainer.kill()
    lab.restart(fault.address, stopped["stats"]["recovery_step"])


@pytest.mark.parametrize("fault_class", FAULTS)
def test_what_stats_claims_is_there_after_a_kill_at_any_moment(lab: Lab, fault_class: type[Fault]) -> None:
    fault = fault_class(lab)
    claim: int | None = None
    for _ in range(3):
        trainer = lab.restart(fault.address, claim, staging_bytes=SMALL, **RUN)
        trainer.tell("train 100000")
        trainer.await_step(trainer.last_step + lab.random.randrange(1, 20))
        fault.begin()
        if fault_class is Killed:
            trainer.await_("the shadow's death to be noticed", lambda trainer=trainer: trainer.claim is None)
        lasts_s, kill_after_s = lab.random.uniform(0.05, 0.6), lab.random.uniform(0.0, 1.0)
        time.sleep(min(lasts_s, kill_after_s))
        if kill_after_s > lasts_s:
            fault.end()
            time.sleep(kill_after_s - lasts_s)
        trainer.kill()
        claims = [c for c in trainer.claims if c is not None]
        claim = trainer.claim if fault_class is Killed else max(claims, default=claim)
        print(f"{lasts_s:.2f} s of fault, killed after {kill_after_s:.2f} s at step {trainer.last_step}, claim {claim}")
        lab.check_steps(trainer)
        if kill_after_s <= lasts_s:
            fault.end()
    lab.restart(fault.address, claim)


def test_a_shadow_that_is_too_slow_for_ever_still_gets_newer_recovery_points(lab: Lab) -> None:
    fault = Slow(lab)
    trainer = lab.trainer(fault.address, staging_bytes=SMALL, **RUN)
    trainer.tell("train 100000")
    trainer.await_whole(20)
    fault.proxy.bytes_per_s = 0.9 * STEP_BYTES / STEP_S
    trainer.await_("the staging limit", lambda: any(step["stats"]["gaps"] >= 2 for step in trainer.steps[-5:]))
    stopped = trainer.stop_training()
    lab.check_steps(trainer)
    gaps = stopped["stats"]["gaps"]
    print(f"{gaps} gaps in {stopped['step']} steps; recovery points {sorted({c or 0 for c in trainer.claims})[-5:]}")
    assert trainer.count(LOST) <= gaps + 1
    assert trainer.count(WHOLE) <= trainer.count(LOST)
    claim = max(c for c in trainer.claims if c is not None)
    assert claim > 30
    trainer.kill()
    lab.restart(fault.address, claim)


def test_the_first_anchor_of_a_block_larger_than_the_staging_memory(lab: Lab) -> None:
    """However little staging the user allows, a shadow that has lost its state becomes whole again."""
    fault = Killed(lab)
    trainer = lab.trainer(fault.address, staging_bytes=1, **RUN)
    trainer.tell("train 100000")
    trainer.await_whole(20)
    fault.begin()
    fault.end()
    trainer.line(WHOLE)
    trainer.kill()
    lab.restart(fault.address, trainer.claim)
