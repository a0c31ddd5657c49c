"""``checkmate bench overhead``: what a checkpoint of every step costs the workers.

The accelerator is emulated. Each rank sleeps through forward (a third of the compute time) and backward, as the host
of a GPU would; meanwhile gradients of a GPT's real shapes become ready bucket by bucket, and two ranks reduce them with
Gloo over TCP. Then ``optimizer.step()`` takes what AdamW takes on an accelerator, asleep. The tap, the staging copy,
the sender, the network and the shadow, which applies AdamW in full, are real. Three things differ from a GPU:

- A GPU's copy engine takes gradients to the host beside everything else. Here the training thread has to copy them, as
  it has when it trains on a CPU. So there are two figures: with that copy, and with a thread as the copy engine; the
  next gradients wait for it as they would on a device.
- Gradients are reduced by MAX, so that one memory can be reduced step after step and stays finite.
- The learning rate is 0. So the shadow's parameters are those of the workers, whose step changes nothing, and the
  rolling audit that compares them stays on; it must find no difference.

Loops with and without a checkpointer live in the same processes and take turns, a block of steps each. A block ends
when all is sent; its first steps count in processor time and bytes, but not in step times. The ratio is that of
neighbouring blocks' medians, where a step is over when the slowest rank is. Each rank has a core, as far as there are
two. The shadow shares the last one with a rank, so there, and in memory bandwidth, the two contend.

The limit: a tap that copies on the training thread adds the time of a plain copy, which all ranks make at once.

With ``--real`` the loops train a small GPT on the CPU, under DistributedDataParallel. Both ranks have the first core,
the shadow has the last.
"""

from __future__ import annotations

import logging
import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import checkmate

from ..demo.gpt import VOCABULARY
from ..shadow.partition import RING_STEPS
from ..trainer import recorder
from .baselines import BASELINES, Saver
from .common import TIMEOUT_S, BenchmarkFailed, Crew, Figure, Outcome, at_most, median, quantile, shadow_on, two_cores
from .limits import gpt
from .streamer import warm_up

WORLD_SIZE = 2
#: As DDP has it.
BUCKET_BYTES = 25 << 20
#: AdamW over 50 M parameters is bound by memory: 1.4 GB at more than 1.4 TB/s.
OPTIMIZER_S = 1e-3
#: Steps of a block that do not count: until what the other loop has left behind is done.
WARM_UP_STEPS = 2
#: Plain copies that are measured.
COPIES = 5
RUN = "overhead"
NONE, CHECKMATE, ENGINE = "without", "with", "with a copy engine"
PROTECTED = (CHECKMATE, ENGINE)


@dataclass(frozen=True)
class Settings:
    parameters: int
    compute_s: float  #: of one step, forward and backward; 0: train on the CPU for real
    block_steps: int
    pairs: int
    baselines: bool = False


@dataclass
class Block:
    """What one rank measured over consecutive steps."""

    times_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0  #: per step
    sent_bytes: float = 0.0  #: per step
    staging_bytes: int = 0  #: the most that it had while lag was at most one step
    lag_steps: int = 0  #: the most


class AdamW(torch.optim.AdamW):
    """AdamW on an emulated accelerator: its time passes, and the parameters stay."""

    __module__ = "torch.optim"  # which is where a shadow finds what it is to apply

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(OPTIMIZER_S)


class CopyEngine:
    """A thread that copies, in place of a device's copy engine."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._copying: Future[None] | None = None

    def copy_to_host(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], None]:
        """In place of the recorder's."""
        self._copying = self._thread.submit(torch._foreach_copy_, targets, sources)
        return self._copying.result

    def wait(self) -> None:
        if self._copying is not None:
            self._copying.result()


class Emulated:
    """A training loop whose forward, backward and optimizer take time and nothing else."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        self.model: torch.nn.Module = gpt(settings.parameters)
        self.optimizer: torch.optim.Optimizer = AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.engine = CopyEngine()
        self._compute_s = settings.compute_s
        self._buckets: list[torch.Tensor] = []
        bucket: list[torch.nn.Parameter] = []
        for param in reversed(list(self.model.parameters())):
            bucket.append(param)
            if sum(p.numel() for p in bucket) * 4 >= BUCKET_BYTES:
                self._buckets.append(_flat_gradients(bucket))
                bucket = []
        if bucket:
            self._buckets.append(_flat_gradients(bucket))

    def step(self) -> None:
        began = time.perf_counter()
        works = []
        for ready, bucket in enumerate(self._buckets, 1):
            # The device does not wait for its host: what is late by then is not made later.
            due = began + self._compute_s * (1 + 2 * ready / len(self._buckets)) / 3
            time.sleep(max(0.0, due - time.perf_counter()))
            self.engine.wait()  # before there are other gradients in their place
            works.append(dist.all_reduce(bucket, dist.ReduceOp.MAX, async_op=True))
        for work in works:
            work.wait()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """As large as what AdamW would have by now; the gradients stand for the moments."""
        params = dict(self.model.named_parameters())
        return {"model": params, "exp_avg": (grads := {n: p.grad for n, p in params.items()}), "exp_avg_sq": grads}


def _flat_gradients(params: list[torch.nn.Parameter]) -> torch.Tensor:
    """One tensor, of which the gradients of `params` are views."""
    flat = torch.randn(sum(p.numel() for p in params)).mul_(0.01)
    for param, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = piece.view_as(param)
    return flat


class Real:
    """A GPT that is trained on the CPU, on random bytes."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        self.model: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(gpt(settings.parameters))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._text = torch.randint(VOCABULARY, (8, 65))

    def step(self) -> None:
        loss = self.model(self._text[:, :-1], self._text[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Rank:
    """One worker process with two loops: one with a checkpointer, and one without."""

    def __init__(self, rank: int, folder: str, address: str, settings: Settings) -> None:
        logging.basicConfig(format=f"rank {rank}: %(message)s")
        store = f"file://{os.path.join(folder, 'store')}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
        self._folder = folder
        kind = Emulated if settings.compute_s else Real
        self._protected, self._bare = kind(settings), kind(settings)
        model, optimizer = self._protected.model, self._protected.optimizer
        self._checkpointer = checkmate.attach(model, optimizer, shadow=address, run=RUN)
        self._checkpointer.restore()

    def gradient_bytes(self) -> int:
        return 4 * sum(p.numel() for p in self._bare.model.parameters())

    def copy(self) -> float:
        """Seconds of a plain copy of as many bytes as this rank has to send per step."""
        source = torch.ones(self.gradient_bytes() // WORLD_SIZE, dtype=torch.uint8)
        target = torch.zeros_like(source)
        dist.barrier()
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began

    def block(self, kind: str, num_steps: int) -> Block:
        """Warm up, then so many steps that count."""
        with ExitStack() as stack:
            if kind == ENGINE and isinstance(self._protected, Emulated):
                engine = self._protected.engine
                stack.enter_context(mock.patch.object(recorder, "copy_to_host", engine.copy_to_host))
            return self._block(kind, num_steps)

    def _block(self, kind: str, num_steps: int) -> Block:
        loop = self._protected if kind in PROTECTED else self._bare
        saver = Saver(kind, self._folder) if kind in BASELINES else None
        block = Block()
        dist.barrier()
        cpu, sent = _cpu_s(), self._checkpointer.stats()["bytes_sent"]
        for number in range(-WARM_UP_STEPS, num_steps):
            began = time.perf_counter()
            loop.step()
            if kind in PROTECTED:
                self._checkpointer.step()
            elif saver is not None:
                saver.step(loop.state())
            if number >= 0:
                block.times_s.append(time.perf_counter() - began)
                self._look(block)
        if saver is not None:
            saver.wait()
        self._checkpointer.wait(timeout=TIMEOUT_S)
        block.cpu_s = (_cpu_s() - cpu) / (WARM_UP_STEPS + num_steps)
        block.sent_bytes = (self._checkpointer.stats()["bytes_sent"] - sent) / (WARM_UP_STEPS + num_steps)
        return block

    def _look(self, block: Block) -> None:
        stats = self._checkpointer.stats()
        if stats["lag_steps"] is None or stats["gaps"] or stats["differences"]:
            raise BenchmarkFailed(f"the shadow does not hold what the workers have: {stats}")
        block.lag_steps = max(block.lag_steps, stats["lag_steps"])
        if stats["lag_steps"] <= 1:
            gradients = stats["staging_bytes"] - stats["staging_parts_bytes"]
            block.staging_bytes = max(block.staging_bytes, gradients)

    def leave(self) -> None:
        self._checkpointer.close()
        dist.destroy_process_group()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass
class Measured:
    """All blocks by kind, each as one per rank; and what the shadow took."""

    gradient_bytes: int = 0
    copies_s: list[float] = field(default_factory=list)  #: in which all ranks copy a slice each
    blocks: dict[str, list[list[Block]]] = field(default_factory=lambda: defaultdict(list))
    shadow_cpu_s: float = 0.0  #: per step
    shadow_held_bytes: int = 0
    shadow_peak_bytes: int = 0

    def steps(self, kind: str) -> list[list[float]]:
        """Per block: the seconds that each step took the slowest rank."""
        return [[max(step) for step in zip(*(b.times_s for b in ranks), strict=True)] for ranks in self.blocks[kind]]

    def ratio(self, kind: str) -> float:
        """Median over pairs of neighbouring blocks: median step time with, by that without."""
        pairs = zip(self.steps(kind), self.steps(NONE), strict=True)
        return median([median(with_it) / median(without) for with_it, without in pairs])

    def added_cpu_s(self, kind: str) -> float:
        """Processor seconds per step, of all ranks, beyond those without; the median over pairs."""
        used = {k: [sum(b.cpu_s for b in ranks) for ranks in self.blocks[k]] for k in (kind, NONE)}
        return median([with_it - without for with_it, without in zip(used[kind], used[NONE], strict=True)])


def measure(settings: Settings) -> Outcome:
    """Run the benchmark: so many pairs of blocks, or blocks of each baseline too."""
    worker_core, shadow_core = two_cores()
    rank_cores = [worker_core, shadow_core] if settings.compute_s else [worker_core, worker_core]
    kinds = [NONE, CHECKMATE, *((ENGINE,) if settings.compute_s else ()), *(BASELINES if settings.baselines else ())]
    found = Measured()
    with tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder, shadow_on(shadow_core) as shadow:
        warm_up(shadow)
        arguments = [(rank, folder, shadow.address, settings) for rank in range(WORLD_SIZE)]
        with Crew(Rank, arguments, rank_cores) as ranks:
            found.gradient_bytes = ranks.call("gradient_bytes")[0]
            found.copies_s = [max(ranks.call("copy")) for _ in range(COPIES)]
            for kind in kinds:
                ranks.call("block", kind, 1)  # whatever happens only once
            for pair in range(settings.pairs):
                for kind in kinds if pair % 2 == 0 else reversed(kinds):
                    before = shadow.cpu_s()
                    found.blocks[kind].append(ranks.call("block", kind, settings.block_steps))
                    if kind == CHECKMATE:
                        found.shadow_cpu_s += (shadow.cpu_s() - before) / settings.pairs
            found.shadow_cpu_s /= settings.block_steps + WARM_UP_STEPS
            found.shadow_held_bytes = shadow.status(RUN)["memory_bytes"]
            found.shadow_peak_bytes = shadow.peak_bytes()
            ranks.call("leave")
    return Outcome("overhead", __doc__ or "", _figures(settings, found))


def _figures(settings: Settings, found: Measured) -> list[Figure]:
    steps = {kind: list(chain.from_iterable(found.steps(kind))) for kind in list(found.blocks)}
    late = {kind: quantile(times, 0.95) for kind, times in steps.items()}
    blocks = list(chain.from_iterable(found.blocks[CHECKMATE]))
    staging = max(block.staging_bytes for block in blocks) / (found.gradient_bytes / WORLD_SIZE)
    bound = found.gradient_bytes * (3 + RING_STEPS) * 1.1 / 1e6
    figures = [
        Figure("parameters", found.gradient_bytes / 4e6, "M"),
        Figure("plain copy of a slice, all ranks at once", median(found.copies_s) * 1e3, "ms"),
    ]
    figures += [
        figure
        for kind, times in steps.items()
        for figure in (
            Figure(f"step {kind}, median", median(times) * 1e3, "ms"),
            Figure(f"step {kind}, p95", late[kind] * 1e3, "ms"),
        )
    ]
    for kind in (kind for kind in PROTECTED if kind in steps):
        figures += [
            at_most(f"ratio {kind}, median", found.ratio(kind), 1.01 if settings.compute_s else 1.03),
            at_most(f"ratio {kind}, p95", late[kind] / late[NONE], 1.03 if settings.compute_s else None),
            Figure(f"workers' processor time per step {kind}", found.added_cpu_s(kind) * 1e3, "ms more"),
        ]
    figures += [
        Figure("shadow's processor time per step", found.shadow_cpu_s * 1e3, "ms"),
        Figure("sent per step and rank", median([block.sent_bytes for block in blocks]) / 1e6, "MB"),
        Figure("lag, at most", max(block.lag_steps for block in blocks), "steps"),
        at_most("staging of a rank, by its slice, while lag ≤ 1", staging, 2.0),
        at_most("tensors that the shadow holds", found.shadow_held_bytes / 1e6, bound, "MB"),
        at_most("its memory, code left out, at most", found.shadow_peak_bytes / 1e6, bound, "MB"),
    ]
    for kind in (kind for kind in steps if kind in BASELINES):
        figures.append(Figure(f"ratio {kind}, median", found.ratio(kind)))
        figures.append(Figure(f"ratio {kind}, p95", late[kind] / late[NONE]))
    return figures
