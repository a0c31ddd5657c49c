"""One rank of the runs that are killed, started by torchrun: ``sigkill FOLDER ADDRESS OF THE SHADOW``.

It trains one row after the other, dies as the row's plan says, and goes on where it was when torchrun starts it again.
FOLDER holds what must outlive it, one JSON value per line: in ``ROW.kills`` what was promised before each kill, in
``ROW.restored`` what each attempt found, in ``ROW-RANK.closed`` each step that a rank has closed. In the end there is
``ROW-RANK.pt``, its state and next batch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from checkmate.trainer import checkpointer

from .cases import CASES
from .job import STEPS, Case, Job

RANKS = 3
KILLER = 1  #: the rank that pulls the trigger

BACKWARD, BETWEEN, AFTER, RESTORE, SOMETIME = "backward", "between", "after", "restore", "sometime"


@dataclass(frozen=True)
class Kill:
    """SIGKILL in `step` (the first is 1): to all ranks at once, or to one, which leaves torchrun to stop the others.

    `moment`: in the backward; between ``optimizer.step()`` and ``ckpt.step()``; right after ``ckpt.step()``, with
    nothing awaited; inside ``restore()`` before any step; or a random while after the step has begun.
    """

    step: int
    moment: str
    everyone: bool = True


ROWS: dict[str, list[Kill]] = {
    "DDP": [Kill(2, BACKWARD)],
    "several buckets": [Kill(3, BETWEEN, everyone=False)],
    "schedule, OneCycleLR, DDP": [Kill(4, AFTER)],
    "BatchNorm": [Kill(1, AFTER), Kill(1, RESTORE)],
    "scaler, fused": [Kill(5, SOMETIME)],
    "augmentation in workers": [Kill(5, AFTER)],
}


def case_of(row: str) -> Case:
    return replace(CASES[row], ranks=RANKS)


class Folder:
    """Notes that survive a SIGKILL."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, value: Any) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(value) + "\n")

    def read(self, name: str) -> list[Any]:
        path = self.path / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Doomed:
    """A job of one rank, and the kill that awaits it."""

    def __init__(self, row: str, rank: int, folder: Folder, address: str) -> None:
        self.row, self.rank, self.folder = row, rank, folder
        self.pids: list[int] = [0] * RANKS
        dist.all_gather_object(self.pids, os.getpid())
        done = len(folder.read(f"{row}.kills"))
        dist.barrier()  # nobody dies before all have read that
        self.kill = next(iter(ROWS[row][done:]), None) if rank == KILLER else None
        self.random = random.Random(f"{row} {done}")
        if self.kill and self.kill.moment == RESTORE:
            install = checkpointer.install
            checkpointer.install = lambda *arguments: (install(*arguments), self.strike())  # type: ignore[assignment]
        self.job = Job(case_of(row), rank, attempt=done).begin(address, f"killed, {row}")
        if rank == 0:
            closed = [folder.read(f"{row}-{r}.closed") or [0] for r in range(RANKS)]
            folder.add(f"{row}.restored", {"step": self.job.step, "finished": min(steps[-1] for steps in closed)})

    def train(self) -> None:
        job = self.job
        trained = [param for param in job.net.parameters() if param.requires_grad]
        trained[len(trained) // 2].register_hook(self.at(BACKWARD))
        job.optimizer.register_step_post_hook(self.at(BETWEEN))
        while job.step < STEPS:
            if self.due(SOMETIME):
                threading.Timer(self.random.uniform(0, 0.02), self.strike).start()
            job.train()
            self.folder.add(f"{self.row}-{self.rank}.closed", job.step)
            job.step -= 1  # still in that step
            self.at(AFTER)()
            job.step += 1
        torch.save([job.state(), next(job.batches)], self.folder.path / f"{self.row}-{self.rank}.pt")
        job.ckpt.close()
        job.end()

    def due(self, moment: str) -> bool:
        return self.kill is not None and (self.kill.step, self.kill.moment) == (self.job.step + 1, moment)

    def at(self, moment: str) -> Callable[..., None]:
        return lambda *_: self.strike() if self.due(moment) else None

    def strike(self) -> NoReturn:
        assert self.kill is not None
        stats = self.job.ckpt.stats() if hasattr(self, "job") else {"recovery_step": 0, "lag_steps": 0}
        self.folder.add(f"{self.row}.kills", {"promised": stats["recovery_step"], "lag": stats["lag_steps"]})
        for rank, pid in enumerate(self.pids):
            if self.kill.everyone and rank != self.rank:
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def main(folder: Folder, address: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for row in ROWS:
        done = [(folder.path / f"{row}-{r}.pt").exists() for r in range(RANKS)]
        dist.barrier()
        if not all(done):
            Doomed(row, rank, folder, address).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Folder(Path(sys.argv[1])), sys.argv[2])
