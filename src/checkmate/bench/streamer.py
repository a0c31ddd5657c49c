"""A trainer that does nothing but send: one rank that speaks the protocol, with the same gradients in every step."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import torch
from xxhash import xxh3_64_intdigest as xxh3

from .. import values
from ..recovery import Reader, open_channel
from ..shadow.partition import RING_STEPS
from ..tensors import bytes_of, fingerprint
from ..trainer.model import hyper_parameters
from ..transport.base import Channel, call
from ..transport.tcp import parse_address
from ..wire import messages
from ..wire.frames import MAX_BULK_BYTES, Header, Kind
from ..wire.messages import (
    Ack,
    Adopt,
    Adopted,
    Anchor,
    Attach,
    Attempt,
    Block,
    Entry,
    Join,
    Joined,
    Optimizer,
    Part,
    Prepare,
    Prepared,
    Spec,
    Update,
)  # fmt: skip
from .common import TIMEOUT_S, BenchmarkFailed, ShadowProcess
from .limits import LEARNING_RATE, RawSender, noise, shapes_of

T = TypeVar("T")
RUN = "ingest"


class Streamer:
    """One member of a `Crew`. Parameters are zero at step 0; gradients are noise."""

    def __init__(self, parameters: int) -> None:
        self._shapes = shapes_of(parameters)
        self._sizes = [torch.Size(shape).numel() * 4 for shape in self._shapes]
        self._gradients = bytes_of(noise(sum(self._sizes)))
        self._optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LEARNING_RATE)
        self._members = [list(range(len(self._shapes)))]

    # ------------------------------------------------------------ raw TCP

    @cached_property
    def _raw(self) -> RawSender:
        return RawSender()

    def raw_address(self) -> str:
        return self._raw.address

    def send_raw(self, times: int) -> None:
        self._raw.send(self._gradients, 1, times)

    # ------------------------------------------------------------ the protocol

    def join(self, address: str, replay: str, run: str = RUN) -> None:
        """Begin a run that the shadow does not know; returns when it holds step 0."""
        self._address, self._run = parse_address(address), run
        self._step = 0
        self._applied = threading.Condition()
        self._times: dict[int, float] = {}  #: when the shadow said that it had applied a step
        self._control = open_channel(self._address, "control", None, TIMEOUT_S)
        attempt = Attempt(secrets.token_bytes(16), socket.gethostname(), 0)
        self._incarnation = self._ask(Prepare(run, attempt), Prepared).incarnation
        adopted = self._ask(Adopt(run, self._incarnation, None, self._spec(replay)), Adopted)
        self._epoch = adopted.epoch
        self._ask(Join(run, self._incarnation, 0, self._epoch, adopted.life, 0), Joined)
        self._control.stream.settimeout(None)
        threading.Thread(target=self._listen, args=(self._control,), daemon=True).start()
        self._data = open_channel(self._address, "data", None, TIMEOUT_S)
        self._data.stream.settimeout(None)
        self._data.send(Attach(run, self._incarnation, 0, self._epoch))
        self._data.send_frames(self._first_step())
        self._await(0)

    def stream(self, num_steps: int) -> list[float]:
        """Send so many steps; the seconds until the first is applied, and from each one to the next."""
        first = self._step
        self._times[first] = time.perf_counter()
        for self._step in range(first + 1, first + num_steps + 1):
            self._data.send_frames(self._frames())
        self._await(self._step)
        return [after - before for before, after in pairwise(self._times[s] for s in range(first, self._step + 1))]

    def check(self, fused: bool | None) -> None:
        """Compare one block, bit for bit, with what torch's optimizer makes of it. Raises BenchmarkFailed."""
        block = min(range(len(self._sizes)), key=lambda b: abs(self._sizes[b] - (1 << 20)))
        shape, at = self._shapes[block], sum(self._sizes[:block])
        param = torch.nn.Parameter(torch.zeros(shape))
        gradient = bytearray(self._gradients[at : at + self._sizes[block]])
        param.grad = torch.frombuffer(gradient, dtype=torch.float32).view(shape)
        optimizer = torch.optim.AdamW([param], lr=LEARNING_RATE, fused=fused)
        for _ in range(self._step):
            optimizer.step()
        held = torch.empty(shape)
        with Reader(self._address, self._run, self._step, timeout_s=TIMEOUT_S) as reader:
            reader.read([(block, 0, 0, bytes_of(held))])
        if not torch.equal(held, param.detach()):
            raise BenchmarkFailed(f"block {block} of the shadow is not what AdamW makes of it")

    def cpu_s(self) -> float:
        """Processor seconds of this process so far."""
        return time.process_time()

    def leave(self) -> None:
        self._data.close()
        self._control.close()

    # ------------------------------------------------------------ what is sent

    def _spec(self, replay: str) -> Spec:
        blocks = [
            Block(f"block.{i}", "float32", 4, [0] * len(shape), list(shape), list(shape))
            for i, shape in enumerate(self._shapes)
        ]
        optimizer = Optimizer("torch.optim", "AdamW", hyper_parameters(self._optimizer), self._members)
        return Spec(1, [[0]], blocks, [optimizer], fingerprint(), replay)

    def _header(self, kind: Kind, length: int, block: int = 0, offset: int = 0) -> Header:
        return Header(kind, length, self._incarnation.id, 0, self._epoch, self._step, block, offset=offset)

    def _part(self, part: Part) -> tuple[Header, memoryview]:
        payload = memoryview(messages.encode(part))
        return self._header(Kind.PART, len(payload)), payload

    def _first_step(self) -> Iterator[tuple[Header, memoryview]]:
        nothing = values.dumps({})
        anchors = [
            Anchor(i, 0, [Entry("", "float32", list(shape), size)], nothing)
            for i, (shape, size) in enumerate(zip(self._shapes, self._sizes, strict=True))
        ]
        yield self._part(Part(0, 0, self._epoch, anchors=anchors))
        zeros = memoryview(bytes(MAX_BULK_BYTES))
        for block, size in enumerate(self._sizes):
            for start in range(0, size, MAX_BULK_BYTES):
                piece = zeros[: size - start]
                yield self._header(Kind.ANCHOR, len(piece), block, start), piece

    def _frames(self) -> Iterator[tuple[Header, memoryview]]:
        at = 0
        for block, size in enumerate(self._sizes):
            for start in range(0, size, MAX_BULK_BYTES):
                piece = self._gradients[at + start : at + min(start + MAX_BULK_BYTES, size)]
                yield self._header(Kind.GRAD, len(piece), block, start), piece
            at += size
        groups = hyper_parameters(self._optimizer)
        update = Update(0, self._members[0], xxh3(groups), groups, self._members if self._step == 1 else None)
        yield self._part(Part(0, self._step, self._epoch, updates=[update]))

    # ------------------------------------------------------------ what is heard

    def _ask(self, request: messages.Control, answer: type[T]) -> T:
        found = call(self._control, request, TIMEOUT_S)
        assert isinstance(found, answer), found
        return found

    def _listen(self, control: Channel) -> None:
        try:
            while (message := control.message()) is not None:
                if isinstance(message, Ack):
                    with self._applied:
                        self._times.setdefault(message.applied, time.perf_counter())
                        self._applied.notify_all()
        except (OSError, ValueError):
            pass  # `leave` has closed it; any other end, `_await` finds out

    def _await(self, step: int) -> None:
        with self._applied:
            if not self._applied.wait_for(lambda: step in self._times, TIMEOUT_S):
                raise BenchmarkFailed(f"the shadow has not applied step {step}")


def warm_up(shadow: ShadowProcess) -> None:
    """Have the shadow load all of its code, by a tiny run; what it has beyond that is the memory of runs."""
    tiny = Streamer(1)
    tiny.join(shadow.address, "match", "warm-up")
    tiny.stream(RING_STEPS)
    tiny.leave()
    shadow.count_from_here()
