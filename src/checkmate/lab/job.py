"""A job in the lab: a shadow on each shadow host, a command on each worker, what they print, and how they end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

from .cluster import Lab
from .network import LabError
from .plan import CONTROL_PORT, DATA

MASTER_PORT = 29500
#: How long a command may take to end after SIGTERM.
GRACE_S = 10.0
#: How long a shadow may take until it listens: it imports torch.
LISTENING_S = 60.0
#: How long the last lines of what has ended may take to come: whoever left the command's group may hold the pipe.
DRAIN_S = 1.0
POLL_S = 0.02
LISTENING = re.compile(r"checkmate shadow listening on ")

#: Takes the name of a host and a line that was printed there, without its end. Called from several threads.
Emit = Callable[[str, str], None]


class Ended(NamedTuple):
    """How a job ended: with exit code 0, or as the worker that failed first. A signal counts as shells count it."""

    code: int
    host: str = ""


class Commands:
    """Commands on hosts of the lab. Leaving the ``with`` ends them and what they have started."""

    def __init__(self, lab: Lab, emit: Emit) -> None:
        self._lab, self._emit = lab, emit
        self._started: list[tuple[str, subprocess.Popen[bytes], threading.Thread]] = []

    def start(self, host: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        process = self._lab.run_in(host, argv, dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        pump = threading.Thread(target=self._pump, args=(host, process), daemon=True)
        self._started.append((host, process, pump))
        pump.start()

    def ended(self) -> dict[str, int]:
        """The hosts whose command has ended, with its exit code."""
        codes = ((host, process.poll()) for host, process, _ in self._started)
        return {host: code if code >= 0 else 128 - code for host, code in codes if code is not None}

    def __enter__(self) -> Commands:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while len(self.ended()) < len(self._started) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        finally:  # also at a second Ctrl-C
            for _, process, _ in self._started:
                with contextlib.suppress(ProcessLookupError):  # its group outlives it if it has left children
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            deadline = time.monotonic() + DRAIN_S
            for _, _, pump in self._started:
                pump.join(max(0.0, deadline - time.monotonic()))

    def _signal(self, number: int) -> None:
        for _, process, _ in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _pump(self, host: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with contextlib.suppress(OSError):  # nobody reads our output any more; the command must not wait
                    self._emit(host, line.decode(errors="replace").rstrip("\r\n"))


def tap(lab: Lab) -> str:
    """How gradients reach the shadows of this lab, for ``attach(tap=)``."""
    return "multicast" if lab.shape.multicast else "mirror"


def environment(lab: Lab, rank: int, shadows: Sequence[str]) -> dict[str, str]:
    """What a command on the worker of this rank finds in its environment, besides our own.

    CHECKMATE_SHADOW is the first shadow's address, for ``attach(shadow=)``, and CHECKMATE_TAP goes with it; there are
    none without a shadow.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(lab.workers)),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": lab.workers[0].address,
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": DATA[0],
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # all hosts share these cores
        "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),  # lines come as they are printed
        **({"CHECKMATE_SHADOW": shadows[0], "CHECKMATE_TAP": tap(lab)} if shadows else {}),
    }


@contextmanager
def shadows(lab: Lab, emit: Emit) -> Iterator[list[str]]:
    """An empty shadow on each shadow host, listening on the management network; what is copied comes on the other.

    Yields their addresses. Raises LabError if one does not listen.
    """
    listening = {host.name: threading.Event() for host in lab.shadows}

    def watch(host: str, line: str) -> None:
        if LISTENING.match(line):
            listening[host].set()
        emit(host, line)

    addresses = [f"{host.management}:{CONTROL_PORT}" for host in lab.shadows]
    with Commands(lab, watch) as started:
        for host, address in zip(lab.shadows, addresses, strict=True):
            source = "--multicast" if lab.shape.multicast else "--capture"
            shadow = ["-m", "checkmate", "shadow", "--listen", address, source, DATA[0]]
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            started.start(host.name, [sys.executable, *shadow], threads)
        deadline = time.monotonic() + LISTENING_S
        for name, event in listening.items():
            while not event.wait(POLL_S):
                if name in started.ended() or time.monotonic() > deadline:
                    raise LabError(f"the shadow on {name} does not listen; what it printed says why")
        yield [f"tcp://{address}" for address in addresses]


def run(
    lab: Lab,
    argv: Sequence[str],
    emit: Emit,
    shadows: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command on every worker to the end, its own or that of the first that fails, which ends the others.

    `env` is added to the environment of all; `meanwhile` is called now and then, and may end all by raising.
    """
    with Commands(lab, emit) as ranks:
        for rank, host in enumerate(lab.workers):
            ranks.start(host.name, argv, environment(lab, rank, shadows) | dict(env or {}))
        while True:
            codes = ranks.ended()
            if failed := [Ended(code, host) for host, code in codes.items() if code]:
                return failed[0]
            if len(codes) == len(lab.workers):
                return Ended(0)
            meanwhile()
            time.sleep(POLL_S)


@contextmanager
def lossy(lab: Lab, percent: float) -> Iterator[None]:
    """Meanwhile the switch loses this share of the packets towards the shadows on the data network, at random."""
    try:
        for host in lab.shadows if percent else ():
            lab.drop(host.name, percent)
        yield
    finally:
        for host in lab.shadows if percent else ():
            lab.drop(host.name, 0)


Counters = dict[str, dict[str, int]]


def difference(before: Counters, after: Counters) -> Counters:
    """What came to two readings of `Lab.counters` between them."""
    return {link: {key: count - before[link][key] for key, count in now.items()} for link, now in after.items()}
