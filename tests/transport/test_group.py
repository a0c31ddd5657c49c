"""Sockets of a multicast group, on loopback."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from checkmate.errors import UsageError
from checkmate.transport.group import (
    Inlet,
    Outlet,
    address_of,
    enlarge,
    interface_of,
    join,
    mtu_of,
    only_from_others,
    sender,
)
from checkmate.wire.datagrams import Datagram, What

PORT = 7993
EACH = 1472
Join = Callable[[], socket.socket]
NUMBERS = itertools.count(1)


@pytest.fixture
def group() -> str:
    return f"239.77.9.{next(NUMBERS)}"


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for sock in sockets:
        sock.close()


def member(group: str, opened: list[socket.socket]) -> Inlet:
    sock = join(group, PORT, "127.0.0.1")
    opened.append(sock)
    enlarge(sock)
    return Inlet(sock)


def outlet(opened: list[socket.socket], each: int = EACH) -> Outlet:
    sock = sender("127.0.0.1", 1)
    opened.append(sock)
    enlarge(sock)
    return Outlet(sock, each)


def received(inlet: Inlet, nbytes: int, each: int = EACH) -> bytes:
    """Datagrams one behind the other, until there are so many bytes."""
    found, limit = b"", time.monotonic() + 5
    while len(found) < nbytes and time.monotonic() < limit:
        for arrival in inlet.receive():
            assert arrival.each <= each
            found += b"".join(row[: arrival.nbytes].tobytes() for row in arrival.data)
    return found


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("nbytes", [1, EACH, EACH + 1, 44 * EACH, 45 * EACH, 200 * EACH + 7])
def test_all_members_get_all_datagrams_in_order(
    group: str, opened: list[socket.socket], segments: bool, nbytes: int
) -> None:
    members, out = [member(group, opened) for _ in range(3)], outlet(opened)
    out.segments = out.segments and segments
    data = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
    out.send(data, (group, PORT))
    for inlet in members:
        assert received(inlet, nbytes) == data.tobytes()


def test_this_kernel_cuts_and_joins_datagrams(group: str, opened: list[socket.socket]) -> None:
    inlet, out = member(group, opened), outlet(opened)
    assert out.segments
    out.send(np.zeros(44 * EACH, np.uint8), (group, PORT))
    (arrival,) = inlet.receive()
    assert (arrival.nbytes, arrival.each, len(arrival.data)) == (44 * EACH, EACH, 1)
    assert arrival.source[0] == "127.0.0.1"


def test_what_is_alike_comes_together_and_what_is_not_does_not(group: str, opened: list[socket.socket]) -> None:
    inlet, out, other = member(group, opened), outlet(opened), outlet(opened)
    for _ in range(3):
        out.send(np.zeros(44 * EACH, np.uint8), (group, PORT))
    other.send(np.zeros(44 * EACH, np.uint8), (group, PORT))
    out.say(b"x" * 40, (group, PORT))
    found = inlet.receive()
    assert [(len(a.data), a.nbytes, a.each) for a in found] == [(3, 44 * EACH, EACH), (1, 44 * EACH, EACH), (1, 40, 40)]
    assert found[0].source == found[2].source != found[1].source


def test_another_group_on_the_same_port_is_not_heard(group: str, opened: list[socket.socket]) -> None:
    inlet, out = member(group, opened), outlet(opened)
    member("239.77.10.1", opened)  # by another socket of this host
    out.say(b"not for us", ("239.77.10.1", PORT))
    assert inlet.receive() == []
    out.say(b"for us", (group, PORT))
    assert received(inlet, 6) == b"for us"


def test_who_waits_wakes_up_when_the_socket_is_shut_down(group: str, opened: list[socket.socket]) -> None:
    sock = join(group, PORT, "127.0.0.1")
    opened.append(sock)
    inlet = Inlet(sock)
    with pytest.raises(OSError, match="not connected"):
        sock.shutdown(socket.SHUT_RDWR)
    assert inlet.receive() == []


def test_the_kernel_drops_what_is_ours_and_what_is_another_sessions(group: str, opened: list[socket.socket]) -> None:
    sock = join(group, PORT, "127.0.0.1")
    opened.append(sock)
    session = 0xFEDC_BA98_7654_3210
    only_from_others(sock, 3, session)
    inlet, out = Inlet(sock), outlet(opened)
    wanted = Datagram(What.ASK, 4, session).encode()
    for unwanted in (
        Datagram(What.ASK, 3, session).encode(),
        Datagram(What.ASK, 4, session ^ 1).encode(),
        Datagram(What.ASK, 4, session ^ 1 << 63).encode(),
        b"short",
    ):
        out.say(unwanted, (group, PORT))
    out.say(wanted, (group, PORT))
    assert received(inlet, 32) == wanted
    assert inlet.receive() == []


def test_what_the_kernel_could_not_keep_is_counted(group: str, opened: list[socket.socket]) -> None:
    sock = join(group, PORT, "127.0.0.1")
    opened.append(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    inlet, out = Inlet(sock), outlet(opened)
    for _ in range(100):
        out.say(b"x" * 1000, (group, PORT))
    while inlet.receive():
        pass
    out.say(b"x" * 1000, (group, PORT))  # the count comes with a datagram
    assert inlet.receive()
    assert 50 < inlet.dropped < 100


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up a capability")
def test_a_buffer_that_is_too_small_is_said_with_the_sysctl() -> None:
    program = (
        "import logging, socket; logging.basicConfig(); from checkmate.transport.group import enlarge; "
        "print(enlarge(socket.socket(type=socket.SOCK_DGRAM), 1 << 30))"
    )
    command = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    had = int(ran.stdout)
    assert had < 1 << 30
    assert f"the kernel keeps {had} bytes for us where {1 << 30} were asked for" in ran.stderr
    assert f"`sysctl net.core.rmem_max={1 << 30}" in ran.stderr


def test_wrong_addresses_are_refused() -> None:
    assert address_of("lo") == "127.0.0.1" == address_of("127.0.0.1")
    assert interface_of("127.0.0.1") == "lo"
    assert mtu_of("lo") > 1500
    with pytest.raises(UsageError, match=r"interface 'nope0' has no IPv4 address .* there are .*lo"):
        address_of("nope0")
    with pytest.raises(UsageError, match=r"no interface has the IPv4 address 192\.0\.2\.9"):
        interface_of("192.0.2.9")
    with pytest.raises(UsageError, match=r"cannot send from 192\.0\.2\.9 by UDP"):
        sender("192.0.2.9", 1)
    with pytest.raises(UsageError, match="cannot join 10"):
        join("10.1.2.3", PORT, "127.0.0.1")
