"""Starts shadow and workers as processes of their own, follows them, and ends them whatever happens.

On this machine torchrun starts the workers, and again after a kill. In a lab each runs on a host of its own; there it
is done here, just as torchrun does it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..lab import Lab, LabError, job
from . import plan
from .journal import Trained, attempts

#: A run that gets no further for so long has failed.
PATIENCE_S = 120.0
#: How long a process may take to end after SIGTERM; torchrun gives its workers 30 s.
ENDING_S = 40.0
#: The second is for torchrun, whose attempts otherwise share one store, and find the addresses of dead ranks
#: in it (https://github.com/pytorch/pytorch/issues/135712).
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

LISTENING = re.compile(r"^checkmate shadow listening on (\S+)", re.MULTILINE)


class RunFailed(Exception):
    """A process of the demo ended or hung where it should not have; the message quotes its last output."""


@contextmanager
def shadow(output: Path, lab: Lab | None = None) -> Iterator[str]:
    """An empty shadow on a free port of this machine, or on the lab's shadow host; yields its address."""
    if lab is not None:
        with _printing(output) as emit, job.shadows(lab, emit) as (address,):
            yield address
        return
    with _process(["checkmate", "shadow", "--listen", "127.0.0.1:0"], output) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not (line := LISTENING.search(output.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(f"the shadow does not listen{_quote(output)}")
            time.sleep(0.1)
        yield line[1]


def train(
    folder: Path,
    ranks: int,
    kills: list[plan.Kill],
    options: list[str],
    progress: Callable[[int, int], None],
    lab: Lab | None = None,
) -> None:
    """Trains in a new `folder`, with `options` for gpt.py, to the end and in spite of `kills`.

    `progress` is called now and then with the steps trained and the attempts begun so far.
    """
    folder.mkdir()
    plan.save(kills, folder)
    worker = ["-m", "checkmate.demo.worker", str(folder), *options]
    output = folder / "output.log"
    last, moved = (0, 0), time.monotonic()

    def look() -> None:
        nonlocal last, moved
        notes = attempts(folder, ranks)
        trained = max((event.step for attempt in notes for event in attempt[0].of(Trained)), default=0)
        if (now := (trained, len(notes))) != last:
            last, moved = now, time.monotonic()
            progress(*now)
        elif time.monotonic() - moved > PATIENCE_S:
            raise RunFailed(f"no progress in {PATIENCE_S:.0f} s{_quote(output)}")
        time.sleep(0.2)

    code = _in_lab(lab, worker, len(kills), output, look) if lab else _here(ranks, worker, len(kills), output, look)
    if code:
        raise RunFailed(f"{'a worker' if lab else 'torchrun'} ended with exit code {code}{_quote(output)}")
    look()


def _here(ranks: int, worker: list[str], restarts: int, output: Path, look: Callable[[], None]) -> int:
    torchrun = ["torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
    torchrun += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    with _process([*torchrun, *worker], output) as process:
        while process.poll() is None:
            look()
    return process.returncode


def _in_lab(lab: Lab, worker: list[str], restarts: int, output: Path, look: Callable[[], None]) -> int:
    with _printing(output) as emit:
        for attempt in range(restarts + 1):
            env = {**ENVIRONMENT, "TORCHELASTIC_RUN_ID": "demo", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
            ended = job.run(lab, [sys.executable, *worker], emit, env=env, meanwhile=look)
            if not ended.code:
                break
    return ended.code


@contextmanager
def _printing(output: Path) -> Iterator[job.Emit]:
    """Takes what hosts print into a file. A lab that fails has failed the run."""
    with output.open("w", buffering=1) as file:
        try:
            yield lambda host, line: print(f"[{host}] {line}", file=file)
        except LabError as error:
            raise RunFailed(f"{error}{_quote(output)}") from None


@contextmanager
def _process(module: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module…` in a session of its own: a Ctrl-C reaches it through us, in good order."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()  # nothing happens where it has ended
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _quote(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()
    return "\n".join([f"; the end of {output}:", *lines[-25:]])
