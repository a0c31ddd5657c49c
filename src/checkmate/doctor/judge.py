"""What observations mean, and which command mends what is wrong. Pure: nothing here asks a host.

A link goes from a worker to a shadow: the copies that the switch makes of what the worker sends to the next one. Each
finding is one line; `remedy` is a command to type, or says what to change where, and stands in each that failed.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median_low

from ..switch.cluster import Cluster, Shadow, Sonic, Worker
from . import CONTROL, FULL, KINDS, PACKETS, SMALL

OK, FAILED, UNKNOWN = "ok", "failed", "not checked"
#: What we ask the kernel for per connection, as transport.tcp does.
LEAST_BUFFER_BYTES = 4 << 20


#: What is typed at a Linux bridge, and at a SONiC switch.
SWITCH_COMMANDS = {
    "ports": ("ip link", "show interfaces status"),
    "rules": ("nft -a list ruleset", "show acl rule"),
    "copying": ("bridge -d link", "show mirror_session"),
    "drops": ("ip -s link show dev {port}", "show interfaces counters -i {port}"),
    "up": ("ip link set dev {port} up", "config interface startup {port}"),
    "mtu": ("ip link set dev {port} mtu {mtu}", "config interface mtu {port} {mtu}"),
}
#: What ERSPAN puts before a packet: Ethernet, IPv6 at most, GRE with a sequence number, ERSPAN.
ERSPAN_BYTES = 14 + 40 + 8 + 12


@dataclass(frozen=True)
class Line:
    subject: str  # a host, "worker -> shadow", "worker -> worker", "switch"
    check: str
    verdict: str  # OK, FAILED, UNKNOWN
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """What a host says of itself. `trouble`, if it cannot take part: interface, privilege, address, other;
    with multicast also memberships, port."""

    mtu: int | None  # of the interface; None if it is not there
    up: bool = True
    interfaces: tuple[str, ...] = ()
    buffers: Mapping[str, int] = field(default_factory=dict)  # rmem_max, wmem_max, as far as they can be read
    foreign_buffers: tuple[str, ...] = ()  # of these, what cannot be changed from within (a network namespace)
    trouble: str = ""
    said: str = ""


@dataclass(frozen=True)
class Arrival:
    """At the next worker, a connection with packets of this kind; `dscp` is None if the kernel does not say."""

    kind: str
    dscp: int | None


@dataclass(frozen=True)
class Probe:
    """What a worker sent to the next one. `lost` are the kinds of packets that were not acknowledged."""

    target: str
    error: str = ""
    lost: tuple[str, ...] = ()
    path_mtu: int | None = None
    arrived: tuple[Arrival, ...] = ()


@dataclass(frozen=True)
class Sightings:
    """At a shadow: per worker and packet (kind, number), how often it came with which mark."""

    seen: Mapping[str, Mapping[tuple[str, int], Mapping[int, int]]]
    dropped: int = 0  # packets that came too fast for us to look at


@dataclass(frozen=True)
class Rules:
    """`error`: the switch could not be asked, though it should be possible. `unknown`: why it was not."""

    differences: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    error: str = ""
    unknown: str = ""


@dataclass(frozen=True)
class Observations:
    """By name of the host. Each is in `facts`, in `silent` (which says why), or in both if it fell silent later."""

    silent: Mapping[str, str]
    facts: Mapping[str, Facts]
    probes: Mapping[str, Probe] = field(default_factory=dict)
    sightings: Mapping[str, Sightings] = field(default_factory=dict)
    rules: Rules = Rules()
    python: str = "python"


@dataclass(frozen=True)
class HostJudge:
    """What is said of each host, however gradients travel."""

    cluster: Cluster
    found: Observations
    file: str
    least_buffer_bytes: int

    # ------------------------------------------------------------ commands

    def on(self, host: Worker | Shadow, command: str) -> str:
        """A command, as it is typed here to run on the host."""
        before = [word.format(name=host.name, address=host.address) for word in shlex.split(self.cluster.exec)]
        return f"{shlex.join(before)} {command}".strip()

    @property
    def everyone(self) -> list[Worker | Shadow]:
        return [*self.cluster.workers, *self.cluster.shadows]

    @property
    def sonic(self) -> bool:
        return self.cluster.switch.sonic != Sonic()

    def at_switch(self, name: str, port: str = "", mtu: int = 0) -> str:
        command = SWITCH_COMMANDS[name][self.sonic].format(port=port, mtu=mtu)
        return f"{self.cluster.switch.exec} {command}".strip()

    @property
    def apply(self) -> str:
        target = " --target sonic" if self.sonic else ""
        return f"checkmate switch apply{target} --cluster {shlex.quote(self.file)}"

    # ------------------------------------------------------------ lines

    def host(self, host: Worker | Shadow) -> Iterator[Line]:
        if why := self.found.silent.get(host.name):
            trial = self.on(host, f"{self.found.python} -c 'import checkmate'")
            remedy = f"this has to work: {trial}; mend `exec` in {self.file}, or name the host's Python: --python"
            yield Line(host.name, "reach", FAILED, f"cannot be reached: {why}", remedy)
        facts = self.found.facts.get(host.name)
        if facts is None:
            return
        yield from self.interface(host, facts)
        yield from self.trouble(host, facts)
        yield from self.buffers(host, facts)

    def interface(self, host: Worker | Shadow, facts: Facts) -> Iterator[Line]:
        name = host.interface
        if facts.mtu is None:
            there = ", ".join(facts.interfaces)
            remedy = f"{self.on(host, 'ip link')} lists them; mend `interface` of {host.name} in {self.file}"
            yield Line(host.name, "interface", FAILED, f"no interface {name!r}; there are {there}", remedy)
            return
        if not facts.up:
            yield Line(host.name, "interface", FAILED, f"{name} is down", self.on(host, f"ip link set dev {name} up"))
            return
        wanted = self.mtu()
        wrong = facts.mtu != wanted if isinstance(host, Worker) else facts.mtu < wanted
        if wrong:
            text = f"{name} has an MTU of {facts.mtu} bytes, where the workers have {wanted}"
            yield Line(host.name, "mtu", FAILED, text, self.on(host, f"ip link set dev {name} mtu {wanted}"))
        else:
            yield Line(host.name, "mtu", OK, f"{name} is up, with an MTU of {facts.mtu} bytes")

    def mtu(self) -> int:
        """What most of the workers have; of several, the largest."""
        facts = [self.found.facts[worker.name] for worker in self.cluster.workers if worker.name in self.found.facts]
        counts = Counter(fact.mtu for fact in facts if fact.mtu is not None)
        return max(counts, key=lambda mtu: (counts[mtu], mtu), default=0)

    def trouble(self, host: Worker | Shadow, facts: Facts) -> Iterator[Line]:
        if facts.trouble == "privilege":
            text = f"may not capture on {host.interface}: {facts.said}; that needs the capability CAP_NET_RAW"
            remedy = (
                f"{self.on(host, 'setpriv --ambient-caps +net_raw,+net_admin --inh-caps +net_raw,+net_admin')} …, "
                "root, or a systemd unit with AmbientCapabilities=CAP_NET_RAW CAP_NET_ADMIN; the shadow needs the same"
            )
            yield Line(host.name, "capture", FAILED, text, remedy)
        elif facts.trouble == "address":
            text = f"{host.address} is no address of this host"
            remedy = f"{self.on(host, 'ip address')} lists them; mend `address` of {host.name} in {self.file}"
            yield Line(host.name, "address", FAILED, text, remedy)
        elif facts.trouble and facts.mtu is not None:
            what = f"listen on {host.address}" if isinstance(host, Worker) else f"capture on {host.interface}"
            remedy = f"{self.on(host, 'ip address')} shows what there is"
            yield Line(host.name, "capture", FAILED, f"cannot {what}: {facts.said}", remedy)
        elif not facts.trouble and isinstance(host, Shadow):
            yield Line(host.name, "capture", OK, f"may capture on {host.interface}")

    def buffers(self, host: Worker | Shadow, facts: Facts) -> Iterator[Line]:
        if len(facts.buffers) < 2:
            yield Line(host.name, "buffers", UNKNOWN, "limits of socket buffers cannot be read here")
        low = {name: size for name, size in facts.buffers.items() if size < self.least_buffer_bytes}
        for name, size in low.items():
            # No failure: the kernel sizes what TCP connections have by itself. It bounds whoever asks for more.
            text = f"net.core.{name} is {size:,} bytes, which bounds a capture without CAP_NET_ADMIN"
            yield Line(host.name, "buffers", OK, text, self.raise_limit(host, facts, name))
        if facts.buffers and not low:
            sizes = ", ".join(f"net.core.{name} {size:,}" for name, size in facts.buffers.items())
            yield Line(host.name, "buffers", OK, sizes)

    def raise_limit(self, host: Worker | Shadow, facts: Facts, name: str) -> str:
        command = f"sysctl -w net.core.{name}={self.least_buffer_bytes}"
        outside = name in facts.foreign_buffers
        return f"{command} (on the machine, outside of its network namespaces)" if outside else self.on(host, command)


@dataclass(frozen=True)
class _Judge(HostJudge):
    @property
    def rules_differ(self) -> bool:
        return bool(self.found.rules.differences or self.found.rules.lacking)

    def lines(self) -> Iterator[Line]:
        for host in self.everyone:
            yield from self.host(host)
        yield from self.switch()
        for worker in self.cluster.workers:
            yield from self.path(worker)
        for worker in self.cluster.workers:
            for shadow in self.cluster.shadows:
                yield from self.link(worker, shadow)

    def switch(self) -> Iterator[Line]:
        rules = self.found.rules
        if rules.unknown:
            yield Line("switch", "rules", UNKNOWN, rules.unknown)
        elif rules.error:
            remedy = (
                f"mend `switch.exec` in {self.file}, or the switch; then: checkmate switch show --cluster {self.file}"
            )
            yield Line("switch", "rules", FAILED, rules.error, remedy)
        for sentence in rules.lacking:
            remedy = f"{self.at_switch('ports')} lists the ports; then: {self.apply}"
            yield Line("switch", "rules", FAILED, sentence, remedy)
        if rules.differences:
            text = f"is not as the description asks: apply would {', '.join(rules.differences)}"
            yield Line("switch", "rules", FAILED, text, self.apply)
        if rules == Rules():
            yield Line("switch", "rules", OK, "has the rules that the description asks for")

    def path(self, worker: Worker) -> Iterator[Line]:
        """What a worker sends to the next one, whether it is copied or not."""
        probe = self.found.probes.get(worker.name)
        if probe is None:
            facts = self.found.facts.get(worker.name)
            if facts is not None and not facts.trouble and worker.name not in self.found.silent:
                yield Line(worker.name, "path", UNKNOWN, "there is no other worker to send packets to")
            return
        subject = f"{worker.name} -> {probe.target}"
        target = next(host for host in self.cluster.workers if host.name == probe.target)
        if probe.error or SMALL in probe.lost:
            why = probe.error or "connected, but packets with the mark are not acknowledged"
            remedy = f"{self.on(worker, f'ip route get {target.address}')}, and look for a firewall on the way: "
            yield Line(subject, "path", FAILED, why, remedy + self.on(target, "nft list ruleset"))
            return
        mtu = self.found.facts[worker.name].mtu or 0
        if FULL in probe.lost:
            text = "packets of full size get lost on the way: a port between them has a smaller MTU"
            yield Line(subject, "mtu", FAILED, text, self.port_mtu(worker, target))
        elif probe.path_mtu is not None and probe.path_mtu < mtu:
            text = f"the path takes {probe.path_mtu} bytes, less than the MTU of {mtu}"
            yield Line(subject, "mtu", FAILED, text, self.port_mtu(worker, target))
        else:
            yield Line(subject, "mtu", OK, "packets of full size arrive")
        yield from self.mark(worker, probe, subject)

    def port_mtu(self, *hosts: Worker | Shadow) -> str:
        return "; ".join(self.at_switch("mtu", host.port, self.mtu()) for host in hosts)

    def mark(self, worker: Worker, probe: Probe, subject: str) -> Iterator[Line]:
        """What became of the mark on the way to the next worker."""
        wanted = self.cluster.dscp
        looking = f"find the rule that sets it: {self.on(worker, 'nft list ruleset')}; {self.at_switch('rules')}"
        marked = [arrival.dscp for arrival in probe.arrived if arrival.kind == SMALL]
        plain = [arrival.dscp for arrival in probe.arrived if arrival.kind == CONTROL]
        if not marked or None in marked:
            yield Line(
                subject, "dscp", UNKNOWN, f"the kernel of {probe.target} does not say with which mark packets came"
            )
        elif marked != [wanted]:
            yield Line(subject, "dscp", FAILED, f"DSCP {wanted} was rewritten to {marked[0]} on the way", looking)
        elif plain == [wanted]:
            text = f"packets that were sent without a mark arrive with DSCP {wanted}: all traffic would be copied"
            yield Line(subject, "dscp", FAILED, text, looking)
        else:
            yield Line(subject, "dscp", OK, f"DSCP {wanted} survives")

    def link(self, worker: Worker, shadow: Shadow) -> Iterator[Line]:
        """What a shadow saw of a worker. Where a host or the path failed, that is said there, and nothing here."""
        probe, sightings = self.found.probes.get(worker.name), self.found.sightings.get(shadow.name)
        if probe is None or sightings is None or probe.error or SMALL in probe.lost:
            return
        if not self.found.facts[shadow.name].up:
            return
        packets = sightings.seen.get(worker.name, {})
        times = {kind: [sum(marks.values()) for key, marks in packets.items() if key[0] == kind] for kind in KINDS}
        subject = f"{worker.name} -> {shadow.name}"
        expected = [kind for kind in (SMALL, FULL) if kind not in probe.lost]
        if times[SMALL] and FULL in expected and not times[FULL]:
            expected.remove(FULL)
            text = "packets of full size are not copied, small ones are: the shadow's port has a smaller MTU"
            yield Line(subject, "mtu", FAILED, text, self.shadow_mtu(shadow))
        copies = [count for kind in expected for count in times[kind]]
        if not copies:
            yield Line(subject, "copies", FAILED, "no marked packet is copied", self.never(worker, shadow, probe))
        else:
            yield self.copies(shadow, subject, copies, PACKETS * len(expected), sightings.dropped)
            yield self.mark_of_copies(subject, {mark for key in packets if key[0] != CONTROL for mark in packets[key]})
        if times[CONTROL]:
            text = "traffic without the mark is copied as well, which may be more than the shadow's port can take"
            looking = f"find what copies it: {self.at_switch('rules')}; {self.at_switch('copying')}"
            remedy = self.apply if self.rules_differ else looking
            yield Line(subject, "unmarked", FAILED, text, remedy)
        elif copies and CONTROL not in probe.lost:
            yield Line(subject, "unmarked", OK, "traffic without the mark is not copied")

    def copies(self, shadow: Shadow, subject: str, times: list[int], sent: int, dropped: int) -> Line:
        """`times` says of each packet that came how often it did: of most, that is not changed by a retransmission."""
        number, lacking = median_low(times), sent - len(times)
        if number > 1:
            often = "twice" if number == 2 else f"{number} times"
            looking = f"find the second rule, or the second switch on the way: {self.at_switch('rules')}"
            remedy = self.apply if self.rules_differ else looking
            return Line(subject, "copies", FAILED, f"each marked packet is copied {often}", remedy)
        if lacking:
            overrun = f"; this host could not look at {dropped} packets: try while nothing trains" if dropped else ""
            remedy = f"{self.at_switch('drops', shadow.port)} shows what its port drops"
            return Line(subject, "copies", FAILED, f"{lacking} of {sent} copies are missing{overrun}", remedy)
        return Line(subject, "copies", OK, "each marked packet is copied once")

    def mark_of_copies(self, subject: str, marks: set[int]) -> Line:
        wanted = self.cluster.dscp
        if others := ", ".join(map(str, sorted(marks - {wanted}))):
            text = f"copies arrive with DSCP {others} in place of {wanted}: the capture overlooks them"
            return Line(subject, "dscp", FAILED, text, f"find the rule that sets it: {self.at_switch('rules')}")
        return Line(subject, "dscp", OK, f"copies have DSCP {wanted}")

    def shadow_mtu(self, shadow: Shadow) -> str:
        room = ERSPAN_BYTES if self.sonic and self.cluster.switch.sonic.session == "erspan" else 0
        size = self.mtu() + room
        host = self.on(shadow, f"ip link set dev {shadow.interface} mtu {size}")
        return f"{host}; {self.at_switch('mtu', shadow.port, size)}"

    def never(self, worker: Worker, shadow: Shadow, probe: Probe) -> str:
        came = {arrival.dscp for arrival in probe.arrived if arrival.kind == SMALL} - {None, self.cluster.dscp}
        if came and not self.rules_differ:
            return f"first keep the mark, see {worker.name} -> {probe.target}"
        if self.rules_differ or self.found.rules.unknown or self.found.rules.error:
            return self.apply
        up = self.at_switch("up", shadow.port)
        return f"the rules are there: {up}; and look at the cable of {shadow.name}"


def judge(cluster: Cluster, found: Observations, file: str, least_buffer_bytes: int = LEAST_BUFFER_BYTES) -> list[Line]:
    """One line per thing that was looked at; `file` has the description."""
    return list(_Judge(cluster, found, file, least_buffer_bytes).lines())
