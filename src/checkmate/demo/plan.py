"""Which kills a seed stands for."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

BACKWARD, BETWEEN, ANYWHERE = "backward", "between", "anywhere"

#: The moments of a step at which it strikes.
MOMENTS = {
    BACKWARD: "in the middle of a backward",
    BETWEEN: "between optimizer.step() and ckpt.step()",
    ANYWHERE: "at a random moment",
}

#: An address for `--shadow`: no checkpointer, but the collective of tap="mirror".
NOBODY = "none"


class Kill(msgspec.Struct, frozen=True):
    """One SIGKILL to every rank at once."""

    step: int  # the step that it interrupts; the first step is 1
    moment: str
    rank: int  # the rank that pulls the trigger
    fraction: float  # how far into the backward (in parameters) or the step (in time); in [0, 1)


def draw(seed: int, steps: int, kills: int, ranks: int) -> list[Kill]:
    """Kills in the order of their steps, spread over the run, no two at one step and none at the first.

    The first three differ in their moment, so that from two on one strikes in a backward and one between
    `optimizer.step()` and `ckpt.step()`.
    """
    if not 0 <= kills < steps:
        raise ValueError(f"{kills} kills do not fit into {steps} steps: at most one per step, none in the first")
    rng = random.Random(seed)
    moments = list(MOMENTS)[:kills]
    moments += rng.choices(list(MOMENTS), k=kills - len(moments))
    rng.shuffle(moments)
    plan = []
    for index, moment in enumerate(moments):
        first, end = (2 + (steps - 1) * i // kills for i in (index, index + 1))
        plan.append(Kill(rng.randrange(first, end), moment, rng.randrange(ranks), rng.random()))
    return plan


def save(plan: list[Kill], folder: Path) -> None:
    _file(folder).write_bytes(msgspec.json.encode(plan))


def load(folder: Path) -> list[Kill]:
    """The plan saved in `folder`; no kills if there is none."""
    return msgspec.json.decode(_file(folder).read_bytes(), type=list[Kill]) if _file(folder).exists() else []


def _file(folder: Path) -> Path:
    return folder / "plan.json"
