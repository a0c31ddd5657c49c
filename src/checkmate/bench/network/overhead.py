"""What a checkpoint of every step costs the workers with the network tap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import NamedTuple

from ...lab import Lab
from ..common import Figure, at_most, median, quantile, two_cores
from .hosts import audience, crew, shadow
from .rank import Rank, Taken, Tap, run_of


class Kind(NamedTuple):
    """What takes turns. With no ports the loop is bare; `stopped` ones do nothing meanwhile."""

    name: str
    ports: int
    stopped: bool = False


BARE = Kind("bare", 0)
MIRROR = (BARE, Kind("attached, shadow stopped", 1, True), Kind("attached, shadow on these cores", 1))
MULTICAST = (
    BARE,
    *(Kind(f"{ports} joined, {where}", ports, where == "stopped")
      for ports in (1, 3) for where in ("stopped", "on these cores")),
)  # fmt: skip
#: Names of the loops.
ALONE, ATTACHED = "bare", "attached"


def overhead(quick: bool, rate: str) -> Iterator[Figure]:
    """The accelerator is emulated as in ``checkmate bench overhead``: host threads sleep until a gradient is ready, the
    optimizer sleeps and changes nothing. Two ranks under DDP, each on a core where there are two, with our collective
    everywhere. "Bare": nobody is attached and no rule is there. "Attached": what is reduced is mirrored to a shadow.
    On a cluster that has cores and memory of its own. Here, where it applies AdamW in full on the workers' two, it gets
    the time that they leave (SCHED_IDLE), but contends for caches and memory. So there is a second figure: stopped by
    SIGSTOP in a block of steps, and waited for after it, it costs only what a worker does for it. What remains is the
    checksum of its own shard, at the speed of memory, when the optimizer steps; and, as this switch is the same kernel,
    the copies that it makes, which a sender's system call pays for. The three take turns in blocks of steps.
    """
    yield from _measure("mirror", MIRROR, quick)


def multicast_overhead(quick: bool, rate: str) -> Iterator[Figure]:
    """As overhead, with the all-gather by multicast. "Bare": nobody but the two ranks has joined the group. Otherwise
    the run's shadow has, and with three so have two processes which do nothing but read. They, too, get the time that
    is left (SCHED_IDLE), or are stopped while a block of steps is measured; the kernel drops what does not fit then.
    """
    yield from _measure("multicast", MULTICAST, quick)


def _measure(tap: Tap, kinds: Sequence[Kind], quick: bool) -> Iterator[Figure]:
    nbytes, compute_s, count, rounds = (1_000_000, 0.05, 3, 1) if quick else (200_000_000, 1.0, 8, 7)
    name, run = f"{'multicast-' if tap == 'multicast' else ''}overhead: ", run_of(ATTACHED, nbytes)
    blocks: dict[Kind, list[list[Taken]]] = defaultdict(list)
    shadow_cpu_s: dict[Kind, float] = defaultdict(float)
    with (
        Lab(2, max(kind.ports for kind in kinds), rules=False, multicast=tap == "multicast") as lab,
        shadow(lab, idle=True) as listening,
        audience(lab, listening) as listeners,
        crew(lab, Rank, two_cores()) as ranks,
    ):
        ranks.call("make", ALONE, nbytes, tap, compute_s, None, "degrade", 0.0)
        ranks.call("make", ATTACHED, nbytes, tap, compute_s, listening.address, "degrade", 0.0)
        listeners.be(1, run)
        with listeners.stopped():  # once before, for then a worker gets the memory that it keeps gradients in meanwhile
            ranks.call("steps", ATTACHED, count, False)
        for number in range(rounds):
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                loop = ATTACHED if kind.ports else ALONE
                listeners.be(kind.ports, run)
                ranks.call("steps", loop, 1)  # until what the other loop has left behind is done
                before = listening.cpu_s()
                with listeners.stopped() if kind.stopped else nullcontext():
                    blocks[kind].append(ranks.call("steps", loop, count, not kind.stopped))
                shadow_cpu_s[kind] += listening.cpu_s() - before
                if kind.stopped:
                    ranks.call("steps", loop, 1)
    steps = {kind: [_steps(block) for block in found] for kind, found in blocks.items()}
    late = {kind: quantile(list(chain.from_iterable(found)), 0.95) for kind, found in steps.items()}
    cpu = {kind: [sum(rank.cpu_s for rank in block) / count for block in found] for kind, found in blocks.items()}
    for kind in kinds:
        yield Figure(f"{name}step {kind.name}, median", median(list(chain.from_iterable(steps[kind]))) * 1e3, "ms")
        yield Figure(f"{name}step {kind.name}, p95", late[kind] * 1e3, "ms")
        yield Figure(f"{name}workers' processor time per step, {kind.name}", median(cpu[kind]) * 1e3, "ms")
    for kind in kinds[1:]:
        ratios = [median(a) / median(b) for a, b in zip(steps[kind], steps[BARE], strict=True)]
        yield at_most(f"{name}ratio {kind.name}, by bare, median", median(ratios), 1.005)
        yield at_most(f"{name}ratio {kind.name}, by bare, p95", late[kind] / late[BARE], 1.02)
    beside = kinds[-1]
    yield Figure(f"{name}shadow's processor time per step", shadow_cpu_s[beside] / rounds / count * 1e3, "ms")
    repaired = sum(rank.repaired_bytes for block in blocks[beside] for rank in block)
    yield Figure(f"{name}repaired", repaired / rounds / count / nbytes * 100, "% of a gradient")


def _steps(block: list[Taken]) -> list[float]:
    """A step is over when the slowest rank is."""
    return [max(times) for times in zip(*(rank.times_s for rank in block), strict=True)]
