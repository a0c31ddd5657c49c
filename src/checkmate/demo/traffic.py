"""What went over the links of the lab, and what replication cost the workers: bytes per step, with it and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from ..lab import Lab
from .journal import WARMUP_STEPS, Trained, attempts
from .runs import RunFailed

#: How long the shadow may take to say what it has received.
ANSWER_S = 60.0
#: How much more a worker may send per step. TCP acknowledges now more often, now less; a gradient sent once more to
#: the shadow would be a quarter.
MOST_EXTRA = 0.01


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on links, headers included."""

    step_bytes_without: float  # that a worker sends per step to its peers; nothing is replicated, there is no shadow
    step_bytes_with: float  # with the rules in the switch, and the shadow
    ratio: float
    links: dict[str, dict[str, int]]  # of the whole run with kills, as `Lab.counters`
    overheard_bytes: int  # gradients that the shadow took from the copies
    repaired_bytes: int  # gradients that it had to ask for


def read(lab: Lab, address: str, calm: Path, stormy: Path, ranks: int) -> Traffic:
    """`lab` is that of the run in folder `stormy`, which has just ended; its shadow still listens at `address`."""
    links, shadow = lab.counters(), _ask_shadow(lab, address)
    without, with_rules = (step_bytes(folder, ranks) for folder in (calm, stormy))
    return Traffic(
        step_bytes_without=without,
        step_bytes_with=with_rules,
        ratio=with_rules / without,
        links=links,
        overheard_bytes=shadow["bytes_overheard"],
        repaired_bytes=shadow["bytes_repaired"],
    )


def step_bytes(folder: Path, ranks: int) -> float:
    """What a worker sends per step, on average over workers and settled steps."""
    spans = []
    for notes in (rank for attempt in attempts(folder, ranks) for rank in attempt):
        turns = notes.of(Trained)[WARMUP_STEPS:]
        if len(turns) > 1:
            spans.append((turns[-1].sent_bytes - turns[0].sent_bytes, len(turns) - 1))
    if not spans:
        raise RunFailed("too few steps between the kills to count bytes; ask for more --steps")
    return sum(sent for sent, _ in spans) / sum(steps for _, steps in spans)


def _ask_shadow(lab: Lab, address: str) -> dict[str, Any]:
    """What the shadow says of the one run that it has."""
    asking = lab.run_in(
        lab.shadows[0].name, [sys.executable, "-m", "checkmate", "status", address, "--json"], stdout=subprocess.PIPE
    )
    try:
        said, _ = asking.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        asking.kill()
        asking.wait()
    if asking.returncode:
        raise RunFailed("the shadow does not say what it has received")
    run: dict[str, Any] = json.loads(said)["runs"][0]
    return run
