"""Real packets on a real link: what one namespace sends, captured in another."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from checkmate.errors import UsageError
from checkmate.shadow.capture import Capture
from checkmate.wire.frames import Header, Kind, encode_header, xxh3
from checkmate.wire.packets import SYN, Flow
from checkmate.wire.seal import TRAILER_BYTES, Seal
from tests.network import requires_network
from tests.wire.packet_makers import ERSPAN, FLOW4, FLOW6, erspan, packet

pytestmark = requires_network

PATIENCE_S = 20.0
DSCP = 43


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread in a network namespace: sockets made here stay there."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{namespace}") as there:
        assert libc.setns(there.fileno(), 0) == 0
        try:
            yield
        finally:
            assert libc.setns(before.fileno(), 0) == 0


class Link:
    """Two hosts on one cable: ``near`` sends, ``far`` is sent to, and captures."""

    def __init__(self) -> None:
        self.near, self.far = (f"cmt-{os.getpid()}-{side}" for side in ("near", "far"))

    def up(self) -> None:
        for name in (self.near, self.far):
            ip(f"netns add {name}")
        self.connect()

    def connect(self) -> None:
        ip(f"link add eth0 netns {self.near} type veth peer name eth0 netns {self.far}")
        for name, host in ((self.near, 1), (self.far, 2)):
            ip(f"-n {name} address add 10.77.0.{host}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")

    def down(self) -> None:
        for name in (self.near, self.far):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def injector(self) -> socket.socket:
        with inside(self.near):
            sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            sock.bind(("eth0", 0))
            return sock


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    made = Link()
    try:
        made.up()
        yield made
    finally:
        made.down()


class Listener:
    """A capture and what it delivered."""

    def __init__(self, link: Link, flows: list[Flow], trailer_bytes: int = 0) -> None:
        self.frames: list[tuple[Flow, bytes]] = []
        self.idle = 0
        self.fails: list[Exception] = []
        with inside(link.far):
            self.capture = Capture("eth0", self._on_frame, self._on_idle, trailer_bytes)
        self.capture.set_flows(flows)
        self.capture.start()

    def _on_frame(self, flow: Flow, _: Header, head: memoryview, payload: memoryview, trailer: memoryview) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.frames.append((flow, bytes(head) + bytes(payload) + bytes(trailer)))

    def _on_idle(self, now: float) -> None:
        assert abs(time.monotonic() - now) < PATIENCE_S
        self.idle += 1

    def wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, (len(self.frames), self.capture.statistics())
            time.sleep(0.005)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.capture.close()


def make_frame(number: int, length: int) -> bytes:
    payload = bytes([number]) * length
    return encode_header(Header(Kind.GRAD, length, rank=3, step=1, offset=number, round=1), xxh3(payload)) + payload


def test_frames_of_a_real_connection_in_large_packets_and_small_ones(link: Link) -> None:
    sent = [make_frame(i, 700_000) for i in range(20)]
    for segments in (1, 65535):  # of a packet as the sender's host hands it down: offload off and on
        ip(f"-n {link.near} link set eth0 gso_max_segs {segments}")
        with inside(link.far):
            server = socket.create_server(("10.77.0.2", 0))
        with inside(link.near):
            client = socket.socket()
        client.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, DSCP << 2)
        client.bind(("10.77.0.1", 0))
        flow = Flow("10.77.0.1", client.getsockname()[1], "10.77.0.2", server.getsockname()[1], DSCP)
        with server, client, Listener(link, [flow]) as listener:
            client.connect(server.getsockname())
            accepted, _ = server.accept()
            reader = threading.Thread(target=lambda accepted=accepted: drain(accepted))
            reader.start()
            client.sendall(b"".join(sent))
            client.shutdown(socket.SHUT_WR)
            reader.join()
            listener.wait(lambda listener=listener: len(listener.frames) == len(sent))
            assert listener.frames == [(flow, frame) for frame in sent]
            counts = listener.capture.statistics()
        assert counts.payload_bytes == sum(map(len, sent))
        assert counts.holes == counts.bad_frames == counts.foreign == counts.unreadable == counts.kernel_drops == 0
        mean_bytes = counts.payload_bytes / counts.segments
        assert mean_bytes < 1500 if segments == 1 else mean_bytes > 3000


def drain(sock: socket.socket) -> None:
    with sock:
        while sock.recv(1 << 20):
            pass


@pytest.mark.parametrize("flow", [FLOW4, FLOW6])
@pytest.mark.parametrize("tags", [(), (0x8100,), (0x88A8, 0x8100)])
def test_tagged_packets_and_foreign_addresses(link: Link, tags: tuple[int, ...], flow: Flow) -> None:
    frame = make_frame(1, 1000)
    with link.injector() as injector, Listener(link, [flow]) as listener:
        injector.send(packet(flow, 99, b"", SYN, tags))
        injector.send(packet(flow, 100, frame, tags=tags))
        listener.wait(lambda: len(listener.frames) == 1)
        assert listener.frames == [(flow, frame)]


@pytest.mark.parametrize("kind", ERSPAN)
def test_mirror_sessions(link: Link, kind: str) -> None:
    frame = make_frame(1, 500)
    other = FLOW4._replace(source_port=5)
    with link.injector() as injector, Listener(link, [FLOW4]) as listener:
        injector.send(erspan(kind, packet(other, 100, frame)))
        injector.send(erspan(kind, packet(other._replace(dscp=0), 100, frame)))
        injector.send(erspan(kind, packet(FLOW4, 100, frame))[:40])
        injector.send(erspan(kind, packet(FLOW4, 100, frame)))
        listener.wait(lambda: len(listener.frames) == 1)
        assert listener.frames == [(FLOW4, frame)]
        counts = listener.capture.statistics()
        assert (counts.foreign, counts.unreadable) == (1, 1)


def test_foreign_packets_are_counted_and_others_never_seen(link: Link) -> None:
    frame = make_frame(1, 1200)
    with link.injector() as injector, Listener(link, [FLOW4]) as listener:
        for i in range(10):
            injector.send(packet(FLOW4._replace(source_port=i + 1), 100, frame))
            injector.send(packet(FLOW4._replace(dscp=0), 100, frame))
        injector.send(packet(FLOW4, 100, frame))
        listener.wait(lambda: len(listener.frames) == 1)
        counts = listener.capture.statistics()
        assert (counts.packets, counts.foreign, counts.segments) == (11, 10, 1)
        assert counts.kernel_drops == 0


def test_hole_is_given_up_while_nothing_else_comes(link: Link) -> None:
    frames = [make_frame(i, 2000) for i in range(4)]
    data = b"".join(frames)
    with link.injector() as injector, Listener(link, [FLOW4]) as listener:  # no SYN: the flow began before
        for at in range(500, len(data), 500):
            if at != 5000:  # within the third
                injector.send(packet(FLOW4, 2**32 - 3000 + at & 0xFFFFFFFF, data[at : at + 500]))
        listener.wait(lambda: len(listener.frames) == 2)
        assert [frame for _, frame in listener.frames] == [frames[1], frames[3]]
        counts = listener.capture.statistics()
        assert (counts.holes, counts.hole_bytes, counts.torn_frames) == (1, 500, 1)


def test_flows_can_change_at_any_time(link: Link) -> None:
    frame = make_frame(1, 100)
    other = FLOW4._replace(source_port=5, dscp=10)
    with link.injector() as injector, Listener(link, []) as listener:
        seq = 100
        for flows in ([FLOW4], [FLOW4, other], [other], [FLOW4]):
            before = len(listener.frames)
            listener.capture.set_flows(flows)
            for flow in (FLOW4, other):
                injector.send(packet(flow, seq, frame))
            listener.wait(lambda before=before, flows=flows: len(listener.frames) == before + len(flows))
            assert listener.frames[before:] == [(flow, frame) for flow in flows]
            seq += len(frame)
        counts = listener.capture.statistics()
        assert counts.frames == 5  # those of streams that are gone count as well
        with pytest.raises(ValueError, match="fd00::1"):
            listener.capture.set_flows([FLOW4._replace(target="fd00::1")])
        injector.send(packet(FLOW4, seq, frame))
        listener.wait(lambda: len(listener.frames) == 6)


def test_sealed_frames_prove_themselves(link: Link) -> None:
    seal, frame = Seal(b"token", "run", bytes(16)), make_frame(1, 900)
    sealed = frame + seal.trailer(3, 1, frame[:80], frame[80:])
    with link.injector() as injector, Listener(link, [FLOW4], TRAILER_BYTES) as listener:
        injector.send(packet(FLOW4, 100, sealed))
        listener.wait(lambda: len(listener.frames) == 1)
        ((_, got),) = listener.frames
        assert seal.holds(3, got[:80], got[80:-TRAILER_BYTES], got[-TRAILER_BYTES:])


def test_callback_that_raises_costs_its_frame_only(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    frames = [make_frame(i, 100) for i in range(4)]
    with link.injector() as injector, Listener(link, [FLOW4]) as listener:
        listener.fails = [KeyError("one"), KeyError("two"), OSError("three")]
        with caplog.at_level(logging.ERROR, "checkmate.shadow"):
            injector.send(packet(FLOW4, 100, b"".join(frames)))
            listener.wait(lambda: len(listener.frames) == 1)
        assert [frame for _, frame in listener.frames] == frames[3:]
        assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["KeyError", "OSError"]
        before = listener.idle
        listener.wait(lambda: listener.idle > before + 2)


def test_what_the_host_sends_itself_is_not_captured(link: Link) -> None:
    with Listener(link, [FLOW4]) as listener:
        with inside(link.far):
            own = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        with own, link.injector() as injector:
            own.bind(("eth0", 0))
            own.send(packet(FLOW4, 100, make_frame(1, 100)))
            injector.send(packet(FLOW4, 100, make_frame(2, 100)))
        listener.wait(lambda: len(listener.frames) == 1)
        assert listener.frames == [(FLOW4, make_frame(2, 100))]


def test_interface_that_goes_down_and_comes_back(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    with Listener(link, [FLOW4]) as listener:
        try:
            ip(f"-n {link.far} link set eth0 down")
            listener.wait(lambda: "ip link set eth0 up" in caplog.text)
        finally:
            ip(f"-n {link.far} link set eth0 up")
        hears(link, listener)


def test_interface_that_is_made_anew_under_its_name(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    with Listener(link, [FLOW4]) as listener:
        ip(f"-n {link.far} link delete eth0")
        listener.wait(lambda: "nothing is captured" in caplog.text)
        link.connect()
        hears(link, listener)
        assert "it is listened to again" in caplog.text


def hears(link: Link, listener: Listener) -> None:
    frame = make_frame(1, 100)
    with link.injector() as injector:
        deadline = time.monotonic() + PATIENCE_S
        while not listener.frames and time.monotonic() < deadline:
            try:
                injector.send(packet(FLOW4, 100, frame))
            except OSError:  # down, as the other end has just been
                time.sleep(0.01)
            time.sleep(0.01)
    assert listener.frames == [(FLOW4, frame)]


def test_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"no interface 'eth9' to capture on; there are .*lo.*`ip link`"):
        Capture("eth9", lambda *_: None, lambda _: None)


def test_without_the_right_to_capture_the_error_says_how_to_get_it() -> None:
    program = (
        "import os; os.setuid(65534)\n"
        "from checkmate.shadow.capture import Capture\n"
        "from checkmate.errors import UsageError\n"
        "try: Capture('lo', lambda *_: None, lambda _: None)\n"
        "except UsageError as error: print(error)\n"
    )
    import sys

    ran = subprocess.run([sys.executable, "-c", "import checkmate.shadow.capture\n" + program], capture_output=True,
                         text=True, timeout=60, check=False)  # fmt: skip
    assert "needs the capability CAP_NET_RAW" in ran.stdout, ran.stderr
    assert "AmbientCapabilities" in ran.stdout
