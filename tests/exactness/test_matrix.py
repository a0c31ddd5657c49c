"""Every kind of training in `cases`, cut off again and again, against the run without Checkmate."""

from __future__ import annotations

import random

import pytest
import torch

from .cases import CASES
from .compare import paths
from .conftest import Shadow
from .job import STEPS, interrupt, resume
from .pool import Pool

IN_ORDER = sorted(CASES, key=lambda name: CASES[name].ranks)  # a change of ranks costs a new process group


@pytest.mark.processes
@pytest.mark.parametrize("name", IN_ORDER)
def test_resumed_training_has_the_bits_of_uninterrupted_training(pool: Pool, shadow: Shadow, name: str) -> None:
    case = CASES[name]
    print(f"seed {case.seed}")
    for rank, found in enumerate(pool.call(case.ranks, interrupt, name, shadow.address)):
        assert found["matters"], "the case does not do what it is about"
        assert [case.drift in reason for reason in found["drift"]] == [True] * bool(case.drift)
        assert not found["problems"], f"rank {rank}:\n" + "\n".join(found["problems"][:20])
    if case.tap == "multicast":
        run = shadow.runs[name]
        print(f"{run.overheard_bytes} bytes overheard, {run.repaired_bytes} repaired")
        assert run.overheard_bytes > 9 * run.repaired_bytes
    fqn = flip_a_bit(shadow, name, case.seed)
    for found in pool.call(case.ranks, resume, name, shadow.address):
        assert paths(found) == [f"model/{fqn}"]


def flip_a_bit(shadow: Shadow, name: str, seed: int) -> str:
    """In one element of one parameter in the shadow's memory: the negative control. Returns the parameter's name."""
    run = shadow.runs[name]
    with run.changed:
        assert run.changed.wait_for(lambda: (state := run.replayer.state) is not None and state.step == STEPS, 10)
    state = run.replayer.state
    assert state is not None
    block = random.Random(seed).choice([i for i, p in enumerate(state.params) if p is not None and p.numel()])
    param = state.params[block]
    assert param is not None
    param.data.reshape(-1).view(torch.uint8)[0] ^= 1
    return state.spec.blocks[block].fqn


#: A function of Checkmate, a case that is exact because of it, and what differs without it.
NEEDED = [
    ("trainer.buckets:Buckets.restore", "several buckets", "model"),
    ("trainer.rng:install", "dropout", "rng"),
    ("trainer.data:Batches.load_state_dict", "augmentation in this process", "model"),
    ("trainer.installing:_install_groups", "hyper-parameters changed by hand", "optimizers"),
    ("trainer.recorder:Recorder.distrust", "pre-hook after restore", "model"),
    ("trainer.recorder:Recorder._note_kept", "missing gradients, zeroed in place", "model"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("function", "name", "what"), NEEDED, ids=[function for function, *_ in NEEDED])
def test_training_resumed_without_one_part_of_checkmate_is_found_to_differ(
    pool: Pool, shadow: Shadow, function: str, name: str, what: str
) -> None:
    found = pool.call(CASES[name].ranks, interrupt, name, shadow.address, function)
    assert any(f": {what}/" in text or f": {what}[" in text for text in found[0]["problems"])
