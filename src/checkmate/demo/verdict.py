"""What the two runs add up to: steps lost, step times, and whether the final states are the same bits."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from .journal import WARMUP_STEPS, Closed, Killed, Notes, Restored, Trained, attempts
from .runs import RunFailed
from .traffic import MOST_EXTRA, Traffic


class Survived(msgspec.Struct, frozen=True):
    """A kill and what became of it."""

    step: int  # that it interrupted
    moment: str
    finished: int  # the newest step that every rank had closed
    resumed: int  # the step that the next attempt went on from
    lost_steps: int  # finished, and trained again
    restore_s: float  # from the call of restore() to its return, on the slowest rank


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo found out."""

    parameters: int
    kills: list[Survived]
    step_s_without: float  # medians on rank 0
    step_s_with: float
    step_time_ratio: float
    flipped_bit_noticed: bool  # the negative control
    traffic: Traffic | None  # in a lab
    faults: list[str]  # everything that should not be so: none, or the demo has failed


def judge(calm: Path, stormy: Path, ranks: int, num_kills: int, traffic: Traffic | None = None) -> Result:
    """Compares the uninterrupted run in folder `calm` with the one in `stormy`, killed `num_kills` times."""
    quiet, killed = (attempts(folder, ranks) for folder in (calm, stormy))
    kills = survived(killed)
    faults = [f"the kill in step {k.step} lost {k.lost_steps} finished steps" for k in kills if k.lost_steps > 1]
    if len(kills) != num_kills:
        faults.append(f"{len(kills)} kills instead of {num_kills}")
    faults += loss_differences(quiet[0], killed)
    for rank in range(ranks):
        expected, state = (torch.load(folder / f"final-{rank}.pt") for folder in (calm, stormy))
        faults += differences(expected, state, f"rank {rank}")
    if not (noticed := notices_one_flipped_bit(expected)):
        faults.append("the comparison does not notice a flipped bit")
    if traffic and abs(traffic.ratio - 1) > MOST_EXTRA:
        faults.append(f"a worker sends {traffic.ratio:.4f} times the bytes per step when its gradients are replicated")
    weights = {weight.data_ptr(): weight.numel() for weight in expected["model"].values()}  # tied ones once
    without, with_checkmate = median_step_s(quiet), median_step_s(killed)
    return Result(
        parameters=sum(weights.values()),
        kills=kills,
        step_s_without=without,
        step_s_with=with_checkmate,
        step_time_ratio=with_checkmate / without,
        flipped_bit_noticed=noticed,
        traffic=traffic,
        faults=faults,
    )


def discard_states(*folders: Path) -> None:
    """Removes the final states, which are large and the same."""
    for folder in folders:
        for file in folder.glob("final-*.pt"):
            file.unlink()


def survived(run: list[list[Notes]]) -> list[Survived]:
    """The kills in order."""
    kills: list[Survived] = []
    for before, after in pairwise(run):
        strikes = [strike for rank in before for strike in rank.of(Killed)]
        if not strikes:
            raise RunFailed(f"attempt {len(kills)} of torchrun ended by a fault of its own, not by a kill")
        closed = ([event.step for event in rank if isinstance(event, Restored | Closed)] for rank in before)
        finished = min(steps[-1] for steps in closed)
        restored = [event for rank in after for event in rank.of(Restored)]
        resumed, seconds = restored[0].step, max(event.seconds for event in restored)
        lost = max(0, finished - resumed)
        kills.append(Survived(strikes[0].step, strikes[0].moment, finished, resumed, lost, seconds))
    return kills


def median_step_s(run: list[list[Notes]]) -> float:
    """Median duration of a turn of the loop on rank 0, in seconds."""
    turns = [(n, turn.seconds) for ranks in run for n, turn in enumerate(ranks[0].of(Trained))]
    settled = [seconds for n, seconds in turns if n >= WARMUP_STEPS]
    return statistics.median(settled or [seconds for _, seconds in turns])


def loss_differences(quiet: list[Notes], killed: list[list[Notes]]) -> Iterator[str]:
    """Every loss on every rank, those of steps trained twice included."""
    for rank, notes in enumerate(quiet):
        expected = {event.step: event.loss for event in notes.of(Trained)}
        for event in (event for ranks in killed for event in ranks[rank].of(Trained)):
            if event.loss != expected[event.step]:
                yield f"rank {rank}, loss of step {event.step}: {expected[event.step]!r} and {event.loss!r}"


def differences(a: Any, b: Any, name: str) -> Iterator[str]:
    """One line for each leaf of two nested states that is not the same, bit for bit."""
    if type(a) is not type(b):
        yield f"{name}: {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        elif not torch.equal(_bytes(a), _bytes(b)):  # as bytes: -0.0 is not 0.0, and a NaN equals itself
            farthest = (a.double() - b.double()).abs().max().item()
            yield f"{name}: {int((a != b).sum())} of {a.numel()} elements, by up to {farthest:.3g}"
    elif isinstance(a, dict):
        for key in a | b:
            if key in a and key in b:
                yield from differences(a[key], b[key], f"{name}, {key}")
            else:
                yield f"{name}, {key}: only in one of them"
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{name}: {len(a)} and {len(b)} items"
        for index, pair in enumerate(zip(a, b, strict=False)):
            yield from differences(*pair, f"{name}, {index}")
    elif a != b:
        yield f"{name}: {a!r} and {b!r}"


def notices_one_flipped_bit(state: dict[str, Any]) -> bool:
    """The negative control: whether `differences` tells a state from a copy with one bit of it flipped."""
    damaged = copy.deepcopy(state)
    weight = next(iter(damaged["model"].values()))
    _bytes(weight)[weight.nbytes // 2] ^= 1
    return len(list(differences(state, damaged, ""))) > 0


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
