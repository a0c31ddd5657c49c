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
    gather: Gather | None = None
    try:
        mine: Member | str
        name = ""
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
        told: list[Any] = _exchange((mine, name, secrets.randbits(64)), group)
        for other, (member, *_) in enumerate(told):
            if isinstance(member, str):
                raise UsageError(f"rank {other} of the group cannot multicast: {member}")
        if len(names := {name for _, name, _ in told}) > 1:
            raise UsageError(f"the ranks have chosen different groups ({', '.join(sorted(names))}): groups= differs")
        deaf: list[int] | str
        try:
            members = [Member(*member) for member, *_ in told]
            gather = Gather(rank, members, told[0][2], (name, GROUP_PORT), sockets[0], sockets[1], timeout_s)
            deaf = gather.probe()
        except (OSError, CheckmateError) as error:
            deaf = f"{error}"
        troubles = [
            f"rank {other} cannot send: {found}" if isinstance(found, str)
            else f"what rank {other} sends does not reach ranks {found}"
            for other, found in enumerate(_exchange(deaf, group)) if found
        ]  # fmt: skip
        if troubles or gather is None:
            raise Unreachable(
                f"the network does not carry {name}:{GROUP_PORT} between all ranks: {'; '.join(troubles)}. Switches "
                "must forward a group to whoever has joined it (IGMP snooping with a querier), routers need ttl=; "
                "`checkmate doctor` finds where it is lost"
            )
    except BaseException:
        if gather is not None:
            gather.close()
            gather.wait_closed()
        for sock in sockets:
            sock.close()
        raise
    how = "UDP_SEGMENT" if gather.segments else "plain datagrams: this kernel or network has no UDP_SEGMENT"
    log.info("checkmate: multicast to %s:%d in pieces of %d bytes (%s)", name, GROUP_PORT, gather.size, how)
    return gather


def _exchange(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered
