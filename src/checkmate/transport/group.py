"""Sockets of an IPv4 multicast group: one that has joined it, and one to send to it and to single members.

With ``UDP_SEGMENT`` one call hands the kernel many datagrams, with ``UDP_GRO`` it hands us many, as one: else each
costs a call. Both are used where the kernel has them. Linux, from 5.0 on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import socket
import struct
import sys
from collections.abc import Collection
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..wire.bpf import EQUAL, LD_HALF, LD_WORD, RETURN, WHOLE, Op
from ..wire.datagrams import MOST_BYTES, MOST_DATAGRAMS

Bytes = npt.NDArray[np.uint8]

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
_IFREQ = struct.Struct("16s24x")
_CONTROL = struct.Struct("Niii4x")  # one ancillary datum: its length, level, kind, and a number
_SEGMENT = struct.Struct("NiiH6x")
_ROOM = 4 * _CONTROL.size
_NAME = struct.Struct("!2sH4s")  # family (as the machine has it), port, address
_NAME_BYTES = 16
_FAMILY = struct.pack("=H", socket.AF_INET)
#: ``struct mmsghdr``: name, its length, places, their number, control, its length, flags; bytes that came.
_MESSAGE_WORDS = 8
_MSG_WAITFORONE = 0x10000
_LOW = np.uint64(0xFFFFFFFF)
#: Taken from the kernel with one call. More calls cost more than what falls out of the cache meanwhile.
AT_ONCE = 16
#: The longest that the kernel joins.
MOST_JOINED_BYTES = 1 << 16
#: The longest that a receiver waits at a time.
TICK_S = 0.02

_library = ctypes.CDLL(None, use_errno=True)
_sendmmsg, _recvmmsg = _library.sendmmsg, _library.recvmmsg
_sendmmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)
_recvmmsg.argtypes = (*_sendmmsg.argtypes, ctypes.c_void_p)


class Arrival(NamedTuple):
    """Datagrams of `each` bytes from one sender, of which the kernel has joined `nbytes` in each row of `data`.

    The last of a row may be shorter.
    """

    data: Bytes
    nbytes: int
    each: int
    source: tuple[str, int]


class Inlet:
    """A socket's datagrams, several with one call: each call lets other threads go on, and must get its turn again."""

    def __init__(self, sock: socket.socket) -> None:
        self.dropped = 0  #: datagrams that the kernel could not keep, as far as the newest one told
        for level, option in ((socket.SOL_SOCKET, _SO_RXQ_OVFL), (_SOL_UDP, _UDP_GRO)):
            with contextlib.suppress(OSError):
                sock.setsockopt(level, option, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, int(TICK_S * 1e6)))
        self._fd = sock.fileno()
        self._memory = np.empty((AT_ONCE, MOST_JOINED_BYTES), np.uint8)
        self._names = np.zeros((AT_ONCE, _NAME_BYTES), np.uint8)
        self._control = np.zeros((AT_ONCE, _ROOM), np.uint8)
        self._places = np.zeros((AT_ONCE, 2), np.uint64)
        self._places[:, 0], self._places[:, 1] = _addresses(self._memory), MOST_JOINED_BYTES
        self._messages = np.zeros((AT_ONCE, _MESSAGE_WORDS), np.uint64)
        for column, memory in ((0, self._names), (2, self._places), (4, self._control)):
            self._messages[:, column] = _addresses(memory)
        self._messages[:, 3] = 1

    def receive(self) -> list[Arrival]:
        """Valid until the next call. Empty if there was nothing for `TICK_S`; raises OSError for a broken socket."""
        self._messages[:, 1], self._messages[:, 5] = _NAME_BYTES, _ROOM
        count = _recvmmsg(self._fd, self._messages.ctypes.data, AT_ONCE, _MSG_WAITFORONE, None)
        if count < 0:
            if (number := ctypes.get_errno()) in (errno.EAGAIN, errno.EINTR, errno.ECONNREFUSED):
                return []
            raise OSError(number, os.strerror(number))
        lengths, ends = ((self._messages[:count, column] & _LOW).tolist() for column in (7, 5))
        rows = [
            (nbytes, name.tobytes(), control.tobytes()[:end])
            for nbytes, name, control, end in zip(lengths, self._names, self._control, ends, strict=False)
        ]
        groups = groupby(range(count), rows.__getitem__)
        return [self._arrival(list(numbers), *row) for row, numbers in groups if row[0]]

    def _arrival(self, rows: list[int], nbytes: int, name: bytes, control: bytes) -> Arrival:
        each, at = nbytes, 0
        while at + _CONTROL.size <= len(control):
            size, level, kind, value = _CONTROL.unpack_from(control, at)
            if (level, kind) == (_SOL_UDP, _UDP_GRO):
                each = value
            elif (level, kind) == (socket.SOL_SOCKET, _SO_RXQ_OVFL):
                self.dropped = value
            at += max(16, (size + 7) & ~7)
        _, port, host = _NAME.unpack_from(name)
        return Arrival(self._memory[rows[0] : rows[-1] + 1], nbytes, each, (socket.inet_ntoa(host), port))


class Outlet:
    """Sends datagrams of one size, many with one call. Not thread-safe, but for `say`."""

    def __init__(self, sock: socket.socket, each: int) -> None:
        self._sock, self._each = sock, each
        self.segments = _has_segments()  #: whether the kernel cuts what it is given into datagrams
        self._name = np.zeros(_NAME_BYTES, np.uint8)
        self._control = np.frombuffer(_SEGMENT.pack(18, _SOL_UDP, _UDP_SEGMENT, each), np.uint8)

    def say(self, data: bytes, target: tuple[str, int]) -> None:
        """One datagram."""
        self._sock.sendto(data, target)

    def send(self, data: Bytes, target: tuple[str, int]) -> None:
        """Datagrams, one behind the other; the last may be shorter."""
        most = self._each * (max(1, min(MOST_DATAGRAMS, MOST_BYTES // self._each)) if self.segments else 1)
        starts = np.arange(0, len(data), most, dtype=np.uint64)
        places = np.empty((len(starts), 2), np.uint64)
        places[:, 0], places[:, 1] = starts + np.uint64(data.ctypes.data), most
        places[-1, 1] = len(data) - int(starts[-1])
        self._name[:8] = np.frombuffer(_NAME.pack(_FAMILY, target[1], socket.inet_aton(target[0])), np.uint8)
        messages = np.zeros((len(starts), _MESSAGE_WORDS), np.uint64)
        messages[:, 0], messages[:, 1] = self._name.ctypes.data, _NAME_BYTES
        messages[:, 2], messages[:, 3] = _addresses(places), 1
        if self.segments:
            messages[:, 4], messages[:, 5] = self._control.ctypes.data, len(self._control)
        at, fd, left = messages.ctypes.data, self._sock.fileno(), len(messages)
        while left:
            count = _sendmmsg(fd, at, left, 0)
            if count < 0:
                if (number := ctypes.get_errno()) == errno.EINTR:
                    continue
                raise OSError(number, os.strerror(number))
            at, left = at + count * 8 * _MESSAGE_WORDS, left - count


def _addresses(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Where each row begins."""
    first, step = rows.ctypes.data, rows.strides[0]
    return np.array([first + number * step for number in range(len(rows))], np.uint64)


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
    """A socket bound to `address` that sends to groups by the interface with that address, `ttl` hops far.

    To others on this host as well, until `skip_own_host`.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.bind((address, 0))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, ttl)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot send from {address} by UDP: {error.strerror or error}") from None
    return sock


def skip_own_host(sock: socket.socket) -> None:
    """Send to other hosts only, which takes less time."""
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)


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
        with contextlib.suppress(OSError):
            if _ask(name, _SIOCGIFADDR)[4:8] == wanted:
                return name
    raise UsageError(f"no interface has the IPv4 address {address} as its first one (`ip addr` lists them)")


def address_of(interface: str) -> str:
    """The IPv4 address of an interface, or the address itself. Raises UsageError."""
    with contextlib.suppress(OSError, ValueError):
        return str(socket.getaddrinfo(interface, 0, flags=socket.AI_NUMERICHOST)[0][4][0])
    try:
        return socket.inet_ntoa(_ask(interface, _SIOCGIFADDR)[4:8])
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise UsageError(f"interface {interface!r} has no IPv4 address ({error.strerror}); there are {names}") from None


def mtu_of(interface: str) -> int:
    return int.from_bytes(_ask(interface, _SIOCGIFMTU)[:4], sys.byteorder)


def _ask(interface: str, what: int) -> bytes:
    """What the kernel says of an interface: what follows the name in its ``struct ifreq``. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe, what, _IFREQ.pack(interface.encode()[:15]))[16:]


def link_bytes_per_s(interface: str) -> float | None:
    """What the card says that its link takes; None for one that is none, or does not say."""
    try:
        with open(f"/sys/class/net/{interface}/device/uevent", "rb"), open(f"/sys/class/net/{interface}/speed") as file:
            mbit = int(file.read())
    except (OSError, ValueError):
        return None
    return mbit * 125e3 if mbit > 0 else None
