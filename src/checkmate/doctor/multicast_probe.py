"""What runs on each host where gradients go by multicast: ``python -m checkmate.doctor.multicast_probe``.

Asked and answered as `probe` is, and no judge either:

    begin    joins the group, captures if it may, and tells facts of the host
    send     a worker: sends datagrams with its cookie to the group, to a second group, and to each other host alone
    end      tells what its sockets heard, and what came in on the interface; the process ends
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import secrets
import socket
import struct
import subprocess
import threading
from collections import Counter
from typing import Any

from ..wire.datagrams import GROUP_PORT, IP_BYTES, MOST_BYTES
from . import DIRECT, FULL, KINDS, PACKETS, SECOND, SMALL, probe
from .probe import FOUND, MAGIC

#: What a receiver would have for what comes in a burst.
RECEIVE_BYTES = 8 << 20
POLL_S = 0.05
ROUTE_S = 5.0

# linux/in.h, linux/udp.h, linux/sockios.h, linux/if.h
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE, _IP_MULTICAST_ALL = 10, 3, 49
_SO_RCVBUFFORCE, _SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 33, 17, 103, 104
_SIOCGIFFLAGS, _IFF_RUNNING = 0x8913, 0x40


class Capture(probe.Shadow):
    """Counts datagrams that come in on an interface, whoever they are for."""

    def _content(self, packet: memoryview, length: int) -> tuple[int, memoryview]:
        return 0, packet[:length]


class Peer:
    """Hears a group, and what is sent to its own address. Raises OSError if it may not."""

    def __init__(self, interface: str, address: str, groups: list[str]) -> None:
        self.interface, self.address = interface, address
        self._heard: Counter[tuple[str, str, int]] = Counter()
        self._stopped = False
        with contextlib.ExitStack() as stack:
            sockets = [
                stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in (address, *groups)
            ]
            sockets[0].bind((address, 0))
            for sock, group in zip(sockets[1:], groups, strict=True):
                self._join(sock, group)
            self._open = stack.pop_all()
        self.port = int(sockets[0].getsockname()[1])
        self.receive_bytes = sockets[-1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
        self._threads = [threading.Thread(target=self._listen, args=(sock,), daemon=True) for sock in sockets]
        for thread in self._threads:
            thread.start()

    def _on_interface(self, group: str) -> bytes:
        addresses = socket.inet_aton(group) + socket.inet_aton(self.address)
        return addresses + struct.pack("i", socket.if_nametoindex(self.interface))

    def _join(self, sock: socket.socket, group: str) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run may be listening already
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BYTES)
        except PermissionError:  # that takes CAP_NET_ADMIN
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        sock.bind((group, GROUP_PORT))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, self._on_interface(group))
        sock.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)

    def _listen(self, sock: socket.socket) -> None:
        sock.settimeout(POLL_S)
        stopping = False
        while not stopping:
            stopping = self._stopped  # once more: what has come by then counts
            with contextlib.suppress(OSError):  # nothing comes any more
                while found := FOUND.match(sock.recv(1 << 16)):
                    if found[2][0] < len(KINDS):
                        self._heard[found[1].hex(), KINDS[found[2][0]], found[3][0]] += 1

    def send(self, groups: list[str], ttl: int, cookie: str, mtu: int, hosts: list[tuple[str, int]]) -> dict[str, Any]:
        """Small datagrams and full ones to the first group, small ones to the second, if there is one, and to hosts."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((self.address, 0))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, self._on_interface("0.0.0.0"))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, ttl)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
            sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)  # whole or not at all
            full = min(mtu - IP_BYTES, MOST_BYTES)
            for number in range(PACKETS):
                for kind, group in zip((SMALL, SECOND), groups, strict=False):
                    sock.sendto(_content(cookie, kind, number), (group, GROUP_PORT))
                sock.sendto(_content(cookie, FULL, number, full), (groups[0], GROUP_PORT))
                for host, port in hosts:
                    with contextlib.suppress(OSError):  # it does not arrive, which says enough
                        sock.sendto(_content(cookie, DIRECT, number), (host, port))
        return {}

    def end(self) -> dict[str, Any]:
        self._stopped = True
        for thread in self._threads:
            thread.join()
        self._open.close()
        return {"heard": [[*key, count] for key, count in self._heard.items()]}


def _content(cookie: str, kind: str, number: int, size: int = 0) -> bytes:
    content = MAGIC + bytes.fromhex(cookie) + bytes((KINDS.index(kind), number))
    return content + secrets.token_bytes(max(0, size - len(content)))


class Both:
    """A peer, and what is captured beside it, if that is allowed."""

    def __init__(self, peer: Peer, capture: Capture | None) -> None:
        self._peer, self._capture = peer, capture
        self.send = peer.send

    def end(self) -> dict[str, Any]:
        return self._peer.end() | (self._capture.end() if self._capture else {})


# ---------------------------------------------------------------- facts


def facts(interface: str, hosts: dict[str, str]) -> dict[str, Any]:
    """Those of `probe`, and what is of interest to datagrams; the way to each of `hosts`, by name their addresses."""
    found = probe.facts(interface) | {"carrier": True, "rp_filter": 0}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with contextlib.suppress(OSError):
            request = struct.pack("16s24x", interface.encode()[:15])
            (flags,) = struct.unpack_from("H", fcntl.ioctl(sock, _SIOCGIFFLAGS, request), 16)
            found["carrier"] = bool(flags & _IFF_RUNNING)
        found["offloads"] = []
        for name, option, value in (("UDP_SEGMENT", _UDP_SEGMENT, 1000), ("UDP_GRO", _UDP_GRO, 1)):
            with contextlib.suppress(OSError):
                sock.setsockopt(_SOL_UDP, option, value)
                found["offloads"].append(name)
    for where in ("all", interface):
        path = f"/proc/sys/net/ipv4/conf/{where}/rp_filter"
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            found["rp_filter"] = max(found["rp_filter"], int(file.read()))
    found["routes"] = {name: route for name, address in hosts.items() if (route := _route(address))}
    return found


def _route(address: str) -> list[str] | None:
    """By which interface, and to which gateway ("" if to none), packets to an address go."""
    try:
        argv = ["ip", "-j", "route", "get", address]
        ran = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=ROUTE_S, check=True)
        (route,) = json.loads(ran.stdout)
        return [route["dev"], route.get("gateway", "")]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):  # no such program, or no route
        return None


def begin(interface: str, address: str, groups: list[str], hosts: dict[str, str]) -> tuple[Both | None, dict[str, Any]]:
    answer = facts(interface, hosts)
    try:
        peer = Peer(interface, address, groups)
    except OSError as error:
        kinds = {errno.EADDRNOTAVAIL: "address", errno.ENOBUFS: "memberships", errno.EADDRINUSE: "port"}
        return None, answer | {"trouble": kinds.get(error.errno or 0, "other"), "said": error.strerror or str(error)}
    answer |= {"port": peer.port, "receive_bytes": peer.receive_bytes, "capture": ""}
    try:
        return Both(peer, Capture(interface)), answer
    except OSError as error:
        return Both(peer, None), answer | {"capture": error.strerror or str(error)}


if __name__ == "__main__":
    probe.serve(begin)
