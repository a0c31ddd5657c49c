"""The lab as the benchmarks use it: a crew on the workers, a shadow on s0, what went over the links."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ...lab import Lab
from ...lab.job import Counters, difference
from ...lab.plan import CONTROL_PORT, DATA
from ...switch import nft
from ...wire.messages import Status
from ..common import Cores, Crew, ShadowProcess, everywhere, inside, started_on

#: So long after the last step the last acknowledgements of TCP have been sent.
SETTLE_S = 0.1


@contextmanager
def crew(lab: Lab, make: Callable[..., Any], on_cores: Sequence[Cores] = ()) -> Iterator[Crew]:
    """One process on each worker; `make` gets rank, number of ranks, and the address of rank 0."""
    hosts = lab.workers
    arguments = [(rank, len(hosts), hosts[0].address) for rank in range(len(hosts))]
    cores = on_cores or [everywhere()] * len(hosts)
    with Crew(make, arguments, cores, [host.namespace for host in hosts]) as members:
        yield members


class LabShadow(ShadowProcess):
    """A shadow on s0 that listens on the management network and captures on the other."""

    def __init__(self, process: subprocess.Popen[str], namespace: str) -> None:
        super().__init__(process)
        self._namespace = namespace

    def answer(self) -> Status:
        with inside(self._namespace):
            return super().answer()

    def capture(self) -> dict[str, int]:
        """Counters of the capture."""
        found: dict[str, int] = self.answer().server["capture"]
        return found

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile it does nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


@contextmanager
def shadow(lab: Lab, *, idle: bool = False) -> Iterator[LabShadow]:
    """On s0. If `idle`, it gets the processor time that nobody else wants (SCHED_IDLE), as one elsewhere takes none."""
    (host, *_) = lab.shadows
    listen = f"{host.management}:{CONTROL_PORT}"
    command = [sys.executable, "-m", "checkmate", "shadow", "--listen", listen, "--capture", DATA[0]]
    if idle:
        command = ["chrt", "--idle", "0", *command]
    with started_on(everywhere()):
        process = lab.run_in(host.name, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with process:
        try:
            yield LabShadow(process, host.namespace)
        finally:
            process.kill()


def mirror_to(lab: Lab, num_ports: int) -> None:
    """Have the switch replicate to so many of the shadows' ports, or to none."""
    if num_ports:
        nft.establish(replace(lab.cluster, shadows=lab.cluster.shadows[:num_ports]))
    else:
        nft.remove(lab.cluster)


def during(lab: Lab, work: Callable[[], Any]) -> tuple[Any, Counters]:
    """What `work` returns, and what went over each link meanwhile."""
    time.sleep(SETTLE_S)
    before = lab.counters()
    result = work()
    time.sleep(SETTLE_S)
    return result, difference(before, lab.counters())
