"""Listening to gradients that workers multicast: an ordinary socket per group, and a thread that reads it.

The shadow has joined the groups as the workers have, and that is all it does: it acknowledges nothing and asks for
nothing here. What its kernel cannot keep is dropped and counted, and repaired by other ways.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

from ..errors import UsageError
from ..transport.group import Arrival, Inlet, address_of, enlarge, join
from ..wire.assembly import Messages
from ..wire.datagrams import Pieces, split
from ..wire.packets import Flow
from ..wire.reassembly import Take
from .capture import TICK_S, OnFrame, OnIdle

log = logging.getLogger("checkmate.shadow")

#: What the kernel keeps for us while we look elsewhere. It doubles that.
QUEUE_BYTES = 64 << 20
_COUNTS = ("pieces", "duplicates", "unfit", "holes", "frames", "bad_frames", "torn_frames")


class Listening:
    """Frames of announced flows to groups, as `Capture` has them of those that come by. Raises UsageError."""

    def __init__(self, interface: str, on_frame: OnFrame, on_idle: OnIdle, trailer_bytes: int = 0) -> None:
        self.interface = interface
        self.address = address_of(interface)
        self._on_frame, self._on_idle, self.trailer_bytes = on_frame, on_idle, trailer_bytes
        self._lock = threading.Lock()
        self._groups: dict[tuple[str, int], _Group] = {}
        self._before: Counter[str] = Counter()  # of groups that were left
        self._told: set[str] = set()

    def close(self) -> None:
        """Stop listening. No callback is called any more once this returns; not to be called from one."""
        self.set_flows([])

    def set_flows(self, flows: Collection[Flow]) -> None:
        """Listen to these flows and no others. A group that cannot be joined is logged: its frames are repaired."""
        wanted: dict[tuple[str, int], dict[tuple[str, int], Flow]] = {}
        for flow in flows:
            wanted.setdefault((flow.target, flow.target_port), {})[flow.source, flow.source_port] = flow
        with self._lock:
            for where in [where for where in self._groups if where not in wanted]:
                group = self._groups.pop(where)
                group.close()
                self._before.update(group.counts())
            for where, senders in wanted.items():
                if where in self._groups:
                    self._before.update(self._groups[where].listen_to(senders))
                    continue
                try:
                    sock = join(*where, self.address)
                except UsageError as error:
                    self.failed(error)
                    continue
                self._groups[where] = _Group(self, sock, senders)

    def status(self) -> dict[str, Any]:
        with self._lock:
            counts = self._before.copy()
            for group in self._groups.values():
                counts.update(group.counts())
            groups = [f"{host}:{port}" for host, port in self._groups]
        return {"interface": self.interface, "groups": groups, **{name: counts[name] for name in _ALL}}

    def failed(self, error: Exception) -> None:
        kind = type(error).__name__
        if kind not in self._told:
            self._told.add(kind)
            log.error("multicast on %s: %s: %s; more of this kind is not logged", self.interface, kind, error)

    def take(self, flow: Flow) -> Take:
        def take(header: Any, head: memoryview, payload: memoryview, trailer: memoryview) -> None:
            try:
                self._on_frame(flow, header, head, payload, trailer)
            except Exception as error:
                self.failed(error)

        return take

    def idle(self, now: float) -> None:
        try:
            self._on_idle(now)
        except Exception as error:
            self.failed(error)


_ALL = (*_COUNTS, "foreign", "kernel_drops")


class _Group:
    """One group that was joined. `senders` are by their address; what others send is counted."""

    def __init__(self, listening: Listening, sock: socket.socket, senders: dict[tuple[str, int], Flow]) -> None:
        self._listening, self._socket, self.senders = listening, sock, senders
        enlarge(sock, QUEUE_BYTES)
        self._inlet = Inlet(sock)
        self._streams: dict[Flow, Messages] = {}
        self._foreign = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="checkmate multicast", daemon=True)
        self._thread.start()

    def listen_to(self, senders: dict[tuple[str, int], Flow]) -> dict[str, int]:
        """To these and no others; returns what was counted of those that are no more."""
        self.senders = senders
        streams, flows = self._streams, set(senders.values())
        self._streams = {flow: stream for flow, stream in streams.items() if flow in flows}
        gone = [stream for flow, stream in streams.items() if flow not in flows]
        return {name: sum(getattr(stream, name) for stream in gone) for name in _COUNTS}

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def counts(self) -> dict[str, int]:
        streams = list(self._streams.values())
        found = {name: sum(getattr(stream, name) for stream in streams) for name in _COUNTS}
        return found | {"foreign": self._foreign, "kernel_drops": self._inlet.dropped}

    def _run(self) -> None:
        tick = 0.0
        while not self._closed:
            try:
                arrivals = self._inlet.receive()
            except OSError as error:
                self._listening.failed(error)
                time.sleep(TICK_S)
                continue
            now = time.monotonic()
            for arrival in arrivals:
                if (flow := self.senders.get(arrival.source)) is None:
                    self._foreign += 1
                else:
                    self._feed(flow, arrival, now)
            if now >= tick:
                tick = now + TICK_S
                for stream in self._streams.values():
                    stream.expire(now)
                self._listening.idle(now)

    def _feed(self, flow: Flow, arrival: Arrival, now: float) -> None:
        if (stream := self._streams.get(flow)) is None:
            stream = Messages(self._listening.take(flow), self._listening.trailer_bytes)
            self._streams = {**self._streams, flow: stream}
        for _, pieces in split(arrival.data, arrival.nbytes, arrival.each):
            if isinstance(pieces, Pieces):
                stream.feed(pieces, now)
