"""A pipeline of two stages, each with replicas of its own, in the hands of one rank; and what its tests do to it.

Also one rank of the run that is killed, started by torchrun: ``stages FOLDER ADDRESS REPLICAS REPLICAS SEED``.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.trainer import installing

FEATURES, HIDDEN, BATCH = 6, 40, 12
STEPS = 6

Replicas = tuple[int, int]  #: of each stage: "1 | 2" are ranks 0 | 1, 2


def net(stage: int) -> nn.Module:
    """With names, random numbers and buffers of its own."""
    layers = (
        [nn.Linear(FEATURES, HIDDEN), nn.Dropout(0.2), nn.Linear(HIDDEN, HIDDEN)]
        if stage == 0
        else [nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)]
    )
    return nn.Sequential(OrderedDict([(f"stage{stage}", nn.Sequential(*layers))]))


class Pipeline:
    """One rank's stage. A later attempt begins with other weights and other random numbers."""

    def __init__(self, rank: int, replicas: Replicas, attempt: int = 0) -> None:
        self.step, self.rank = 0, rank
        ranks = [list(range(replicas[0])), list(range(replicas[0], sum(replicas)))]
        groups = [dist.new_group(of_stage) for of_stage in ranks]
        self.stage = int(rank >= replicas[0])
        self.place, self.count = rank - ranks[self.stage][0], replicas[self.stage]
        others = ranks[1 - self.stage]
        each = max(1, len(others) // self.count)
        first = self.place * len(others) // self.count
        self.partners = others[first : first + each]
        torch.set_num_threads(1)
        torch.manual_seed(1000 * attempt + self.stage)
        self.net = net(self.stage)
        self.model: nn.Module = self.net
        if self.count > 1:
            self.model = DistributedDataParallel(self.net, process_group=groups[self.stage], bucket_cap_mb=0.001)
        params = list(self.net.parameters())
        if self.stage == 0:
            self.optimizer: Any = optim.AdamW(params, lr=0.02)
        else:
            split = [{"params": params[:2], "lr": 0.05}, {"params": params[2:]}]
            self.optimizer = optim.SGD(split, lr=0.1, momentum=0.9)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, 2 + self.stage, 0.5)
        self.ckpt: Any = None
        torch.manual_seed(1000 * attempt + 100 + rank)

    def begin(self, shadow: str = "", run: str = "", tap: Any = "step") -> Pipeline:
        if shadow:
            self.ckpt = checkmate.attach(
                self.model, self.optimizer, shadow=shadow, run=run, stateful={"scheduler": self.scheduler}, tap=tap
            )
            self.step = self.ckpt.restore()
        return self

    def train(self) -> None:
        data = torch.Generator().manual_seed(self.step)
        x = torch.randn(BATCH, FEATURES, generator=data).chunk(self.count)[self.place % self.count]
        y = torch.randn(BATCH, 1, generator=data).chunk(self.count)[self.place]
        self.optimizer.zero_grad()
        if self.stage == 0:
            out = self.model(x)
            pieces = out.detach().chunk(len(self.partners))
            for partner, piece in zip(self.partners, pieces, strict=True):
                dist.send(piece.contiguous(), partner)
            out.backward(torch.cat([receive(piece.shape, p) for p, piece in zip(self.partners, pieces, strict=True)]))
        else:
            hidden = receive(torch.Size((len(y), HIDDEN)), self.partners[0]).requires_grad_()
            nn.functional.mse_loss(self.model(hidden), y).backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, self.partners[0])
        self.optimizer.step()
        self.scheduler.step()
        if self.ckpt is not None:
            self.ckpt.step()
        self.step += 1

    def state(self) -> dict[str, Any]:
        names = {param: name for name, param in self.net.named_parameters()}
        groups = [
            {**group, "params": [names[param] for param in group["params"]]} for group in self.optimizer.param_groups
        ]
        buffers = {name: buffer.detach() for name, buffer in self.net.named_buffers()} if self.place == 0 else {}
        return copy.deepcopy(
            {
                "model": {name: param.detach() for name, param in self.net.named_parameters()},
                "buffers": buffers,  # of the others, DDP puts the first one's there anyway
                "optimizer": {names[param]: dict(state) for param, state in self.optimizer.state.items()},
                "groups": groups,
                "scheduler": self.scheduler.state_dict(),
                "rng": torch.get_rng_state(),
            }
        )


def receive(shape: torch.Size, source: int) -> Tensor:
    found = torch.empty(shape)
    dist.recv(found, source)
    return found


# ------------------------------------------------------------------------------ what the ranks of the pool run


def whole(rank: int, replicas: Replicas) -> list[Any]:
    """All states of the run that nobody disturbs, without Checkmate."""
    job = Pipeline(rank, replicas).begin()
    states = [job.state()]
    for _ in range(STEPS):
        job.train()
        states.append(job.state())
    return states


def cut_off(
    rank: int, replicas: Replicas, shadow: str, run: str, stops: tuple[int, ...], without: str = "", tap: str = "step"
) -> Any:
    """All states of a run that goes on in new objects after each of `stops`, and what it says of drift."""
    states: dict[int, Any] = {}
    drift: list[str] = []
    for attempt, stop in enumerate((*stops, STEPS)):
        job = Pipeline(rank, replicas, attempt)
        with _disabled(without):
            job.begin(shadow, run, tap)
        states[job.step] = job.state()
        while job.step < stop:
            job.train()
            states[job.step] = job.state()
        job.ckpt.wait(timeout=60)
        stats = job.ckpt.stats()
        drift += stats["drift"]
        assert (stats["bytes_tagged"] > 0) == (tap != "step" and job.count > 1)
        assert stats["fallbacks"] == 0
        differing = job.ckpt.audit()["differing"]
        assert differing == [], differing
        job.ckpt.close(timeout=0)
        dist.barrier()
    return [states[step] for step in range(STEPS + 1)], drift


def restored(rank: int, replicas: Replicas, shadow: str, run: str) -> Any:
    """The state that a new attempt finds."""
    job = Pipeline(rank, replicas, 9).begin(shadow, run)
    found = job.state()
    job.ckpt.close(timeout=0)
    dist.barrier()
    return found


@contextmanager
def _disabled(function: str) -> Iterator[None]:
    """A function of `installing` does nothing."""
    if not function:
        yield
        return
    original = getattr(installing, function)
    setattr(installing, function, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(installing, function, original)


# ------------------------------------------------------------------------------ the run that is killed


def strike(pids: list[int]) -> None:
    for pid in [pid for pid in pids if pid != os.getpid()] + [os.getpid()]:
        os.kill(pid, signal.SIGKILL)


def main(folder: Path, address: str, replicas: Replicas, seed: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    chance = random.Random(seed)
    step, moment = chance.randrange(1, STEPS), chance.uniform(0, 0.02)
    job = Pipeline(rank, replicas, attempt).begin(address, "killed")
    (folder / f"restored-{attempt}-{rank}").write_text(str(job.step))
    while job.step < STEPS:
        if attempt == 0 and rank == 1 and job.step == step:
            threading.Timer(moment, functools.partial(strike, pids)).start()
        job.train()
        if attempt == 0 and job.step == STEPS:
            threading.Event().wait()  # the killer is late
        with (folder / f"finished-{attempt}-{rank}").open("a") as file:  # in one write, which a SIGKILL does not cut
            file.write(f"{job.step}\n")
    torch.save(job.state(), folder / f"{rank}.pt")
    job.ckpt.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], (int(sys.argv[3]), int(sys.argv[4])), int(sys.argv[5]))
