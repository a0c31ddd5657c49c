"""What observations of multicast mean, and which command mends it. Pure, as `judge` is.

A link goes from a worker to each other host, worker or shadow: what the worker sends once to the group has to arrive
there, once. Where it does not, the same datagrams sent to that host alone, and those that came in on its interface
without being delivered, say whether the path is at fault, the switch, or the host itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..switch.cluster import Cluster, Shadow, Worker
from ..wire.datagrams import GROUP_PORT
from ..wire.multicast import FIRST_WINDOW_BYTES
from . import DIRECT, FULL, PACKETS, SECOND, SMALL
from .judge import FAILED, OK, UNKNOWN, Facts, HostJudge, Line, Observations

#: What a receiver would have for what comes in a burst.
LEAST_BUFFER_BYTES = 8 << 20
#: Of rp_filter.
STRICT = 1
#: What lets the kernel cut and join datagrams.
OFFLOADS = ("UDP_SEGMENT", "UDP_GRO")

#: By worker, and by kind and number of the datagram: how often it came.
Counts = Mapping[str, Mapping[tuple[str, int], int]]


class Route(NamedTuple):
    interface: str
    gateway: str = ""  # "" if there is none on the way


@dataclass(frozen=True)
class Member:
    """What a host that has joined the group says of itself, besides its `Facts`."""

    carrier: bool = True
    capture: str = ""  # why it may not see what comes in on its interface; "" if it may
    receive_bytes: int = LEAST_BUFFER_BYTES  # that a socket of this process gets
    offloads: tuple[str, ...] = OFFLOADS
    rp_filter: int = 0
    routes: Mapping[str, Route] = field(default_factory=dict)  # to other hosts, as far as they are known


@dataclass(frozen=True)
class Bridge:
    """`error`: the switch could not be asked, though it should be possible. `unknown`: why it was not."""

    snooping: bool = True
    querier: bool = True  # it queries, or has heard somebody who does
    ports: tuple[str, ...] = ()  # behind which it knows members of the first group
    error: str = ""
    unknown: str = ""


@dataclass(frozen=True)
class Found(Observations):
    """By name of the host. Of the second group, the last shadow is the only member."""

    groups: tuple[str, ...] = ()  # one or two
    members: Mapping[str, Member] = field(default_factory=dict)
    sent: Mapping[str, str] = field(default_factory=dict)  # by worker: the system's words, or ""
    heard: Mapping[str, Counts] = field(default_factory=dict)  # by sockets
    seen: Mapping[str, Counts] = field(default_factory=dict)  # on the interface, by those who may capture
    bridge: Bridge = Bridge()


@dataclass(frozen=True)
class _Judge(HostJudge):
    found: Found

    # ------------------------------------------------------------ hosts

    def lines(self) -> Iterator[Line]:
        for host in self.everyone:
            yield from self.host(host)
            yield from self.member(host)
        yield from self.switch()
        for worker in self.cluster.workers:
            yield from self.sending(worker)
        for worker in self.cluster.workers:
            for target in self.everyone:
                yield from self.link(worker, target)

    def trouble(self, host: Worker | Shadow, facts: Facts) -> Iterator[Line]:
        group = self.found.groups[0]
        if facts.trouble == "address":
            yield from super().trouble(host, facts)
        elif facts.trouble and facts.mtu is not None:
            command = {
                "memberships": "sysctl -w net.ipv4.igmp_max_memberships=100",
                "port": f"ss -lunp sport = :{GROUP_PORT}",
            }.get(facts.trouble, f"ip address show dev {host.interface}")
            text = f"cannot join {group}, UDP port {GROUP_PORT}, on {host.interface}: {facts.said}"
            yield Line(host.name, "join", FAILED, text, self.on(host, command))
        elif not facts.trouble:
            yield Line(host.name, "join", OK, f"has joined {group}, UDP port {GROUP_PORT}")

    def buffers(self, host: Worker | Shadow, facts: Facts) -> Iterator[Line]:
        """Peers send what fits. It is a failure if that is less than they begin with."""
        member = self.found.members.get(host.name)
        for name, size in facts.buffers.items():
            if size < self.least_buffer_bytes:
                failed = name == "rmem_max" and member is not None and member.receive_bytes < FIRST_WINDOW_BYTES
                text = (
                    f"net.core.{name} is {size:,} bytes, not {self.least_buffer_bytes:,}: without CAP_NET_ADMIN, less "
                    "is sent at a time"
                )
                verdict = FAILED if failed else OK
                yield Line(host.name, "buffers", verdict, text, self.raise_limit(host, facts, name))

    def member(self, host: Worker | Shadow) -> Iterator[Line]:
        member = self.found.members.get(host.name)
        if member is None:
            return
        if self.found.facts[host.name].up and not member.carrier:
            text = f"{host.interface} has no carrier: the other end is down, or the cable is out"
            yield Line(host.name, "carrier", FAILED, text, self.at_switch("up", host.port))
        if lost := self.filtered(host):
            ways = ", ".join(f"{name} by {member.routes[name].interface}" for name in lost)
            text = f"rp_filter is strict: what comes in on {host.interface} is dropped if answers go elsewhere: {ways}"
            loose = self.on(host, f"sysctl -w net.ipv4.conf.{host.interface.replace('.', '/')}.rp_filter=2")
            yield Line(
                host.name, "rp_filter", FAILED, text, f"{loose}; or mend its routes: {self.on(host, 'ip route')}"
            )
        lacking = " and ".join(name for name in OFFLOADS if name not in member.offloads)
        text = f"plain datagrams, which cost more processor time: no {lacking}" if lacking else " and ".join(OFFLOADS)
        yield Line(host.name, "offloads", OK, text)

    def filtered(self, host: Worker | Shadow) -> list[str]:
        """Workers whose datagrams a strict reverse-path filter drops here."""
        member = self.found.members[host.name]
        workers = {worker.name for worker in self.cluster.workers}
        ways = {name: route for name, route in member.routes.items() if name in workers}
        return [name for name, way in ways.items() if member.rp_filter == STRICT and way.interface != host.interface]

    # ------------------------------------------------------------ the switch

    @property
    def snoop(self) -> str:
        return "switch on IGMP snooping and a querier" if self.sonic else self.apply

    @property
    def bridge_is_wrong(self) -> bool:
        return not (self.found.bridge.snooping and self.found.bridge.querier)

    def switch(self) -> Iterator[Line]:
        bridge, name = self.found.bridge, self.cluster.switch.bridge
        if bridge.error:
            yield Line(
                "switch", "querier", FAILED, bridge.error, f"mend `bridge` and `exec` of [switch] in {self.file}"
            )
        elif bridge.unknown:
            text = f"{bridge.unknown}; without a querier there, groups may fall silent 260 s after they were joined"
            yield Line("switch", "querier", UNKNOWN, text)
        elif not bridge.snooping:
            text = f"{name} does not snoop: it floods, and every port gets all gradients"
            yield Line("switch", "flooding", FAILED, text, self.snoop)
            return
        elif not bridge.querier:
            text = (
                f"{name} snoops, and nobody queries who listens: it floods, and every port gets all gradients; "
                "or none, where ports have mcast_flood off"
            )
            yield Line("switch", "querier", FAILED, text, self.snoop)
            return
        else:
            yield Line("switch", "querier", OK, f"{name} snoops, and members are queried")
        yield self.flooding()

    def flooding(self) -> Line:
        """Does a group reach who has not joined it?"""
        if len(self.found.groups) < 2:
            return Line("switch", "flooding", UNKNOWN, "the range holds one group, and nobody is left out of it")
        group, last = self.found.groups[1], self.cluster.shadows[-1].name
        if not _has(self.found.heard.get(last, {}), SECOND):
            return Line("switch", "flooding", UNKNOWN, f"{last}, the only member of {group}, does not hear it either")
        others = {host: counts for host, counts in self.found.seen.items() if host != last}
        if reached := [host for host, counts in others.items() if _has(counts, SECOND)]:
            text = f"floods: {group} reaches {', '.join(reached)}, and only {last} has joined it"
            ports = f"look for ports with mcast_router 2, and other switches: {self.at_switch('copying')}"
            young = "a querier that was just switched on takes 10 s"
            remedy = self.snoop if self.found.bridge.unknown or self.found.bridge.error else f"{ports}; {young}"
            return Line("switch", "flooding", FAILED, text, remedy)
        if any(name != host for name, error in self.found.sent.items() if not error for host in others):
            return Line("switch", "flooding", OK, f"who has not joined {group} does not get it")
        why = {member.capture for member in self.found.members.values()} - {""} or {"too few hosts take part"}
        text = f"whether {group} reaches who has not joined it cannot be seen: {', '.join(sorted(why))}"
        return Line("switch", "flooding", UNKNOWN, text)

    # ------------------------------------------------------------ links

    def sending(self, worker: Worker) -> Iterator[Line]:
        if why := self.found.sent.get(worker.name):
            remedy = f"{self.on(worker, f'ip route get {self.found.groups[0]}')}; {self.on(worker, 'nft list ruleset')}"
            yield Line(worker.name, "send", FAILED, f"cannot send to {self.found.groups[0]}: {why}", remedy)

    def well(self, host: Worker | Shadow) -> bool:
        """False where nothing can arrive, for a reason that stands in a line of its own."""
        member = self.found.members.get(host.name)
        return member is not None and member.carrier and self.found.facts[host.name].up

    def link(self, worker: Worker, target: Worker | Shadow) -> Iterator[Line]:
        """Where a host failed, that is said there, and nothing here."""
        if worker.name == target.name or self.found.sent.get(worker.name) != "" or not self.well(worker):
            return
        if not self.well(target) or target.name not in self.found.heard or worker.name in self.filtered(target):
            return
        subject = f"{worker.name} -> {target.name}"
        heard = self.found.heard[target.name].get(worker.name, {})
        times = {kind: [count for key, count in heard.items() if key[0] == kind] for kind in (SMALL, FULL, DIRECT)}
        if not times[SMALL] and not times[FULL]:
            yield self.never(subject, worker, target, alone=bool(times[DIRECT]))
            return
        expected = [SMALL, FULL]
        if not times[FULL]:
            expected = [SMALL]
            mtu = "; ".join(self.at_switch("mtu", host.port, self.mtu()) for host in (worker, target))
            text = "full-size datagrams get lost, small ones arrive: a port between them has a smaller MTU"
            yield Line(subject, "mtu", FAILED, text, mtu)
        yield self.arrivals(subject, target, [count for kind in expected for count in times[kind]], expected)
        if not times[DIRECT] and isinstance(target, Worker):  # a shadow answers by TCP
            text = "multicast arrives, and datagrams to this host alone do not: nothing is acknowledged"
            yield Line(subject, "unicast", FAILED, text, self.firewall(worker, target))

    def arrivals(self, subject: str, target: Worker | Shadow, times: list[int], kinds: list[str]) -> Line:
        sent = PACKETS * len(kinds)
        lacking, again = sent - len(times), [count for count in times if count > 1]
        if again:
            text = f"{len(again)} of {sent} datagrams arrive {'twice' if max(again) == 2 else f'{max(again)} times'}"
            remedy = f"find the second path, or the rule that copies: {self.at_switch('copying')}; "
            return Line(subject, "multicast", FAILED, text, remedy + self.at_switch("rules"))
        if lacking:
            text = f"{lacking} of {sent} datagrams are missing"
            remedy = f"{self.at_switch('drops', target.port)} shows what its port drops"
            return Line(subject, "multicast", FAILED, text, remedy)
        what = "small and full-size" if FULL in kinds else "small"
        return Line(subject, "multicast", OK, f"{what} datagrams arrive once")

    def never(self, subject: str, worker: Worker, target: Worker | Shadow, alone: bool) -> Line:
        """Nothing that was sent to the group has arrived; `alone`: what was sent to the host has."""
        assert self.cluster.multicast is not None
        group, ttl = self.found.groups[0], self.cluster.multicast.ttl
        on_interface = self.found.seen.get(target.name, {}).get(worker.name, {})
        route = self.found.members[worker.name].routes.get(target.name)
        if any(kind in (SMALL, FULL) for kind, _ in on_interface):
            text = (
                f"reaches {target.interface} of {target.name}, which drops it: a firewall, or its reverse-path filter"
            )
            remedy = f"{self.on(target, 'nft list ruleset')}; {self.on(target, 'nstat -az TcpExtIPReversePathFilter')}"
        elif route is not None and route.gateway:
            ends = ", and TTL 1 ends there" if ttl == 1 else ", which may not route multicast"
            raise_ttl = f"`ttl = 2` under [multicast] in {self.file}, and attach(ttl=2); " if ttl == 1 else ""
            text = f"{target.name} is in another network, behind {route.gateway}{ends}"
            remedy = f"{raise_ttl}{route.gateway} has to route {group}"
        elif not alone and DIRECT not in {kind for kind, _ in on_interface}:
            text = "nothing arrives, not even what is sent to this host alone"
            remedy = self.firewall(worker, target)
        elif self.bridge_is_wrong:
            text, remedy = "multicast does not arrive, unicast does", f"first mend the switch: {self.snoop}"
        else:
            why, remedy = self.why_not(target, group)
            text = f"multicast does not arrive, unicast does: {why}"
        return Line(subject, "multicast", FAILED, text, remedy)

    def why_not(self, target: Worker | Shadow, group: str) -> tuple[str, str]:
        bridge, rules = self.found.bridge, self.at_switch("rules")
        if target.port in bridge.ports:
            why = "the switch knows who has joined, so a firewall drops it, or its querier was just switched on (10 s)"
            return why, f"{rules}; {self.at_switch('copying')}"
        mdb = f"{self.cluster.switch.exec} bridge mdb show dev {self.cluster.switch.bridge or 'BRIDGE'}".strip()
        groups = "show ip igmp snooping groups" if self.sonic else mdb
        remedy = f"{group} should stand there for port {target.port}: {groups}; {rules}"
        if bridge.error or bridge.unknown:
            return "the switch has not seen who joins, or a firewall drops it", remedy
        return f"the switch has not seen {target.name} join", remedy

    def firewall(self, worker: Worker, target: Worker | Shadow) -> str:
        route = self.on(worker, f"ip route get {target.address}")
        up = self.at_switch("up", target.port)
        return f"{route}; {up}; and look for a firewall on the way: {self.on(target, 'nft list ruleset')}"


def _has(counts: Counts, kind: str) -> bool:
    return any(key[0] == kind for packets in counts.values() for key in packets)


def judge(cluster: Cluster, found: Found, file: str, least_buffer_bytes: int = LEAST_BUFFER_BYTES) -> list[Line]:
    """One line per thing that was looked at; `file` has the description, with `multicast`."""
    return list(_Judge(cluster, found, file, least_buffer_bytes).lines())
