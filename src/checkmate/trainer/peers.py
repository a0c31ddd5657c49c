"""The connections of the collective: between every two ranks of a process group one, and of each rank one tagged.

Addresses are exchanged over the process group itself, with a secret by which each rank knows its peers' connections.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckmateError, Unreachable, UsageError
from ..transport.group import address_of
from ..transport.tcp import mark, not_in_children, tune
from ..wire.packets import Flow
from .collective import Peer

#: Within so long all peers connect, if nothing is in their way.
CONNECT_S = 60.0
#: What a connection begins with: the group's secret, the rank that connects, whether the connection is tagged.
_HELLO = struct.Struct("<16sI?")
#: As torch.distributed has them: the interface whose address a rank gives to its peers.
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Seconds after which an operation of this group fails."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(Exception):  # the group has no backend for that device
            timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
            return timeout.total_seconds()
    return dist.default_pg_timeout.total_seconds()


def local_address(interface: str | None) -> str:
    """The address under which peers reach this rank. Raises UsageError for an interface that has none."""
    named = interface or next((os.environ[name] for name in _INTERFACES if os.environ.get(name)), None)
    if named is not None:
        return address_of(named)
    master = os.environ.get("MASTER_ADDR", "localhost")
    with contextlib.suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: asks for the route
            return str(probe.getsockname()[0])
    raise UsageError(f"there is no route to MASTER_ADDR={master}; name the network interface with interface=")


def connect_peers(
    group: dist.ProcessGroup, interface: str | None, dscp: int | None
) -> tuple[list[Peer | None], Flow | None]:
    """Connect every rank of `group` with every other. A collective. Also returns the flow of this rank's tagged frames.

    Without `dscp` there are none, and no tagged connections.

    Raises UsageError, or Unreachable with the address that did not answer.
    """
    rank, world, timeout_s = dist.get_rank(group), dist.get_world_size(group), group_timeout_s(group)
    deadline = time.monotonic() + min(timeout_s, CONNECT_S)  # all are there, as the exchange of addresses shows
    found: tuple[str, int] | str
    listener: socket.socket | None = None
    try:
        address = local_address(interface)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=2 * world)
        found = (address, listener.getsockname()[1])
    except (OSError, CheckmateError) as error:  # the others must not wait for this rank
        found = f"{error}"
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (found, secrets.token_bytes(16)), group=group)
    addresses, secret = [told[0] for told in gathered], gathered[0][1]
    try:
        for other, told in enumerate(addresses):
            if isinstance(told, str):
                raise UsageError(f"rank {other} of the group cannot be reached by its peers: {told}")
        loops = [other for other, (host, _) in enumerate(addresses) if host.startswith("127.") or host == "::1"]
        if loops and len(loops) < world:
            raise UsageError(
                f"ranks {loops} of the group know themselves only by a loopback address, the others do not; name the "
                "network interface with interface= or GLOO_SOCKET_IFNAME"
            )
        assert listener is not None
        peers: list[Peer | None] = []
        trouble, flow = "", None
        try:
            peers, flow = _connect(rank, addresses, secret, listener, dscp, deadline)
        except (OSError, CheckmateError) as error:  # whoever is connected must not go on without this rank
            trouble = f"{error}"
        dist.all_gather_object(gathered, trouble, group=group)
        sockets = [sock for peer in peers if peer is not None for sock in peer if sock is not None]
        if troubles := [f"rank {other} of the group: {told}" for other, told in enumerate(gathered) if told]:
            for sock in sockets:
                sock.close()
            raise Unreachable("; ".join(troubles))
        for sock in sockets:
            # A rank that computes for long, or is stopped, does not read meanwhile: that is no reason to lose it.
            tune(sock, min(int(1000 * timeout_s), 2**31 - 1))
        return peers, flow
    finally:
        if listener is not None:
            listener.close()


def tagged_distance(hosts: Sequence[str]) -> int:
    """By how many ranks the tagged connections go, the same for all: from as many ranks as can be to another host.

    What ranks of one host send each other no switch ever sees.
    """
    world = len(hosts)
    return max(range(1, world), key=lambda n: (sum(hosts[r] != hosts[(r + n) % world] for r in range(world)), -n))


def _connect(
    rank: int, addresses: list[tuple[str, int]], secret: bytes, listener: socket.socket, dscp: int | None,
    deadline: float,
) -> tuple[list[Peer | None], Flow | None]:  # fmt: skip
    """Every rank connects to those after it, and tagged to the one at `tagged_distance`; the others connect to it."""
    world = len(addresses)
    plain: dict[int, socket.socket] = {}
    tagged: dict[int, socket.socket] = {}
    opened: list[socket.socket] = []
    following = (rank + tagged_distance([host for host, _ in addresses])) % world
    try:
        for other in range(rank + 1, world):
            plain[other] = _open(addresses[other], addresses[rank][0], None, deadline)
            opened.append(plain[other])
            plain[other].sendall(_HELLO.pack(secret, rank, False))
        tagged_out: socket.socket | None = None
        if dscp is not None:
            tagged_out = _open(addresses[following], addresses[rank][0], dscp, deadline)
            opened.append(tagged_out)
            tagged_out.sendall(_HELLO.pack(secret, rank, True))
        while len(plain) < world - 1 or (tagged_out is not None and not tagged):
            sock, other, is_tagged = _accept(listener, secret, deadline)
            opened.append(sock)
            (tagged if is_tagged else plain)[other] = sock
    except BaseException:
        for sock in opened:
            sock.close()
        raise
    for sock in opened:
        not_in_children(sock)
        sock.settimeout(None)
    peers = [
        None if other == rank else Peer(plain[other], tagged_out if other == following else None, tagged.get(other))
        for other in range(world)
    ]
    if tagged_out is None or dscp is None:
        return peers, None
    source, target = tagged_out.getsockname(), tagged_out.getpeername()
    return peers, Flow(source[0], source[1], target[0], target[1], dscp)


def _open(address: tuple[str, int], source: str, dscp: int | None, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if dscp is not None:
            mark(sock, dscp)
        sock.bind((source, 0))
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        sock.connect(address)
    except OSError as error:
        sock.close()
        host, port = address
        raise Unreachable(
            f"cannot connect from {source} to a peer at {host}:{port}: {error.strerror or error}; the ranks of a "
            "process group must reach each other on all ports of the interface that interface= names"
        ) from None
    return sock


def _accept(listener: socket.socket, secret: bytes, deadline: float) -> tuple[socket.socket, int, bool]:
    """The next connection of a peer; of anybody else, none."""
    while True:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            raise Unreachable(
                "not every peer has connected in time; another rank says which address it cannot reach"
            ) from None
        hello = bytearray(_HELLO.size)
        try:
            sock.settimeout(5.0)
            received = 0
            while received < len(hello):
                count = sock.recv_into(memoryview(hello)[received:])
                if count == 0:
                    raise ConnectionError
                received += count
            given, other, tagged = _HELLO.unpack(hello)
            if secrets.compare_digest(given, secret):
                return sock, other, tagged
        except OSError:
            pass
        sock.close()
