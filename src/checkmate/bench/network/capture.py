"""How fast one core captures and reassembles."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

from xxhash import xxh3_64_intdigest as xxh3

from ...lab import Lab
from ...lab.plan import DATA
from ...shadow import capture as capturing
from ...shadow.capture import Capture
from ...trainer.mirror import DSCP
from ...transport.tcp import mark
from ...wire.frames import MAX_BULK_BYTES, Header, Kind, encode_header
from ...wire.packets import Flow
from ..common import TIMEOUT_S, BenchmarkFailed, Figure, at_least, inside, median

#: What is asked of the share.
TARGET = 0.6
#: The most that the kernel keeps, so that a whole burst is there before it is received.
QUEUE_BYTES = 1 << 30
RAW, OURS = "raw recv_into", "capture and reassembly"


def capture(quick: bool, rate: str) -> Iterator[Figure]:
    """A burst of frames of 1 MiB goes from one worker to the other, marked, and the switch copies it to the shadow's
    port, where a capture's socket keeps it. Then it is received, by nothing but ``recv_into`` in a loop, or by the
    capture's own loop, down to frames whose checksums hold. The two take turns. Rates are per packet: time that one
    takes by time that the other takes, in processor time of the one thread that receives.
    """
    for offloads in (True, False):
        with Lab(2, 1, offloads=offloads) as lab:
            total = 4 << 20 if quick else (160 if offloads else 80) << 20
            frames = _frames(total)
            per_packet: dict[str, list[float]] = defaultdict(list)
            rates: dict[str, list[float]] = defaultdict(list)
            for number in range(2 if quick else 11):
                for kind in (RAW, OURS) if number % 2 == 0 else (OURS, RAW):
                    packets, nbytes, seconds = _burst(lab, frames, kind)
                    per_packet[kind].append(seconds / packets)
                    rates[kind].append(nbytes / seconds)
            name = f"capture: offloads {'on' if offloads else 'off'}: "
            for kind in (RAW, OURS):
                yield Figure(f"{name}{kind}", median(rates[kind]) / 1e9, "GB/s")
                yield Figure(f"{name}{kind}, per packet", median(per_packet[kind]) * 1e6, "µs")
            shares = [raw / ours for raw, ours in zip(per_packet[RAW], per_packet[OURS], strict=True)]
            yield at_least(f"{name}share of the raw rate", median(shares), TARGET)


def _frames(total: int) -> list[bytes]:
    payload = os.urandom(MAX_BULK_BYTES)
    digest = xxh3(payload)
    headers = (Header(Kind.GRAD, MAX_BULK_BYTES, step=1, offset=n, round=1) for n in range(0, total, MAX_BULK_BYTES))
    return [encode_header(header, digest) + payload for header in headers]


def _burst(lab: Lab, frames: list[bytes], kind: str) -> tuple[int, int, float]:
    """Packets and bytes that were received, and the seconds that took."""
    near, far = lab.workers
    with inside(far.namespace):
        listener = socket.create_server((far.address, 0))
    with inside(near.namespace):
        sender = socket.socket()
        mark(sender, DSCP)
        sender.bind((near.address, 0))
    flow = Flow(near.address, sender.getsockname()[1], far.address, listener.getsockname()[1], DSCP)
    drained = _Drained(len(frames))
    with mock.patch.object(capturing, "QUEUE_BYTES", QUEUE_BYTES), inside(lab.shadows[0].namespace):
        listening = Capture(DATA[0], drained.on_frame, drained.on_idle)
    try:
        with listener, sender:
            drained.capture = listening
            listening.set_flows([flow])
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            with receiver:
                _exchange(sender, receiver, frames)
        if kind == RAW:
            return _raw(listening._socket)
        return drained.run(listening)
    finally:
        listening.close()


def _exchange(sender: socket.socket, receiver: socket.socket, frames: list[bytes]) -> None:
    def receive() -> None:
        memory, left = bytearray(1 << 20), sum(map(len, frames))
        while left:
            left -= receiver.recv_into(memory)

    thread = threading.Thread(target=receive)
    thread.start()
    for frame in frames:
        sender.sendall(frame)
    thread.join()


def _raw(sock: socket.socket) -> tuple[int, int, float]:
    sock.setblocking(False)
    memory, packets, nbytes = memoryview(bytearray(256 << 10)), 0, 0
    receive = sock.recv_into
    began = time.thread_time()
    try:
        while True:
            nbytes += receive(memory)
            packets += 1
    except BlockingIOError:
        return packets, nbytes, time.thread_time() - began


class _Drained:
    """Ends a capture when the last frame is there."""

    def __init__(self, num_frames: int) -> None:
        self.capture: Capture
        self._left, self._ended = num_frames, 0.0

    def on_frame(self, *_: Any) -> None:
        self._left -= 1
        if not self._left:
            self._ended = time.thread_time()
            self.capture._stopped = True

    def on_idle(self, _: float) -> None:
        if time.monotonic() > self._deadline:
            self.capture._stopped = True

    def run(self, capture: Capture) -> tuple[int, int, float]:
        self._deadline, began = time.monotonic() + TIMEOUT_S, time.thread_time()
        capture._run()
        counts = capture.statistics()
        if self._left:
            raise BenchmarkFailed(f"not every frame was captured: {counts}")
        return counts.packets, counts.payload_bytes, self._ended - began
