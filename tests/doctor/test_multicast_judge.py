"""What observations of multicast mean: every fault is found, in its place, with what mends it; and nothing else is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from checkmate.doctor import DIRECT, FULL, PACKETS, SECOND, SMALL
from checkmate.doctor.judge import FAILED, OK, UNKNOWN, Facts, Line
from checkmate.doctor.multicast_judge import Bridge, Found, Member, Route, judge
from checkmate.switch.cluster import Cluster, Multicast, Shadow, Sonic, Switch, Worker

CLUSTER = Cluster(
    (Worker("w0", "10.77.0.1", "p0"), Worker("w1", "10.77.0.2", "p1"), Worker("w2", "10.77.0.3", "p2")),
    (Shadow("s0", "10.77.1.1", "q0"), Shadow("s1", "10.77.1.2", "q1")),
    exec="ssh {address}",
    switch=Switch("br0", "ssh tor"),
    multicast=Multicast(),
)
WORKERS, HOSTS = ("w0", "w1", "w2"), ("w0", "w1", "w2", "s0", "s1")
FACTS = Facts(1500, True, ("lo", "eth0"), {"rmem_max": 8 << 20, "wmem_max": 8 << 20})
Datagrams = Mapping[tuple[str, int], int]


def came(*kinds: str, times: int = 1) -> Datagrams:
    return {(kind, number): times for kind in kinds for number in range(PACKETS)}


ALL = came(SMALL, FULL, DIRECT)


def at(host: str) -> dict[str, Datagrams]:
    """What comes from each worker on a host of a healthy cluster."""
    return {worker: ALL | (came(SECOND) if host == "s1" else {}) for worker in WORKERS if worker != host}


HEALTHY = Found(
    silent={},
    facts=dict.fromkeys(HOSTS, FACTS),
    groups=("239.77.0.4", "239.77.0.5"),
    members={
        name: Member(routes={other: Route("eth0") for other in HOSTS if other != name}) for name in HOSTS
    },
    sent=dict.fromkeys(WORKERS, ""),
    heard={name: at(name) for name in HOSTS},
    seen={name: at(name) for name in HOSTS},
    bridge=Bridge(ports=("p0", "p1", "p2", "q0", "q1")),
)  # fmt: skip


def failures(found: Found, cluster: Cluster = CLUSTER) -> list[Line]:
    failed = [line for line in judge(cluster, found, "c.toml") if line.verdict == FAILED]
    assert all(line.remedy for line in failed)
    return failed


def failure(found: Found, cluster: Cluster = CLUSTER) -> Line:
    (line,) = failures(found, cluster)
    return line


def unknown(found: Found, cluster: Cluster = CLUSTER) -> Line:
    (line,) = (line for line in judge(cluster, found, "c.toml") if line.verdict == UNKNOWN)
    return line


def with_facts(host: str, **changes: object) -> Found:
    return replace(HEALTHY, facts={**HEALTHY.facts, host: replace(FACTS, **changes)})  # type: ignore[arg-type]


def with_member(host: str, **changes: object) -> Found:
    member = replace(HEALTHY.members[host], **changes)  # type: ignore[arg-type]
    return replace(HEALTHY, members={**HEALTHY.members, host: member})


def with_heard(datagrams: Datagrams, seen: Datagrams | None = None, base: Found = HEALTHY, host: str = "w1") -> Found:
    """What a host heard of w0, and saw on its interface: the same if nothing is said."""
    seen = datagrams if seen is None else seen
    return replace(
        base,
        heard={**base.heard, host: {**base.heard[host], "w0": datagrams}},
        seen={**base.seen, host: {**base.seen[host], "w0": seen}},
    )


def without(host: str, base: Found = HEALTHY) -> Found:
    """A host that has not joined."""
    kept = {
        key: {name: value for name, value in getattr(base, key).items() if name != host}
        for key in ("members", "sent", "heard", "seen")
    }
    return replace(base, **kept)


def test_of_a_healthy_cluster_every_link_is_found_well() -> None:
    lines = judge(CLUSTER, HEALTHY, "c.toml")
    assert {line.verdict for line in lines} == {OK}
    links = {line.subject for line in lines if line.check == "multicast"}
    assert links == {f"{worker} -> {host}" for worker in WORKERS for host in HOSTS if worker != host}
    assert "has joined 239.77.0.4, UDP port 7079" in {line.text for line in lines}


class TestHosts:
    def test_host_that_is_silent_or_down_is_one_line(self) -> None:
        facts = {name: FACTS for name in HOSTS if name != "w1"}
        found = replace(without("w1"), silent={"w1": "no route to host"}, facts=facts)
        assert (failure(found).subject, failure(found).check) == ("w1", "reach")
        down = with_heard({}, base=with_facts("w1", up=False))
        assert failure(down).remedy == "ssh 10.77.0.2 ip link set dev eth0 up"

    def test_mtu_that_is_not_that_of_most(self) -> None:
        assert failure(with_facts("w2", mtu=1400)).remedy == "ssh 10.77.0.3 ip link set dev eth0 mtu 1500"

    def test_port_without_carrier_is_told_once_and_not_per_link(self) -> None:
        line = failure(with_heard({}, base=with_member("w1", carrier=False)))
        assert (line.subject, line.check) == ("w1", "carrier")
        assert line.remedy == "ssh tor ip link set dev p1 up"

    @pytest.mark.parametrize(
        ("trouble", "remedy"),
        [
            ("memberships", "ssh 10.77.0.2 sysctl -w net.ipv4.igmp_max_memberships=100"),
            ("port", "ssh 10.77.0.2 ss -lunp sport = :7079"),
            ("other", "ssh 10.77.0.2 ip address show dev eth0"),
        ],
    )
    def test_host_that_cannot_join(self, trouble: str, remedy: str) -> None:
        line = failure(without("w1", with_facts("w1", trouble=trouble, said="odd")))
        assert (line.subject, line.check, line.remedy) == ("w1", "join", remedy)
        assert line.text == "cannot join 239.77.0.4, UDP port 7079, on eth0: odd"

    def test_address_and_interface_that_are_not_there(self) -> None:
        line = failure(without("w1", with_facts("w1", trouble="address", said="odd")))
        assert "mend `address` of w1 in c.toml" in line.remedy
        line = failure(without("w1", with_facts("w1", mtu=None, trouble="other", said="odd")))
        assert "mend `interface` of w1 in c.toml" in line.remedy

    @pytest.mark.parametrize(("size", "failed"), [(212992, True), ((1 << 20) - 1, True), (1 << 20, False)])
    def test_receive_buffer_without_room_for_the_first_window_is_a_failure(self, size: int, failed: bool) -> None:
        base = with_facts("s0", buffers={"rmem_max": size, "wmem_max": 8 << 20})
        found = replace(base, members=with_member("s0", receive_bytes=size).members)
        (line,) = (line for line in judge(CLUSTER, found, "c.toml") if line.remedy)
        assert (line.subject, line.check, line.verdict) == ("s0", "buffers", FAILED if failed else OK)
        assert line.text.startswith(f"net.core.rmem_max is {size:,} bytes, not 8,388,608")
        assert line.remedy == "ssh 10.77.1.1 sysctl -w net.core.rmem_max=8388608"

    def test_limit_that_binds_only_others_is_no_failure(self) -> None:
        found = with_facts("s0", buffers={"rmem_max": 212992, "wmem_max": 212992})
        assert failures(found) == []
        remedies = [line.remedy for line in judge(CLUSTER, found, "c.toml") if line.remedy]
        assert remedies == [f"ssh 10.77.1.1 sysctl -w net.core.{name}=8388608" for name in ("rmem_max", "wmem_max")]

    @pytest.mark.parametrize(("rp_filter", "dropped"), [(0, False), (1, True), (2, False)])
    def test_strict_filter_with_the_way_back_elsewhere(self, rp_filter: int, dropped: bool) -> None:
        routes = {**HEALTHY.members["s0"].routes, "w0": Route("eth1", "10.1.0.1"), "s1": Route("eth1")}
        found = with_member("s0", rp_filter=rp_filter, routes=routes)
        if dropped:
            line = failure(with_heard({}, seen=ALL, base=found, host="s0"))
            assert (line.subject, line.check) == ("s0", "rp_filter")
            assert line.text.endswith("w0 by eth1")
            assert line.remedy.startswith("ssh 10.77.1.1 sysctl -w net.ipv4.conf.eth0.rp_filter=2")
        else:
            assert failures(found) == []

    def test_strict_filter_alone_is_no_failure(self) -> None:
        assert failures(with_member("s0", rp_filter=1)) == []

    @pytest.mark.parametrize(
        ("offloads", "text"),
        [
            (("UDP_SEGMENT", "UDP_GRO"), "UDP_SEGMENT and UDP_GRO"),
            (("UDP_SEGMENT",), "plain datagrams, which cost more processor time: no UDP_GRO"),
            ((), "plain datagrams, which cost more processor time: no UDP_SEGMENT and UDP_GRO"),
        ],
    )
    def test_what_the_kernel_cuts_and_joins(self, offloads: tuple[str, ...], text: str) -> None:
        lines = judge(CLUSTER, with_member("w0", offloads=offloads), "c.toml")
        assert next((line.text, line.verdict) for line in lines if line.check == "offloads") == (text, OK)

    def test_worker_that_cannot_send(self) -> None:
        found = replace(HEALTHY, sent={**HEALTHY.sent, "w0": "Operation not permitted"})
        for host in HOSTS[1:]:
            found = with_heard({}, base=found, host=host)
        line = failure(found)
        assert (line.subject, line.text) == ("w0", "cannot send to 239.77.0.4: Operation not permitted")
        assert "ssh 10.77.0.1 nft list ruleset" in line.remedy


class TestSwitch:
    def test_no_snooping(self) -> None:
        line = failure(replace(HEALTHY, bridge=Bridge(snooping=False)))
        assert (line.subject, line.check) == ("switch", "flooding")
        assert line.remedy == "checkmate switch apply --cluster c.toml"

    def test_no_querier(self) -> None:
        line = failure(replace(HEALTHY, bridge=Bridge(querier=False)))
        assert (line.subject, line.check) == ("switch", "querier")
        assert line.remedy == "checkmate switch apply --cluster c.toml"

    def test_switch_that_does_not_answer(self) -> None:
        assert "`exec` of [switch]" in failure(replace(HEALTHY, bridge=Bridge(error="ssh: no route"))).remedy

    def test_switch_that_cannot_be_asked_is_no_failure(self) -> None:
        line = unknown(replace(HEALTHY, bridge=Bridge(unknown="no bridge is named")))
        assert (line.subject, line.check) == ("switch", "querier")
        assert "no bridge is named; without a querier there" in line.text

    @pytest.mark.parametrize("bridge", [Bridge(), Bridge(unknown="not asked")])
    def test_flooding_is_seen_from_outside(self, bridge: Bridge) -> None:
        line = failure(with_heard(ALL, seen=ALL | came(SECOND), base=replace(HEALTHY, bridge=bridge)))
        assert (line.subject, line.check) == ("switch", "flooding")
        assert line.text == "floods: 239.77.0.5 reaches w1, and only s1 has joined it"
        assert ("checkmate switch apply" in line.remedy) == bool(bridge.unknown)
        assert ("ssh tor bridge -d link" in line.remedy) == (not bridge.unknown)

    def test_without_its_member_the_second_group_says_nothing(self) -> None:
        assert "s1, the only member of 239.77.0.5" in unknown(without("s1")).text

    def test_range_of_one_group(self) -> None:
        assert unknown(replace(HEALTHY, groups=HEALTHY.groups[:1])).check == "flooding"

    def test_nobody_who_may_look(self) -> None:
        members = {name: replace(member, capture="not permitted") for name, member in HEALTHY.members.items()}
        assert unknown(replace(HEALTHY, members=members, seen={})).text.endswith("cannot be seen: not permitted")


class TestLinks:
    def test_nothing_arrives_at_all(self) -> None:
        line = failure(with_heard({}))
        assert (line.subject, line.text) == ("w0 -> w1", "nothing arrives, not even what is sent to this host alone")
        assert "ssh 10.77.0.1 ip route get 10.77.0.2" in line.remedy
        assert "ssh tor ip link set dev p1 up" in line.remedy

    @pytest.mark.parametrize(
        ("ports", "text", "remedy"),
        [
            (
                ("p0", "p2", "q0", "q1"),
                "the switch has not seen w1 join",
                "for port p1: ssh tor bridge mdb show dev br0",
            ),
            (("p1",), "the switch knows who has joined, so a firewall drops it", "ssh tor nft -a list ruleset"),
        ],
    )
    def test_only_multicast_does_not_arrive(self, ports: tuple[str, ...], text: str, remedy: str) -> None:
        line = failure(with_heard(came(DIRECT), base=replace(HEALTHY, bridge=Bridge(ports=ports))))
        assert line.subject == "w0 -> w1"
        assert line.text.startswith(f"multicast does not arrive, unicast does: {text}")
        assert remedy in line.remedy

    def test_only_multicast_does_not_arrive_and_nobody_can_tell(self) -> None:
        sonic = replace(CLUSTER, switch=Switch("", "ssh tor", Sonic(src_ip="10.1.0.1")))
        line = failure(with_heard(came(DIRECT), base=replace(HEALTHY, bridge=Bridge(unknown="not asked"))), sonic)
        assert "has not seen who joins, or a firewall drops it" in line.text
        assert "show ip igmp snooping groups" in line.remedy

    def test_multicast_lost_for_want_of_a_querier(self) -> None:
        switch, link = failures(with_heard(came(DIRECT), base=replace(HEALTHY, bridge=Bridge(querier=False))))
        assert (switch.subject, link.subject) == ("switch", "w0 -> w1")
        assert link.remedy == "first mend the switch: checkmate switch apply --cluster c.toml"

    @pytest.mark.parametrize("heard", [{}, came(DIRECT)])
    def test_host_that_drops_what_reaches_it(self, heard: Datagrams) -> None:
        line = failure(with_heard(heard, seen=ALL))
        assert line.text == "reaches eth0 of w1, which drops it: a firewall, or its reverse-path filter"
        assert line.remedy.startswith("ssh 10.77.0.2 nft list ruleset")

    @pytest.mark.parametrize("ttl", [1, 2])
    def test_host_behind_a_router(self, ttl: int) -> None:
        routes = {**HEALTHY.members["w0"].routes, "w1": Route("eth0", "10.77.0.254")}
        found = with_heard(came(DIRECT), base=with_member("w0", routes=routes))
        line = failure(found, replace(CLUSTER, multicast=Multicast(ttl=ttl)))
        assert line.text.startswith("w1 is in another network, behind 10.77.0.254")
        assert ("`ttl = 2` under [multicast] in c.toml, and attach(ttl=2)" in line.remedy) == (ttl == 1)
        assert "10.77.0.254 has to route 239.77.0.4" in line.remedy

    def test_full_size_never(self) -> None:
        line = failure(with_heard(came(SMALL, DIRECT)))
        assert (line.subject, line.check) == ("w0 -> w1", "mtu")
        assert line.remedy == "ssh tor ip link set dev p0 mtu 1500; ssh tor ip link set dev p1 mtu 1500"

    @pytest.mark.parametrize(("times", "text"), [(2, "8 of 8 datagrams arrive twice"), (3, "arrive 3 times")])
    def test_more_than_once(self, times: int, text: str) -> None:
        line = failure(with_heard(came(DIRECT) | came(SMALL, FULL, times=times)))
        assert text in line.text
        assert "ssh tor nft -a list ruleset" in line.remedy

    def test_one_that_comes_twice(self) -> None:
        assert failure(with_heard({**ALL, (SMALL, 1): 2})).text == "1 of 8 datagrams arrive twice"

    @pytest.mark.parametrize("lost", [1, PACKETS])
    def test_some_are_missing(self, lost: int) -> None:
        keys = sorted(came(SMALL, FULL), key=lambda key: (key[1] % 2, key))
        line = failure(with_heard({**dict.fromkeys(keys[lost:], 1), **came(DIRECT)}))
        assert line.text == f"{lost} of {2 * PACKETS} datagrams are missing"
        assert "ssh tor ip -s link show dev p1" in line.remedy

    def test_worker_that_only_multicast_reaches(self) -> None:
        line = failure(with_heard(came(SMALL, FULL)))
        assert (line.subject, line.check) == ("w0 -> w1", "unicast")
        assert failures(with_heard(came(SMALL, FULL), host="s0")) == [], "a shadow is asked by TCP"
