"""Ranks that outlive a test: importing torch takes seconds, a restart here takes new objects in the same process.

A call runs one function on the first N ranks, in a default process group of N; the rank of a group of one has none.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4
#: A rank that is silent for so long hangs. Collectives give up earlier, to say which rank was missing.
PATIENCE_S = 220.0
COLLECTIVE_S = 180.0


class RankFailed(Exception):
    """A function raised on some ranks; the message holds their tracebacks."""


class Pool:
    """`call` functions on the ranks; `close` ends them. They start at once, and the first call waits for them."""

    def __init__(self) -> None:
        self._store = tempfile.TemporaryDirectory(prefix="ranks-")
        self._groups = 0  # made so far
        self._start()

    def call(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(rank, *arguments)`` returned on each of `ranks` ranks. Raises RankFailed."""
        if ranks != self._size:
            self._groups += 1
        self._size = ranks
        used = self._pipes[:ranks]
        for pipe in used:
            pipe.send((f"{self._store.name}/{self._groups}", ranks, function, arguments))
        answers = []
        for rank, pipe in enumerate(used):
            if not pipe.poll(PATIENCE_S):
                self._end(0)
                self._start()
                raise RankFailed(f"rank {rank} does not answer; where all threads stand is on stderr")
            answers.append(pipe.recv())
        if failures := [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(answers) if failure]:
            self._size = 0  # the next call makes a new group
            raise RankFailed("\n".join(failures))
        return [result for result, _ in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        self._end(20)
        self._store.cleanup()

    def _start(self) -> None:
        spawn = torch.multiprocessing.get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(RANKS)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            spawn.Process(target=_serve, args=(rank, theirs)) for rank, (_, theirs) in enumerate(pairs)
        ]  # not daemons, for a DataLoader's workers are their children
        for process in self._processes:
            process.start()
        self._size = 1  # of the group that the ranks are in

    def _end(self, patience_s: float) -> None:
        for process in self._processes:
            process.join(patience_s)
            if process.is_alive() and process.pid is not None:
                for pid in (process.pid, *_children(process.pid)):  # a DataLoader's workers may be what it waits for
                    with contextlib.suppress(OSError):  # it has ended
                        print(f"process {pid}: {Path(f'/proc/{pid}/wchan').read_text()}", file=sys.stderr, flush=True)
                        os.kill(pid, signal.SIGUSR1)
                    process.join(1)
                process.kill()


def _children(pid: int) -> list[int]:
    """They have its signal handlers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (process / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(process.name))
    return found


def _serve(rank: int, pipe: Connection) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.multiprocessing.set_start_method("fork", force=True)  # for DataLoaders, as in any other program
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    present = ""
    while (work := pipe.recv()) is not None:
        group, size, function, arguments = work
        try:
            if group != present:
                _leave_group()
                if size > 1:
                    wait = timedelta(seconds=COLLECTIVE_S)
                    dist.init_process_group("gloo", f"file://{group}", rank=rank, world_size=size, timeout=wait)
                present = group
            answer = function(rank, *arguments), ""
        except BaseException:
            answer = None, traceback.format_exc()
            _leave_group()  # and so end the collectives in which the others wait
            present = ""
        pipe.send(answer)
    _leave_group()
    atexit._run_exitfuncs()
    os._exit(0)  # torch takes seconds to unload


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
