"""Starts the shadow and torchrun as processes of their own, follows them, and ends them whatever happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
def shadow(output: Path) -> Iterator[str]:
    """An empty shadow on a free port of this machine; yields its address."""
    with _process(["checkmate", "shadow", "--listen", "127.0.0.1:0"], output) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not (line := LISTENING.search(output.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunFailed(f"the shadow does not listen{_quote(output)}")
            time.sleep(0.1)
        yield line[1]


def train(
    folder: Path, ranks: int, kills: list[plan.Kill], options: list[str], progress: Callable[[int, int], None]
) -> None:
    """Trains in a new `folder`, with `options` for gpt.py, to the end and in spite of `kills`.

    `progress` is called now and then with the steps trained and the attempts begun so far.
    """
    folder.mkdir()
    plan.save(kills, folder)
    torchrun = ["torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
    torchrun += [f"--nproc-per-node={ranks}", f"--max-restarts={len(kills)}"]
    worker = ["-m", "checkmate.demo.worker", str(folder), *options]
    with _process([*torchrun, *worker], output := folder / "output.log") as process:
        last, moved = (0, 0), time.monotonic()
        running = True
        while running:
            running = process.poll() is None
            notes = attempts(folder, ranks)
            trained = max((event.step for attempt in notes for event in attempt[0].of(Trained)), default=0)
            if (now := (trained, len(notes))) != last:
                last, moved = now, time.monotonic()
                progress(*now)
            elif time.monotonic() - moved > PATIENCE_S:
                raise RunFailed(f"no progress in {PATIENCE_S:.0f} s{_quote(output)}")
            time.sleep(0.2)
    if process.returncode:
        raise RunFailed(f"torchrun ended with exit code {process.returncode}{_quote(output)}")


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
