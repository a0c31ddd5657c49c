"""What a lab looks like, and the commands that build it. Pure: nothing here touches a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address

from ..errors import UsageError
from ..switch.cluster import DSCP, Cluster, Multicast, Shadow, Switch, Worker

PREFIX = "cm-"
SWITCH = PREFIX + "switch"
#: The namespaces that are ours. What bears another name is never looked into, let alone removed.
OURS = re.compile(PREFIX + r"(switch|w\d+|s\d+)")

#: Interface on a host; beginning of the port's name and of the bridge's in the switch; addresses.
DATA = ("eth0", "", "data", "10.77.{}.{}")
MGMT = ("mgmt0", "m-", "mgmt", "10.78.{}.{}")
CONTROL_PORT = 7070

MOST_WORKERS, MOST_SHADOWS = 64, 16
#: What tbf lets pass at once. A GSO packet has up to 64 KiB and the headers of all that it will be cut into.
BURST_BYTES = 128 * 1024
#: How long a packet may wait in a limited link's queue.
QUEUE_S = 0.02
RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class Shape:
    """What can be chosen. Rate, MTU and offloads are those of the data network; management is never limited."""

    workers: int = 2
    shadows: int = 1
    mtu: int = 1500
    rate: str | None = None  # of each link, in each direction: "1gbit"
    offloads: bool = True  # False: every packet on the wire has at most the MTU, with its checksum filled in
    rules: bool = True  # the switch mirrors what is marked
    multicast: bool = False  # gradients go by multicast, to whom the switch has heard join

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise UsageError(f"{self.workers} workers; a lab has 1 to {MOST_WORKERS}")
        if not 0 <= self.shadows <= MOST_SHADOWS:
            raise UsageError(f"{self.shadows} shadows; a lab has 0 to {MOST_SHADOWS}")
        if not 576 <= self.mtu <= 65535:
            raise UsageError(f"MTU {self.mtu}; it must be 576 to 65535")
        if self.rate is not None and bytes_per_s(self.rate) < 1000:
            raise UsageError(f"rate {self.rate!r} is too low; write, for example, 1gbit")
        if self.rules and self.multicast:
            raise UsageError("a lab with multicast mirrors nothing: no rules")

    def __str__(self) -> str:
        rate = f", {self.rate} per link" if self.rate else ""
        offloads, rules = (
            "" if on else f", no {what}" for on, what in ((self.offloads, "offloads"), (self.rules, "rules"))
        )
        if self.multicast:
            rules = ", multicast"
        workers, shadows = (
            f"{count} {noun}{'' if count == 1 else 's'}"
            for count, noun in ((self.workers, "worker"), (self.shadows, "shadow"))
        )
        return f"{workers}, {shadows}, MTU {self.mtu}{rate}{offloads}{rules}"


@dataclass(frozen=True)
class Host:
    name: str
    address: str  # on eth0
    management: str  # on mgmt0

    @property
    def namespace(self) -> str:
        return PREFIX + self.name

    @property
    def links(self) -> tuple[tuple[str, str, str, str], ...]:
        """Of each link: interface, port and bridge in the switch, address."""
        return tuple(
            (interface, prefix + self.name, bridge, address)
            for (interface, prefix, bridge, _), address in zip(
                (DATA, MGMT), (self.address, self.management), strict=True
            )
        )


@dataclass(frozen=True)
class Command:
    """`argv`, given `text`: a batch, because a process per link would take seconds."""

    argv: tuple[str, ...]
    text: str = ""


def workers(shape: Shape) -> list[Host]:
    return [_host(f"w{i}", 0, i) for i in range(shape.workers)]


def shadows(shape: Shape) -> list[Host]:
    return [_host(f"s{i}", 1, i) for i in range(shape.shadows)]


def hosts(shape: Shape) -> list[Host]:
    return workers(shape) + shadows(shape)


def _host(name: str, group: int, number: int) -> Host:
    return Host(name, *(template.format(group, number + 1) for *_, template in (DATA, MGMT)))


def cluster(shape: Shape) -> Cluster:
    """The lab as ``checkmate switch`` and ``checkmate doctor`` take it. There may be no shadow in it."""
    return Cluster(
        tuple(Worker(host.name, host.address, host.name) for host in workers(shape)),
        tuple(
            Shadow(host.name, host.address, host.name, listen=f"{host.management}:{CONTROL_PORT}")
            for host in shadows(shape)
        ),
        DSCP,
        f"ip netns exec {PREFIX}{{name}}",
        Switch(DATA[2], f"ip netns exec {SWITCH}"),
        Multicast() if shape.multicast else None,
    )


def commands(shape: Shape) -> Iterator[Command]:
    """Build a lab where there is none."""
    everyone = hosts(shape)
    namespaces = [SWITCH, *(host.namespace for host in everyone)]
    yield Command(("ip", "-batch", "-"), _lines(f"netns add {name}" for name in namespaces))
    for name in namespaces:
        yield Command((*within(name), "sh", "-c", NO_IPV6))
    yield Command(("ip", "-batch", "-"), _lines(_cables(shape)))
    for name in namespaces:
        yield Command((*within(name), "sh", "-c", IN_ORDER))
    yield Command(("ip", "-n", SWITCH, "-batch", "-"), _lines(_bridges(shape)))
    yield Command(("bridge", "-n", SWITCH, "-batch", "-"), _lines(_forwarding(shape)))
    for host in everyone:
        yield Command(("ip", "-n", host.namespace, "-batch", "-"), _lines(_interfaces(host, everyone)))
        if shape.multicast:
            yield Command(("ip", "-n", host.namespace, "route", "add", "224.0.0.0/4", "dev", DATA[0]))
    if not shape.offloads:
        for host in everyone:
            yield Command((*within(host.namespace), "ethtool", "-K", DATA[0], *OFFLOADS))
    if shape.rate is not None:
        limits = _limit(shape.rate)
        yield Command(
            ("tc", "-n", SWITCH, "-batch", "-"), _lines(f"qdisc add dev {h.name} root {limits}" for h in everyone)
        )
        for host in everyone:
            yield Command(("tc", "-n", host.namespace, "qdisc", "add", "dev", DATA[0], "root", *limits.split()))


#: Router solicitations and reports of group membership would stand in the counters.
NO_IPV6 = "for f in all default; do f=/proc/sys/net/ipv6/conf/$f/disable_ipv6; [ ! -e $f ] || echo 1 >$f; done"
#: As on a wire, packets of one connection stay in order, whichever processor their sender runs on. Otherwise TCP takes
#: some for lost, and what it sends again stands in the counters.
IN_ORDER = (
    "n=$(nproc); [ $n -lt 32 ] || n=31; mask=$(printf %x $(((1 << n) - 1))); "
    "for f in /sys/class/net/*/queues/rx-*/rps_cpus; do [ ! -e $f ] || echo $mask >$f; done"
)
#: A group goes to the ports whose host has joined it, as soon as that is heard. In this order: a new querier waits for
#: as long as hosts may take to answer, until when no group goes anywhere; here it does not wait. Then they have 0.1 s
#: (all is in 1/100 s). It asks often, because `Lab.drop` loses questions too; who is silent for 260 s is forgotten.
SNOOPING = (
    "mcast_query_response_interval 0",
    "mcast_snooping 1 mcast_querier 1",
    "mcast_query_response_interval 10 mcast_query_interval 1000",
)
OFFLOADS = ("tx", "off", "sg", "off", "tso", "off", "gso", "off", "gro", "off")


def within(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


def mac(address: str) -> str:
    """Locally administered, and the IPv4 address in it: whoever reads a capture knows who it was."""
    return "02:00:" + ":".join(f"{byte:02x}" for byte in IPv4Address(address).packed)


def bytes_per_s(rate: str) -> float:
    if not (found := RATE.fullmatch(rate)):
        raise UsageError(f"rate {rate!r}; write a number and kbit, mbit or gbit, as in 1gbit")
    return float(found[1]) * UNITS[found[2]] / 8


def _limit(rate: str) -> str:
    limit = BURST_BYTES + max(BURST_BYTES * 2, int(bytes_per_s(rate) * QUEUE_S))
    return f"tbf rate {rate} burst {BURST_BYTES} limit {limit}"


def _lines(lines: Iterator[str] | list[str]) -> str:
    return "".join(line + "\n" for line in lines)


def _cables(shape: Shape) -> Iterator[str]:
    """Both ends of a cable come to be where they belong, so that no name is ever taken outside."""
    for host in hosts(shape):
        for interface, port, bridge, address in host.links:
            mtu = f"mtu {shape.mtu if bridge == DATA[2] else 1500}"
            near = f"link add {interface} {mtu} address {mac(address)} netns {host.namespace}"
            yield f"{near} type veth peer name {port} {mtu} netns {SWITCH}"


def _bridges(shape: Shape) -> Iterator[str]:
    """Nothing is learned and nothing flooded: a port sees what is addressed to its host, or a group that it has joined,
    and what is mirrored to it."""
    for *_, bridge, _ in (DATA, MGMT):
        yield f"link add {bridge} type bridge stp_state 0 mcast_snooping 0"
    for host in hosts(shape):
        for _, port, bridge, _ in host.links:
            yield f"link set {port} master {bridge} up"
            yield f"link set {port} type bridge_slave learning off flood off mcast_flood off bcast_flood off"
    if shape.multicast:
        yield from (f"link set {DATA[2]} type bridge {words}" for words in SNOOPING)
        yield from (f"link set {host.name} type bridge_slave mcast_fast_leave on" for host in hosts(shape))
    for *_, bridge, _ in (DATA, MGMT):
        yield f"link set {bridge} up"


def _forwarding(shape: Shape) -> Iterator[str]:
    for host in hosts(shape):
        for _, port, _, address in host.links:
            yield f"fdb add {mac(address)} dev {port} master static"


def _interfaces(host: Host, everyone: list[Host]) -> Iterator[str]:
    """Who has which MAC is said once: there is no ARP in the counters."""
    yield "link set lo up"
    for number, (interface, _, _, address) in enumerate(host.links):
        yield f"addr add {address}/16 dev {interface}"
        yield f"link set {interface} up"
        for other in everyone:
            if other != host:
                there = other.links[number][3]
                yield f"neigh add {there} lladdr {mac(there)} dev {interface} nud permanent"
