"""A training run in the hands of one rank, with Checkmate or without, and what the matrix does to it."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import random
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import checkmate
from checkmate.trainer.data import Batches, InexactData

from .compare import differences

FEATURES, SAMPLES, BATCH = 6, 10, 4  # samples per rank: an epoch has batches of 4, 4 and 2
STOPS = (1, 2, 3, 5)  #: after so many steps the run is cut off and goes on in new objects
STEPS = 7  #: into the third epoch


def nothing(job: Job) -> None:
    """What most cases do at the moments at which a case may do something."""


def no_objects(job: Job) -> dict[str, Any]:
    return {}


def samples(ranks: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(11)
    count = SAMPLES * ranks
    return TensorDataset(torch.randn(count, FEATURES, generator=generator), torch.randn(count, 1, generator=generator))


@dataclass(frozen=True)
class Case:
    """One kind of training. Functions that take a `Job` are the user's code at that moment."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], Optimizer | list[Optimizer]]
    train: Callable[[Job, Tensor, Tensor], None]  #: an iteration, but for fetching its batch and `ckpt.step()`
    ranks: int = 1
    ddp: dict[str, Any] | None = field(default_factory=dict)  #: its options; None: ranks average by themselves
    stateful: Callable[[Job], dict[str, Any]] = no_objects
    made: Callable[[Job], None] = nothing  #: before attach
    attached: Callable[[Job], None] = nothing  #: between attach and restore
    begun: Callable[[Job], None] = nothing  #: after restore
    data: Callable[[int], Dataset[Any]] = samples
    loader: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    flush_denormal: bool = False
    tap: str = "step"
    drift: str = ""  #: what `stats()` says where a restart is not exact; then only the restored state is compared
    matters: Callable[[list[Any]], object] = bool  #: from all states: whether what the case is about happened
    seed: int = 5


class Job:
    """The objects of one attempt at `case`. A later attempt begins with other weights and other random numbers."""

    def __init__(self, case: Case, rank: int, attempt: int = 0) -> None:
        self.case, self.rank, self.step = case, rank, 0
        seed = case.seed + 1000 * attempt
        torch.set_num_threads(case.threads)
        torch.set_flush_denormal(case.flush_denormal)
        torch.manual_seed(seed)
        self.net = case.model()
        self.model: Any = self.net
        if case.ranks > 1 and case.ddp is not None:
            self.model = DistributedDataParallel(self.net, **case.ddp)
        made = case.optimizer(self.net)
        self.optimizers = made if isinstance(made, list) else [made]
        self.optimizer = self.optimizers[0]
        self.stateful: dict[str, Any] = {}
        self.stateful = case.stateful(self)
        data = case.data(case.ranks)
        order = {"sampler": DistributedSampler(data, case.ranks, rank)} if case.ranks > 1 else {"shuffle": True}
        self.loader = DataLoader(data, BATCH, **order, **case.loader)
        self.batches: Iterator[Any] = iter(())
        self.ckpt: Any = None
        seed += 100 * (rank + 1)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        case.made(self)

    def begin(self, shadow: str = "", run: str = "") -> Job:
        """Attach and restore where a shadow is given; after that, the loop can begin."""
        if shadow:
            self.ckpt = checkmate.attach(
                self.model, self.optimizers, shadow=shadow, run=run, stateful=self.stateful, tap=self.case.tap
            )
        elif self.case.tap != "step":
            self.model.register_comm_hook(None, average_in_rank_order)
        self.case.attached(self)
        if self.ckpt is not None:
            self.step = self.ckpt.restore()
        self.case.begun(self)
        self.batches = self.ckpt.batches(self.loader) if self.ckpt is not None else self._batches()
        return self

    def _batches(self) -> Iterator[Any]:
        for epoch in itertools.count():
            if self.case.ranks > 1:
                self.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from self.loader

    def end(self) -> None:
        """End the workers of the loader now. Left to the garbage collector, each would wait for 5 s."""
        if isinstance(self.batches, Batches):
            self.batches._iterator = None
        elif isinstance(self.batches, Generator):
            self.batches.close()
        barrier()

    def train(self) -> None:
        """One step."""
        x, y = next(self.batches)
        self.case.train(self, x, y)
        if self.ckpt is not None:
            self.ckpt.step()
        self.step += 1

    def state(self) -> dict[str, Any]:
        """A copy of all that decides how training goes on, but for the position in the data."""
        names = {param: name for name, param in self.net.named_parameters()}
        optimizers = [
            {
                "state": {names[param]: dict(state) for param, state in optimizer.state.items() if state},
                "groups": [
                    {**group, "params": [names[param] for param in group["params"]]} for group in optimizer.param_groups
                ],
            }
            for optimizer in self.optimizers
        ]
        return copy.deepcopy(
            {
                "model": {name: param.detach() for name, param in self.net.named_parameters()},
                "buffers": {name: buffer.detach() for name, buffer in self.net.named_buffers()},
                "optimizers": optimizers,
                "stateful": {name: item.state_dict() for name, item in self.stateful.items()},
                "rng": {
                    "torch": torch.get_rng_state(),
                    "numpy": np.random.get_state(legacy=False),
                    "python": [np.array(random.getstate()[1]), random.getstate()[2]],
                },
            }
        )

    def crash(self) -> None:
        """What an in-process crash leaves at the shadow: connections that end, whatever is still to be sent."""
        self.ckpt.close(timeout=0)
        self.end()


def average_in_rank_order(_, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
    """What the network tap's collective promises, in terms of torch's own."""
    ours, world = bucket.buffer(), dist.get_world_size()
    theirs = [torch.empty_like(ours) for _ in range(world)]
    dist.all_gather(theirs, ours)
    total = theirs[0] / world
    for other in theirs[1:]:
        total = total + other / world
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(total)
    return done


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


# ------------------------------------------------------------------------------ what the ranks of the pool run

_whole: tuple[Case, list[Any]]  # the last case, and its states without Checkmate


def interrupt(rank: int, name: str, shadow: str, without: str = "") -> dict[str, Any]:
    """Train without Checkmate, with it, and with it cut off at every one of `STOPS`; what differed, and where.

    ``problems`` should be empty; ``drift`` is what the resumed runs said of it; ``matters`` as the case says.
    `without` names a function of Checkmate that is to do nothing meanwhile.
    """
    global _whole
    from .cases import CASES

    warnings.simplefilter("error", InexactData)
    case = CASES[name]
    job = Job(case, rank).begin()
    states = [job.state()]
    for _ in range(STEPS):
        job.train()
        states.append(job.state())
    batch = next(job.batches)
    job.end()
    _whole = case, states
    run = f"{name}, without {without}".replace(":", ".") if without else name
    with _disabled(without):
        problems = _never_cut_off(case, rank, shadow, f"{run}, whole", states, batch)
        drift = _cut_off(case, rank, shadow, run, states, batch, problems)
    return {"problems": problems, "drift": sorted(drift), "matters": bool(case.matters(states))}


def _never_cut_off(case: Case, rank: int, shadow: str, run: str, states: list[Any], batch: Any) -> list[str]:
    job = Job(case, rank).begin(shadow, run)
    problems = []
    for step in range(1, STEPS + 1):
        job.train()
        problems += [f"never cut off, step {step}: {text}" for text in differences(states[step], job.state())]
    problems += [f"never cut off: the shadow differs in {fqn}" for fqn in job.ckpt.audit()["differing"]]
    problems += [f"never cut off, next batch: {text}" for text in differences(batch, next(job.batches))]
    job.ckpt.close()
    job.end()
    return problems


def _cut_off(
    case: Case, rank: int, shadow: str, run: str, states: list[Any], batch: Any, problems: list[str]
) -> set[str]:
    """Appends to `problems`. In drift, a restored state has to be the one that was there before."""
    drift: set[str] = set()
    finished = 0
    for attempt, stop in enumerate((*STOPS, STEPS)):
        job = Job(case, rank, attempt).begin(shadow, run)
        if not finished - 1 <= job.step <= finished:
            problems.append(f"attempt {attempt}: resumed at step {job.step} of {finished}")
        problems += [f"attempt {attempt}, restored {job.step}: {text}" for text in _restored_wrongly(job, states)]
        drift.update(job.ckpt.stats()["drift"])
        while job.step < stop:
            job.train()
            if drift:
                states[job.step] = job.state()
            problems += [f"attempt {attempt}, step {job.step}: {t}" for t in differences(states[job.step], job.state())]
        finished = stop
        job.ckpt.wait(stop - attempt % 2)  # every other time, the last step is still on its way
        if stop == STEPS and not drift:
            problems += [f"attempt {attempt}, next batch: {text}" for text in differences(batch, next(job.batches))]
        job.crash()
    return drift


def _restored_wrongly(job: Job, states: list[Any]) -> list[str]:
    expected, found = states[job.step], job.state()
    if job.rank and job.case.ddp is not None and job.case.ddp.get("broadcast_buffers", True):
        found = {**found, "buffers": expected["buffers"]}  # those of rank 0, which the next forward puts there anyway
    return differences(expected, found)


def resume(rank: int, name: str, shadow: str) -> list[str]:
    """Restore the run that `interrupt` has just left; how it differs from the one without Checkmate."""
    case, states = _whole
    job = Job(case, rank, attempt=99).begin(shadow, name)
    found = _restored_wrongly(job, states)
    job.crash()
    return found


@contextmanager
def _disabled(function: str) -> Iterator[None]:
    """``module:class.function`` of Checkmate does nothing and returns None."""
    if not function:
        yield
        return
    module, _, path = function.partition(":")
    *outer, name = path.split(".")
    home = functools.reduce(getattr, outer, importlib.import_module(f"checkmate.{module}"))
    original = getattr(home, name)
    setattr(home, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(home, name, original)
