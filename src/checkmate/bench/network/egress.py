"""What the workers send, with and without shadows: read from the counters of their links, in the lab."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from ...lab import Lab
from ...lab.job import Counters
from ..common import Crew, Figure, at_least, at_most, median
from .hosts import Audience, LabShadow, audience, crew, during, shadow
from .rank import Rank, Tap, run_of

#: Ethernet, IPv4, TCP with time stamps: what every packet has before its payload.
HEADER_BYTES = 14 + 20 + 20 + 12
PORTS = (0, 1, 3)
#: What the workers may send more, or less, in per cent.
BOUND_PERCENT = 0.1
#: Steps of one measurement: for so many gradient bytes, but never fewer than that.
STEPS_BYTES, FEWEST_STEPS = 150_000_000, 4


class Scale(NamedTuple):
    """Workers and the sizes of their gradients in MB; how often to measure with each number of ports."""

    cases: tuple[tuple[int, tuple[float, ...]], ...]
    rounds: int


FULL = Scale(((2, (1, 10, 50, 200)), (3, (1, 10, 50, 200)), (4, (1, 10, 50, 200)), (8, (1, 10, 50))), 5)
MULTICAST = Scale(tuple((workers, (10, 50)) for workers in (2, 3, 4, 8)), 5)
QUICK = Scale(((2, (1,)),), 1)


class Sent(NamedTuple):
    """Per worker and step: bytes on the data network, those without the headers, and on the management network."""

    nbytes: float
    payload: float
    management: float


def egress(quick: bool, rate: str) -> Iterator[Figure]:
    """With 0 ports there are no rules and no shadow: the same collective, in the same processes. Otherwise the switch
    replicates to that many ports; a shadow listens at the first. They take turns. Counters are those of whole packets,
    acknowledgements and all; how many of these TCP sends depends on timing, so "0 ports" is compared with itself too.
    """
    yield from _cases("mirror", QUICK if quick else FULL)
    if not quick:
        yield Figure("egress: 8 workers × 200 MB are left out: 16 models of it and more do not fit here", 0)


def multicast_egress(quick: bool, rate: str) -> Iterator[Figure]:
    """As egress, but each rank's sums go to a group that peers and shadows have joined: to the peers it sends
    (N - 1) / N of a gradient, and to the group 1 / N, while a ring of N sends 2 (N - 1) / N. With 0 ports nobody but
    the workers has joined; otherwise a shadow, and others that join and read. Questions, answers and pieces that are
    sent again are in the counters. Datagrams that the kernel would cut only for a wire count as one packet.
    """
    yield from _cases("multicast", QUICK if quick else MULTICAST)


def _cases(tap: Tap, scale: Scale) -> Iterator[Figure]:
    for num_workers, sizes in scale.cases:
        with (
            Lab(workers=num_workers, shadows=max(PORTS), rules=False, multicast=tap == "multicast") as lab,
            shadow(lab) as listening,
            audience(lab, listening) as listeners,
            crew(lab, Rank) as ranks,
        ):
            for size in sizes:
                yield from _size(lab, ranks, listening, listeners, tap, int(size * 1e6), scale.rounds)


def _size(
    lab: Lab, ranks: Crew, listening: LabShadow, listeners: Audience, tap: Tap, nbytes: int, rounds: int
) -> Iterator[Figure]:
    num_workers = len(lab.workers)
    name = f"{'multicast-' if tap == 'multicast' else ''}egress: {num_workers} workers × {nbytes / 1e6:g} MB: "
    ranks.call("make", "bare", nbytes, tap)
    ranks.call("make", "attached", nbytes, tap, 0.0, listening.address)
    if tap == "multicast":
        ranks.call("make", "mirrored", nbytes, "mirror")
    count = max(FEWEST_STEPS, STEPS_BYTES // nbytes // (1 if rounds > 1 else 5))
    sent: dict[int, list[Sent]] = defaultdict(list)
    heard: dict[str, list[float]] = defaultdict(list)
    resent = 0
    for number in range(rounds):
        for ports in PORTS if number % 2 == 0 else reversed(PORTS):
            listeners.be(ports, run_of("attached", nbytes))
            loop = "attached" if ports else "bare"
            taken, links = during(lab, lambda loop=loop: ranks.call("steps", loop, count))  # type: ignore[misc]
            sent[ports].append(_sent(links, num_workers, count))
            resent += sum(rank.resent_bytes for rank in taken)
            for host in lab.shadows[:ports]:
                heard[host.name].append(links[host.name]["rx_bytes"] / count)
    listeners.be(0, run_of("attached", nbytes))
    _, links = during(lab, lambda: ranks.call("gloo", nbytes, count))
    if tap == "multicast":
        _, mirrored = during(lab, lambda: ranks.call("steps", "mirrored", count))
    ranks.call("drop")
    limit = 2 * (num_workers - 1) / num_workers * nbytes
    without = median([s.nbytes for s in sent[0]])
    yield Figure(f"{name}least payload{' of a ring' if tap == 'multicast' else ''}, 2 (N - 1) / N", limit / 1e6, "MB")
    yield Figure(f"{name}Gloo's all_reduce", _sent(links, num_workers, count).nbytes / 1e6, "MB")
    if tap == "multicast":
        yield Figure(f"{name}the mirrored tap", _sent(mirrored, num_workers, count).nbytes / 1e6, "MB")
        yield Figure(f"{name}least payload by multicast", nbytes / 1e6, "MB")
    yield Figure(f"{name}0 ports", without / 1e6, "MB")
    if tap == "mirror":
        yield Figure(f"{name}0 ports, without packet headers", median([s.payload for s in sent[0]]) / 1e6, "MB")
    else:
        yield Figure(f"{name}0 ports, by Gloo's all_reduce", without / _sent(links, num_workers, count).nbytes)
        yield Figure(f"{name}sent again", resent / rounds / len(PORTS) / count / nbytes * 100, "% of a gradient")
        least = min(chain.from_iterable(heard.values())) / nbytes
        yield at_least(f"{name}at the port of each that has joined, of a gradient", least, 1.0)
    spread = max(abs(s.nbytes / without - 1) for s in sent[0])
    yield Figure(f"{name}0 ports differ among themselves by up to", 100 * spread, "%")
    for ports in PORTS[1:]:
        pairs = list(zip(sent[ports], sent[0], strict=True))
        differs = abs(median([a.nbytes / b.nbytes for a, b in pairs]) - 1)
        payload = median([a.payload - b.payload for a, b in pairs])
        yield at_most(f"{name}{ports} ports differ by", 100 * differs, BOUND_PERCENT, "%")
        if tap == "mirror":
            yield Figure(f"{name}{ports} ports, payload per step more by", payload, "bytes")
    management = [s.management for ports in PORTS[1:] for s in sent[ports]]
    yield Figure(f"{name}on the management network", median(management) / 1e3, "kB")


def _sent(links: Counters, num_workers: int, count: int) -> Sent:
    data = [links[f"w{i}"] for i in range(num_workers)]
    nbytes = sum(link["tx_bytes"] for link in data)
    payload = nbytes - HEADER_BYTES * sum(link["tx_packets"] for link in data)
    management = sum(links[f"w{i}/mgmt0"]["tx_bytes"] for i in range(num_workers))
    each = num_workers * count
    return Sent(nbytes / each, payload / each, management / each)
