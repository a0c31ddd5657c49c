"""Faults that hit ranks of one job differently. Both ranks see the same data, so training equals that of one rank."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.faults.faults import Proxied, Reset, Stalled
from tests.faults.helpers import Lab, Trainer

pytestmark = pytest.mark.processes

RUN = {"step_s": 0.01, "user_timeout_ms": 1500, "staging_bytes": 500_000}


def start(lab: Lab, store: Path, *addresses: str) -> list[Trainer]:
    ranks = [lab.trainer(a, world=(r, len(addresses), str(store)), **RUN) for r, a in enumerate(addresses)]
    for rank in ranks:
        restored = rank.event("restored")
        assert restored["digest"] == lab.reference(restored["step"])
    return ranks


def train(ranks: list[Trainer]) -> None:
    for rank in ranks:
        rank.tell("train 100000")


def kill(lab: Lab, ranks: list[Trainer]) -> int:
    """Kill all; returns the newest step that any of them has called safe."""
    for rank in ranks:
        rank.signal(signal.SIGKILL)
    for rank in ranks:
        rank.kill()
        lab.check_steps(rank)
    return max(claim for rank in ranks for claim in rank.claims if claim is not None)


def test_ranks_that_find_a_new_shadow_at_different_steps(lab: Lab, tmp_path: Path) -> None:
    shadow = lab.shadow()
    ranks = start(lab, tmp_path / "0", shadow.address, shadow.address)
    for round in (1, 2):
        train(ranks)
        ranks[0].await_whole(ranks[0].last_step + 25)
        shadow.kill()
        time.sleep(lab.random.uniform(0, 0.2))
        told = ranks[0].count("whole again")  # of the shadow that is gone, if it was behind
        shadow = lab.shadow(port=shadow.port)
        ranks[0].line("whole again", after=told)
        claim = kill(lab, ranks)
        ranks = start(lab, tmp_path / str(round), shadow.address, shadow.address)
        assert ranks[0].last_step == ranks[1].last_step >= claim


@pytest.mark.parametrize("fault_class", [Stalled, Reset])
def test_fault_of_one_rank_ends_the_epoch_of_all(lab: Lab, tmp_path: Path, fault_class: type[Proxied]) -> None:
    fault = fault_class(lab)
    ranks = start(lab, tmp_path / "0", fault.shadow.address, fault.address)
    train(ranks)
    ranks[0].await_whole(20)
    fault.begin()
    ranks[0].await_(
        "the end of an epoch", lambda: ranks[0].steps[-1]["stats"]["lag_steps"] > 15 or fault_class is Reset
    )
    during = ranks[0].last_step
    fault.end()
    ranks[0].await_whole(during + 1)
    time.sleep(lab.random.uniform(0, 0.5))
    claim = kill(lab, ranks)
    assert claim > during
    ranks = start(lab, tmp_path / "1", fault.shadow.address, fault.address)
    assert ranks[0].last_step == ranks[1].last_step >= claim


def test_ranks_that_step_differently_are_told_so(lab: Lab, tmp_path: Path) -> None:
    shadow = lab.shadow()
    store = str(tmp_path / "0")
    ranks = [
        lab.trainer(shadow.address, world=(0, 2, store), **RUN),
        lab.trainer(shadow.address, world=(1, 2, store), step_every=2, **RUN),
    ]
    train(ranks)
    told = ranks[0].line("took different optimizer steps")
    assert "ranks 0 and 1 took different optimizer steps in step 1: 1 and 2 updates" in told
    ranks[0].await_step(100)
    assert ranks[0].count("took different optimizer steps") <= 5 + 1  # reports, and the warning that says why
    for rank in ranks:
        rank.kill()
        lab.check_steps(rank)
    assert start(lab, tmp_path / "1", shadow.address, shadow.address)[0].last_step == 0


def test_status_names_the_rank_that_does_not_close_its_steps(lab: Lab, tmp_path: Path) -> None:
    shadow = lab.shadow()
    store = str(tmp_path / "0")
    ranks = [
        lab.trainer(shadow.address, world=(0, 2, store), **RUN),
        lab.trainer(shadow.address, world=(1, 2, store), step_every=1000, **RUN),
    ]
    train(ranks)
    ranks[0].line("a restart would resume at step 0")
    status = lab.command("status", shadow.address, "--json", "--max-lag", "1")
    assert status.join() == 1
    assert "rank 1 has not closed step 1 (newest: 0)" in status.event("json")["runs"][0]["waiting_for"]
    for rank in ranks:
        rank.kill()
        lab.check_steps(rank)
    assert start(lab, tmp_path / "1", shadow.address, shadow.address)[0].last_step == 0
