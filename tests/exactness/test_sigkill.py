"""The same with real processes: torchrun starts them, SIGKILL ends them, the restarted ones end with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .compare import differences
from .conftest import Shadow
from .job import STEPS, Job
from .pool import Pool
from .sigkill import RANKS, RESTORE, ROWS, Folder, case_of

PATIENCE_S = 300.0
ROOT = Path(__file__).parents[2]


def without_checkmate(rank: int, row: str) -> list[Any]:
    """The state at the end of the run that nobody kills, and its next batch."""
    job = Job(case_of(row), rank).begin()
    for _ in range(STEPS):
        job.train()
    found = [job.state(), next(job.batches)]
    job.end()
    return found


@pytest.fixture(scope="module")
def killed(shadow: Shadow, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Trains all rows under one torchrun, which restarts the ranks after every kill: to import torch takes the time."""
    path = tmp_path_factory.mktemp("killed")
    kills = sum(map(len, ROWS.values()))
    torchrun = ["torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
    torchrun += [f"--nproc-per-node={RANKS}", f"--max-restarts={kills}", "-m", "tests.exactness.sigkill"]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    output = path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *torchrun, str(path), shadow.address],
            cwd=ROOT, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(40)
            raise
        finally:
            print(output.read_text(errors="replace")[-20000:])
    assert code == 0
    return Folder(path)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_run_that_was_killed_ends_with_the_bits_of_one_that_was_not(pool: Pool, killed: Folder, row: str) -> None:
    kills, restored = killed.read(f"{row}.kills"), killed.read(f"{row}.restored")
    print(f"seed {case_of(row).seed}\n{kills=}\n{restored=}")
    for rank, expected in enumerate(pool.call(RANKS, without_checkmate, row)):
        found = torch.load(killed.path / f"{row}-{rank}.pt", weights_only=False)
        assert differences(expected, found) == []

    assert len(kills) == len(ROWS[row])
    assert restored[0] == {"step": 0, "finished": 0}
    during_restore = [kill.moment == RESTORE for kill in ROWS[row]]
    assert len(restored) == 1 + len(kills) - sum(during_restore)
    for kill, found in zip(kills, restored[1:], strict=False):
        assert kill["promised"] <= found["step"] <= found["finished"] + 1
        if kill["lag"] <= 1:
            assert found["step"] >= found["finished"] - 1
