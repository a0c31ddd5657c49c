"""Listening to gradients that workers send each other: a socket that sees packets, a filter, a thread.

The thread ``checkmate capture`` owns the streams: it receives packets, finds their streams and feeds them, which copies
the payload into the memory of the frame that is arriving. Nothing is ever sent, so nothing that happens
here can be felt by a worker: what the kernel cannot keep for us is dropped and counted, and repaired by other ways.

A packet may be larger than any Ethernet frame: cards and virtual links join or do not cut what belongs together. The
outermost VLAN tag never arrives here: the kernel takes it off (``PACKET_AUXDATA`` would tell its number, which says
nothing about the data). What the host itself sends is not looked at.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..errors import UsageError
from ..transport.group import attach_filter
from ..wire.bpf import program
from ..wire.frames import Header
from ..wire.packets import FRAGMENTED, PLAIN, PLAIN_IPV4, TCP, Flow, parse
from ..wire.reassembly import Stream, Take

log = logging.getLogger("checkmate.shadow")

#: flow, header, its 80 bytes, payload, trailer; the views are valid until the call returns.
OnFrame = Callable[[Flow, Header, memoryview, memoryview, memoryview], None]
#: The time, as `time.monotonic` tells it.
OnIdle = Callable[[float], None]

#: The largest packet that Linux can join is 512 KiB (BIG TCP), the largest that it does by default 64 KiB.
#: A power of two would have the packets of a batch evict each other from the cache.
BUFFER_BYTES = (512 << 10) + 1536
#: Packets that are taken from the kernel at a time, unless they are large.
MANY = 32
LARGE_BYTES = 9000
#: What the kernel keeps for us while we look elsewhere. It counts its own overhead, half of it and more.
QUEUE_BYTES = 128 << 20
#: So often holes expire and `on_idle` is called, whether packets come or not.
TICK_S = 0.02
#: So often we look whether the interface is still the one that was there.
LOOK_S = 1.0

# linux/if_packet.h, linux/if_ether.h and asm/socket.h, where the socket module has no names for them.
_SOL_PACKET = 263
_PACKET_ADD_MEMBERSHIP, _PACKET_STATISTICS, _PACKET_IGNORE_OUTGOING = 1, 6, 23
_PACKET_MR_PROMISC = 1
_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33
_SIOCGIFINDEX = 0x8933
_IFREQ = struct.Struct("16si20x")
_MEMBERSHIP = struct.Struct("iHH8s")
_TWO_COUNTS = struct.Struct("II")
_TIMEVAL = struct.Struct("ll")
_IOVEC = struct.Struct("PN")
_MMSGHDR = struct.Struct("PIPNPNi0PI0P")  # name, its length, places, their number, control, its length, flags; length
_LENGTH_AT = struct.calcsize("PIPNPNi0P")
_MSG_WAITFORONE = 0x10000


class Statistics(NamedTuple):
    """Since the capture began. What is not in `frames` but was sent is in one of the others, or was never seen."""

    packets: int  #: that the filter let pass and the kernel could keep
    kernel_drops: int  #: packets that it could not: the queue was full
    foreign: int  #: packets with a mark, but of no announced flow
    unreadable: int  #: packets without a whole TCP header, such as fragments of encapsulated ones
    segments: int
    payload_bytes: int  #: in order, each once
    duplicate_bytes: int
    holes: int
    hole_bytes: int
    jumps: int  #: holes of unknown length
    frames: int
    bad_frames: int  #: header or payload does not fit its checksum
    torn_frames: int  #: a hole is in them
    skipped_bytes: int  #: passed over in search of a header
    queue_bytes: int  #: the kernel's limit for what waits for us


class Capture:
    """Frames of announced flows that come by on an interface.

    Callbacks are called from the capture's thread; what they raise is logged, once per kind, and costs that frame.
    `trailer_bytes` follow each payload. Raises UsageError, with what to do, if there is no such interface or no right
    to listen.
    """

    def __init__(self, interface: str, on_frame: OnFrame, on_idle: OnIdle, trailer_bytes: int = 0) -> None:
        self.interface = interface
        self._on_frame = on_frame
        self._on_idle = on_idle
        self._trailer_bytes = trailer_bytes
        self._lock = threading.Lock()  # over the three that follow, for writing
        self._streams: dict[bytes, Stream] = {}
        self._flows: dict[bytes, Flow] = {}
        self._before: Counter[str] = Counter()  # of streams that are gone, and of the kernel, which forgets its own
        self._marks: frozenset[int] = frozenset()
        self._foreign = 0
        self._unreadable = 0
        self._told: set[str] = set()
        self._stopped = False
        self._socket = _open(interface)
        self._number = _number_of(self._socket, interface)
        self.queue_bytes = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self._thread = threading.Thread(target=self._run, name="checkmate capture", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening. No callback is called any more once this returns; not to be called from one."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()

    def set_flows(self, flows: Collection[Flow]) -> None:
        """Listen to these flows and no others. Raises ValueError for one whose addresses are none."""
        with self._lock:
            wanted = {flow.key: flow for flow in flows}
            streams = {
                key: self._streams[key]
                if self._flows.get(key) == flow
                else Stream(self._take(flow), self._trailer_bytes)
                for key, flow in wanted.items()
            }
            for key, stream in self._streams.items():
                if streams.get(key) is not stream:
                    self._before.update(_counts(stream))
            self._streams, self._flows = streams, wanted
            self._marks = frozenset(flow.dscp for flow in flows)
            _attach(self._socket, list(wanted.values()))  # replaces the old one at once

    def statistics(self) -> Statistics:
        with self._lock:
            seen, dropped = _TWO_COUNTS.unpack(self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
            self._before.update(packets=seen - dropped, kernel_drops=dropped)
            counts = self._before.copy()
            for stream in self._streams.values():
                counts.update(_counts(stream))
        counts.update(foreign=self._foreign, unreadable=self._unreadable, queue_bytes=self.queue_bytes)
        return Statistics(**{name: counts[name] for name in Statistics._fields})

    # ------------------------------------------------------------ its thread

    def _run(self) -> None:
        batch = _Batch(self._socket)
        packets = batch.packets
        clock, unpack = time.monotonic, PLAIN.unpack_from
        tick = look = 0.0
        while not self._stopped:
            try:
                lengths = batch.receive()
            except OSError as error:
                self._broken(error)
                lengths = ()
            now = clock()
            streams = self._streams
            for packet, length in zip(packets, lengths, strict=False):
                # As `parse` begins, without a call: nearly every packet comes this way.
                kind, _, total, fragment, protocol, key, seq, offset, flags = unpack(packet)
                start, stop = 34 + (offset >> 4 << 2), total + 14
                if (
                    54 <= start <= stop <= length
                    and kind == PLAIN_IPV4
                    and protocol == TCP
                    and not fragment & FRAGMENTED
                    and (stream := streams.get(key)) is not None
                ):
                    stream.feed(seq, flags, packet[start:stop], now)
                    continue
                segment = parse(packet, length)
                if segment is None:
                    self._unreadable += 1
                    continue
                key, dscp, seq, flags, payload = segment
                stream = streams.get(key)
                if stream is not None:
                    stream.feed(seq, flags, payload, now)
                elif dscp in self._marks:
                    self._foreign += 1
            if now >= tick:
                tick = now + TICK_S
                self._tick(now)
            if now >= look:
                look = now + LOOK_S
                self._look()

    def _tick(self, now: float) -> None:
        for stream in self._streams.values():
            stream.expire(now)
        try:
            self._on_idle(now)
        except Exception as error:
            self._failed(error)

    def _look(self) -> None:
        """A driver loaded again, a bond or a link made anew: the same name, but another interface to the kernel."""
        try:
            number = _number_of(self._socket, self.interface)
            if number == self._number:
                return
            _listen_on(self._socket, self.interface, number)
        except OSError:  # gone, and not there yet
            return
        self._number = number
        log.warning("capture on %s: the interface was made anew; it is listened to again", self.interface)

    def _take(self, flow: Flow) -> Take:
        def take(header: Header, head: memoryview, payload: memoryview, trailer: memoryview) -> None:
            try:
                self._on_frame(flow, header, head, payload, trailer)
            except Exception as error:
                self._failed(error)

        return take

    def _failed(self, error: Exception) -> None:
        kind = type(error).__name__
        if kind not in self._told:
            self._told.add(kind)
            log.error(
                "capture on %s: %s: %s; more of this kind is not logged", self.interface, kind, error, exc_info=error
            )

    def _broken(self, error: OSError) -> None:
        """The socket reports the interface's trouble once, and goes on when it is there and up again."""
        kind = errno.errorcode.get(error.errno or 0, "?")
        if kind not in self._told:
            self._told.add(kind)
            hint = f"`ip link set {self.interface} up`" if error.errno == errno.ENETDOWN else "restart the shadow"
            log.warning("capture on %s: %s; nothing is captured (%s)", self.interface, error.strerror, hint)
        time.sleep(TICK_S)


class _Batch:
    """Memory for some packets, and ``recvmmsg(2)``, which fills it at one call: half the cost of small packets.

    Large ones are taken one by one, so that each is still in the processor's cache when its turn comes.
    """

    def __init__(self, sock: socket.socket) -> None:
        memory = mmap.mmap(-1, MANY * BUFFER_BYTES)  # touched, and so there, only as far as packets reach
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        view = memoryview(memory)
        self.packets = [view[i * BUFFER_BYTES : (i + 1) * BUFFER_BYTES] for i in range(MANY)]
        places = b"".join(_IOVEC.pack(address + i * BUFFER_BYTES, BUFFER_BYTES) for i in range(MANY))
        self._places = ctypes.create_string_buffer(places)
        place = ctypes.addressof(self._places)
        messages = b"".join(_MMSGHDR.pack(0, 0, place + i * _IOVEC.size, 1, 0, 0, 0, 0) for i in range(MANY))
        self._messages = ctypes.create_string_buffer(messages)
        words = memoryview(self._messages).cast("B")[: len(messages)].cast("I")
        self._lengths = words[_LENGTH_AT // 4 :: _MMSGHDR.size // 4]
        self._call = ctypes.CDLL(None, use_errno=True).recvmmsg
        self._arguments = ctypes.c_int(sock.fileno()), ctypes.c_void_p(ctypes.addressof(self._messages))
        self._many, self._flags = ctypes.c_uint(MANY), ctypes.c_int(_MSG_WAITFORONE)
        self._receive_one = sock.recv_into
        self._large = True

    def receive(self) -> Sequence[int]:
        """The lengths of the next packets, which lie in `packets`; none if none came in `TICK_S`."""
        if self._large:
            try:
                length = self._receive_one(self.packets[0])
            except BlockingIOError:  # SO_RCVTIMEO
                return ()
            self._large = length > LARGE_BYTES
            return (length,)
        count = self._call(*self._arguments, self._many, self._flags, None)
        if count < 0:
            number = ctypes.get_errno()
            if number in (errno.EAGAIN, errno.EINTR):
                return ()
            raise OSError(number, os.strerror(number))
        lengths = self._lengths[:count].tolist()
        self._large = max(lengths) > LARGE_BYTES
        return lengths


def _counts(stream: Stream) -> dict[str, int]:
    scanner = stream.scanner
    return {
        "segments": stream.segments,
        "payload_bytes": stream.payload_bytes,
        "duplicate_bytes": stream.duplicate_bytes,
        "holes": stream.holes,
        "hole_bytes": stream.hole_bytes,
        "jumps": stream.jumps,
        "frames": scanner.frames,
        "bad_frames": scanner.bad_frames,
        "torn_frames": scanner.torn_frames,
        "skipped_bytes": scanner.skipped_bytes,
    }


def _open(interface: str) -> socket.socket:
    """A socket that sees what comes in on an interface, for whomever it is; nothing passes its filter yet but GRE."""
    try:
        number = socket.if_nametoindex(interface)
    except OSError:
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise UsageError(
            f"no interface {interface!r} to capture on; there are {there} (`ip link` lists them)"
        ) from None
    try:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    except PermissionError:
        raise UsageError(
            f"capturing on {interface} needs the capability CAP_NET_RAW: run the shadow as root, with `setpriv "
            "--ambient-caps +net_raw,+net_admin --inh-caps +net_raw,+net_admin`, or from a systemd unit with "
            "AmbientCapabilities=CAP_NET_RAW CAP_NET_ADMIN"
        ) from None
    try:
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, QUEUE_BYTES)
        except PermissionError:  # that takes CAP_NET_ADMIN; net.core.rmem_max bounds what anybody may ask for
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)
            had = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            log.warning(
                "capture on %s: the kernel keeps %d bytes for us where %d were asked for; packets may be lost "
                "(give CAP_NET_ADMIN, or `sysctl net.core.rmem_max=%d`)", interface, had, 2 * QUEUE_BYTES, QUEUE_BYTES
            )  # fmt: skip
        whole, part = divmod(TICK_S, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(whole), int(part * 1e6)))
        sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        _attach(sock, [])
        _listen_on(sock, interface, number)
    except BaseException:
        sock.close()
        raise
    return sock


def _listen_on(sock: socket.socket, interface: str, number: int) -> None:
    sock.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, _MEMBERSHIP.pack(number, _PACKET_MR_PROMISC, 0, bytes(8)))
    sock.bind((interface, _ETH_P_ALL))


def _number_of(sock: socket.socket, interface: str) -> int:
    """The number of the interface of this name where the socket is, whatever namespace its thread is in."""
    number: int = _IFREQ.unpack(fcntl.ioctl(sock, _SIOCGIFINDEX, _IFREQ.pack(interface.encode(), 0)))[1]
    return number


def _attach(sock: socket.socket, flows: Collection[Flow]) -> None:
    try:
        attach_filter(sock, program(flows))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        log.warning(
            "capture: net.core.optmem_max is too low for a filter of %d flows; packets are told apart here instead "
            "(`sysctl net.core.optmem_max=131072`)", len(flows)
        )  # fmt: skip
        attach_filter(sock, program(flows, by_flow=False))
