"""What the ranks did: one file per rank and attempt, one line of JSON per event.

An attempt is what torchrun starts at once: the first, and one more after every kill. A line is one `write` to
a file opened for appending, so it outlives a SIGKILL of its writer.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TypeVar

import msgspec

#: Steps at the start of every attempt that step time and traffic leave out, while DDP and the allocator settle.
WARMUP_STEPS = 2


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of what a rank notes down."""


class Started(Event, frozen=True, tag=True):
    pid: int


class Restored(Event, frozen=True, tag=True):
    """`ckpt.restore()` has returned `step`, after `seconds`."""

    step: int
    seconds: float


class Closed(Event, frozen=True, tag=True):
    """`ckpt.step()` has returned: `step` is finished on this rank."""

    step: int


class Trained(Event, frozen=True, tag=True):
    """One turn of the loop, with or without a checkpointer; the loss in nats per byte."""

    step: int
    loss: float
    seconds: float
    sent_bytes: int = 0  # that this host had sent by then, where the ranks exchange gradients; 0: not in a lab


class Killed(Event, frozen=True, tag=True):
    """This rank is about to kill all of them."""

    step: int
    moment: str


AnyEvent = Started | Restored | Closed | Trained | Killed
E_ = TypeVar("E_", bound=Event)

_encode = msgspec.json.Encoder().encode
_decode_lines = msgspec.json.Decoder(AnyEvent).decode_lines


class Journal:
    """The file of one rank and attempt, to write."""

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        self._file = os.open(_path(folder, attempt, rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: Event) -> None:
        os.write(self._file, _encode(event) + b"\n")


class Notes(list[AnyEvent]):
    """The events of one rank in one attempt, in order."""

    def of(self, kind: type[E_]) -> list[E_]:
        return [event for event in self if isinstance(event, kind)]


def read(folder: Path, attempt: int, rank: int) -> Notes:
    """Empty where the rank has not started."""
    try:
        return Notes(_decode_lines(_path(folder, attempt, rank).read_bytes()))
    except FileNotFoundError:
        return Notes()


def attempts(folder: Path, ranks: int) -> list[list[Notes]]:
    """For each attempt in order the notes of all ranks."""
    everything = ([read(folder, attempt, rank) for rank in range(ranks)] for attempt in itertools.count())
    return list(itertools.takewhile(any, everything))


def _path(folder: Path, attempt: int, rank: int) -> Path:
    return folder / f"attempt-{attempt}-rank-{rank}.jsonl"
