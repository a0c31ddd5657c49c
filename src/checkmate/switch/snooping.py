"""A Linux bridge as the switch of a cluster with ``[multicast]``: IGMP snooping, so that a group goes to its members.

With snooping on, a bridge notes at which ports it hears hosts join a group, and sends the group's packets there only.
What it has heard it forgets after some minutes, unless somebody asks the hosts again and again: the querier, which the
bridge itself can be. It gives way to one with an address that is there already. Off, every packet goes to every port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from ..errors import CheckmateError, UsageError
from ..wire.datagrams import group_range
from .cluster import Cluster
from .nft import ask, execute
from .rules import Operation, State

SETTINGS = ("mcast_snooping", "mcast_querier")


@dataclass(frozen=True)
class Found:
    """What a bridge does. `groups` are those of the cluster's range that somebody has joined, with the ports."""

    state: State
    groups: Mapping[str, tuple[str, ...]]
    routers: tuple[str, ...] = ()  # ports behind which it believes a multicast router: they get every group


def desired(cluster: Cluster) -> State:
    if cluster.multicast is None:
        return {}
    return {entry(_bridge(cluster), setting): 1 for setting in SETTINGS}


def entry(bridge: str, setting: str) -> str:
    return f"bridge {bridge} {setting}"


def read(cluster: Cluster) -> Found:
    """What is there; nothing where the cluster has no multicast. Raises CheckmateError for what is no bridge."""
    if cluster.multicast is None:
        return Found({}, {})
    bridge = _bridge(cluster)
    link = ask(cluster, ["ip", "-j", "-d", "link", "show", "dev", bridge])
    groups = group_range(cluster.multicast.groups)
    members: dict[IPv4Address, set[str]] = {}
    routers = set()
    for part in ask(cluster, ["bridge", "-j", "-d", "mdb", "show", "dev", bridge]):
        routers |= {port["port"] for port in part.get("router", {}).get(bridge, ())}
        for row in part.get("mdb", ()):
            if (group := _ipv4(row["grp"])) is not None and group in groups:
                members.setdefault(group, set()).add(row["port"])
    joined = {str(group): tuple(sorted(ports)) for group, ports in sorted(members.items())}
    return Found(parse(bridge, link), joined, tuple(sorted(routers)))


def parse(bridge: str, link: Any) -> State:
    """The settings in what ``ip -j -d link show`` prints."""
    info = link[0].get("linkinfo", {})
    if info.get("info_kind") != "bridge":
        raise CheckmateError(f"{bridge} of the switch is no bridge; mend switch.bridge in the cluster's description")
    return {entry(bridge, setting): info["info_data"].get(setting) for setting in SETTINGS}


def commands(operations: Iterable[Operation]) -> list[list[str]]:
    """What carries out a plan."""
    wanted: dict[str, list[str]] = {}
    for operation in operations:
        _, bridge, setting = operation.name.split()
        wanted.setdefault(bridge, []).extend((setting, str(operation.after)))
    return [["ip", "link", "set", "dev", bridge, "type", "bridge", *words] for bridge, words in wanted.items()]


def apply(cluster: Cluster, operations: Iterable[Operation]) -> None:
    """Carry out a plan. Raises CheckmateError with what ip says."""
    for command in commands(operations):
        execute(cluster, command)


def _bridge(cluster: Cluster) -> str:
    if not cluster.switch.bridge:
        raise UsageError(
            "switch.bridge is missing in the cluster's description: with [multicast], write the name of the bridge "
            "whose IGMP snooping is meant"
        )
    return cluster.switch.bridge


def _ipv4(text: str) -> IPv4Address | None:
    try:
        return IPv4Address(text)
    except ValueError:
        return None  # IPv6, or a hardware address
