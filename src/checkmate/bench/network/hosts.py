"""The lab as the benchmarks use it: a crew on the workers, a shadow on s0, what went over the links."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from ...lab import Lab
from ...lab.job import Counters, difference
from ...lab.plan import CONTROL_PORT, DATA
from ...shadow.listening import QUEUE_BYTES
from ...switch import nft
from ...transport.group import Inlet, enlarge, join
from ...wire.datagrams import GROUP_PORT, GROUPS, group_of
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
    """A shadow on s0 that listens on the management network and captures on the other, or joins groups there."""

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
def shadow(lab: Lab, *, idle: bool = False) -> Iterator[LabShadow]:
    """On s0. If `idle`, it gets the processor time that nobody else wants (SCHED_IDLE), as one elsewhere takes none."""
    (host, *_) = lab.shadows
    listen = f"{host.management}:{CONTROL_PORT}"
    source = "--multicast" if lab.shape.multicast else "--capture"
    command = [sys.executable, "-m", "checkmate", "shadow", "--listen", listen, source, DATA[0]]
    if idle:
        command = ["chrt", "--idle", "0", *command]
    with started_on(everywhere()):
        process = lab.run_in(host.name, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with process:
        try:
            yield LabShadow(process, host.namespace)
        finally:
            process.kill()


class Listener:
    """One more replica of a run by multicast, as far as the network knows: it joins the run's group and reads.

    It gets the processor time that nobody else wants.
    """

    def __init__(self, address: str) -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        self._address = address
        self._group: str | None = None
        self._thread: threading.Thread | None = None

    def pid(self) -> int:
        return os.getpid()

    def listen(self, group: str | None) -> None:
        """To this group, or to none."""
        if group == self._group:
            return
        self._group = None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if group is not None:
            self._group = group
            sock = join(group, GROUP_PORT, self._address)
            enlarge(sock, QUEUE_BYTES)
            self._thread = threading.Thread(target=self._read, args=(sock,), daemon=True)
            self._thread.start()

    def _read(self, sock: socket.socket) -> None:
        with sock:
            inlet = Inlet(sock)
            while self._group is not None:
                inlet.receive()


class Audience:
    """All whom gradients reach besides the peers: by the rules of the switch, or because they have joined the group.

    By multicast the first is the run's shadow, and the others are a `Listener` each. Nobody has joined the group of a
    loop that is not attached.
    """

    def __init__(self, lab: Lab, first: LabShadow, others: Crew | None) -> None:
        self._lab, self._first, self._others = lab, first, others

    def be(self, count: int, run: str) -> None:
        """There are so many now: none, one or all of the lab."""
        if self._others is None:
            if count:
                nft.establish(replace(self._lab.cluster, shadows=self._lab.cluster.shadows[:count]))
            else:
                nft.remove(self._lab.cluster)
        else:
            self._others.call("listen", group_of(GROUPS, run) if count > 1 else None)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile they do nothing."""
        pids = [self._first.pid, *([] if self._others is None else self._others.call("pid"))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@contextmanager
def audience(lab: Lab, first: LabShadow) -> Iterator[Audience]:
    others = lab.shadows[1:]
    arguments, cores = [(host.address,) for host in others], [everywhere()] * len(others)
    listeners = Crew(Listener, arguments, cores, [host.namespace for host in others]) if lab.shape.multicast else None
    with listeners or nullcontext():
        yield Audience(lab, first, listeners)


def during(lab: Lab, work: Callable[[], Any]) -> tuple[Any, Counters]:
    """What `work` returns, and what went over each link meanwhile."""
    time.sleep(SETTLE_S)
    before = lab.counters()
    result = work()
    time.sleep(SETTLE_S)
    return result, difference(before, lab.counters())
