"""Whether gradients are pending is told by their versions: a backward of DDP raises them, wherever they live."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from .cases import CASES, SEVERAL, VIEWS
from .conftest import Shadow
from .job import Job
from .loops import loss_of
from .pool import Pool


def grown(rank: int, shadow: str, run: str, ddp: dict[str, Any]) -> list[tuple[int, int]]:
    """Steps and merged steps: after a skipped batch, and after two that add to gradients which were used."""
    job = Job(replace(CASES["DDP"], ddp=ddp), rank).begin(shadow, run)
    found = []
    for skipped in (True, False, False):
        job.train()
        x, y = next(job.batches)
        if not skipped:
            loss_of(job, x, y).backward()
        job.ckpt.step()
        found.append((job.ckpt.stats()["step"], job.ckpt.stats()["merged_steps"]))
    job.ckpt.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("ddp", [SEVERAL, VIEWS, {**VIEWS, "static_graph": True}])
def test_a_backward_that_adds_to_used_gradients_is_merged(pool: Pool, shadow: Shadow, ddp: dict[str, Any]) -> None:
    for found in pool.call(2, grown, shadow.address, f"grown {sorted(ddp)}", ddp):
        assert found == [(2, 0), (3, 1), (4, 2)]
