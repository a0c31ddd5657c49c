"""A lab for multicast: a group goes to the hosts that have joined it, to no other, and as soon as they say so."""

from __future__ import annotations

import json
import socket
import subprocess
import time

import pytest

from checkmate import UsageError
from checkmate.lab import Lab, Shape, cluster, plan
from checkmate.switch import snooping
from checkmate.switch.cluster import Multicast
from tests.lab.conftest import Ran, wait_until
from tests.network import requires_network
from tests.switch.wires import socket_in

GROUP, PORT = "239.77.0.5", 7079
SOL_UDP, UDP_SEGMENT = 17, 103
#: One send, which is 46 datagrams.
SENT, EACH = 64000, 1400
#: More than what IGMP says to one port in a few seconds.
NOTHING = 1000


def test_shape_with_multicast_mirrors_nothing() -> None:
    assert str(Lab(multicast=True).shape) == "2 workers, 1 shadow, MTU 1500, multicast"
    assert Lab(multicast=True).cluster.multicast == Multicast()
    assert plan.cluster(Shape()).multicast is None
    with pytest.raises(UsageError, match="mirrors nothing"):
        Lab(multicast=True, rules=True)


def test_lab_without_multicast_has_nothing_of_it() -> None:
    def said(shape: Shape) -> str:
        return str(list(plan.commands(shape)))

    assert "mcast_querier" in said(Shape(rules=False, multicast=True))
    for words in ("mcast_querier", "mcast_fast_leave", "224.0.0.0"):
        assert words not in said(Shape())


def udp(lab: Lab, host: str, *, join: bool = False) -> socket.socket:
    """A socket on a host, as peers and shadows have one."""
    opened = socket_in(lab.hosts[host].namespace, socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind(("", PORT))
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    if join:
        membership = socket.inet_aton(GROUP) + socket.inet_aton(lab.hosts[host].address)
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        wait_until(lambda: host in members(lab))  # a host tells the switch some milliseconds later
    return opened


def members(lab: Lab) -> tuple[str, ...]:
    return snooping.read(lab.cluster).groups.get(GROUP, ())


def send(lab: Lab, host: str = "w0") -> None:
    with udp(lab, host) as sender:
        sender.setsockopt(SOL_UDP, UDP_SEGMENT, EACH)
        sender.sendto(bytes(SENT), (GROUP, PORT))


def received(opened: socket.socket, patience_s: float = 10.0) -> int:
    """The bytes that arrive, up to SENT of them."""
    opened.settimeout(patience_s)
    count = 0
    while count < SENT:
        try:
            count += len(opened.recv(1 << 16))
        except TimeoutError:
            break
    return count


def set_bridge(*words: str) -> None:
    subprocess.run(["ip", "-n", plan.SWITCH, "link", "set", plan.DATA[2], "type", "bridge", *words], check=True)


class TestInALab:
    pytestmark = requires_network

    @pytest.mark.parametrize("options", [{}, {"offloads": False}, {"mtu": 9000, "rate": "1gbit"}], ids=str)
    def test_one_send_reaches_who_has_joined_and_nobody_else(self, options: dict[str, object]) -> None:
        with Lab(2, 2, multicast=True, **options) as lab:  # type: ignore[arg-type]
            with udp(lab, "s1") as outsider, udp(lab, "w1", join=True) as peer, udp(lab, "s0", join=True) as shadow:
                before = lab.counters()
                send(lab)
                assert [received(peer), received(shadow)] == [SENT, SENT]
                assert received(outsider, 0.1) == 0
                after = lab.counters()
                sent, heard, missed = (
                    after[host][way] - before[host][way]
                    for host, way in (("w0", "tx_bytes"), ("s0", "rx_bytes"), ("s1", "rx_bytes"))
                )
                assert missed < NOTHING < SENT < sent < heard + NOTHING
            wait_until(lambda: not members(lab))  # they have left

    def test_counters_would_show_what_reaches_others(self) -> None:
        with Lab(1, 2, multicast=True) as lab:
            set_bridge("mcast_snooping", "0")
            port = ["ip", "-n", plan.SWITCH, "link", "set", "s1", "type", "bridge_slave", "mcast_flood", "on"]
            subprocess.run(port, check=True)
            before = lab.counters()
            send(lab)
            wait_until(lambda: lab.counters()["s1"]["rx_bytes"] - before["s1"]["rx_bytes"] > SENT)
            assert lab.counters()["s0"]["rx_bytes"] - before["s0"]["rx_bytes"] < NOTHING

    def test_querier_keeps_members_known_and_without_it_they_are_forgotten(self) -> None:
        with Lab(1, 1, multicast=True) as lab:
            set_bridge("mcast_querier", "0")
            set_bridge(  # 1/100 s; a new querier begins with these
                "mcast_membership_interval", "300", "mcast_query_interval", "100", "mcast_startup_query_interval", "100"
            )
            set_bridge("mcast_querier", "1")
            with udp(lab, "s0", join=True) as shadow:
                time.sleep(5)
                send(lab)
                assert received(shadow) == SENT
                set_bridge("mcast_querier", "0")
                wait_until(lambda: not members(lab))
                send(lab)
                assert received(shadow, 0.2) == 0

    def test_loss_is_lost(self) -> None:
        with Lab(1, 1, multicast=True) as lab, udp(lab, "s0", join=True) as shadow:
            lab.drop("s0", 100)
            send(lab)
            assert received(shadow, 0.2) == 0
            lab.drop("s0", 0)
            send(lab)
            assert received(shadow) == SENT

    def test_command_line_builds_it_and_says_who_has_joined(self) -> None:
        up = json.loads(Ran("up", "--multicast", "--json").out)
        assert (up["shape"]["multicast"], up["shape"]["rules"], up["groups"]) == (True, False, {})
        lab = cluster.existing()
        assert lab is not None
        with udp(lab, "s0", join=True):
            assert f"multicast group {GROUP} goes to s0" in Ran("status").out
        assert Ran("run", "--shadows", "0", "--no-multicast", "--", "true").code == 1
        assert Ran("run", "--shadows", "0", "--", "true").code == 0
        assert Ran("up", "--multicast", "--rules").code == 2
        assert Ran("down").code == 0
