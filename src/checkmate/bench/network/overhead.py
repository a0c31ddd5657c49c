"""What a checkpoint of every step costs the workers with the network tap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain

from ...lab import Lab
from ..common import Figure, at_most, median, quantile, two_cores
from .hosts import crew, mirror_to, shadow
from .rank import Rank, Taken

#: The loops that take turns; the second is the third's, while the shadow is stopped.
BARE, APART, BESIDE = "bare", "attached, shadow stopped", "attached, shadow on these cores"
KINDS = (BARE, APART, BESIDE)


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
    nbytes, compute_s, count, rounds = (1_000_000, 0.05, 3, 1) if quick else (200_000_000, 1.0, 8, 7)
    blocks: dict[str, list[list[Taken]]] = defaultdict(list)
    shadow_cpu_s = 0.0
    with (
        Lab(2, 1, rules=False) as lab,
        shadow(lab, idle=True) as listening,
        crew(lab, Rank, two_cores()) as ranks,
    ):
        ranks.call("make", BARE, nbytes, compute_s, None, "degrade", 0.0)
        ranks.call("make", BESIDE, nbytes, compute_s, listening.address, "degrade", 0.0)
        mirror_to(lab, 1)
        with listening.stopped():  # once before, for then a worker gets the memory that it keeps gradients in meanwhile
            ranks.call("steps", BESIDE, count, False)
        for number in range(rounds):
            for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                loop = BARE if kind == BARE else BESIDE
                mirror_to(lab, int(kind != BARE))
                ranks.call("steps", loop, 1)  # until what the other loop has left behind is done
                before = listening.cpu_s()
                with listening.stopped() if kind == APART else nullcontext():
                    blocks[kind].append(ranks.call("steps", loop, count, kind != APART))
                if kind == APART:
                    ranks.call("steps", loop, 1)
                elif kind == BESIDE:
                    shadow_cpu_s += listening.cpu_s() - before
    steps = {kind: [_steps(block) for block in found] for kind, found in blocks.items()}
    late = {kind: quantile(list(chain.from_iterable(found)), 0.95) for kind, found in steps.items()}
    cpu = {kind: [sum(rank.cpu_s for rank in block) / count for block in found] for kind, found in blocks.items()}
    for kind in KINDS:
        yield Figure(f"overhead: step {kind}, median", median(list(chain.from_iterable(steps[kind]))) * 1e3, "ms")
        yield Figure(f"overhead: step {kind}, p95", late[kind] * 1e3, "ms")
        yield Figure(f"overhead: workers' processor time per step, {kind}", median(cpu[kind]) * 1e3, "ms")
    for kind in (APART, BESIDE):
        ratios = [median(a) / median(b) for a, b in zip(steps[kind], steps[BARE], strict=True)]
        yield at_most(f"overhead: ratio {kind}, by bare, median", median(ratios), 1.005)
        yield at_most(f"overhead: ratio {kind}, by bare, p95", late[kind] / late[BARE], 1.02)
    yield Figure("overhead: shadow's processor time per step", shadow_cpu_s / rounds / count * 1e3, "ms")
    repaired = sum(rank.repaired_bytes for block in blocks[BESIDE] for rank in block)
    yield Figure("overhead: repaired", repaired / rounds / count / nbytes * 100, "% of a gradient")


def _steps(block: list[Taken]) -> list[float]:
    """A step is over when the slowest rank is."""
    return [max(times) for times in zip(*(rank.times_s for rank in block), strict=True)]
