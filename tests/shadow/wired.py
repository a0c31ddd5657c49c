"""A shadow served over the in-memory transport, and a rank that speaks to it message by message."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from checkmate import values
from checkmate.shadow.daemon import Daemon
from checkmate.tensors import bytes_of, fingerprint
from checkmate.transport.base import Channel, call, greet
from checkmate.transport.memory import Faults, MemoryStream, pair
from checkmate.wire import messages as m
from checkmate.wire.frames import Header, Kind, encode

PATIENCE_S = 20.0


class Errors(logging.Handler):
    """Collects what the shadow logs as an error of its own: an exception that nobody foresaw."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))


class Served:
    """A daemon; `open` gives the client's end of a new connection to it."""

    def __init__(self, token: bytes | None = None) -> None:
        self.daemon = Daemon(token=token)
        self.errors = Errors()
        self.threads: list[threading.Thread] = []
        self.streams: list[MemoryStream] = []

    def open(self, there: Faults | None = None, back: Faults | None = None) -> MemoryStream:
        ours, theirs = pair(1 << 16, there, back)
        ours.settimeout(PATIENCE_S)
        self.streams.append(ours)
        self.threads.append(threading.Thread(target=self.daemon.handle, args=(theirs, "peer")))
        self.threads[-1].start()
        return ours

    def greeted(self, role: str, token: bytes | None = None) -> Channel:
        channel = Channel(self.open(), "shadow")
        greet(channel, role, token)
        return channel

    def settle(self, keep: int = 0) -> None:
        """Wait until every connection but the `keep` oldest that live has come to its end."""
        alive = [thread for thread in self.threads if thread.is_alive()]
        for thread in alive[keep:]:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a connection that was closed is still being served"


@contextmanager
def served(token: bytes | None = None) -> Iterator[Served]:
    """A daemon that must not have logged an error, nor left a thread, when all its connections are closed."""
    before = set(threading.enumerate())
    shadow = Served(token)
    logging.getLogger("checkmate.shadow").addHandler(shadow.errors)
    try:
        yield shadow
        for stream in shadow.streams:
            stream.close()
        shadow.settle()
        for name in list(shadow.daemon.runs):
            shadow.daemon._remove(name, force=True)
        for thread in set(threading.enumerate()) - before:
            thread.join(PATIENCE_S)
        assert set(threading.enumerate()) <= before
        assert not shadow.errors.found, shadow.errors.found[0]
    finally:
        logging.getLogger("checkmate.shadow").removeHandler(shadow.errors)


class Rank:
    """The only rank of a run of one small parameter under SGD with momentum, and what the shadow must come to hold."""

    GROUPS = values.dumps([{"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0,
                            "maximize": False, "foreach": None, "differentiable": False, "fused": None}])  # fmt: skip
    NUMEL = 40

    def __init__(self, shadow: Served, run: str) -> None:
        self.shadow, self.run = shadow, run
        self.param = torch.nn.Parameter(torch.arange(self.NUMEL, dtype=torch.float32))
        self.optimizer = torch.optim.SGD([self.param], lr=0.1, momentum=0.9)
        self.spec = m.Spec(
            1, [[0]], [m.Block("w", "float32", 4, [0], [self.NUMEL], [self.NUMEL])],
            [m.Optimizer("torch.optim", "SGD", self.GROUPS, [[0]])], fingerprint(),
        )  # fmt: skip
        self.step = 0
        self.control = shadow.greeted("control")
        prepared = call(self.control, m.Prepare(run, m.Attempt(bytes(range(16)), "host", 1)), PATIENCE_S)
        assert isinstance(prepared, m.Prepared)
        self.me = prepared.incarnation
        adopted = call(self.control, m.Adopt(run, self.me, None, self.spec), PATIENCE_S)
        assert isinstance(adopted, m.Adopted)
        self.epoch, self.life = adopted.epoch, adopted.life
        self.join()
        self.attach()
        anchor = m.Anchor(0, 0, [m.Entry("", "float32", [self.NUMEL], 4 * self.NUMEL)], values.dumps({}))
        part = m.Part(0, 0, self.epoch, anchors=[anchor], groups=[self.GROUPS], members=[[[0]]], sidecar={"rng": b"0"})
        data = bytes(bytes_of(self.param))
        self.send([self.frame(Kind.PART, m.encode(part)), self.frame(Kind.ANCHOR, data)])
        self.await_applied()

    def join(self) -> None:
        if self.control.closed:
            self.control = self.shadow.greeted("control")
        joined = call(self.control, m.Join(self.run, self.me, 0, self.epoch, self.life, self.step), PATIENCE_S)
        assert isinstance(joined, m.Joined), joined
        assert joined.known

    def attach(self) -> None:
        self.data = self.shadow.greeted("data")
        self.data.send(m.Attach(self.run, self.me, 0, self.epoch))

    def frame(self, kind: Kind, payload: bytes, offset: int = 0) -> bytes:
        return encode(Header(kind, len(payload), self.me.id, 0, self.epoch, self.step, offset=offset), payload)

    def train(self) -> list[bytes]:
        """Take a step; the frames that tell the shadow, gradient first, in two pieces."""
        self.step += 1
        grad = torch.randn(self.NUMEL, generator=torch.Generator().manual_seed(self.step))
        self.param.grad = grad
        self.optimizer.step()
        data = bytes(bytes_of(grad))
        part = m.Part(
            0,
            self.step,
            self.epoch,
            updates=[m.Update(0, [0], 7, self.GROUPS)],
            sidecar={"rng": str(self.step).encode()},
        )
        return [
            self.frame(Kind.GRAD, data[:64]),
            self.frame(Kind.GRAD, data[64:], 64),
            self.frame(Kind.PART, m.encode(part)),
        ]

    def send(self, frames: list[bytes]) -> None:
        rest = b"".join(frames)
        while rest:
            rest = rest[self.data.stream.sendmsg([rest]) :]

    def await_applied(self) -> None:
        """Read acknowledgements until the newest step is applied."""
        while True:
            message = self.control.message()
            assert isinstance(message, (m.Ack, m.Anchoring, m.Pong)), message
            if isinstance(message, m.Ack) and message.applied == self.step:
                return

    def ping(self) -> None:
        self.control.send(m.Ping(self.step))

    def check(self) -> None:
        """What a reader gets of the newest step is what training without a shadow has."""
        reader = self.shadow.greeted("reader")
        leased = call(reader, m.Lease(self.run), PATIENCE_S)
        assert isinstance(leased, m.Leased)
        assert leased.step == self.step
        ours = {"": self.param.detach(), **self.optimizer.state[self.param]}
        ours = {key: tensor for key, tensor in ours.items() if isinstance(tensor, torch.Tensor)}
        assert {entry.key for entry in leased.held[0].entries} == ours.keys()
        for number, entry in enumerate(leased.held[0].entries):
            reader.send(m.Read([(0, number, 0, entry.nbytes)]))
            frame = reader.receive()
            assert frame is not None
            assert frame.payload == bytes_of(ours[entry.key]), entry.key
        sidecar = call(reader, m.ReadSidecar(0), PATIENCE_S)
        assert sidecar == m.Sidecar({"rng": str(self.step).encode()})
        reader.close()

    def close(self) -> None:
        self.data.close()
        self.control.close()
