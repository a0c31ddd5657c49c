"""A bit that flips in the shadow's memory or in the trainer's: `audit()` finds it at once, the rolling audit soon."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from .cases import CASES
from .compare import differences
from .conftest import Shadow
from .job import Job, barrier
from .pool import Pool

NAME = "dropout, one rank"  # SGD with momentum
TENSORS = 20  # parameters and momentum buffers, of which the rolling audit looks at one per step
FQN = "layers.2.weight"
WHERE = ["shadow", "trainer"]
WHAT = {"parameter": "", "state": "momentum_buffer"}


def flip(tensor: Tensor) -> None:
    """A bit in the middle of the mantissa. Of the odd elements of this tensor, `Watch` sees none."""
    tensor.data.reshape(-1)[3:4].view(torch.int32).bitwise_xor_(1 << 14)


def of_trainer(job: Job, key: str) -> Tensor:
    param = job.net.get_parameter(FQN)
    return job.optimizer.state[param][key] if key else param.detach()


def of_shadow(shadow: Shadow, run: str, step: int, key: str) -> Tensor:
    """The tensor in the shadow's memory, once it stands at `step`."""
    changed, held = shadow.runs[run].changed, shadow.runs[run].replayer
    with changed:
        assert changed.wait_for(lambda: held.state is not None and held.state.step == step, 10)
    state = held.state
    assert state is not None
    block = [block.fqn for block in state.spec.blocks].index(FQN)
    return state.entries(block)[1][key]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("what", WHAT)
def test_audit_names_the_tensor_and_the_next_step_heals_it(
    shadow: Shadow, caplog: pytest.LogCaptureFixture, where: str, what: str
) -> None:
    run, key = f"audit {where} {what}", WHAT[what]
    job = Job(CASES[NAME], 0).begin(shadow.address, run)
    for _ in range(3):
        job.train()
    assert job.ckpt.audit() == {"step": 3, "compared": TENSORS, "differing": []}

    ours, theirs = of_trainer(job, key), of_shadow(shadow, run, 3, key)
    flip(ours if where == "trainer" else theirs)
    flipped_by = float((ours.double() - theirs.double()).abs().max())
    name = f"{FQN} {key}".strip()
    for _ in range(2):
        assert job.ckpt.audit() == {"step": 3, "compared": TENSORS, "differing": [name]}

    job.train()
    assert job.ckpt.audit()["differing"] == []
    assert torch.equal(of_trainer(job, key), of_shadow(shadow, run, 4, key))
    job.train()  # which hears the report
    assert job.ckpt.stats()["differences"] == 1
    (told,) = [r.getMessage() for r in caplog.records if r.name == "checkmate"]
    differs = f"checkmate: audit at step 3: {name} differs between trainer and shadow"
    found = re.fullmatch(rf"{differs} by up to (\S+); anchored anew at step 4", told)
    assert found
    assert 0.5 * flipped_by < float(found[1]) < 1.5 * flipped_by
    job.ckpt.close()


@pytest.mark.parametrize("where", [*WHERE, "nowhere"])
@pytest.mark.parametrize("what", WHAT)
def test_rolling_audit_finds_it_within_a_round_and_heals_it(
    shadow: Shadow, caplog: pytest.LogCaptureFixture, where: str, what: str
) -> None:
    run, key = f"rolling {where} {what}", WHAT[what]
    job = Job(CASES[NAME], 0).begin(shadow.address, run)
    for _ in range(3):
        job.train()
    theirs = of_shadow(shadow, run, 3, key)
    if where != "nowhere":
        flip(theirs if where == "shadow" else of_trainer(job, key))
    while job.step < 3 + TENSORS + 3 and not job.ckpt.stats()["differences"]:
        job.train()
        job.ckpt.wait()
    assert job.ckpt.stats()["differences"] == (where != "nowhere")
    assert (f"{FQN} " in caplog.text) == (where != "nowhere")  # by then, state has changed its parameter
    assert job.ckpt.audit()["differing"] == []
    job.ckpt.close()


def flip_on_one_rank(rank: int, shadow: str, flipping: int) -> tuple[list[str], int]:
    """What an audit finds on this rank when the parameter has changed on rank `flipping`; how many reports it hears."""
    job = Job(CASES["DDP"], rank).begin(shadow, f"flip on {flipping}")
    job.train()
    if rank == flipping:
        flip(of_trainer(job, ""))
    found = job.ckpt.audit()["differing"]
    barrier()
    for _ in range(3):  # by the end of one its owner has heard of it, one anchors it anew, one hears of that
        job.train()
        job.ckpt.wait()
    job.ckpt.close()
    return found, job.ckpt.stats()["differences"]


@pytest.mark.processes
@pytest.mark.parametrize("flipping", range(3))
def test_each_rank_audits_its_own_memory(pool: Pool, shadow: Shadow, flipping: int) -> None:
    for rank, (found, reports) in enumerate(pool.call(3, flip_on_one_rank, shadow.address, flipping)):
        assert found == ([FQN] if rank == flipping else [])
        assert reports == 1


def test_state_of_a_group_that_was_added_before_a_restart_is_audited_and_anchored_after_it(shadow: Shadow) -> None:
    case, run = CASES["group added in mid-run"], "audit of an added group"
    job = Job(case, 0).begin(shadow.address, run)
    for _ in range(4):
        job.train()
    state = job.state()
    for attempt in (1, 2):
        job.ckpt.wait()
        job.crash()
        job = Job(case, 0, attempt).begin(shadow.address, run)
        found = job.state()
        assert differences(state["optimizers"], found["optimizers"]) == []
        assert job.ckpt.audit()["compared"] == 10 + 3 * 6  # two moments and a step for the parameters of three layers
        job.ckpt.anchor()
        job.ckpt.step()  # without an update
    job.crash()


def test_group_that_is_removed_in_mid_run_is_left_alone_by_the_shadow_too(shadow: Shadow) -> None:
    job = Job(replace(CASES["several groups"], ranks=1), 0).begin(shadow.address, "a group is removed")
    for _ in range(2):
        job.train()
    del job.optimizer.param_groups[1]
    for _ in range(2):
        job.train()
    assert job.ckpt.wait() == 4
    assert job.ckpt.audit()["differing"] == []
    assert job.ckpt.stats()["reports"] == {}
    job.crash()
