"""``checkmate bench ingest``: how fast one core of a shadow receives gradients *and* applies them.

A light process on another core speaks the real protocol as one rank and sends a step after the other as fast as they
are taken; the shadow is a real one. What its core could do at best is measured in alternation, on the same core: raw
TCP into memory of the same size (rate a), and torch's optimizer alone on the same shapes (rate b). One after the other,
a core can do 1 / (1/a + 1/b). TCP that the sender's core works off meanwhile is no work of this core, so the ratio may
exceed 1. At the end one block is read back and compared, bit for bit, with what torch's optimizer makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..shadow.partition import RING_STEPS
from .common import (
    Crew,
    Figure,
    Outcome,
    ShadowProcess,
    at_least,
    at_most,
    median,
    quantile,
    shadow_on,
    two_cores,
)  # fmt: skip
from .limits import Optimizing, raw_receive, shapes_of, warmed
from .streamer import RUN, Streamer, warm_up

#: Steps before the measurement: until the ring is full and every buffer is there.
WARM_UP_STEPS = RING_STEPS + 2
#: What is asked of the ratio between ingest and its limit.
TARGET = 0.75
#: How the shadow replays, and what torch makes of it.
REPLAYS = {"fast": "fused AdamW", "match": "AdamW with torch's default flags"}


class Limits:
    """On the shadow's core: raw TCP, and the optimizer alone."""

    def __init__(self, parameters: int) -> None:
        shapes = shapes_of(parameters)
        self._optimizing = Optimizing(shapes)
        self._memory = warmed(sum(torch.Size(shape).numel() for shape in shapes) * 4)

    def receive(self, address: str, times: int) -> tuple[float, float]:
        return raw_receive(address, self._memory, times)

    def optimize(self, fused: bool | None, times: int) -> tuple[float, float]:
        return self._optimizing.measure(fused, times)


@dataclass
class Rates:
    """Seconds per step, one for each round: by the clock, or of processor time."""

    raw: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    ingest: list[float] = field(default_factory=list)

    @property
    def limit(self) -> list[float]:
        return [a + b for a, b in zip(self.raw, self.optimizer, strict=True)]

    @property
    def ratio(self) -> float:
        return median([limit / taken for limit, taken in zip(self.limit, self.ingest, strict=True)])


def measure(parameters: int, num_steps: int, rounds: int) -> Outcome:
    """Run the benchmark: `rounds` times the limits and then `num_steps` steps, for each way to replay."""
    worker_core, shadow_core = two_cores()
    figures: list[Figure] = []
    with (
        Crew(Streamer, [(parameters,)], [worker_core]) as streamer,
        Crew(Limits, [(parameters,)], [shadow_core]) as limits,
    ):
        for replay in REPLAYS:
            with shadow_on(shadow_core) as shadow:
                warm_up(shadow)
                figures += _measure(replay, streamer, limits, shadow, parameters, num_steps, rounds)
    return Outcome("ingest", __doc__ or "", figures)


def _measure(
    replay: str, streamer: Crew, limits: Crew, shadow: ShadowProcess, parameters: int, num_steps: int, rounds: int
) -> list[Figure]:
    fused = True if replay == "fast" else None
    (raw_address,) = streamer.call("raw_address")
    streamer.call("join", shadow.address, replay)
    streamer.call("stream", WARM_UP_STEPS)
    wall, cpu, sender_cpu, steps = Rates(), Rates(), [], []
    times = max(2, num_steps // 5)
    for _ in range(rounds):
        streamer.tell("send_raw", times)
        raw = limits.call("receive", raw_address, times)[0]
        streamer.hear()
        alone = limits.call("optimize", fused, times)[0]
        for rates, raw_s, alone_s in zip((wall, cpu), raw, alone, strict=True):
            rates.raw.append(raw_s / times)
            rates.optimizer.append(alone_s / times)
        before = shadow.cpu_s(), streamer.call("cpu_s")[0]
        (taken,) = streamer.call("stream", num_steps)
        wall.ingest.append(sum(taken) / num_steps)
        cpu.ingest.append(max(shadow.cpu_s() - before[0], 1e-3) / num_steps)
        sender_cpu.append((streamer.call("cpu_s")[0] - before[1]) / num_steps)
        steps += taken
    held, peak = shadow.status(RUN)["memory_bytes"], shadow.peak_bytes()
    streamer.call("check", fused)
    streamer.call("leave")

    nbytes = sum(torch.Size(shape).numel() for shape in shapes_of(parameters)) * 4
    bound = nbytes * (3 + RING_STEPS) * 1.1 / 1e6
    name = f"{replay}: "

    def rate(name: str, seconds: list[float]) -> Figure:
        return Figure(name, nbytes / median(seconds) / 1e9, "GB/s")

    return [
        rate(f"{name}raw TCP (a)", wall.raw),
        rate(f"{name}{REPLAYS[replay]} alone (b)", wall.optimizer),
        rate(f"{name}limit 1/(1/a + 1/b)", wall.limit),
        rate(f"{name}received and applied", wall.ingest),
        at_least(f"{name}share of the limit", wall.ratio, TARGET),
        Figure(f"{name}the same, in processor time", cpu.ratio),
        Figure(f"{name}step of {nbytes / 1e6:,.1f} MB, median", median(steps) * 1e3, "ms"),
        Figure(f"{name}step, p95", quantile(steps, 0.95) * 1e3, "ms"),
        Figure(f"{name}shadow's processor time per step", median(cpu.ingest) * 1e3, "ms"),
        Figure(f"{name}sender's processor time per step", median(sender_cpu) * 1e3, "ms"),
        at_most(f"{name}tensors that the shadow holds", held / 1e6, bound, "MB"),
        at_most(f"{name}its memory, code left out, at most", peak / 1e6, bound, "MB"),
    ]
