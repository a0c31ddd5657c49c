"""The shadow's process: accepts connections, greets them, and hands them to their run.

One thread per connection and one replayer per run. A connection that misbehaves is closed with one log line; nothing
that it sent partially counts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..errors import CheckmateError, Mismatch, ProtocolError, StepNotFound, Superseded, Unsupported
from ..tensors import bytes_of
from ..transport.base import Channel, Stream
from ..transport.tcp import tune
from ..wire.auth import GREETING_S, ServerGreeting
from ..wire.frames import MAX_BULK_BYTES, MAX_GREETING_BYTES, Header, Kind
from ..wire.messages import (
    Adopt,
    Attach,
    Control,
    Done,
    GetStatus,
    Join,
    Lease,
    Leased,
    Prepare,
    Read,
    ReadSidecar,
    Refusal,
    Remove,
    Sidecar,
    Status,
    check_run_name,
)  # fmt: skip
from .members import Member
from .overhear import Overhearing
from .replay import Cut
from .run import Limits, NotTaken, Run

log = logging.getLogger("checkmate.shadow")

#: A reader that neither asks nor takes anything for so long loses its lease, which may cost a copy of the state.
READER_S = 300.0
#: Before the next connection, where one could not be taken: also between two lines about it.
BREATH_S = 1.0


@functools.cache  # it reads a file, and there may be no descriptor left for one
def release() -> str:
    try:
        return f"checkmate {version('checkmate-ckpt')}"
    except PackageNotFoundError:
        return "checkmate (not installed)"


class Daemon:
    """All runs of one shadow process. `serve` takes over the calling thread; `handle` serves one connection."""

    def __init__(
        self, limits: Limits | None = None, token: bytes | None = None, capture: str | None = None,
        multicast: str | None = None,
    ) -> None:  # fmt: skip
        """`capture` and `multicast` name the interfaces on which gradients come by, or are multicast, if they are."""
        self.limits = replace(limits or Limits(), captures=capture is not None, joins=multicast is not None)
        self.runs: dict[str, Run] = {}
        self._token = token
        self._lock = threading.Lock()
        self._began = time.time()
        self._listener: socket.socket | None = None
        self._stopped = False
        self._overhearing: Overhearing | None = None
        if capture is not None or multicast is not None:
            self._overhearing = Overhearing(capture, multicast, lambda: list(self.runs.values()), token)

    # ------------------------------------------------------------ connections

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until `stop`. A shadow that cannot take another one still holds what it holds."""
        self._listener = listener
        listener.settimeout(1.0)
        while not self._stopped:
            try:
                sock, peer = listener.accept()
                self._begin(sock, f"{peer[0]}:{peer[1]}")
            except TimeoutError:
                pass
            except (OSError, RuntimeError) as error:  # RuntimeError: no more threads
                if not self._stopped:
                    log.warning("cannot take another connection: %s (raise `ulimit -n` or `ulimit -u`)", error)
                    time.sleep(BREATH_S)
            self._forget_idle()
            for run in list(self.runs.values()):
                run.repair(time.monotonic())

    def _begin(self, sock: socket.socket, peer: str) -> None:
        """Serve a connection from a thread of its own."""
        try:
            tune(sock)
            threading.Thread(target=self.handle, args=(sock, peer), name=f"connection {peer}", daemon=True).start()
        except BaseException:
            sock.close()
            raise

    def _forget_idle(self) -> None:
        for name, run in list(self.runs.items()):
            if self.limits.idle_s is not None and run.idle_s > self.limits.idle_s:
                log.warning("run %s: nobody has used it for %.0f s; forgotten, as asked for", name, run.idle_s)
                with contextlib.suppress(NotTaken):  # somebody uses it from this moment on
                    self._remove(name, force=False)

    def _remove(self, name: str, force: bool) -> None:
        run = self.run(name)
        run.remove(force)
        self._forget(run)

    def _forget(self, run: Run) -> None:
        with self._lock:
            if self.runs.get(run.name) is run:
                del self.runs[run.name]

    def stop(self) -> None:
        """End `serve`; connections that stand are left alone."""
        self._stopped = True
        if self._listener is not None:
            with contextlib.suppress(OSError):  # wakes whoever waits in accept(), where the system can do that
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._overhearing is not None:
            self._overhearing.close()

    def handle(self, stream: Stream, peer: str) -> None:
        """Serve one connection to its end. Never raises."""
        channel = Channel(stream, peer)
        try:
            role = self._greet(channel)
            if role == "control":
                self._control(channel)
            elif role == "data":
                self._data(channel)
            elif role:
                self._reader(channel)
        except CheckmateError as error:
            if isinstance(error, ProtocolError):
                log.warning("closing the connection from %s: %s", peer, error)
            self._refuse(channel, error)
        except OSError as error:
            log.info("connection from %s ended: %s", peer, error)
        except Exception as error:
            log.exception("closing the connection from %s", peer)
            self._refuse(channel, CheckmateError(f"the shadow failed: {error!r}"))
        finally:
            channel.close()

    @staticmethod
    def _refuse(channel: Channel, error: CheckmateError) -> None:
        kinds = {
            StepNotFound: "missing", Unsupported: "unsupported", Superseded: "superseded", Mismatch: "mismatch",
        }  # fmt: skip
        refusal = error.message if isinstance(error, NotTaken) else Refusal(kinds.get(type(error), "usage"), str(error))
        try:
            channel.stream.settimeout(1.0)
            channel.send(refusal)
        except OSError:
            pass  # the peer is gone, and with it whoever would have read this

    def _greet(self, channel: Channel) -> str:
        channel.limit_messages(MAX_GREETING_BYTES)
        greeting = ServerGreeting(self._token, release())
        with channel.within(GREETING_S):
            while not greeting.done:
                if (message := channel.message()) is None:
                    return ""
                reply = greeting.answer(message)
                channel.send(reply)
                if isinstance(reply, Refusal):
                    log.warning("refused %s: %s", channel.peer, reply.reason)
                    return ""
        channel.limit_messages()
        channel.stream.settimeout(None)
        return greeting.role

    def run(self, name: str, *, create: bool = False) -> Run:
        """The run of that name. Raises NotTaken if there is none, UsageError if the name cannot be one."""
        check_run_name(name)
        with self._lock:
            if name not in self.runs:
                if not create:
                    raise NotTaken("missing", f"this shadow holds no run {name!r}; it holds {self._names()}")
                self.runs[name] = Run(name, self.limits, lambda: self._need_beside(name))
            return self.runs[name]

    def _need_beside(self, name: str) -> int:
        return sum(run.need_bytes for run in list(self.runs.values()) if run.name != name)

    def _names(self) -> str:
        names = sorted(self.runs)
        return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if names[20:] else "") or "none"

    # ------------------------------------------------------------ control

    def _control(self, channel: Channel) -> None:
        member = Member(channel)
        run: Run | None = None
        joined = False
        try:
            while (message := channel.message()) is not None:
                if joined and run is not None:
                    run.heard_from(member, message)
                    continue
                match message:
                    case Prepare(run=name) | Adopt(run=name) | Join(run=name) if run is not None and run.name != name:
                        raise ProtocolError(f"a connection for run {run.name!r} asks for run {name!r}")
                    case Prepare(run=name):
                        run = self.run(name, create=True)
                        with run.changed:
                            member.send(run.prepare(message, member))
                    case Adopt(run=name):
                        run = self.run(name)
                        adopted = run.adopt(message)
                        member.send(adopted)
                    case Join(run=name):
                        run = self.run(name, create=True)
                        joined = run.join(message, member)
                        if joined and self._overhearing is not None:
                            self._overhearing.follow()
                    case _:
                        raise ProtocolError(f"{type(message).__name__} before this rank has joined")
        finally:
            if run is not None:
                run.leave(member)
                if joined and self._overhearing is not None:
                    self._overhearing.follow()
                if run.remove_if_empty():
                    self._forget(run)

    # ------------------------------------------------------------ data

    def _data(self, channel: Channel) -> None:
        message = channel.message()
        if not isinstance(message, Attach):
            raise ProtocolError("a data connection begins with Attach")
        run = self.run(message.run)
        run.attach(message, channel)
        scratch = memoryview(bytearray(MAX_BULK_BYTES))
        drained = False

        def sink(header: Header) -> memoryview | None:
            nonlocal drained
            target = run.place(header, message, channel, scratch)
            drained = target is not None and target.obj is scratch.obj
            return target

        channel.use_sink(sink)
        try:
            while (frame := channel.receive()) is not None:
                run.arrived(frame, message, channel, drained)
        finally:
            run.detach(message.rank, channel)

    # ------------------------------------------------------------ readers and admins

    def _reader(self, channel: Channel) -> None:
        leased: tuple[Run, Cut] | None = None
        channel.stream.settimeout(READER_S)
        try:
            while (message := channel.message()) is not None:
                match message:
                    case Lease():
                        if leased is not None:
                            leased[0].release(leased[1])
                        run = self.run(message.run or self._only_run())
                        leased = run, run.lease(message.step)
                        channel.send(_description(run.name, leased[1]))
                    case Read() if leased is not None:
                        channel.send_frames(_pieces(message, leased[1]))
                    case ReadSidecar(rank) if leased is not None:
                        channel.send(Sidecar(leased[1].sidecars.get(rank, {})))
                    case _:
                        channel.send(self._admin(message))
        finally:
            if leased is not None:
                leased[0].release(leased[1])

    def _only_run(self) -> str:
        names = sorted(self.runs)
        if len(names) != 1:
            raise NotTaken("usage", f"name the run: this shadow holds {self._names()}")
        return names[0]

    def _admin(self, message: Control) -> Control:
        match message:
            case GetStatus():
                server = {
                    "server": release(),
                    "pid": os.getpid(),
                    "host": socket.gethostname(),
                    "up_s": time.time() - self._began,
                }
                if self._overhearing is not None:
                    server |= self._overhearing.status()
                return Status([run.status() for run in list(self.runs.values())], server)
            case Remove(name, force):
                self._remove(name, force)
                return Done(f"run {name!r} is removed")
            case _:
                raise ProtocolError(f"{type(message).__name__} from a reader")


def _description(run: str, cut: Cut) -> Leased:
    sidecars = {rank: sorted(entries) for rank, entries in cut.sidecars.items()}
    spec = cut.spec
    return Leased(
        run, cut.holder, cut.step, spec.world_size, cut.held, cut.optimizers, spec.aliases, sidecars, spec.fingerprint,
        cut.replica_sets,
    )  # fmt: skip


def _pieces(message: Read, cut: Cut) -> Any:
    """The frames that answer a `Read`."""
    for block, entry, offset, nbytes in message.items:
        if block >= len(cut.tensors) or entry >= len(cut.tensors[block]):
            raise ProtocolError(f"read of block {block}, entry {entry}, which the lease does not hold")
        memory = bytes_of(cut.tensors[block][entry].contiguous())
        if offset + nbytes > len(memory):
            raise ProtocolError(f"read of bytes {offset} to {offset + nbytes} of an entry of {len(memory)}")
        for start in range(offset, offset + nbytes, MAX_BULK_BYTES):
            piece = memory[start : min(start + MAX_BULK_BYTES, offset + nbytes)]
            yield Header(Kind.STATE, len(piece), step=cut.step, block=block, entry=entry, offset=start), piece
