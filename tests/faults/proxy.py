"""A TCP proxy whose connections can be made slow, stalled, reset or black-holed while they stand."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
import time

CHUNK_BYTES = 16 << 10
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27


class Proxy:
    """Forwards every connection to `port` of this host. Its attributes may be changed at any time."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.bytes_per_s: float | None = None  #: towards the shadow, over all connections together
        self.delay_s = 0.0  #: of whatever the shadow says
        self.accepted = 0
        self.forwarded_bytes = 0  #: towards the shadow
        self.resets = 0
        self._reset_after: int | None = None
        self._reset_inward = True
        self._flowing = threading.Event()
        self._flowing.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._free_at = 0.0  #: when the throttled line will have sent what it has taken
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    # ------------------------------------------------------------ faults

    def stall(self) -> None:
        """Forward nothing more, but go on accepting and, as far as buffers reach, taking."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def reset_after(self, nbytes: int | None, inward: bool = True) -> None:
        """Reset the connection that next takes more than so many bytes towards (or from) the shadow; None: no more."""
        self._reset_after = nbytes
        self._reset_inward = inward

    def reset_all(self) -> None:
        """Reset every connection now."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _reset(pair)

    def blackhole(self) -> None:
        """Packets from clients vanish in the kernel, also those that open connections: nothing is acknowledged."""
        for sock in self._client_side():
            _drop_all(sock)

    def heal(self) -> None:
        for sock in self._client_side():
            with contextlib.suppress(FileNotFoundError):  # had none
                sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def _client_side(self) -> list[socket.socket]:
        with self._lock:
            return [self._listener, *(client for client, _ in self._pairs if client.fileno() >= 0)]

    def close(self) -> None:
        self.flow()
        self.heal()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset_all()

    # ------------------------------------------------------------ forwarding

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.port))
        except OSError:
            _reset((client,))
            return
        pair = (client, server)
        with self._lock:
            self._pairs.append(pair)
        back = threading.Thread(target=self._forward, args=(server, client, pair, False), daemon=True)
        back.start()
        self._forward(client, server, pair, True)
        back.join()
        with self._lock:
            self._pairs = [p for p in self._pairs if p is not pair]
        client.close()
        server.close()

    def _forward(
        self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, ...], inward: bool
    ) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        taken = 0
        with contextlib.suppress(OSError, ValueError):
            while count := source.recv_into(buffer):
                self._flowing.wait()
                taken += count
                if inward:
                    self._throttle(count)
                    self.forwarded_bytes += count
                elif self.delay_s:
                    time.sleep(self.delay_s)
                if inward is self._reset_inward and (limit := self._reset_after) is not None and taken > limit:
                    self._reset_after = None
                    self.resets += 1
                    sink.sendall(buffer[: max(count - (taken - limit), 0)])
                    _reset(pair)
                    return
                sink.sendall(buffer[:count])
            sink.shutdown(socket.SHUT_WR)  # an end in one direction is passed on, the other goes on
            return
        _reset(pair)

    def _throttle(self, count: int) -> None:
        if self.bytes_per_s is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self.bytes_per_s
            wait_s = self._free_at - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


def _reset(sockets: tuple[socket.socket, ...]) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.shutdown(socket.SHUT_RD)  # wakes a thread that is blocked in it; sends nothing
        sock.close()


def _drop_all(sock: socket.socket) -> None:
    """A packet filter that accepts nothing."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
