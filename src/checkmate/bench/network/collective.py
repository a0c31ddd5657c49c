"""Our all-reduce beside Gloo's."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ...lab import Lab
from ...lab.plan import DATA
from ...tensors import bytes_of
from ...trainer.collective import Collective
from ...trainer.mirror import DSCP
from ...trainer.multicast import Group, join_group
from ...trainer.peers import connect_peers
from ...trainer.shards import Place, Plan
from ...wire.datagrams import GROUPS
from ..common import TIMEOUT_S, BenchmarkFailed, Crew, Figure, at_most, median
from .hosts import crew
from .rank import join

#: What is asked of the ratios of the mirrored tap's and of that by multicast.
TARGET, MULTICAST_TARGET = 1.05, 1.0
OURS, DIVIDED, PLAIN = "ours", "Gloo, div_ and all_reduce", "Gloo, all_reduce alone"
MULTICAST, MIRRORED = "by multicast", "the mirrored tap's"
KINDS = (OURS, DIVIDED, PLAIN)
BESIDE = (MULTICAST, MIRRORED, DIVIDED)
#: What the switch loses of the packets to each worker.
PERCENTS = (0.0, 0.1, 1.0, 5.0)

Times = dict[str, list[float]]


class Reducer:
    """One rank, which averages a bucket in one of several ways."""

    def __init__(self, kinds: Sequence[str], rank: int, world: int, master: str) -> None:
        join(rank, world, master)
        self._rank, self._world = rank, world
        self._collectives = {kind: _connect(rank, kind) for kind in kinds if kind in (OURS, MULTICAST, MIRRORED)}

    def prepare(self, nbytes: int) -> None:
        """Raises BenchmarkFailed if the average is not right."""
        made = [torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(r)) for r in range(self._world)]
        self._bucket = made[self._rank].clone()
        self._plan = Plan(nbytes, self._world, [Place(0, 0, nbytes)])
        start, stop = self._plan.bounds[self._rank]
        self._shard = bytes_of(torch.empty(stop - start, dtype=torch.uint8))
        expected = made[0] / self._world
        for tensor in made[1:]:
            expected += tensor / self._world
        for kind in self._collectives:
            self._bucket.copy_(made[self._rank])
            self.reduce(kind)
            if not torch.equal(self._bucket, expected):
                raise BenchmarkFailed(f"the all-reduce {kind} does not bring the average")

    def reduce(self, kind: str, meet: bool = True) -> float:
        """Seconds. All ranks `meet` before, or are only told at the same time: what is lost may hold up a barrier."""
        if meet:
            dist.barrier()
        began = time.perf_counter()
        if kind in self._collectives:
            self._collectives[kind].begin(self._bucket, self._plan, self._shard).done.wait()
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


def _connect(rank: int, kind: str) -> Collective:
    world: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    peers, _ = connect_peers(world, DATA[0], None if kind == MULTICAST else DSCP)
    gather = join_group(world, Group(GROUPS, "bench", 1), DATA[0], TIMEOUT_S) if kind == MULTICAST else None
    return Collective(rank, peers, TIMEOUT_S, gather=gather)


def collective(quick: bool, rate: str) -> Iterator[Figure]:
    """In the same processes, taking turns, each with a barrier before; a reduction is over when the slowest rank is. On
    links of MTU 65535 with offloads, which is as a loopback. Averages are what DDP makes of all_reduce with a division.
    """
    for num_workers in (2,) if quick else (2, 4):
        with Lab(num_workers, 0, mtu=65535, rules=False) as lab, crew(lab, partial(Reducer, KINDS)) as ranks:
            for size in (1,) if quick else (25, 100, 256):
                ranks.call("prepare", size * 1_000_000)
                name = f"collective: {num_workers} ranks × {size} MB: "
                times = yield from _times(ranks, name, KINDS, 3 if quick else 21 if size < 50 else 11)
                for kind in (DIVIDED, PLAIN):
                    yield _ratio(f"{name}ours by {kind}", times[OURS], times[kind], TARGET if kind == DIVIDED else None)


def multicast_collective(quick: bool, rate: str) -> Iterator[Figure]:
    """As collective, the all-gather by multicast, the mirrored tap's and Gloo's in the same rounds. On links of MTU
    65535 and of 1500, with offloads. Then with random loss on the way to each worker, on links of MTU 1500 without
    offloads, so that a loss is that of a real packet: of Gloo's TCP and of our reduce-scatter's, which is TCP as well,
    as of the datagrams. There ranks begin when they are told, without a barrier, which is TCP too.
    """
    for num_workers in (2,) if quick else (2, 4):
        for mtu in (1500,) if quick else (65535, 1500):
            with (
                Lab(num_workers, 0, mtu=mtu, multicast=True) as lab,
                crew(lab, partial(Reducer, BESIDE)) as ranks,
            ):
                for size in (1,) if quick else (25, 100, 256):
                    ranks.call("prepare", size * 1_000_000)
                    name = f"multicast-collective: {num_workers} ranks × {size} MB, MTU {mtu}: "
                    times = yield from _times(ranks, name, BESIDE, 3 if quick else 21 if size < 50 else 11)
                    for kind in BESIDE[1:]:
                        target = MULTICAST_TARGET if kind == DIVIDED else None
                        yield _ratio(f"{name}{MULTICAST} by {kind}", times[MULTICAST], times[kind], target)
        with (
            Lab(num_workers, 0, offloads=False, multicast=True) as lab,
            crew(lab, partial(Reducer, BESIDE)) as ranks,
        ):
            yield from _lossy(lab, ranks, quick)


def _lossy(lab: Lab, ranks: Crew, quick: bool) -> Iterator[Figure]:
    size, rounds = (1, 2) if quick else (25, 7)
    whole: Times = {}
    ranks.call("prepare", size * 1_000_000)
    for percent in PERCENTS[::3] if quick else PERCENTS:
        name = f"multicast-collective: {len(lab.workers)} ranks × {size} MB, loss of {percent:g} %: "
        for host in lab.workers:
            lab.drop(host.name, percent)
        times = yield from _times(ranks, name, BESIDE, rounds, False)
        whole = whole or times
        yield _ratio(f"{name}{MULTICAST} by {DIVIDED}", times[MULTICAST], times[DIVIDED], None)
        for kind in BESIDE:
            yield Figure(f"{name}{kind}, by that without loss", median(times[kind]) / median(whole[kind]))


def _times(
    ranks: Crew, name: str, kinds: Sequence[str], rounds: int, meet: bool = True
) -> Generator[Figure, None, Times]:  # fmt: skip
    """Seconds of each kind, in each round."""
    times: Times = defaultdict(list)
    for number in range(rounds):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            times[kind].append(max(ranks.call("reduce", kind, meet)))
    for kind in kinds:
        yield Figure(f"{name}{kind}", median(times[kind]) * 1e3, "ms")
    return times


def _ratio(name: str, ours: list[float], theirs: list[float], target: float | None) -> Figure:
    return at_most(name, median([a / b for a, b in zip(ours, theirs, strict=True)]), target)
