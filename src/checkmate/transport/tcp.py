"""TCP sockets, addresses, and the greeting with which every connection begins."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import NamedTuple

from ..errors import UsageError
from .base import Channel

#: An unreachable host is noticed after this long without an acknowledgement from its kernel.
USER_TIMEOUT_MS = 20_000

#: Connections of this process. A child that it forks (the worker of a DataLoader) may outlive it by seconds, and must
#: not keep them open: to the shadow, this process would still live.
_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for sock in list(_connections):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse_address(text: str) -> Address:
    """``tcp://HOST:PORT`` or ``HOST:PORT``; an IPv6 host stands in brackets."""
    rest = text.removeprefix("tcp://")
    host, colon, port = rest.rpartition(":")
    if "://" in rest or not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is not an address; write tcp://HOST:PORT, for example tcp://10.0.0.5:7070")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def tune(sock: socket.socket, user_timeout_ms: int = USER_TIMEOUT_MS) -> None:
    """Small messages leave at once; an end that is gone, or does not read for `user_timeout_ms`, is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_USER_TIMEOUT", user_timeout_ms), ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5)):
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def mark(sock: socket.socket, dscp: int) -> None:
    """Have all packets of this socket marked; if it is not connected yet, its first included."""
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


def connect(address: Address, timeout_s: float) -> Channel:
    """Open a connection. Raises OSError (with the address in it) when that takes longer or is refused."""
    try:
        sock = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise ConnectionError(f"cannot connect to {address}: {error.strerror or error}") from None
    not_in_children(sock)
    tune(sock)
    return Channel(sock, str(address))


def not_in_children(sock: socket.socket) -> None:
    """Have this socket closed in processes that are forked from here."""
    _connections.add(sock)


def listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.create_server(address, family=family, backlog=1024)
    return sock
