"""What runs on each host: ``python -m checkmate.doctor.probe``. It observes and judges nothing.

One JSON object per line comes in, and one answer per line goes out:

    begin    listens (a shadow: captures; a worker: accepts connections), and tells facts of the host
    send     a worker: sends packets with its cookie to a peer, over a marked and over an unmarked connection
    end      tells what was seen meanwhile; the process ends

It also ends when its input does, and after `LIFE_S` in any case, so that nothing stays behind on a host.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..transport.tcp import mark
from ..wire.packets import parse
from . import CONTROL, FULL, KINDS, PACKETS, SMALL

LIFE_S = 120
CONNECT_S = 5.0
#: For a packet to be acknowledged: longer than a few retransmissions take.
ACKNOWLEDGED_S = 2.0
POLL_S = 0.002
#: What a packet's payload begins with: who sent it, its kind, its number.
MAGIC = b"checkmate doctor"
COOKIE_BYTES = 16
FOUND = re.compile(re.escape(MAGIC) + b"(.{%d})(.)(.)" % COOKIE_BYTES, re.DOTALL)
#: Of each packet that a shadow sees. Headers of an encapsulated one and what we look for have room in it.
SNAP_BYTES = 512
QUEUE_BYTES = 32 << 20

# linux/if_packet.h, asm/socket.h, linux/sockios.h, linux/in.h, linux/in6.h, linux/tcp.h; see also shadow/capture.py
_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, _PACKET_STATISTICS, _PACKET_IGNORE_OUTGOING = 263, 1, 6, 23
_SO_RCVBUFFORCE, _SO_ATTACH_FILTER, _ETH_P_ALL, _RETURN = 33, 26, 3, 0x06
_SIOCGIFFLAGS, _SIOCGIFMTU, _SIOCOUTQ, _IFF_UP = 0x8913, 0x8921, 0x5411, 1
_IP_RECVTOS, _IP_PKTOPTIONS, _IP_MTU, _IPV6_RECVTCLASS, _IPV6_PKTOPTIONS, _IPV6_MTU = 13, 9, 14, 66, 6, 24
_CONTROL_MESSAGE = struct.Struct("Niii")  # length, level, type, the value

#: cookie, kind, number of the packet, DSCP
Sighting = tuple[str, str, int, int]


class Worker:
    """Accepts connections at an address, notes what comes by them, and with which mark they were opened."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        if family == socket.AF_INET6:
            self._listener.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVTCLASS, 1)
        else:
            self._listener.setsockopt(socket.IPPROTO_IP, _IP_RECVTOS, 1)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._arrived: list[dict[str, Any]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._read, args=(sock,), daemon=True).start()

    def _read(self, sock: socket.socket) -> None:
        dscp = _received_dscp(sock)
        content = b""
        with sock, contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                content = (content + data)[: 1 << 20]
        found = {(m[1].hex(), KINDS[m[2][0]]) for m in FOUND.finditer(content) if m[2][0] < len(KINDS)}
        self._arrived += [{"cookie": cookie, "kind": kind, "dscp": dscp} for cookie, kind in found]

    def send(self, host: str, port: int, dscp: int, cookie: str) -> dict[str, Any]:
        """Send all kinds of packets; says which were not acknowledged in time."""
        lost = []
        with self._open(host, port, dscp) as sock:
            full = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            for kind, size in ((SMALL, 0), (FULL, full)):
                if not _send(sock, cookie, kind, size):
                    lost.append(kind)
            level, name = (
                (socket.IPPROTO_IPV6, _IPV6_MTU) if sock.family == socket.AF_INET6 else (socket.IPPROTO_IP, _IP_MTU)
            )
            path_mtu = sock.getsockopt(level, name)
            if lost:  # end at once, for the peer's sake: no more can be brought to it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with self._open(host, port, None) as sock:
            if not _send(sock, cookie, CONTROL, 0):
                lost.append(CONTROL)
        return {"lost": lost, "path_mtu": path_mtu}

    def _open(self, host: str, port: int, dscp: int | None) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            if dscp is not None:
                mark(sock, dscp)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.bind((self.address, 0))
            sock.settimeout(CONNECT_S)
            sock.connect((host, port))
        except BaseException:
            sock.close()
            raise
        return sock

    def end(self) -> dict[str, Any]:
        return {"arrived": self._arrived}


def _received_dscp(sock: socket.socket) -> int | None:
    """The mark of the packet that opened this connection, which the kernel kept. None if it does not say."""
    options = (
        (socket.IPPROTO_IPV6, _IPV6_PKTOPTIONS)
        if sock.family == socket.AF_INET6
        else (socket.IPPROTO_IP, _IP_PKTOPTIONS)
    )
    try:
        told = sock.getsockopt(*options, 256)
    except OSError:
        return None
    if len(told) < _CONTROL_MESSAGE.size:
        return None
    *_, value = _CONTROL_MESSAGE.unpack_from(told)
    return int(value) >> 2 & 0x3F


def _send(sock: socket.socket, cookie: str, kind: str, size: int) -> bool:
    """Packets of one kind, each when the last one has arrived, so that none is joined. False if one does not."""
    for number in range(PACKETS):
        content = MAGIC + bytes.fromhex(cookie) + bytes((KINDS.index(kind), number))
        sock.sendall(content + secrets.token_bytes(max(0, size - len(content))))
        deadline = time.monotonic() + ACKNOWLEDGED_S
        while int.from_bytes(fcntl.ioctl(sock, _SIOCOUTQ, bytes(4)), sys.byteorder):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
    return True


class Shadow:
    """Counts the packets with somebody's cookie that come in on an interface."""

    def __init__(self, interface: str) -> None:
        self._stopped = False
        self._seen: Counter[Sighting] = Counter()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, QUEUE_BYTES)
        except PermissionError:  # that takes CAP_NET_ADMIN
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        promiscuous = struct.pack("iHH8s", socket.if_nametoindex(interface), 1, 0, bytes(8))
        self._socket.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, promiscuous)
        operation = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, SNAP_BYTES))
        program = struct.pack("HP", 1, ctypes.addressof(operation))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        self._socket.bind((interface, _ETH_P_ALL))
        self._socket.settimeout(0.05)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        buffer = memoryview(bytearray(SNAP_BYTES))
        while not self._stopped:
            try:
                length = self._socket.recv_into(buffer)
            except OSError:  # nothing came, or the interface is down
                continue
            dscp, payload = self._content(buffer, length)
            for match in FOUND.finditer(payload):
                if match[2][0] < len(KINDS):
                    self._seen[match[1].hex(), KINDS[match[2][0]], match[3][0], dscp] += 1

    def _content(self, packet: memoryview, length: int) -> tuple[int, memoryview]:
        """DSCP and payload of what counts here."""
        segment = parse(packet, length)
        return (segment[1], segment[4]) if segment is not None else (0, packet[:0])

    def end(self) -> dict[str, Any]:
        self._stopped = True
        self._thread.join()
        _, dropped = struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        self._socket.close()
        return {"seen": [[*key, count] for key, count in self._seen.items()], "dropped": dropped}


# ---------------------------------------------------------------- facts


def facts(interface: str) -> dict[str, Any]:
    """Of the host and one of its interfaces; of one that is not there, `mtu` is None."""
    found: dict[str, Any] = {"interfaces": [name for _, name in socket.if_nameindex()], "mtu": None, "up": False}
    request = struct.pack("16s24x", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        (found["mtu"],) = struct.unpack_from("i", fcntl.ioctl(sock, _SIOCGIFMTU, request), 16)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(sock, _SIOCGIFFLAGS, request), 16)
        found["up"] = bool(flags & _IFF_UP)
    for name in ("rmem_max", "wmem_max"):
        found[name], found[f"{name}_is_ours"] = None, True
        with contextlib.suppress(OSError, ValueError), open(f"/proc/sys/net/core/{name}", encoding="ascii") as file:
            found[name] = int(file.read())
            found[f"{name}_is_ours"] = bool(os.fstat(file.fileno()).st_mode & 0o200)
    return found


def begin(role: str, interface: str, address: str) -> tuple[Worker | Shadow | None, dict[str, Any]]:
    """What listens from here on, and the answer. `trouble` says why nothing listens: a kind, and the system's words."""
    answer = facts(interface)
    try:
        if role == "shadow":
            return Shadow(interface), answer
        worker = Worker(address)
        return worker, answer | {"port": worker.port}
    except OSError as error:
        kind = {errno.EPERM: "privilege", errno.EACCES: "privilege", errno.EADDRNOTAVAIL: "address"}
        trouble = "interface" if answer["mtu"] is None and role == "shadow" else kind.get(error.errno or 0, "other")
        return None, answer | {"trouble": trouble, "said": error.strerror or str(error)}


def serve(begin: Callable[..., tuple[Any, dict[str, Any]]]) -> None:
    """Do what is asked, line by line, with what `begin` makes: something that can `end`, and perhaps `send`."""
    signal.alarm(LIFE_S)
    host: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        if what == "begin":
            host, answer = begin(**request)
        elif what == "send" and hasattr(host, "send"):
            try:
                answer = host.send(**request)
            except OSError as error:
                answer = {"error": error.strerror or str(error)}
        else:
            answer = {} if host is None else host.end()
        print(json.dumps({"checkmate": answer}), flush=True)
        if what == "end":
            return


if __name__ == "__main__":
    serve(begin)
