"""What the benchmarks share: processes pinned to cores, a shadow to measure, figures and how they are shown."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec

from ..errors import CheckmateError
from ..recovery import open_channel
from ..transport.base import call
from ..transport.tcp import parse_address
from ..wire.messages import GetStatus, Status

#: Attempts to connect and answers are given up after so long.
TIMEOUT_S = 60.0


class BenchmarkFailed(CheckmateError):
    """A process of the benchmark failed, or what it computed is wrong."""


# ---------------------------------------------------------------- results


class Figure(msgspec.Struct, frozen=True):
    """One number that was measured; with a target, also whether it holds."""

    name: str
    value: float
    unit: str = ""
    target: str = ""
    holds: bool | None = None


class Outcome(msgspec.Struct, frozen=True):
    """All that one benchmark has to say."""

    benchmark: str
    method: str
    figures: list[Figure]


def at_most(name: str, value: float, bound: float | None, unit: str = "") -> Figure:
    """Without a bound there is no target."""
    if bound is None:
        return Figure(name, value, unit)
    return Figure(name, value, unit, f"≤ {bound:,.4g}", value <= bound)


def at_least(name: str, value: float, bound: float, unit: str = "") -> Figure:
    return Figure(name, value, unit, f"≥ {bound:,.4g}", value >= bound)


def exactly(name: str, value: float, wanted: float, unit: str = "") -> Figure:
    return Figure(name, value, unit, f"= {wanted:,.10g}", value == wanted)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that a share `q` of all does not exceed: 0.5 is the median, 0.95 the 95th percentile."""
    ordered = sorted(values)
    return ordered[max(0, -int(-q * len(ordered) // 1) - 1)]


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


# ---------------------------------------------------------------- processes


Cores = set[int]


def everywhere() -> Cores:
    """All cores that this process may use."""
    return os.sched_getaffinity(0)


def two_cores() -> tuple[Cores, Cores]:
    """One core for workers and another for the shadow; the same where there is no second."""
    usable = sorted(everywhere())
    return {usable[0]}, {usable[-1]}


@contextmanager
def started_on(cores: Cores) -> Iterator[None]:
    """Processes started inside run on these cores, with one thread for torch: both are inherited."""
    before, threads = everywhere(), os.environ.get("OMP_NUM_THREADS")
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread in a network namespace: sockets made here, and processes started, stay there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
        try:
            yield
        finally:
            libc.setns(before.fileno(), 0)


class Crew:
    """Processes that each make an object once and then call its methods when told, all at the same time.

    With `namespaces`, each is in one.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        on_cores: Sequence[Cores],
        namespaces: Sequence[str] = (),
    ) -> None:
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        resource_tracker.ensure_running()  # out here, and not wherever the first one starts
        places: list[AbstractContextManager[None]] = [inside(namespace) for namespace in namespaces]
        places += [nullcontext()] * (len(arguments) - len(places))
        for args, cores, place in zip(arguments, on_cores, places, strict=True):
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(theirs, make, args), daemon=True)
            with started_on(cores), place:
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.hear()

    def tell(self, method: str, *args: Any) -> None:
        """Call a method on every member; `hear` waits for the results."""
        for pipe in self._pipes:
            pipe.send((method, args))

    def hear(self) -> list[Any]:
        """Raises BenchmarkFailed with the traceback of the first member that failed."""
        results: dict[Any, Any] = {}
        while len(results) < len(self._pipes):
            ready: list[Any] = wait([pipe for pipe in self._pipes if pipe not in results])
            for pipe in ready:
                try:
                    ok, results[pipe] = pipe.recv()
                except EOFError:
                    raise BenchmarkFailed("a process of the benchmark has died") from None
                if not ok:
                    raise BenchmarkFailed(f"a process of the benchmark failed:\n{results[pipe]}")
        return [results[pipe] for pipe in self._pipes]

    def call(self, method: str, *args: Any) -> list[Any]:
        self.tell(method, *args)
        return self.hear()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.terminate()


def _member(pipe: Any, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        member = make(*args)
        pipe.send((True, None))
        while True:
            method, given = pipe.recv()
            pipe.send((True, getattr(member, method)(*given)))
    except EOFError:
        return
    except Exception:
        with suppress(OSError):  # another member has failed before, and nobody listens any more
            pipe.send((False, traceback.format_exc()))


class ShadowProcess:
    """``checkmate shadow`` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if not words:
            raise BenchmarkFailed("the shadow did not start")
        self.address = words[-1]
        self.pid = process.pid
        self.count_from_here()

    def answer(self) -> Status:
        """What ``checkmate status`` says."""
        channel = open_channel(parse_address(self.address), "admin", None, TIMEOUT_S)
        try:
            answer = call(channel, GetStatus(), TIMEOUT_S)
        finally:
            channel.close()
        assert isinstance(answer, Status)
        return answer

    def status(self, run: str) -> dict[str, Any]:
        """What it says of a run."""
        return next(found for found in self.answer().runs if found["run"] == run)

    def cpu_s(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def count_from_here(self) -> None:
        """Memory that it has now is not counted."""
        self._before_bytes = self._status_field("VmRSS")

    def peak_bytes(self) -> int:
        """The most memory that it ever had, beyond what is not counted."""
        return self._status_field("VmHWM") - self._before_bytes

    def _status_field(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@contextmanager
def shadow_on(cores: Cores) -> Iterator[ShadowProcess]:
    """An empty shadow on a free port of this machine, pinned to cores."""
    with started_on(cores):
        process = subprocess.Popen(
            [sys.executable, "-m", "checkmate", "shadow", "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    with process:
        try:
            yield ShadowProcess(process)
        finally:
            process.terminate()
