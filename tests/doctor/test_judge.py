"""What observations mean: every fault is found, in its place, with what mends it; and nothing else is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from checkmate.doctor import CONTROL, FULL, KINDS, PACKETS, SMALL
from checkmate.doctor.judge import (
    FAILED,
    OK,
    UNKNOWN,
    Arrival,
    Facts,
    Line,
    Observations,
    Probe,
    Rules,
    Sightings,
    judge,
)
from checkmate.switch.cluster import Cluster, Shadow, Sonic, Switch, Worker

CLUSTER = Cluster(
    (Worker("w0", "10.77.0.1", "p0"), Worker("w1", "10.77.0.2", "p1"), Worker("w2", "10.77.0.3", "p2")),
    (Shadow("s0", "10.77.1.1", "q0"), Shadow("s1", "10.77.1.2", "q1")),
    exec="ssh {address}",
    switch=Switch(exec="ssh tor"),
)
FACTS = Facts(1500, True, ("lo", "eth0"), {"rmem_max": 4 << 20, "wmem_max": 4 << 20})
ARRIVED = (Arrival(SMALL, 43), Arrival(FULL, 43), Arrival(CONTROL, 0))
Seen = Mapping[tuple[str, int], Mapping[int, int]]


def seen(*kinds: str, marks: Mapping[int, int] | None = None) -> Seen:
    return {(kind, number): marks or {43: 1} for kind in kinds for number in range(PACKETS)}


COPIED = seen(SMALL, FULL)
HEALTHY = Observations(
    silent={},
    facts={host.name: FACTS for host in (*CLUSTER.workers, *CLUSTER.shadows)},
    probes={f"w{i}": Probe(f"w{(i + 1) % 3}", path_mtu=1500, arrived=ARRIVED) for i in range(3)},
    sightings={f"s{i}": Sightings({f"w{j}": COPIED for j in range(3)}) for i in range(2)},
)


def failures(found: Observations, cluster: Cluster = CLUSTER) -> list[Line]:
    failed = [line for line in judge(cluster, found, "c.toml") if line.verdict == FAILED]
    assert all(line.remedy for line in failed)
    return failed


def failure(found: Observations, cluster: Cluster = CLUSTER) -> Line:
    (line,) = failures(found, cluster)
    return line


def with_facts(host: str, **changes: object) -> Observations:
    return replace(HEALTHY, facts={**HEALTHY.facts, host: replace(FACTS, **changes)})  # type: ignore[arg-type]


def with_probe(**changes: object) -> Observations:
    return replace(HEALTHY, probes={**HEALTHY.probes, "w0": replace(HEALTHY.probes["w0"], **changes)})  # type: ignore[arg-type]


def with_sightings(found: Seen, dropped: int = 0, base: Observations = HEALTHY) -> Observations:
    """What s0 saw of w0."""
    s0 = Sightings({**HEALTHY.sightings["s0"].seen, "w0": found}, dropped)
    return replace(base, sightings={**HEALTHY.sightings, "s0": s0})


def test_of_a_healthy_cluster_every_link_is_found_well() -> None:
    lines = judge(CLUSTER, HEALTHY, "c.toml")
    assert {line.verdict for line in lines} == {OK}
    links = {line.subject for line in lines if line.check == "copies"}
    assert links == {f"w{i} -> s{j}" for i in range(3) for j in range(2)}


class TestHosts:
    def test_host_that_cannot_be_reached_is_one_line(self) -> None:
        names = {"silent": {"s0": "no route to host"}, "python": "/opt/python"}
        without = {
            key: {name: value for name, value in getattr(HEALTHY, key).items() if name != "s0"}
            for key in ("facts", "sightings")
        }
        line = failure(replace(HEALTHY, **names, **without))  # type: ignore[arg-type]
        assert line.subject == "s0"
        assert "no route to host" in line.text
        assert "ssh 10.77.1.1 /opt/python -c 'import checkmate'" in line.remedy

    def test_missing_interface(self) -> None:
        line = failure(with_facts("w1", mtu=None, interfaces=("lo", "ens3")))
        assert (line.subject, line.check) == ("w1", "interface")
        assert "lo, ens3" in line.text
        assert "mend `interface` of w1 in c.toml" in line.remedy

    def test_interface_that_is_down_is_told_once_and_not_per_link(self) -> None:
        found = with_facts("s0", up=False)
        line = failure(replace(found, sightings={**found.sightings, "s0": Sightings({})}))
        assert line.remedy == "ssh 10.77.1.1 ip link set dev eth0 up"

    def test_worker_whose_mtu_is_not_that_of_most(self) -> None:
        assert failure(with_facts("w2", mtu=1400)).remedy == "ssh 10.77.0.3 ip link set dev eth0 mtu 1500"

    @pytest.mark.parametrize(("mtu", "wrong"), [(1400, True), (1500, False), (9000, False)])
    def test_shadow_may_have_a_larger_mtu_than_the_workers(self, mtu: int, wrong: bool) -> None:
        assert len(failures(with_facts("s1", mtu=mtu))) == wrong

    @pytest.mark.parametrize(("size", "wrong"), [(212992, True), ((4 << 20) - 1, True), (4 << 20, False)])
    def test_limits_of_socket_buffers(self, size: int, wrong: bool) -> None:
        found = with_facts("w0", buffers={"rmem_max": size, "wmem_max": 4 << 20})
        expected = ["ssh 10.77.0.1 sysctl -w net.core.rmem_max=4194304"] if wrong else []
        assert [line.remedy for line in judge(CLUSTER, found, "c.toml") if line.remedy] == expected
        assert failures(found) == []  # TCP's own buffers are not bounded by it

    def test_limit_that_a_namespace_cannot_change_is_changed_outside(self) -> None:
        buffers = {"rmem_max": 1000, "wmem_max": 4 << 20}
        found = with_facts("w0", buffers=buffers, foreign_buffers=("rmem_max", "wmem_max"))
        (line,) = (line for line in judge(CLUSTER, found, "c.toml") if line.remedy)
        assert line.remedy.startswith("sysctl -w net.core.rmem_max=4194304 (on the machine")

    def test_limits_that_cannot_be_read_are_not_failures(self) -> None:
        lines = judge(CLUSTER, with_facts("w0", buffers={}), "c.toml")
        assert [line.subject for line in lines if line.verdict == UNKNOWN] == ["w0"]

    @pytest.mark.parametrize(
        ("host", "kind", "text", "remedy"),
        [
            ("s0", "privilege", "CAP_NET_RAW", "AmbientCapabilities"),
            ("w0", "address", "10.77.0.1 is no address of this host", "mend `address` of w0"),
            ("w0", "other", "cannot listen on 10.77.0.1: odd", "ip address"),
            ("s0", "other", "cannot capture on eth0: odd", "ip address"),
        ],
    )
    def test_host_that_cannot_listen(self, host: str, kind: str, text: str, remedy: str) -> None:
        line = failure(with_facts(host, trouble=kind, said="odd"))
        assert text in line.text
        assert remedy in line.remedy


class TestSwitch:
    def test_differences_are_mended_by_apply(self) -> None:
        line = failure(replace(HEALTHY, rules=Rules(differences=("add chain from_p0",))))
        assert "apply would add chain from_p0" in line.text
        assert line.remedy == "checkmate switch apply --cluster c.toml"

    def test_missing_port_and_a_switch_that_does_not_answer(self) -> None:
        assert "ssh tor ip link" in failure(replace(HEALTHY, rules=Rules(lacking=("port p0 is no device",)))).remedy
        assert "`switch.exec`" in failure(replace(HEALTHY, rules=Rules(error="ssh: no route"))).remedy

    def test_switch_that_cannot_be_asked_is_no_failure(self) -> None:
        lines = judge(CLUSTER, replace(HEALTHY, rules=Rules(unknown="no nft")), "c.toml")
        assert [(line.subject, line.text) for line in lines if line.verdict == UNKNOWN] == [("switch", "no nft")]

    def test_remedies_on_sonic_are_commands_of_sonic(self) -> None:
        cluster = replace(CLUSTER, switch=Switch("", "ssh tor", Sonic(src_ip="10.1.0.1")))
        rules = Rules(unknown="not asked")
        line = failure(with_sightings({}, base=replace(HEALTHY, rules=rules)), cluster)
        assert line.remedy == "checkmate switch apply --target sonic --cluster c.toml"
        line = failure(with_sightings(seen(SMALL)), cluster)
        assert line.remedy.endswith("ssh tor config interface mtu q0 1574"), "ERSPAN puts headers before a packet"


class TestPaths:
    def test_worker_that_cannot_reach_the_next_one(self) -> None:
        line = failure(with_probe(error="timed out"))
        assert (line.subject, line.text) == ("w0 -> w1", "timed out")
        assert "ssh 10.77.0.1 ip route get 10.77.0.2" in line.remedy

    @pytest.mark.parametrize("changes", [{"lost": (FULL,)}, {"path_mtu": 1400}])
    def test_path_with_a_smaller_mtu(self, changes: dict[str, object]) -> None:
        line = failure(with_probe(**changes))
        assert (line.subject, line.check) == ("w0 -> w1", "mtu")
        assert "ssh tor ip link set dev p0 mtu 1500" in line.remedy

    def test_mark_that_is_rewritten(self) -> None:
        line = failure(with_probe(arrived=(Arrival(SMALL, 10), Arrival(FULL, 10), Arrival(CONTROL, 0))))
        assert line.text == "DSCP 43 was rewritten to 10 on the way"
        assert "ssh tor nft -a list ruleset" in line.remedy

    def test_mark_that_everything_gets(self) -> None:
        line = failure(with_probe(arrived=(Arrival(SMALL, 43), Arrival(FULL, 43), Arrival(CONTROL, 43))))
        assert "without a mark arrive with DSCP 43" in line.text

    def test_kernel_that_does_not_tell_marks_is_no_failure(self) -> None:
        assert failures(with_probe(arrived=tuple(Arrival(kind, None) for kind in KINDS))) == []


class TestLinks:
    def test_never(self) -> None:
        line = failure(with_sightings({}))
        assert (line.subject, line.text) == ("w0 -> s0", "no marked packet is copied")
        assert "ssh tor ip link set dev q0 up" in line.remedy, "the rules are there"

    def test_never_for_want_of_rules(self) -> None:
        found = with_sightings({}, base=replace(HEALTHY, rules=Rules(differences=("add chain from_p0",))))
        assert {line.remedy for line in failures(found)} == {"checkmate switch apply --cluster c.toml"}

    def test_never_for_want_of_the_mark(self) -> None:
        first, second = failures(with_sightings({}, base=with_probe(arrived=(Arrival(SMALL, 10),))))
        assert first.check == "dscp"
        assert second.remedy == "first keep the mark, see w0 -> w1"

    @pytest.mark.parametrize(("times", "text"), [(2, "copied twice"), (3, "copied 3 times")])
    def test_more_than_once(self, times: int, text: str) -> None:
        line = failure(with_sightings(seen(SMALL, FULL, marks={43: times})))
        assert text in line.text
        assert "ssh tor nft -a list ruleset" in line.remedy

    def test_one_packet_that_was_sent_again_is_no_second_copy(self) -> None:
        assert failures(with_sightings({**COPIED, (SMALL, 1): {43: 2}})) == []

    @pytest.mark.parametrize("lost", [1, PACKETS, PACKETS + 1])
    def test_some_are_missing(self, lost: int) -> None:
        """Also if as many are missing as there are of full size, but not these."""
        keys = sorted(COPIED, key=lambda key: (key[1] % 2, key))
        line = failure(with_sightings({key: COPIED[key] for key in keys[lost:]}, dropped=7))
        assert f"{lost} of {2 * PACKETS} copies are missing; this host could not look at 7 packets" in line.text
        assert "ssh tor ip -s link show dev q0" in line.remedy

    def test_full_size_never(self) -> None:
        line = failure(with_sightings(seen(SMALL)))
        assert (line.subject, line.check) == ("w0 -> s0", "mtu")
        assert line.remedy == "ssh 10.77.1.1 ip link set dev eth0 mtu 1500; ssh tor ip link set dev q0 mtu 1500"

    def test_full_size_that_gets_lost_before_is_not_held_against_the_shadow(self) -> None:
        """Its packets are sent again and again, and each time copied."""
        found = {**seen(SMALL), (FULL, 0): {43: 5}}
        assert [line.subject for line in failures(with_sightings(found, base=with_probe(lost=(FULL,))))] == ["w0 -> w1"]

    def test_copies_with_another_mark(self) -> None:
        line = failure(with_sightings(seen(SMALL, FULL, marks={10: 1})))
        assert "DSCP 10 in place of 43" in line.text

    def test_unmarked_traffic(self) -> None:
        line = failure(with_sightings({**COPIED, (CONTROL, 0): {0: 1}}))
        assert (line.subject, line.check) == ("w0 -> s0", "unmarked")
        assert "ssh tor bridge -d link" in line.remedy
