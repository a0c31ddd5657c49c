"""Joining the run's multicast group. It carries data only after every peer has echoed a probe as long as they will be.

What a rank says of itself is exchanged over the process group, and so is whom it reaches: all raise, or none.
"""

from __future__ import annotations

import logging
import secrets
import socket
from typing import Any, NamedTuple

import torch.distributed as dist

from ..errors import CheckmateError, Unreachable, UsageError
from ..transport.group import enlarge, interface_of, join, mtu_of, sender
from ..wire.datagrams import GROUP_PORT, MOST_RANKS, group_of
from .gather import Gather, Member
from .peers import local_address

log = logging.getLogger("checkmate")


class Group(NamedTuple):
    """What `join_group` asks for: where groups are taken from, for whom, and how far datagrams go."""

    groups: str
    run: str
    ttl: int


def check_ranks(world: int) -> None:
    """Raises UsageError for more ranks than multicast is for."""
    if world > MOST_RANKS:
        raise UsageError(
            f"{world} ranks reduce together, and tap='multicast' is for at most {MOST_RANKS}: each acknowledges what "
            "each other one sends, and the slowest holds up all; use tap='mirror'"
        )


def join_group(group: dist.ProcessGroup, asked: Group, interface: str | None, timeout_s: float) -> Gather:
    """Join the run's group with every rank of `group`, and see that all hear each other. A collective.

    Raises UsageError, or Unreachable with the ranks that do not hear this one.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    sockets: list[socket.socket] = []
    try:
        mine: Member | str
        try:
            check_ranks(world)
            name, address = group_of(asked.groups, asked.run), local_address(interface)
            if ":" in address:
                raise UsageError(f"{address}: tap='multicast' knows IPv4 only; name an interface with interface=")
            sockets += (join(name, GROUP_PORT, address), sender(address, asked.ttl))
            room = min(map(enlarge, sockets))
            mine = Member(sockets[1].getsockname(), mtu_of(interface_of(address)), room)
        except (OSError, CheckmateError) as error:  # the others must not wait for this rank
            mine = f"{error}"
        told: list[Any] = _exchange((mine, secrets.randbits(64)), group)
        for other, (member, _) in enumerate(told):
            if isinstance(member, str):
                raise UsageError(f"rank {other} of the group cannot multicast: {member}")
        members = [Member(*member) for member, _ in told]
        gather = Gather(rank, members, told[0][1], (name, GROUP_PORT), sockets[0], sockets[1], timeout_s)
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    try:
        deaf: list[list[int] | str] = _exchange(_probe(gather), group)
        troubles = [f"rank {r} cannot send: {found}" for r, found in enumerate(deaf) if isinstance(found, str)]
        troubles += [f"what rank {r} sends does not reach ranks {found}" for r, found in enumerate(deaf) if found]
        if troubles:
            raise Unreachable(
                f"the network does not carry {name}:{GROUP_PORT} between all ranks: {'; '.join(troubles)}. Switches "
                "must forward a group to whoever has joined it (IGMP snooping with a querier), routers need ttl=; "
                "`checkmate doctor` finds where it is lost"
            )
    except BaseException:
        gather.close()
        gather.wait_closed()
        raise
    how = "UDP_SEGMENT" if gather.segments else "plain datagrams: this kernel or network has no UDP_SEGMENT"
    log.info("checkmate: multicast to %s:%d in pieces of %d bytes (%s)", name, GROUP_PORT, gather.size, how)
    return gather


def _probe(gather: Gather) -> list[int] | str:
    try:
        return gather.probe()
    except OSError as error:
        return f"{error.strerror or error}"


def _exchange(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered
