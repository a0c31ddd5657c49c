"""Sockets of an IPv4 multicast group: one that has joined it, and one to send to it and to single members.

With ``UDP_SEGMENT`` one call hands the kernel many datagrams, with ``UDP_GRO`` it hands us many, as one: else each
costs a call. Both are used where the kernel has them. Linux, from 5.0 on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import socket
import struct
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..wire.bpf import EQUAL, LD_HALF, LD_WORD, RETURN, WHOLE, Op
from ..wire.datagrams import MOST_BYTES, MOST_DATAGRAMS

log = logging.getLogger("checkmate")

#: What we ask the kernel to keep for us while we look elsewhere: the windows of all peers must fit.
BUFFER_BYTES = 8 << 20

_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104
_IP_MULTICAST_ALL = 49
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE = 33, 32
_SO_ATTACH_FILTER, _SO_RXQ_OVFL = 26, 40
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
_MREQN = struct.Struct("4s4si")
_OP = struct.Struct("HBBI")
_PROGRAM = struct.Struct("HP")
_TIMEVAL = struct.Struct("ll")
_NAMED = struct.Struct("16si20x")
_SIZE = struct.Struct("i")
_ROOM = 2 * socket.CMSG_SPACE(_SIZE.size)
#: The longest that a receiver waits at a time.
TICK_S = 0.02


class Arrival(NamedTuple):
    """Datagrams of `each` bytes from one sender that the kernel has joined into one; the last may be shorter."""

    data: npt.NDArray[np.uint8]
    each: int
    source: tuple[str, int]


class Inlet:
    """A socket's datagrams. Valid until the next one is taken."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._memory = np.empty(1 << 16, np.uint8)
        self.dropped = 0  #: datagrams that the kernel could not keep, as far as the newest one told
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
            sock.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, int(TICK_S * 1e6)))

    def receive(self) -> Arrival | None:
        """None if there was nothing for `TICK_S`, or the socket is closed; raises OSError where it cannot be used."""
        try:
            count, ancillary, _, source = self._sock.recvmsg_into([self._memory], _ROOM)  # type: ignore[list-item]
        except (BlockingIOError, InterruptedError, ConnectionRefusedError):
            return None
        each = count
        for level, kind, value in ancillary:
            if level == _SOL_UDP and kind == _UDP_GRO:
                each = _SIZE.unpack(value)[0]
            elif level == socket.SOL_SOCKET and kind == _SO_RXQ_OVFL:
                self.dropped = _SIZE.unpack(value)[0]
        return Arrival(self._memory[:count], each, source) if count else None


class Outlet:
    """Sends datagrams of one size with one call, where the kernel can. Safe to use from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.segments = _has_segments()

    def batch(self, each: int) -> int:
        """How many datagrams of this size go out at once."""
        return max(1, min(MOST_DATAGRAMS, MOST_BYTES // each))

    def send(self, data: memoryview | bytes, each: int, target: tuple[str, int]) -> None:
        """Datagrams of `each` bytes; the last may be shorter."""
        if len(data) <= each:
            self._sock.sendto(data, target)
        elif self.segments:
            self._sock.sendmsg([data], [(_SOL_UDP, _UDP_SEGMENT, struct.pack("H", each))], 0, target)
        else:
            for at in range(0, len(data), each):
                self._sock.sendto(data[at : at + each], target)


def _has_segments() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.setsockopt(_SOL_UDP, _UDP_SEGMENT, 1472)
        except OSError:
            return False
    return True


def join(group: str, port: int, address: str) -> socket.socket:
    """A socket that gets what is sent to `group`, on the interface with this address. Raises UsageError.

    Others on this host may join as well: each gets everything.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)  # only what this socket has joined
        sock.bind((group, port))
        number = socket.if_nametoindex(interface_of(address))
        membership = _MREQN.pack(socket.inet_aton(group), socket.inet_aton(address), number)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    except OSError as error:
        sock.close()
        raise UsageError(
            f"cannot join {group}:{port} on the interface with {address}: {error.strerror or error} (`ip addr` shows "
            "the interfaces; another program may hold the port: `ss -ulpn`)"
        ) from None
    return sock


def sender(address: str, ttl: int) -> socket.socket:
    """A socket bound to `address` that sends to groups by the interface with that address, `ttl` hops far."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.bind((address, 0))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, ttl)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)  # others on this host
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot send from {address} by UDP: {error.strerror or error}") from None
    return sock


def enlarge(sock: socket.socket, nbytes: int = BUFFER_BYTES) -> int:
    """Have the kernel keep so many bytes for us and of ours; returns how many it will keep for us.

    It doubles what it is asked for, to have room for its own records of each packet.
    """
    for forced, asked in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        try:
            sock.setsockopt(socket.SOL_SOCKET, forced, nbytes)
        except PermissionError:  # that takes CAP_NET_ADMIN; net.core.rmem_max bounds what anybody may ask for
            sock.setsockopt(socket.SOL_SOCKET, asked, nbytes)
    had = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
    if had < nbytes:
        log.warning(
            "multicast: the kernel keeps %d bytes for us where %d were asked for, so peers send less at a time "
            "(`sysctl net.core.rmem_max=%d net.core.wmem_max=%d`, or give CAP_NET_ADMIN)", had, nbytes, nbytes, nbytes
        )  # fmt: skip
    return had


def only_from_others(sock: socket.socket, member: int, session: int) -> None:
    """Have the kernel drop datagrams of other sessions, and those of this member, which come back to its own host."""
    low, high = struct.unpack(">II", session.to_bytes(8, "little"))  # as a filter reads what we write
    own = int.from_bytes(member.to_bytes(2, "little"), "big")
    ops = [  # offsets count from the UDP header, which has 8 bytes
        *(Op(LD_WORD, 0, 0, 16), Op(EQUAL, 0, 4, low), Op(LD_WORD, 0, 0, 20), Op(EQUAL, 0, 2, high)),
        *(Op(LD_HALF, 0, 0, 14), Op(EQUAL, 0, 1, own), Op(RETURN, 0, 0, 0), Op(RETURN, 0, 0, WHOLE)),
    ]
    attach_filter(sock, ops)


def attach_filter(sock: socket.socket, ops: Collection[Op]) -> None:
    code = ctypes.create_string_buffer(b"".join(_OP.pack(*op) for op in ops))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM.pack(len(ops), ctypes.addressof(code)))


def interface_of(address: str) -> str:
    """The name of the interface that has this IPv4 address. Raises UsageError."""
    wanted = socket.inet_aton(address)
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16s24x", name.encode()))
            if found[20:24] == wanted:
                return name
    raise UsageError(f"no interface has the IPv4 address {address} as its first one (`ip addr` lists them)")


def address_of(interface: str) -> str:
    """The IPv4 address of an interface, or the address itself. Raises UsageError."""
    with contextlib.suppress(OSError, ValueError):
        return str(socket.getaddrinfo(interface, 0, flags=socket.AI_NUMERICHOST)[0][4][0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16s24x", interface.encode()[:15]))
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise UsageError(f"interface {interface!r} has no IPv4 address ({error.strerror}); there are {names}") from None
    return socket.inet_ntoa(found[20:24])


def mtu_of(interface: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return int(_NAMED.unpack(fcntl.ioctl(probe, _SIOCGIFMTU, _NAMED.pack(interface.encode(), 0)))[1])


def link_bytes_per_s(interface: str) -> float | None:
    """What the card says that its link takes; None for one that is none, or does not say."""
    try:
        with open(f"/sys/class/net/{interface}/device/uevent", "rb"), open(f"/sys/class/net/{interface}/speed") as file:
            mbit = int(file.read())
    except (OSError, ValueError):
        return None
    return mbit * 125e3 if mbit > 0 else None
