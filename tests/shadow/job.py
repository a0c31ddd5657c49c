"""A training attempt of two ranks that hands its messages and frames straight to a `Run`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from checkmate import values
from checkmate.layout import Layout
from checkmate.shadow.members import Member
from checkmate.shadow.run import Run
from checkmate.tensors import bytes_of, fingerprint
from checkmate.transport.base import Channel
from checkmate.transport.memory import pair
from checkmate.wire import messages as m
from checkmate.wire.frames import MAX_BULK_BYTES, Frame, Header, Kind

PATIENCE_S = 20.0
SIZES = {
    "w": [6, 8],
    "b": [16],
}  # rank 0 sends the first 128 of w's 192 bytes and owns w; rank 1 sends and owns the rest
GROUP = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False,
         "foreach": None, "differentiable": False, "fused": None}  # fmt: skip

T = TypeVar("T")
_ids = itertools.count(1)


def spec(names: str = "wb") -> m.Spec:
    blocks = [m.Block(n, "float32", 4, [0] * len(SIZES[n]), SIZES[n], SIZES[n]) for n in names]
    optimizer = m.Optimizer("torch.optim", "SGD", values.dumps([GROUP]), [[0, 1]])
    return m.Spec(2, [[0, 1]], blocks, [optimizer], fingerprint())


class Control:
    """A control connection: the shadow's end as a `Member`, and ours to read what it says."""

    def __init__(self) -> None:
        ours, theirs = pair()
        ours.settimeout(PATIENCE_S)
        self.channel, self.member = Channel(ours, "shadow"), Member(Channel(theirs, "rank"))

    def hear(self, kind: type[T], like: Callable[[T], bool] = lambda _: True) -> T:
        """The next message of this kind that is like this; those before it are passed over."""
        while not (isinstance(message := self.channel.message(), kind) and like(message)):
            assert message is not None, f"the connection has ended, and no {kind.__name__} came"
        return message

    def ended(self) -> bool:
        """Whether the shadow ends this connection."""
        while self.channel.message() is not None:
            pass
        return True


class Attempt:
    """One attempt, with the parameters and optimizer that it trains."""

    def __init__(self, run: Run, job: str = "", restarts: int = 0, names: str = "wb") -> None:
        self.run, self.spec = run, spec(names)
        self.layout = Layout(self.spec)
        number = next(_ids)
        self.attempt = m.Attempt(number.to_bytes(16, "big"), "host", number, job, restarts)
        self.claim = Control()
        self.controls: dict[int, Control] = {}
        self.data: dict[int, Channel] = {}
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(SIZES[name])) for name in names]
        self.optimizer = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)
        self.step = self.epoch = self.life = 0
        self.history: dict[int, list[torch.Tensor]] = {}

    # ------------------------------------------------------------ control

    def prepare(self) -> m.Prepared:
        with self.run.changed:  # as the daemon does
            prepared = self.run.prepare(m.Prepare(self.run.name, self.attempt), self.claim.member)
        self.incarnation = prepared.incarnation
        return prepared

    def adopt(self, step: int | None) -> m.Adopted:
        adopted = self.run.adopt(m.Adopt(self.run.name, self.incarnation, step, self.spec))
        self.epoch, self.life, self.step = adopted.epoch, adopted.life, step or 0
        return adopted

    def join(self, rank: int, with_spec: bool = False) -> m.Joined:
        control = self.controls[rank] = Control()
        known = self.spec if with_spec else None
        message = m.Join(self.run.name, self.incarnation, rank, self.epoch, self.life, self.step, known)
        self.run.join(message, control.member)
        return control.hear(m.Joined)

    def attach(self, rank: int) -> Channel:
        self.data[rank] = channel = Channel(pair()[0], f"rank {rank}")
        self.run.attach(m.Attach(self.run.name, self.incarnation, rank, self.epoch), channel)
        return channel

    def detach(self, rank: int) -> None:
        self.run.detach(rank, self.data[rank])

    def begin(self) -> Attempt:
        """Prepare, adopt what is held or step 0, join and attach: ready to train."""
        prepared = self.prepare()
        self.adopt(prepared.steps[-1] if prepared.steps else None)
        self.connect()
        if not prepared.steps:
            self.remember()
            for rank in (0, 1):
                self.send(rank, [self.part(rank, anchors=self.owned(rank)), *self.anchors(rank)])
            self.await_applied()
        return self

    def connect(self) -> None:
        for rank in (0, 1):
            self.join(rank)
            self.attach(rank)

    def die(self) -> None:
        """All connections end, as those of killed workers do."""
        for rank, control in self.controls.items():
            self.run.leave(control.member)
            if rank in self.data:
                self.detach(rank)
        self.run.leave(self.claim.member)

    # ------------------------------------------------------------ frames

    def train(self) -> None:
        """Take a step. Its gradient depends on nothing but its number."""
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator)
        self.optimizer.step()
        self.remember()

    def remember(self) -> None:
        momenta = [self.optimizer.state[p].get("momentum_buffer") for p in self.params if p in self.optimizer.state]
        self.history[self.step] = [t.detach().clone() for t in [*self.params, *momenta]]

    def header(self, kind: Kind, rank: int, length: int, **place: int) -> Header:
        return Header(kind, length, self.incarnation.id, rank, self.epoch, self.step, **place)

    def grads(self, rank: int) -> list[Frame]:
        frames = []
        for block, piece in self.layout.slices[rank].items():
            grad = self.params[block].grad
            assert grad is not None
            payload = bytes_of(grad)[piece.offset : piece.offset + piece.nbytes]
            header = self.header(Kind.GRAD, rank, piece.nbytes, block=block, offset=piece.offset)
            frames.append(Frame(header, payload))
        return frames

    def owned(self, rank: int) -> list[int]:
        return [block for block, owner in enumerate(self.layout.owners) if owner == rank]

    def tensors(self, block: int) -> dict[str, torch.Tensor]:
        state = self.optimizer.state[self.params[block]] if self.optimizer.state else {}
        return {"": self.params[block].detach(), **state}

    def part(self, rank: int, anchors: list[int] | None = None, **more: object) -> Frame:
        lead = rank in self.layout.leads
        groups, members = ([values.dumps([GROUP])], [[[0, 1]]]) if lead else (None, None)
        updates = [m.Update(0, [0, 1], 7, values.dumps([GROUP]) if lead else b"", [[0, 1]] if lead else None)]
        described = [
            m.Anchor(b, 0, [m.Entry(k, "float32", list(t.shape), 4 * t.numel()) for k, t in self.tensors(b).items()],
                     values.dumps({}))
            for b in anchors or []
        ]  # fmt: skip
        fields = {"updates": updates if self.step else [], "anchors": described, "groups": groups, "members": members,
                  "sidecar": {"rng": str(self.step).encode()}, **more}  # fmt: skip
        payload = m.encode(m.Part(rank, self.step, self.epoch, **fields))  # type: ignore[arg-type]
        return Frame(self.header(Kind.PART, rank, len(payload)), memoryview(payload))

    def anchors(self, rank: int) -> list[Frame]:
        return [
            Frame(self.header(Kind.ANCHOR, rank, 4 * t.numel(), block=block, entry=entry), bytes_of(t.contiguous()))
            for block in self.owned(rank)
            for entry, t in enumerate(self.tensors(block).values())
        ]

    def send(self, rank: int, frames: list[Frame]) -> None:
        """Each as the daemon does it with a frame that it receives."""
        message = m.Attach(self.run.name, self.incarnation, rank, self.epoch)
        scratch = memoryview(bytearray(MAX_BULK_BYTES))
        for frame in frames:
            target = self.run.place(frame.header, message, self.data[rank], scratch)
            if target is not None:
                target[:] = frame.payload
            drained = target is not None and target.obj is scratch.obj
            self.run.arrived(frame, message, self.data[rank], drained)

    def deliver(self, anchored: bool = False) -> None:
        """Both ranks send the newest step; with it, if asked for, every block as it is after."""
        for rank in (0, 1):
            self.send(rank, [*self.grads(rank), self.part(rank, self.owned(rank) if anchored else None)])
            if anchored:
                self.send(rank, self.anchors(rank))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.train()
            self.deliver()
        self.await_applied()

    def resume(self, epoch: int) -> None:
        """Both ranks begin an epoch, from the next step on."""
        self.epoch = epoch
        for rank in (0, 1):
            self.send(rank, [self.part(rank, begins=True, updates=[], groups=None, members=None, sidecar={})])

    def gap(self, rank: int) -> None:
        self.send(rank, [self.part(rank, gap=True, updates=[], groups=None, members=None, sidecar={})])

    def await_applied(self) -> m.Ack:
        return self.controls[0].hear(m.Ack, lambda ack: ack.epoch == self.epoch and ack.applied >= self.step)


class Call(threading.Thread):
    """Something that may have to wait, begun now."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.work, self.result, self.error = work, None, None  # type: object, object, BaseException | None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error

    def end(self) -> object:
        """Its result, or its error."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), "still waiting"
        if self.error is not None:
            raise self.error
        return self.result
