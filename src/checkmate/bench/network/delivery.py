"""What reaches the shadow, and how fast."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...lab import Lab
from ...lab.plan import SWITCH, bytes_per_s
from ...switch import nft
from ...wire.frames import HEADER_BYTES
from ..common import Crew, Figure, at_most, exactly, inside, median, quantile
from .hosts import LabShadow, crew, during, shadow
from .rank import Rank, Taken, run_of

#: Counters are read so often, and a rate is that of so long: what tbf lets pass at once is little in that time.
SAMPLE_S, WINDOW_S = 0.01, 0.05
NAME = "attached"


def delivery(quick: bool, rate: str) -> Iterator[Figure]:
    """First on links without a limit. Bytes are counted by the shadow's capture, shares by the switch's rules. Then all
    links are limited, and the counters of the ports are read every 10 ms. What the queue of the mirror port cannot hold
    is dropped there and repaired over the management network. The shadow is waited for in both.
    """
    num_workers, nbytes, count = (2, 1_000_000, 3) if quick else (4, 50_000_000, 10)
    with Lab(num_workers, 1) as lab, shadow(lab) as listening, crew(lab, Rank) as ranks:
        yield from _whole(lab, listening, ranks, nbytes, count)
    nbytes, count = (1_000_000, 5) if quick else (20_000_000, 10)
    for workers in (2,) if quick else (2, 4):
        with Lab(workers, 1, rate=rate) as lab, shadow(lab) as listening, crew(lab, Rank) as ranks:
            yield from _limited(lab, listening, ranks, nbytes, count, rate)


def _whole(lab: Lab, listening: LabShadow, ranks: Crew, nbytes: int, count: int) -> Iterator[Figure]:
    name = f"delivery: {len(lab.workers)} workers × {nbytes / 1e6:g} MB: "
    ranks.call("make", NAME, nbytes, "mirror", 0.0, listening.address)
    captured, run = listening.capture(), listening.status(run_of(NAME, nbytes))
    copied = nft.read(lab.cluster).counted
    _, links = during(lab, lambda: ranks.call("steps", NAME, count))
    now = listening.capture()
    came = {key: now[key] - captured[key] for key in ("payload_bytes", "frames", "kernel_drops", "holes")}
    after = listening.status(run_of(NAME, nbytes))
    shares = {port: nft.read(lab.cluster).counted[port][1] - copied[port][1] for port in copied}
    frames = came["frames"] / count
    yield exactly(f"{name}gradients taken by the shadow", (after["bytes_overheard"] - run["bytes_overheard"]) / count,
                  nbytes, "bytes/step")  # fmt: skip
    yield exactly(f"{name}repaired", after["bytes_repaired"] - run["bytes_repaired"], 0, "bytes")
    yield Figure(f"{name}frames, each with a header of {HEADER_BYTES} bytes", frames, "per step")
    yield exactly(f"{name}TCP payload captured", came["payload_bytes"] / count, nbytes + HEADER_BYTES * frames,
                  "bytes/step")  # fmt: skip
    yield Figure(f"{name}at the mirror port, packet headers and all", links["s0"]["rx_bytes"] / count / 1e6, "MB/step")
    yield Figure(f"{name}management network to the shadow", links["s0/mgmt0"]["rx_bytes"] / count / 1e3, "kB/step")
    largest = max(shares.values()) / sum(shares.values()) * len(shares)
    yield at_most(f"{name}largest share of a worker, times N", largest, 1.01)
    yield Figure(f"{name}smallest share, times N", min(shares.values()) / sum(shares.values()) * len(shares))


def _limited(
    lab: Lab, listening: LabShadow, ranks: Crew, nbytes: int, count: int, rate: str
) -> Iterator[Figure]:  # fmt: skip
    name = f"delivery: {len(lab.workers)} workers × {nbytes / 1e6:g} MB, links of {rate}: "
    limit = bytes_per_s(rate)
    ranks.call("make", NAME, nbytes, "mirror", 0.0, listening.address)
    copied = sum(nbytes for _, nbytes in nft.read(lab.cluster).counted.values())
    with sampled() as samples:
        taken, links = during(lab, lambda: ranks.call("steps", NAME, count))
    copied = sum(nbytes for _, nbytes in nft.read(lab.cluster).counted.values()) - copied
    ports = {"the mirror port": ("s0", "tx"), "what the busiest worker sends": ("w0", "rx")}
    step = median([t for rank in taken for t in rank.times_s])
    yield Figure(f"{name}link", limit / 1e6, "MB/s")
    yield Figure(f"{name}step, median", step * 1e3, "ms")
    least = 2 * (len(lab.workers) - 1) / len(lab.workers) * nbytes / limit
    yield Figure(f"{name}least time of an all-reduce on such links", least * 1e3, "ms")
    yield Figure(f"{name}gradient by step time", nbytes / step / 1e6, "MB/s")
    for what, (port, direction) in ports.items():
        rates = windows(samples, port, direction)
        yield Figure(f"{name}{what}, peak over {WINDOW_S * 1e3:g} ms", max(rates) / 1e6, "MB/s")
        yield Figure(f"{name}{what}, median", median(rates) / 1e6, "MB/s")
    mirrored = windows(samples, "s0", "tx")
    yield at_most(f"{name}mirror port by link, p95", quantile(mirrored, 0.95) / limit, 1.05)
    yield Figure(f"{name}copies for the mirror port", copied / count / 1e6, "MB/step")
    yield Figure(f"{name}dropped there", links["s0"]["rx_dropped"] / count, "packets/step")
    yield Figure(f"{name}repaired", _repaired(taken) / count / nbytes * 100, "% of a gradient")


def _repaired(taken: list[Taken]) -> int:
    return sum(rank.repaired_bytes for rank in taken)


#: Time; per port of the switch, bytes received and sent.
Sample = tuple[float, dict[str, tuple[int, int]]]


@contextmanager
def sampled() -> Iterator[list[Sample]]:
    """Read the counters of the switch's ports again and again, meanwhile."""
    samples: list[Sample] = []
    ended = threading.Event()

    def sample() -> None:
        with inside(SWITCH):
            while not ended.wait(SAMPLE_S):
                lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
                rows = {name.strip(): counts.split() for name, _, counts in (line.partition(":") for line in lines)}
                samples.append((time.perf_counter(), {name: (int(r[0]), int(r[8])) for name, r in rows.items()}))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def windows(samples: list[Sample], port: str, direction: str) -> list[float]:
    """Bytes per second at a port, over windows one after the other in which there were any."""
    index, rates = ("rx", "tx").index(direction), []
    began, first = samples[0][0], samples[0][1][port][index]
    for now, ports in samples[1:]:
        if now - began >= WINDOW_S:
            count = ports[port][index] - first
            if count:
                rates.append(count / (now - began))
            began, first = now, ports[port][index]
    return rates
