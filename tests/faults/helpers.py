"""Starts, watches and kills real processes; `processes` has what runs in them, `proxy` the faults of the network."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0  #: how long a test waits for an event before it says that it never came


class Process:
    """A forked process. Lines of its stdout that are JSON become `events`, all others and stderr become `lines`."""

    def __init__(self, zygote: Zygote, main: str, args: list[Any], options: dict[str, Any]) -> None:
        self.changed = threading.Condition()
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.status: int | None = None
        self._zygote = zygote
        pipes = [os.pipe() for _ in range(3)]
        (stdin, self._stdin), (stdout, out), (stderr, err) = pipes
        try:
            self.pid = zygote.fork(self, main, args, options, [stdin, out, err])
        finally:
            for fd in (stdin, out, err):
                os.close(fd)
        self._readers = [threading.Thread(target=self._read, args=(fd,), daemon=True) for fd in (stdout, stderr)]
        for reader in self._readers:
            reader.start()

    def _read(self, fd: int) -> None:
        with os.fdopen(fd) as stream:
            for line in stream:
                with self.changed:
                    if line.startswith("{"):
                        self.events.append({"event": "json", **json.loads(line)})
                    else:
                        self.lines.append(line.rstrip("\n"))
                    self.changed.notify_all()

    def exited(self, status: int) -> None:
        with self.changed:
            self.status = status
            self.changed.notify_all()

    def await_(self, what: str, predicate: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
        """Wait until `predicate` gives something true, and return that; fail if the process ends before."""
        found: Any = None

        def ready() -> bool:
            nonlocal found
            found = predicate()
            return bool(found) or (self.status is not None and not any(r.is_alive() for r in self._readers))

        deadline = time.monotonic() + timeout_s
        with self.changed:
            while not ready() and time.monotonic() < deadline:
                self.changed.wait(0.2)
        assert found, f"{what}: never came (exit status {self.status}). It said:\n{self.transcript()}"
        return found

    def event(self, *kinds: str) -> dict[str, Any]:
        """The first event of one of these kinds."""
        found: dict[str, Any] = self.await_(
            f"event {kinds}", lambda: next((e for e in self.events if e["event"] in kinds), None)
        )
        return found

    def line(self, pattern: str, after: int = 0) -> str:
        """The first line in which the pattern is found, `after` so many others in which it is."""
        found: str = self.await_(
            f"line with {pattern!r} after {after} others",
            lambda: next(islice((x for x in self.lines if re.search(pattern, x)), after, None), None),
        )
        return found

    def count(self, pattern: str) -> int:
        with self.changed:
            return sum(1 for line in self.lines if re.search(pattern, line))

    def transcript(self) -> str:
        steps = [e for e in self.events if e["event"] != "step"]
        return "\n".join([*map(str, steps[-20:]), f"({len(self.events)} events)", *self.lines[-60:]])

    def tell(self, line: str) -> None:
        os.write(self._stdin, (line + "\n").encode())

    def signal(self, number: signal.Signals) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def join(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end and the end of its output; returns the exit status (minus the signal that killed it)."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            ended = self.changed.wait_for(lambda: self.status is not None, timeout_s)
        assert ended, f"does not end. It said:\n{self.transcript()}"
        for reader in self._readers:
            reader.join(max(0.1, deadline - time.monotonic()))
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone and all that it said is read."""
        self.signal(signal.SIGKILL)
        self.join()

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.signal(signal.SIGCONT)
        self.join()
        with contextlib.suppress(OSError):
            os.close(self._stdin)
        self._stdin = -1


class Trainer(Process):
    """A training process; see `processes.trainer`."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        with self.changed:
            return [e for e in self.events if e["event"] == "step"]

    @property
    def last_step(self) -> int:
        with self.changed:
            return next((e["step"] for e in reversed(self.events) if e["event"] in ("step", "restored")), -1)

    @property
    def claims(self) -> list[int | None]:
        """Every recovery step that ``stats()`` has given, in order."""
        with self.changed:
            return [e["step"] for e in self.events if e["event"] == "recovery"]

    @property
    def claim(self) -> int | None:
        return self.claims[-1] if self.claims else None

    def state(self) -> str:
        with self.changed:
            return next((e["stats"]["state"] for e in reversed(self.events) if "stats" in e), "")

    def await_step(self, step: int) -> None:
        self.await_(f"step {step}", lambda: self.last_step >= step)

    def await_whole(self, at_least: int = 0, lag: int = 2) -> None:
        """Until the recovery point is `at_least` that step, and no older than `lag` steps."""

        def whole() -> bool:
            step = next((e for e in reversed(self.events) if e["event"] == "step"), None)
            if step is None:
                return False
            recovery = step["stats"]["recovery_step"]
            return recovery is not None and recovery >= at_least and step["stats"]["lag_steps"] <= lag

        self.await_(f"a recovery point at step {at_least} or later", whole)

    def call(self, verb: str, timeout: float | None = None) -> dict[str, Any]:
        """Call a method of the Checkpointer between two steps."""
        before = sum(1 for e in self.events if e["event"] == "called")
        self.tell(verb if timeout is None else f"{verb} {timeout}")
        answers: list[dict[str, Any]] = self.await_(
            f"an answer of {verb}()",
            lambda: [e for e in self.events if e["event"] == "called"][before:],
        )
        return answers[0]

    def stop_training(self) -> dict[str, Any]:
        """Pause between two steps; returns step, digest and stats."""
        before = sum(1 for e in self.events if e["event"] == "paused")
        self.tell("pause")
        paused: list[dict[str, Any]] = self.await_(
            "the pause", lambda: [e for e in self.events if e["event"] == "paused"][before:]
        )
        return paused[0]


class Zygote:
    """The process that has imported everything and forks the others."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.processes", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], cwd=ROOT, env=environment,
        )  # fmt: skip
        theirs.close()
        self._socket = ours
        self._lock = threading.Lock()
        self._answered = threading.Condition()
        self._forked: list[int] = []
        self._ended: dict[int, int] = {}
        self._children: dict[int, Process] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, child: Process, main: str, args: list[Any], options: dict[str, Any], fds: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps({"main": main, "args": args, "options": options}).encode()], fds)
            with self._answered:
                assert self._answered.wait_for(lambda: self._forked, PATIENCE_S), "nothing was forked"
                pid = self._forked.pop()
                self._children[pid] = child
                if pid in self._ended:
                    child.exited(self._ended.pop(pid))
                return pid

    def _listen(self) -> None:
        while data := self._socket.recv(65536):
            message = json.loads(data)
            with self._answered:
                if "status" not in message:
                    self._forked.append(message["pid"])
                elif (child := self._children.pop(message["pid"], None)) is not None:
                    child.exited(message["status"])
                else:
                    self._ended[message["pid"]] = message["status"]
                self._answered.notify_all()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait(PATIENCE_S)
        self._socket.close()


class Shadow(Process):
    """A shadow process; `port` is where it listens."""

    def __init__(self, zygote: Zygote, port: int, args: tuple[str, ...], options: dict[str, Any]) -> None:
        super().__init__(zygote, "command", [["shadow", "--listen", f"127.0.0.1:{port}", *args]], options)
        found = re.search(r"listening on (tcp://\S+:(\d+))", self.line("listening on"))
        assert found is not None
        self.address, self.port = found[1], int(found[2])

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)

    def cont(self) -> None:
        self.signal(signal.SIGCONT)


class Lab:
    """Starts what a test needs, and ends all of it afterwards."""

    def __init__(self, zygote: Zygote, seed: int, references: dict[int, list[str]]) -> None:
        self.zygote = zygote
        self.random = random.Random(seed)
        self._references = references
        self._stack = contextlib.ExitStack()

    def shadow(self, *args: str, port: int = 0, **options: Any) -> Shadow:
        return self._own(Shadow(self.zygote, port, args, options))

    def command(self, *args: str) -> Process:
        """``checkmate`` with these arguments, started."""
        return self._own(Process(self.zygote, "command", [list(args)], {}))

    def proxy(self, port: int) -> Any:
        from .proxy import Proxy

        return self._own(Proxy(port))

    def trainer(self, address: str, run: str = "r", **options: Any) -> Trainer:
        return self._own(Trainer(self.zygote, "trainer", [address, run], options))

    def _own(self, thing: Any) -> Any:
        self._stack.callback(thing.close)
        return thing

    def reference(self, step: int, width: int = 48) -> str:
        """The digest of an undisturbed training without Checkmate after `step` steps."""
        known = self._references.get(width, [])
        if len(known) <= step:
            process = Process(self.zygote, "reference", [max(2 * step, 400), width], {})
            known = self._references[width] = process.event("reference")["digests"]
            process.close()
        return known[step]

    def check_steps(self, trainer: Trainer, width: int = 48, slowest_s: float = 1.0) -> None:
        """Every step of this trainer gave what training alone gives, and none was held up."""
        steps = trainer.steps
        assert steps
        for step in steps:
            assert step["digest"] == self.reference(step["step"], width), f"step {step['step']} differs"
        slowest = max(steps, key=lambda step: step["took"])
        assert slowest["took"] < slowest_s, f"step {slowest['step']} took {slowest['took']:.2f} s"

    def restart(self, address: str, claim: int | None, width: int = 48, run: str = "r", **options: Any) -> Trainer:
        """Start a trainer after all were killed: it must stand at `claim` or later, exactly as training alone."""
        trainer = self.trainer(address, run, width=width, **options)
        restored = trainer.event("restored")
        assert restored["step"] >= (claim or 0), f"claimed {claim}, restored {restored['step']}"
        assert restored["digest"] == self.reference(restored["step"], width)
        return trainer

    def close(self) -> None:
        self._stack.close()


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An address to which a connection is never made and never refused."""
    from .proxy import Proxy

    proxy = Proxy(9)
    proxy.blackhole()
    try:
        yield proxy.address
    finally:
        proxy.close()
