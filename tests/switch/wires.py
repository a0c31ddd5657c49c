"""A switch in a namespace of its own: a bridge, ports, and the far end of each, where tests send and receive."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from checkmate.switch.cluster import Cluster, Shadow, Switch, Worker

CLONE_NEWNET = 0x40000000
PATIENCE_S = 20.0
#: Ports have these hardware addresses, and a number behind them.
MACS = b"\x02\0\0\0\0"
NUMBERS = itertools.count()


class Wires:
    """Ports w0, w1 (workers), s0, s1 (shadows) and x0 (foreign); host HOST is at the far end of port HOST."""

    hosts = ("w0", "w1", "s0", "s1", "x0")

    def __init__(self) -> None:
        self.name = f"cmt-{os.getpid()}-{next(NUMBERS)}"
        self.cluster = Cluster(
            (Worker("w0", "10.77.0.1", "w0"), Worker("w1", "10.77.0.2", "w1")),
            (Shadow("s0", "10.77.1.1", "s0"), Shadow("s1", "10.77.1.2", "s1")),
            switch=Switch(exec=f"ip netns exec {self.name}"),
        )

    def run(self, *command: str, given: str = "") -> str:
        argv = ["ip", "netns", "exec", self.name, *command]
        ran = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert ran.returncode == 0, (argv, ran.stderr)
        return ran.stdout

    def add_port(self, host: str) -> None:
        mac = f"02:00:00:00:00:{self.hosts.index(host):02x}"
        self.run("ip", "link", "add", host, "type", "veth", "peer", "name", f"{host}-far")
        self.run("ip", "link", "set", f"{host}-far", "address", mac, "up")
        self.run("ip", "link", "set", host, "master", "br0", "up")
        self.run("bridge", "fdb", "replace", mac, "dev", host, "master", "static")  # or frames would be flooded

    def ruleset(self) -> Any:
        return json.loads(self.run("nft", "-n", "-j", "list", "ruleset"))

    def socket(self, host: str) -> socket.socket:
        """A packet socket on a host's end."""
        opened = socket_in(self.name, socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
        opened.bind((f"{host}-far", 0))
        return opened

    def exchange(self, frames: list[tuple[str, bytes]]) -> dict[str, list[bytes]]:
        """Send frames from hosts, and return what arrived at each host, up to a last frame that is flooded to all.

        What the kernel says of its own accord on new links, as reports of multicast groups, is left out.
        """
        end = frame("x0", None, b"the end", dscp=0)
        sockets = {host: self.socket(host) for host in self.hosts}
        try:
            for host, sent in [*frames, ("x0", end)]:
                sockets[host].send(sent)
            arrived: dict[str, list[bytes]] = {}
            for host in self.hosts[:-1]:
                received = iter(lambda host=host: sockets[host].recvfrom(65536), None)  # type: ignore[misc]
                inwards = (data for data, at in received if at[2] != socket.PACKET_OUTGOING and data[6:11] == MACS)
                arrived[host] = list(itertools.takewhile(lambda data: data != end, inwards))
            return arrived
        finally:
            for opened in sockets.values():
                opened.close()


def socket_in(namespace: str, *kind: int) -> socket.socket:
    """A socket of another network namespace. Made in a thread, since a thread enters a namespace alone."""
    made: list[socket.socket] = []

    def make() -> None:
        with open(f"/run/netns/{namespace}") as there:
            assert ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET) == 0
        made.append(socket.socket(*kind))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    made[0].settimeout(PATIENCE_S)
    return made[0]


def frame(
    source: str, target: str | None, payload: bytes, *, dscp: int, protocol: int = 6, ipv6: bool = False
) -> bytes:
    """An Ethernet frame from host to host (None: to all), TCP or else over IP."""
    macs = [MACS + bytes((Wires.hosts.index(host),)) if host else b"\xff" * 6 for host in (target, source)]
    inside = struct.pack("!HHLLBBHHH", 1000, 2000, 1, 1, 0x50, 0x10, 1024, 0, 0) + payload
    if ipv6:
        header = struct.pack("!LHBB32x", 6 << 28 | dscp << 22, len(inside), protocol, 64)
    else:
        header = struct.pack("!BBHHHBBHLL", 0x45, dscp << 2, 20 + len(inside), 0, 0, 64, protocol, 0, 0, 0)
        total = sum(struct.unpack("!10H", header))
        checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
        header = header[:10] + struct.pack("!H", checksum) + header[12:]
    return b"".join(macs) + (b"\x86\xdd" if ipv6 else b"\x08\x00") + header + inside


@contextmanager
def wires() -> Iterator[Wires]:
    """A switch, taken away at the end. This process stays on one core, so that packets keep their order."""
    cores = os.sched_getaffinity(0)
    made = Wires()
    subprocess.run(["ip", "netns", "add", made.name], check=True)
    try:
        os.sched_setaffinity(0, {min(cores)})
        made.run("sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1")
        made.run("ip", "link", "add", "br0", "type", "bridge")
        made.run("ip", "link", "set", "br0", "up")
        for host in made.hosts:
            made.add_port(host)
        yield made
    finally:
        os.sched_setaffinity(0, cores)
        subprocess.run(["ip", "netns", "del", made.name], check=True)
