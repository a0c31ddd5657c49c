"""Packets that get lost on the shadow's leg."""

from __future__ import annotations

from collections.abc import Iterator

from ...lab import Lab
from ..common import Figure, at_most, exactly, median
from .hosts import crew, shadow
from .rank import Rank, Taken

PERCENTS = (0.1, 1.0, 5.0)


def loss(quick: bool, rate: str) -> Iterator[Figure]:
    """The switch drops packets of at most 1500 bytes at random on their way to the shadow, and nowhere else; without
    offloads, so that a loss is that of a real packet. Blocks of steps with and without loss take turns. What is lost
    takes the frames that it was in, of up to 1 MiB, with it: those are repaired. In the end an audit compares all
    tensors, and each is read back and compared byte by byte. SGD with
    momentum. The shadow gets the processor time that no worker wants.
    """
    nbytes, compute_s, count, pairs = (1_000_000, 0.05, 4, 1) if quick else (20_000_000, 0.5, 8, 5)
    for percent in PERCENTS[-1:] if quick else PERCENTS:
        with Lab(2, 1, offloads=False) as lab, shadow(lab, idle=True) as listening, crew(lab, Rank) as ranks:
            ranks.call("make", "attached", nbytes, "mirror", compute_s, listening.address, "degrade")
            ratios: list[float] = []
            repaired = 0
            for number in range(pairs):
                taken: dict[float, list[Taken]] = {}
                for now in (0.0, percent) if number % 2 == 0 else (percent, 0.0):
                    lab.drop("s0", now)
                    taken[now] = ranks.call("steps", "attached", count)
                ratios.append(_step(taken[percent]) / _step(taken[0.0]))
                repaired += sum(rank.repaired_bytes for rank in taken[percent])
            lab.drop("s0", 0)
            captured = listening.capture()
            name = f"loss: {percent:g} % of 2 workers × {nbytes / 1e6:g} MB: "
            checks = ranks.call("check", "attached")
            compared = sum(count for count, _ in checks)
            yield exactly(
                f"{name}tensors that differ, of {compared} compared", sum(len(names) for _, names in checks), 0
            )
            yield at_most(f"{name}step time by that without loss, median", median(ratios), 1.01)
            yield Figure(f"{name}the same, highest of {pairs} pairs", max(ratios))
            yield Figure(f"{name}repaired", repaired / pairs / count / nbytes * 100, "% of a gradient")
            yield Figure(f"{name}holes in the streams", captured["holes"] / pairs / count, "per step")


def _step(taken: list[Taken]) -> float:
    """Median over steps; one is over when the slowest rank is."""
    return median([max(times) for times in zip(*(rank.times_s for rank in taken), strict=True)])
