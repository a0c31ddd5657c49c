"""No answer is not "empty": however a restart comes about, what a shadow holds is neither lost nor passed over."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.faults.faults import STEP_S, USER_TIMEOUT_MS, BlackHoled, Fault, Proxied, Stalled, Stopped
from tests.faults.helpers import Lab, Trainer

pytestmark = pytest.mark.processes

RUN = {"step_s": STEP_S, "user_timeout_ms": USER_TIMEOUT_MS}


def train_and_kill(lab: Lab, address: str, steps: int = 25) -> int:
    """Train that many steps, and kill the trainer; returns the last step that it called safe."""
    trainer = lab.restart(address, None, **RUN)
    trainer.tell(f"train {steps}")
    trainer.await_step(steps)
    assert trainer.call("wait", 10)["answer"] == steps
    trainer.kill()
    return steps


@pytest.mark.parametrize("fault_class", [Stopped, BlackHoled, Stalled])
def test_restart_waits_for_a_shadow_that_does_not_answer(lab: Lab, fault_class: type[Fault]) -> None:
    fault = fault_class(lab)
    claim = train_and_kill(lab, fault.address)
    fault.begin()
    trainer = lab.trainer(fault.address, **RUN)
    trainer.event("attached")
    time.sleep(1.0)
    assert trainer.last_step == -1
    fault.end()
    assert trainer.event("restored")["step"] == claim
    assert trainer.event("restored")["digest"] == lab.reference(claim)


@pytest.mark.parametrize("fault_class", [Stopped, BlackHoled, Stalled])
def test_restart_that_gives_up_starts_nothing_and_loses_nothing(lab: Lab, fault_class: type[Fault]) -> None:
    fault = fault_class(lab)
    claim = train_and_kill(lab, fault.address)
    fault.begin()
    trainer = lab.trainer(fault.address, restore={"timeout": 0.7}, **RUN)
    failed = trainer.event("failed")
    assert failed["type"] == "Unreachable"
    assert fault.address in failed["text"]
    assert trainer.join() == 1
    fault.end()  # now the shadow answers those that have gone
    lab.restart(fault.address, claim, **RUN)


def test_closed_port_is_unreachable(lab: Lab) -> None:
    shadow = lab.shadow()
    shadow.kill()
    trainer = lab.trainer(shadow.address, restore={"timeout": 1.0})
    failed = trainer.event("failed")
    assert failed["type"] == "Unreachable"
    assert re.search(rf"{re.escape(shadow.address)} did not answer within (1|0\.9\d+) s: ", failed["text"])
    assert "Connection refused" in failed["text"]
    trainer = lab.trainer(shadow.address)  # and one that begins before its shadow waits for it
    trainer.line("no answer from")
    lab.shadow(port=shadow.port)
    assert trainer.event("restored")["step"] == 0


def test_connections_cut_anywhere_in_a_restart(lab: Lab) -> None:
    fault = Proxied(lab)
    claim = train_and_kill(lab, fault.address)
    outcomes = []
    for _ in range(6):
        inward = lab.random.random() < 0.5
        fault.proxy.reset_after(lab.random.randrange(0, 2000 if inward else 120_000), inward=inward)
        trainer = lab.trainer(fault.address, **RUN)
        end = trainer.event("restored", "failed")
        outcomes.append(end["event"])
        if end["event"] == "restored":
            assert (end["step"], end["digest"]) == (claim, lab.reference(claim))
        else:
            assert end["type"] == "Unreachable", end
        trainer.kill()
    print(outcomes)
    fault.proxy.reset_after(None)
    lab.restart(fault.address, claim)


def test_answers_that_come_late(lab: Lab) -> None:
    fault = Proxied(lab)
    claim = train_and_kill(lab, fault.address)
    fault.proxy.delay_s = 0.1
    lab.restart(fault.address, claim, **RUN)


def unprotected(lab: Lab, address: str) -> Trainer:
    trainer = lab.trainer(address, restore={"timeout": 1.0, "missing_ok": True}, **RUN)
    assert trainer.event("restored")["step"] == 0
    trainer.line("training goes on from here, unprotected until it is reached")
    trainer.tell("train 100000")
    trainer.await_step(10)
    assert trainer.steps[-1]["stats"]["recovery_step"] is None
    return trainer


def test_missing_ok_trains_unprotected_until_an_empty_shadow_is_there(lab: Lab) -> None:
    shadow = lab.shadow()
    shadow.kill()
    trainer = unprotected(lab, shadow.address)
    shadow = lab.shadow(port=shadow.port)
    trainer.line("whole again")
    trainer.kill()
    lab.check_steps(trainer)
    assert trainer.claim is not None
    lab.restart(shadow.address, trainer.claim)


@pytest.mark.parametrize("fault_class", [Stopped, BlackHoled, Stalled])
def test_missing_ok_leaves_what_the_shadow_holds_alone(lab: Lab, fault_class: type[Fault]) -> None:
    fault = fault_class(lab)
    claim = train_and_kill(lab, fault.address)
    fault.begin()
    trainer = unprotected(lab, fault.address)
    fault.end()
    told = trainer.line("Training goes on")
    trainer.await_("refusal", lambda: trainer.state() == "refused")
    print(told, trainer.transcript())
    trainer.await_step(trainer.last_step + 10)
    lab.check_steps(trainer)
    assert trainer.count("untouched") == 1, trainer.transcript()
    assert trainer.claim is None
    trainer.kill()
    lab.restart(fault.address, claim)


def test_second_job_neither_damages_nor_displaces_the_healthy_one(lab: Lab) -> None:
    shadow = lab.shadow()
    healthy = lab.trainer(shadow.address, **RUN)
    healthy.tell("train 100000")
    healthy.await_whole(20)
    second = lab.trainer(shadow.address, restore={"timeout": 1.0})
    failed = second.event("failed")
    assert failed["type"] == "Refused"
    assert f"is being trained by process {healthy.pid} on" in failed["text"]
    assert second.join() == 1
    at = healthy.last_step
    healthy.await_whole(at + 20)
    healthy.kill()
    lab.check_steps(healthy)
    assert healthy.count("WARNING") == 0, healthy.transcript()
    lab.restart(shadow.address, healthy.claim)


def test_second_job_does_not_displace_one_that_a_suspended_shadow_could_not_hear(lab: Lab) -> None:
    shadow = lab.shadow(lease_s=2.5)
    healthy = lab.trainer(shadow.address, step_s=STEP_S)
    healthy.tell("train 100000")
    healthy.await_whole(20)
    shadow.stop()
    second = lab.trainer(shadow.address, restore={"timeout": 6.0}, lease_s=2.5)
    second.event("attached")
    time.sleep(3.5)  # longer than the lease
    shadow.cont()
    assert second.event("failed")["type"] == "Refused"
    healthy.await_whole(healthy.last_step + 20)
    healthy.kill()
    lab.check_steps(healthy)
    lab.restart(shadow.address, healthy.claim)


def test_second_job_does_not_displace_one_whose_shadow_was_restarted(lab: Lab) -> None:
    shadow = lab.shadow()
    healthy = lab.trainer(shadow.address, **RUN)
    healthy.tell("train 100000")
    healthy.await_whole(20)
    shadow.kill()
    told = healthy.count("whole again")  # of the shadow that is gone, if it was behind
    shadow = lab.shadow(port=shadow.port)
    healthy.line("whole again", after=told)
    second = lab.trainer(shadow.address, restore={"timeout": 1.0})
    assert f"is being trained by process {healthy.pid} on" in second.event("failed")["text"]
    healthy.await_whole(healthy.last_step + 5)


def test_hung_job_is_superseded_and_does_not_fight_back(lab: Lab) -> None:
    shadow = lab.shadow(lease_s=1.0)
    hung = lab.trainer(shadow.address, **RUN)
    hung.tell("train 100000")
    hung.await_whole(20)
    hung.signal(signal.SIGSTOP)
    time.sleep(1.1)
    claim = hung.claim
    heir = lab.restart(shadow.address, claim, lease_s=1.0, **RUN)
    heir.tell("train 100000")
    heir.await_whole(heir.last_step + 10)
    hung.signal(signal.SIGCONT)
    hung.await_("refusal", lambda: hung.state() == "refused")
    hung.line("superseded")
    hung.await_step(hung.last_step + 20)
    lab.check_steps(hung, slowest_s=60.0)
    assert hung.count("superseded") == 1
    heir.await_whole(heir.last_step + 10)
    heir.kill()
    lab.check_steps(heir)
    lab.restart(shadow.address, heir.claim)
