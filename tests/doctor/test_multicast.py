"""``checkmate doctor`` where gradients go by multicast: a sound lab passes, each planted fault is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from checkmate.doctor import multicast_hosts, multicast_probe
from checkmate.doctor.judge import FAILED, OK, UNKNOWN, Line
from checkmate.doctor.multicast_judge import judge
from checkmate.lab import Lab
from checkmate.switch.cluster import Cluster, Multicast, Shadow, Worker, dumps
from tests.network import one_lab, requires_network

Result = tuple[int, str, str]


class TestInALab:
    pytestmark = requires_network

    @pytest.fixture
    def lab(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
        # Limits of socket buffers are the machine's, not the lab's: one test is about them, and not the others.
        monkeypatch.setattr("checkmate.doctor.multicast_judge.judge", partial(judge, least_buffer_bytes=1))
        monkeypatch.setattr(multicast_hosts, "JOIN_S", 0.2)  # this switch learns at once
        with one_lab(), Lab(workers=2, shadows=1, multicast=True) as lab:
            yield lab

    def failures(self, lab: Lab, cluster: Cluster | None = None) -> list[Line]:
        cluster = cluster or lab.cluster
        lines = judge(cluster, multicast_hosts.observe(cluster), "cluster.toml", least_buffer_bytes=1)
        return [line for line in lines if line.verdict == FAILED]

    def failure(self, lab: Lab, cluster: Cluster | None = None) -> Line:
        (line,) = self.failures(lab, cluster)
        return line

    def at(self, host: str, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", f"cm-{host}", *command], check=True, timeout=10)

    def drop(self, host: str, family: str, hook: str, rule: str) -> None:
        chain = f"add chain {family} foreign c {{ type filter hook {hook} priority 0; }}"
        self.at(host, "nft", f"add table {family} foreign; {chain}; add rule {family} foreign c {rule} drop")

    def flood(self) -> None:
        for port in ("w0", "w1", "s0"):
            self.at("switch", "ip", "link", "set", port, "type", "bridge_slave", "mcast_flood", "on")

    def test_sound_lab_passes(self, lab: Lab, run: Callable[..., Result]) -> None:
        code, out, err = run(lab.cluster_file)
        assert (code, err) == (0, "")
        assert "all is well" in out
        assert "w0 -> s0  ok           small and full-size datagrams arrive once\n" in out
        assert "has joined 239.77.0." in out
        assert "switch    ok           data snoops, and members are queried; who has not joined 239.77.0." in out

    def test_no_join_possible(self, lab: Lab) -> None:
        self.at("w1", "sysctl", "-qw", "net.ipv4.igmp_max_memberships=0")
        line = self.failure(lab)
        assert (line.subject, line.check) == ("w1", "join")
        assert line.remedy == "ip netns exec cm-w1 sysctl -w net.ipv4.igmp_max_memberships=100"

    def test_no_querier(self, lab: Lab) -> None:
        self.flood()
        self.at("switch", "ip", "link", "set", "data", "type", "bridge", "mcast_querier", "0")
        line = self.failure(lab)
        assert (line.subject, line.check) == ("switch", "querier")
        assert line.remedy == "checkmate switch apply --cluster cluster.toml"

    def test_no_querier_and_ports_that_do_not_flood(self, lab: Lab) -> None:
        self.at("switch", "ip", "link", "set", "data", "type", "bridge", "mcast_querier", "0")
        found = self.failures(lab)
        assert [line.subject for line in found] == ["switch", "w0 -> w1", "w0 -> s0", "w1 -> w0", "w1 -> s0"]
        assert all("checkmate switch apply --cluster cluster.toml" in line.remedy for line in found)
        command = ["switch", "apply", "--cluster", str(lab.cluster_file)]
        subprocess.run([sys.executable, "-m", "checkmate", *command], check=True, timeout=60)
        assert self.failures(lab) == [], "what the remedy says"

    def test_no_snooping(self, lab: Lab) -> None:
        self.flood()
        self.at("switch", "ip", "link", "set", "data", "type", "bridge", "mcast_snooping", "0")
        line = self.failure(lab)
        assert (line.subject, line.check) == ("switch", "flooding")

    def test_flooding_of_a_switch_that_is_not_asked(self, lab: Lab) -> None:
        self.flood()
        self.at("switch", "ip", "link", "set", "data", "type", "bridge", "mcast_snooping", "0")
        line = self.failure(lab, replace(lab.cluster, switch=replace(lab.cluster.switch, bridge="")))
        assert (line.subject, line.check) == ("switch", "flooding")
        assert "reaches w0, w1, and only s0 has joined it" in line.text

    def test_port_that_gets_everything(self, lab: Lab) -> None:
        self.at("switch", "ip", "link", "set", "w1", "type", "bridge_slave", "mcast_router", "2")
        line = self.failure(lab)
        assert (line.subject, line.check) == ("switch", "flooding")
        assert "ip netns exec cm-switch bridge -d link" in line.remedy

    def test_port_that_is_down(self, lab: Lab) -> None:
        self.at("switch", "ip", "link", "set", "w1", "down")
        line = self.failure(lab)
        assert (line.subject, line.check) == ("w1", "carrier")
        assert line.remedy == "ip netns exec cm-switch ip link set dev w1 up"

    def test_strict_reverse_path_filter_and_a_wrong_route(self, lab: Lab) -> None:
        self.at("s0", "sysctl", "-qw", "net.ipv4.conf.eth0.rp_filter=1")
        assert self.failures(lab) == []
        self.at("s0", "ip", "route", "add", "10.77.0.1/32", "dev", "mgmt0")
        line = self.failure(lab)
        assert (line.subject, line.check) == ("s0", "rp_filter")
        assert line.text.endswith("w0 by mgmt0")
        self.at("s0", "sysctl", "-qw", "net.ipv4.conf.eth0.rp_filter=2")
        assert self.failures(lab) == [], "what the remedy says"

    def test_firewall_of_a_host(self, lab: Lab) -> None:
        self.drop("w1", "ip", "input", "ip daddr 239.77.0.0/24")
        line = self.failure(lab)
        assert line.subject == "w0 -> w1"
        assert "reaches eth0 of w1, which drops it" in line.text

    def test_firewall_of_the_switch(self, lab: Lab) -> None:
        self.drop("switch", "bridge", "forward", "ip daddr 239.77.0.0/24 oifname w1")
        line = self.failure(lab)
        assert line.subject == "w0 -> w1"
        assert "multicast does not arrive, unicast does: the switch knows who has joined" in line.text

    def test_firewall_of_the_switch_that_drops_all_datagrams(self, lab: Lab) -> None:
        self.drop("switch", "bridge", "forward", "ip protocol udp oifname w1")
        line = self.failure(lab)
        assert (line.subject, line.text) == ("w0 -> w1", "nothing arrives, not even what is sent to this host alone")

    def test_firewall_of_the_switch_that_drops_acknowledgements(self, lab: Lab) -> None:
        self.drop("switch", "bridge", "forward", "ip protocol udp ip daddr 10.77.0.2")
        line = self.failure(lab)
        assert (line.subject, line.check) == ("w0 -> w1", "unicast")

    def test_reports_that_do_not_reach_the_switch(self, lab: Lab) -> None:
        self.drop("switch", "netdev", "ingress device w1", "ip protocol igmp")
        line = self.failure(lab)
        assert line.subject == "w0 -> w1"
        assert line.text.endswith("the switch has not seen w1 join")

    def test_host_that_may_not_send(self, lab: Lab) -> None:
        self.drop("w0", "ip", "output", "udp dport 7079")
        line = self.failure(lab)
        assert (line.subject, line.check) == ("w0", "send")

    def test_smaller_mtu_of_a_port(self, lab: Lab) -> None:
        self.at("switch", "ip", "link", "set", "w1", "mtu", "1400")
        found = self.failures(lab)
        assert [line.subject for line in found] == ["w0 -> w1", "w1 -> w0", "w1 -> s0"]
        assert all("ip netns exec cm-switch ip link set dev w1 mtu 1500" in line.remedy for line in found)

    def test_datagrams_that_come_twice(self, lab: Lab) -> None:
        hook = "type filter hook ingress device w0 priority 0;"
        rule = "add rule netdev foreign c ip daddr 239.77.0.0/24 udp dport 7079 dup to s0"
        self.at("switch", "nft", f"add table netdev foreign; add chain netdev foreign c {{ {hook} }}; {rule}")
        line = self.failure(lab)
        assert (line.subject, line.text) == ("w0 -> s0", "8 of 8 datagrams arrive twice")

    def test_without_privileges_all_but_flooding_is_found(self, lab: Lab) -> None:
        cluster = replace(lab.cluster, exec=lab.cluster.exec + " setpriv --bounding-set=-net_raw,-net_admin")
        found = multicast_hosts.observe(cluster)
        wrong = [line for line in judge(cluster, found, "cluster.toml", least_buffer_bytes=1) if line.verdict != OK]
        assert [(line.subject, line.check, line.verdict) for line in wrong] == [("switch", "flooding", UNKNOWN)]
        limit = int(Path("/proc/sys/net/core/rmem_max").read_text())
        assert {member.receive_bytes for member in found.members.values()} == {min(limit, 8 << 20)}

    def test_socket_buffers(self, lab: Lab) -> None:
        at_least = 1 << 40
        lines = judge(lab.cluster, multicast_hosts.observe(lab.cluster), "cluster.toml", at_least)
        buffers = [line for line in lines if line.check == "buffers"]
        assert [line.subject for line in buffers] == ["w0", "w0", "w1", "w1", "s0", "s0"]
        assert {line.verdict for line in buffers} == {OK}, "with CAP_NET_ADMIN"
        assert f"sysctl -w net.core.rmem_max={at_least}" in buffers[0].remedy

    def test_nothing_stays_behind_on_the_hosts(self, lab: Lab) -> None:
        multicast_hosts.observe(lab.cluster)
        for host in lab.hosts:
            assert subprocess.check_output(["ip", "netns", "pids", f"cm-{host}"], text=True) == ""


# ---------------------------------------------------------------- without a network


def test_datagrams_are_counted_without_privileges() -> None:
    peer, answer = multicast_probe.begin("lo", "127.0.0.1", ["239.77.0.4", "239.77.0.5"], {"w1": "127.0.0.2"})
    assert peer is not None
    assert answer["routes"] in ({"w1": ["lo", ""]}, {}), "or there is no `ip`"
    cookie = "0123456789abcdef" * 2
    assert peer.send(["239.77.0.4", "239.77.0.5"], 1, cookie, 65536, [("127.0.0.1", answer["port"])]) == {}
    counts = dict.fromkeys(("small", "full", "second", "direct"), 0)
    for found, kind, _, count in peer.end()["heard"]:
        assert (found, count) == (cookie, 1)
        counts[kind] += 1
    assert counts == {"small": 4, "full": 4, "second": 4, "direct": 4}


def test_host_without_its_address_or_interface_says_so() -> None:
    assert multicast_probe.begin("lo", "192.0.2.1", ["239.77.0.4"], {})[1]["trouble"] == "address"
    peer, answer = multicast_probe.begin("no-such", "127.0.0.1", ["239.77.0.4"], {})
    assert (peer, answer["mtu"], answer["trouble"]) == (None, None, "other")


def test_description_with_multicast_has_its_own_examination(tmp_path: Path, run: Callable[..., Result]) -> None:
    here = Cluster(
        (Worker("w0", "127.0.0.1", "w0", "lo"),), (Shadow("s0", "127.0.0.2", "s0", "lo"),), multicast=Multicast()
    )
    (tmp_path / "cluster.toml").write_text(dumps(here))
    _, out, _ = run(tmp_path / "cluster.toml")
    assert "w0 -> s0  ok           small and full-size datagrams arrive once" in out
    assert "switch    not checked  the description has no switch.bridge" in out


def test_probe_needs_no_torch_on_the_hosts() -> None:
    program = "import sys, checkmate.doctor.multicast_probe; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
