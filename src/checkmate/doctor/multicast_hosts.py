"""Leads the probes of multicast on all hosts through one examination, and gathers what they observe."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address
from typing import Any

from ..errors import CheckmateError
from ..switch import snooping
from ..switch.cluster import Cluster, Sonic
from ..wire.datagrams import group_of, group_range
from .hosts import ANSWER_S, REACH_S, SETTLE_S, ask_all, everyone, facts_of, start
from .multicast_judge import Bridge, Counts, Found, Member, Route
from .probe import COOKIE_BYTES

#: For the switches on the way to learn who has joined.
JOIN_S = 1.0


def observe(cluster: Cluster, python: str = sys.executable, reach_s: float = REACH_S) -> Found:
    """Examine a cluster with `multicast`: let everyone join a group of its range, and each worker send to it.

    Of a second group, to which they send as well, the last shadow is the only member: nobody else should receive that.
    """
    assert cluster.multicast is not None
    groups = _groups(cluster.multicast.groups)
    addresses = {host.name: host.address for host in everyone(cluster)}
    silent: dict[str, str] = {}
    with start(cluster, "checkmate.doctor.multicast_probe", python, silent) as remotes:
        asked = {
            host.name: {
                "do": "begin",
                "interface": host.interface,
                "address": host.address,
                "groups": groups if host is cluster.shadows[-1] else groups[:1],
                "hosts": {name: address for name, address in addresses.items() if name != host.name},
            }
            for host in everyone(cluster)
        }
        begun = ask_all(remotes, asked, silent, reach_s)
        joined = {name: answer for name, answer in begun.items() if "port" in answer}
        cookies = {worker.name: secrets.token_hex(COOKIE_BYTES) for worker in cluster.workers if worker.name in joined}
        orders = {
            name: {
                "do": "send",
                "groups": groups,
                "ttl": cluster.multicast.ttl,
                "cookie": cookie,
                "mtu": joined[name]["mtu"],
                "hosts": [(addresses[other], answer["port"]) for other, answer in joined.items() if other != name],
            }
            for name, cookie in cookies.items()
        }
        time.sleep(JOIN_S)
        sent = ask_all(remotes, orders, silent, ANSWER_S)
        bridge = read_bridge(cluster, groups[0])
        time.sleep(SETTLE_S)
        ended = ask_all(remotes, {name: {"do": "end"} for name in begun}, silent, ANSWER_S)
    owner = {cookie: name for name, cookie in cookies.items()}
    return Found(
        silent,
        {name: facts_of(answer) for name, answer in begun.items()},
        python=python,
        groups=tuple(groups),
        members={name: _member(answer) for name, answer in joined.items()},
        sent={name: answer.get("error", "") for name, answer in sent.items()},
        heard={name: _counts(answer["heard"], owner) for name, answer in ended.items() if "heard" in answer},
        seen={name: _counts(answer["seen"], owner) for name, answer in ended.items() if "seen" in answer},
        bridge=bridge,
    )


def _groups(groups: str) -> list[str]:
    """One of the range, and its neighbour, whose Ethernet address is another."""
    first = group_of(groups, secrets.token_hex())
    second = str(IPv4Address(int(IPv4Address(first)) ^ 1))
    return [first, second] if group_range(groups).num_addresses > 1 else [first]


def _member(answer: Mapping[str, Any]) -> Member:
    return Member(
        carrier=answer["carrier"],
        capture=answer["capture"],
        receive_bytes=answer["receive_bytes"],
        offloads=tuple(answer["offloads"]),
        rp_filter=answer["rp_filter"],
        routes={name: Route(*route) for name, route in answer["routes"].items()},
    )


def _counts(rows: Iterable[Any], owner: Mapping[str, str]) -> Counts:
    """Datagrams of others who try the doctor at the same time are not ours."""
    found: dict[str, dict[tuple[str, int], int]] = {}
    for cookie, kind, number, *_, count in rows:
        if cookie in owner:
            found.setdefault(owner[cookie], {})[kind, number] = count
    return found


def read_bridge(cluster: Cluster, group: str) -> Bridge:
    """How the switch treats multicast, and at which ports it has seen who joined, as far as it can be asked."""
    switch = cluster.switch
    if switch.sonic != Sonic():
        return Bridge(unknown="a SONiC switch is not asked")
    if not switch.bridge:
        return Bridge(unknown="the description has no switch.bridge")
    try:
        found = snooping.read(cluster)
    except CheckmateError as error:
        return Bridge(error=str(error)) if switch.exec else Bridge(unknown=f"it cannot be asked: {error}")
    snoops, queries = (found.state[snooping.entry(switch.bridge, setting)] == 1 for setting in snooping.SETTINGS)
    # Behind such a port somebody else has been heard to query.
    return Bridge(snoops, queries or bool(found.routers), found.groups.get(group, ()))
