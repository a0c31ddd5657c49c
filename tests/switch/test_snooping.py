"""IGMP snooping of a Linux bridge: as settings, and in a real switch in a namespace."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from checkmate.errors import CheckmateError, UsageError
from checkmate.switch import nft, snooping
from checkmate.switch.cluster import Cluster, Multicast, Switch
from checkmate.switch.rules import Operation, plan
from tests.network import requires_network
from tests.switch.clusters import TWO_WORKERS
from tests.switch.wires import PATIENCE_S, Wires, frame, socket_in, wires

GROUP = "239.77.0.5"
BY_MULTICAST = replace(TWO_WORKERS, multicast=Multicast(), switch=Switch("br0"))


def bridge(**settings: int) -> list[dict[str, Any]]:
    """What ``ip -j -d link show dev br0`` of iproute2 6.1 prints, as far as it is read."""
    return [{"ifname": "br0", "linkinfo": {"info_kind": "bridge", "info_data": {"stp_state": 0, **settings}}}]


def changes(cluster: Cluster) -> tuple[Operation, ...]:
    return plan(snooping.read(cluster).state, snooping.desired(cluster))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mcast_snooping": 1, "mcast_querier": 1}, None),
        ({"mcast_snooping": 1, "mcast_querier": 0}, ["mcast_querier", "1"]),
        ({"mcast_snooping": 0, "mcast_querier": 0}, ["mcast_snooping", "1", "mcast_querier", "1"]),
        ({}, ["mcast_snooping", "1", "mcast_querier", "1"]),
    ],
)
def test_what_is_not_on_is_switched_on(settings: dict[str, int], words: list[str] | None) -> None:
    operations = plan(snooping.parse("br0", bridge(**settings)), snooping.desired(BY_MULTICAST))
    wanted = [["ip", "link", "set", "dev", "br0", "type", "bridge", *words]] if words else []
    assert snooping.commands(operations) == wanted


def test_with_multicast_no_rules_are_wanted_and_without_it_no_snooping() -> None:
    assert nft.desired(BY_MULTICAST) == {}
    assert (snooping.desired(TWO_WORKERS), snooping.read(TWO_WORKERS).state) == ({}, {})


def test_bridge_must_be_named_and_be_one() -> None:
    for ask in (snooping.desired, snooping.read):
        with pytest.raises(UsageError, match=r"switch\.bridge is missing"):
            ask(replace(BY_MULTICAST, switch=Switch()))
    with pytest.raises(CheckmateError, match=r"w0 of the switch is no bridge; mend switch\.bridge"):
        snooping.parse("w0", [{"ifname": "w0", "linkinfo": {"info_kind": "veth"}}])


def datagram(source: str) -> bytes:
    """A UDP packet from a host to GROUP."""
    made = bytearray(frame(source, None, b"a gradient", dscp=0, protocol=17))
    made[:6] = b"\1\0\x5e" + socket.inet_aton(GROUP)[1:]
    made[24:26], made[30:34] = b"\0\0", socket.inet_aton(GROUP)
    total = sum(struct.unpack_from("!10H", made, 14))
    made[24:26] = struct.pack("!H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF)
    return bytes(made)


def join(switch: Wires, host: str) -> socket.socket:
    """As a program on this host would; it leaves when the socket is closed."""
    opened = socket_in(switch.name, socket.AF_INET, socket.SOCK_DGRAM)
    index = int(switch.run("cat", f"/sys/class/net/{host}-far/ifindex"))
    membership = struct.pack("=4s4si", socket.inet_aton(GROUP), bytes(4), index)
    opened.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    deadline = time.monotonic() + PATIENCE_S
    while host not in snooping.read(switch.cluster).groups.get(GROUP, ()):  # a host tells it some milliseconds later
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return opened


@pytest.fixture
def switch() -> Iterator[Wires]:
    with wires() as made:
        made.cluster = replace(made.cluster, multicast=Multicast(), switch=replace(made.cluster.switch, bridge="br0"))
        # a querier that has just begun waits for as long as hosts may take to answer, and until then it floods
        made.run(
            "ip", "link", "set", "br0", "type", "bridge", "mcast_snooping", "0", "mcast_query_response_interval", "1"
        )
        yield made


class TestInANamespace:
    pytestmark = requires_network

    def arrived(self, switch: Wires) -> set[str]:
        sent = datagram("w0")
        return {host for host, frames in switch.exchange([("w0", sent)]).items() if sent in frames}

    def test_group_goes_to_its_members_only_once_it_is_applied(self, switch: Wires) -> None:
        assert self.arrived(switch) == {"w1", "s0", "s1"}
        operations = changes(switch.cluster)
        assert [o.name for o in operations] == ["bridge br0 mcast_snooping", "bridge br0 mcast_querier"]
        snooping.apply(switch.cluster, operations)
        assert changes(switch.cluster) == ()
        time.sleep(0.3)
        assert snooping.read(switch.cluster).groups == {}
        with join(switch, "s0"), join(switch, "w1"):
            assert snooping.read(switch.cluster).groups == {GROUP: ("s0", "w1")}
            assert self.arrived(switch) == {"s0", "w1"}
            others = replace(switch.cluster, multicast=Multicast("239.78.0.0/24"))
            assert snooping.read(others).groups == {}

    def test_ports_of_routers_are_told(self, switch: Wires) -> None:
        snooping.apply(switch.cluster, changes(switch.cluster))
        switch.run("ip", "link", "set", "x0", "type", "bridge_slave", "mcast_router", "2")
        assert snooping.read(switch.cluster).routers == ("x0",)
