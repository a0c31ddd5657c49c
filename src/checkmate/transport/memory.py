"""The in-memory twin of a TCP connection, with faults that come from a seed. For tests; it opens no socket.

Two streams share a lock; each direction is a bounded buffer. What is kept of TCP: a write may take only a part of the
bytes; timeouts, ``MSG_DONTWAIT`` and `shutdown` are as `socket.socket` has them; bytes that arrived before a reset can
still be read; to close with unread input resets the connection. Unlike a socket's, `close` alone wakes who is blocked.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from socket import MSG_DONTWAIT, SHUT_RD, SHUT_WR
from typing import Any

from .base import Buffer


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in one direction. All that is random comes from `seed`."""

    seed: int = 0
    short: bool = False  #: reads and writes move fewer bytes than they could, though at least one
    delay_s: float = 0.0  #: every read waits up to so long first: a slow reader, or a long way
    reset_at: int | None = None  #: after so many bytes have been written, the connection is reset


class _Direction:
    def __init__(self, capacity_bytes: int, faults: Faults) -> None:
        self.capacity_bytes, self.faults = capacity_bytes, faults
        self.random = Random(faults.seed)
        self.unread = bytearray()
        self.written = 0
        self.ended = False  #: nothing more will be written
        self.deaf = False  #: nobody will read any more
        self.reset = False

    def room(self) -> int:
        at_most = self.capacity_bytes - len(self.unread)
        return at_most if self.faults.reset_at is None else min(at_most, self.faults.reset_at - self.written)

    def some(self, count: int) -> int:
        return self.random.randint(1, count) if self.faults.short and count else count


def pair(
    capacity_bytes: int = 1 << 16, there: Faults | None = None, back: Faults | None = None
) -> tuple[MemoryStream, MemoryStream]:
    """Both ends of a connection. `there` befalls what the first end writes, `back` what the second does.

    `capacity_bytes` is how much may be written in each direction before anything is read.
    """
    changed = threading.Condition()
    outward = _Direction(capacity_bytes, there or Faults())
    homeward = _Direction(capacity_bytes, back or Faults())
    return MemoryStream(changed, homeward, outward), MemoryStream(changed, outward, homeward)


class MemoryStream:
    """One end; a `transport.base.Stream`. One thread may read while another writes and a third closes."""

    def __init__(self, changed: threading.Condition, inward: _Direction, outward: _Direction) -> None:
        self._changed = changed  # guards everything, at both ends
        self._in, self._out = inward, outward
        self._shut_in = self._closed = False
        self._timeout: float | None = None
        self._reset_if_due()

    def recv_into(self, buffer: memoryview, /) -> int:
        with self._changed:
            source = self._in
            not_before = time.monotonic() + source.random.uniform(0, source.faults.delay_s)
            self._wait(lambda: bool(source.unread or source.ended or source.reset or self._shut_in), True, not_before)
            if not source.unread:
                if source.reset:
                    raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
                return 0
            count = source.some(min(len(buffer), len(source.unread)))
            buffer[:count] = source.unread[:count]
            del source.unread[:count]
            self._changed.notify_all()
            return count

    def sendmsg(self, buffers: Sequence[Buffer], ancdata: Sequence[Any] = (), flags: int = 0, /) -> int:
        with self._changed:
            target = self._out
            # As a socket does: with a timeout it waits for room, whatever the flags say.
            patient = not flags & MSG_DONTWAIT or bool(self._timeout)
            self._wait(lambda: target.room() > 0 or target.ended or target.deaf or target.reset, patient)
            if target.reset:
                raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            if target.ended or target.deaf:
                raise BrokenPipeError(errno.EPIPE, "Broken pipe")
            count = left = target.some(min(target.room(), sum(map(len, buffers))))
            for buffer in buffers:
                target.unread += memoryview(buffer)[:left]
                left -= min(left, len(buffer))
            target.written += count
            self._reset_if_due()
            self._changed.notify_all()
            return count

    def settimeout(self, value: float | None, /) -> None:
        with self._changed:
            self._check_open()
            self._timeout = value

    def shutdown(self, how: int, /) -> None:
        with self._changed:
            self._check_open()
            if self._out.reset:
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
            self._shut_in |= how != SHUT_WR
            self._out.ended |= how != SHUT_RD
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._out.ended = self._in.deaf = True
                if self._in.unread:
                    self._in.unread.clear()
                    self._reset()
                self._changed.notify_all()

    # ------------------------------------------------------------ all of these with the lock held

    def _wait(self, ready: Callable[[], bool], patient: bool, not_before: float = 0.0) -> None:
        """Until something can be done, within the timeout."""
        began = time.monotonic()
        deadline = None if self._timeout is None or not patient else began + self._timeout
        while True:
            self._check_open()
            now = time.monotonic()
            if ready() and (now >= not_before or not self._in.unread):
                return
            if not patient or self._timeout == 0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if deadline is not None and now >= deadline:
                raise TimeoutError("timed out")
            until = [t for t in (deadline, not_before if ready() else None) if t is not None]
            self._changed.wait(min(until) - now if until else None)

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _reset_if_due(self) -> None:
        if self._out.written == self._out.faults.reset_at:
            self._reset()

    def _reset(self) -> None:
        self._in.reset = self._out.reset = True
