"""Our all-reduce beside Gloo's."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ...lab import Lab
from ...lab.plan import DATA
from ...tensors import bytes_of
from ...trainer.collective import Collective
from ...trainer.mirror import DSCP
from ...trainer.peers import connect_peers
from ...trainer.shards import Place, Plan
from ..common import TIMEOUT_S, BenchmarkFailed, Figure, at_most, median
from .hosts import crew
from .rank import join

#: What is asked of the ratio.
TARGET = 1.05
OURS, DIVIDED, PLAIN = "ours", "Gloo, div_ and all_reduce", "Gloo, all_reduce alone"
KINDS = (OURS, DIVIDED, PLAIN)


class Reducer:
    """One rank, which averages a bucket in one of three ways."""

    def __init__(self, rank: int, world: int, master: str) -> None:
        join(rank, world, master)
        self._rank, self._world = rank, world
        peers, _ = connect_peers(dist.group.WORLD, DATA[0], DSCP)  # type: ignore[arg-type]
        self._collective = Collective(rank, peers, TIMEOUT_S)

    def prepare(self, nbytes: int) -> None:
        """Raises BenchmarkFailed if the average is not right."""
        made = [torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(r)) for r in range(self._world)]
        self._bucket = made[self._rank].clone()
        self._plan = Plan(nbytes, self._world, [Place(0, 0, nbytes)])
        start, stop = self._plan.bounds[self._rank]
        self._shard = bytes_of(torch.empty(stop - start, dtype=torch.uint8))
        self.reduce(OURS)
        expected = made[0] / self._world
        for tensor in made[1:]:
            expected += tensor / self._world
        if not torch.equal(self._bucket, expected):
            raise BenchmarkFailed("our all-reduce does not bring the average")

    def reduce(self, kind: str) -> float:
        """Seconds."""
        dist.barrier()
        began = time.perf_counter()
        if kind == OURS:
            self._collective.begin(self._bucket, self._plan, self._shard).done.wait()
        else:
            if kind == DIVIDED:
                self._bucket.div_(self._world)
            dist.all_reduce(self._bucket)
            if kind == PLAIN:
                return self._scaled(time.perf_counter() - began)
        return time.perf_counter() - began

    def _scaled(self, taken: float) -> float:
        self._bucket.div_(self._world)  # for it to stay finite; not counted
        return taken


def collective(quick: bool, rate: str) -> Iterator[Figure]:
    """In the same processes, taking turns, each with a barrier before; a reduction is over when the slowest rank is. On
    links of MTU 65535 with offloads, which is as a loopback. Averages are what DDP makes of all_reduce with a division.
    """
    for num_workers in (2,) if quick else (2, 4):
        with Lab(num_workers, 0, mtu=65535, rules=False) as lab, crew(lab, Reducer) as ranks:
            for size in (1,) if quick else (25, 100, 256):
                ranks.call("prepare", size * 1_000_000)
                rounds = 3 if quick else 21 if size < 50 else 11
                times: dict[str, list[float]] = defaultdict(list)
                for number in range(rounds):
                    for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                        times[kind].append(max(ranks.call("reduce", kind)))
                name = f"collective: {num_workers} ranks × {size} MB: "
                for kind in KINDS:
                    yield Figure(f"{name}{kind}", median(times[kind]) * 1e3, "ms")
                for kind in (DIVIDED, PLAIN):
                    ratios = [ours / theirs for ours, theirs in zip(times[OURS], times[kind], strict=True)]
                    yield at_most(f"{name}ours by {kind}", median(ratios), TARGET if kind == DIVIDED else None)
