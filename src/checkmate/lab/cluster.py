"""A lab for as long as it is needed: brought up, held by a lock, taken down whatever happens."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..switch import cluster as description
from ..switch import nft
from . import network, plan
from .network import LabError
from .plan import Host, Shape

#: One machine has one lab, because the names of its namespaces are fixed. Here is who holds it, and its shape if it
#: was left up: that file is written last, so a namespace without it is a leftover.
STATE = Path("/run/checkmate-lab")
LOCK, KEPT, CLUSTER = "lock", "lab.json", "cluster.toml"


class Lab:
    """``with Lab(workers=2, shadows=1) as lab:`` builds the cluster, and removes it with all that runs in it.

    Raises LabError if it cannot be built, if another process has a lab, or if one was left with ``checkmate lab up``.
    Leftovers of a process that was killed are removed first.
    """

    def __init__(
        self,
        workers: int = 2,
        shadows: int = 1,
        mtu: int = 1500,
        rate: str | None = None,
        offloads: bool = True,
        rules: bool | None = None,
        multicast: bool = False,
    ) -> None:
        rules = not multicast if rules is None else rules
        self.shape = Shape(workers, shadows, mtu, rate, offloads, rules, multicast)
        self.cluster = plan.cluster(self.shape)
        self.cluster_file = STATE / CLUSTER  #: there while the lab is
        self.hosts = {host.name: host for host in plan.hosts(self.shape)}
        self._held: Any = None

    @property
    def workers(self) -> list[Host]:
        return plan.workers(self.shape)

    @property
    def shadows(self) -> list[Host]:
        return plan.shadows(self.shape)

    def __enter__(self) -> Lab:
        network.require(self.shape)
        self._held = lock()
        self._held.__enter__()
        try:
            if shape := kept():
                raise LabError(f"a lab is up already ({shape}); take it down: checkmate lab down")
            self._build()
        except BaseException:
            self._held.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.cluster_file.unlink(missing_ok=True)
            network.clear()
        finally:
            self._held.__exit__(None, None, None)

    def _build(self) -> None:
        try:
            network.clear()
            network.build(self.shape)
            if self.shape.rules and self.shape.shadows:
                nft.establish(self.cluster)
            self.cluster_file.parent.mkdir(parents=True, exist_ok=True)
            self.cluster_file.write_text(description.dumps(self.cluster))
        except BaseException:
            network.clear()
            raise

    def run_in(
        self, host: str, argv: Sequence[str], env: dict[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host; `env` is added to the environment, `popen` goes to ``subprocess.Popen``.

        Its pid is that of the command. It is killed when the lab ends, and when the *thread* that started it ends.
        """
        if host not in self.hosts:
            raise UsageError(f"the lab has no host {host!r}; there are {', '.join(self.hosts)}")
        command = [*plan.within(self.hosts[host].namespace), "setpriv", "--pdeathsig", "KILL", "--", *argv]
        popen = {"stdin": subprocess.DEVNULL, "start_new_session": True} | popen
        return subprocess.Popen(command, env=os.environ | (env or {}), **popen)

    def counters(self) -> dict[str, dict[str, int]]:
        """Per link, as the host sees it: rx_bytes, rx_packets, tx_bytes, tx_packets; with a rate also rx_dropped.

        "w0" is the data network's eth0 of that host, "w0/mgmt0" its management interface. Bytes count Ethernet headers.
        With offloads a packet may stand for many on a wire, and its bytes for fewer: their headers are counted once.
        """
        return network.counters(self.shape)

    def drop(self, host: str, percent: float) -> None:
        """Let the switch lose this share of the packets towards a host's eth0, at random; 0 ends it."""
        if not 0 <= percent <= 100:
            raise UsageError(f"a loss of {percent} %; it must be 0 to 100")
        network.drop(self.hosts[host], percent)


# ---------------------------------------------------------------- a lab that is left up


def up(lab: Lab) -> bool:
    """Build a lab that stays. False if it is there already, with the same shape."""
    network.require(lab.shape)
    with lock():
        if (shape := kept()) == lab.shape:
            return False
        if shape:
            raise LabError(f"a lab of another shape is up ({shape}); take it down first: checkmate lab down")
        lab._build()
        (STATE / KEPT).write_text(json.dumps({"shape": asdict(lab.shape)}))
    return True


def down() -> list[str]:
    """Remove a lab that was left up, or what is left of one. Says which namespaces there were."""
    network.require(Shape(rules=False))
    with lock():
        for name in (KEPT, CLUSTER):
            (STATE / name).unlink(missing_ok=True)
        return network.clear()


def existing() -> Lab | None:
    """The lab that was left up."""
    if not (shape := kept()):
        return None
    return Lab(**asdict(shape))


@contextmanager
def borrowed(**options: Any) -> Iterator[Lab]:
    """The lab that was left up, held meanwhile, with as many hosts as are asked for; if there is none, one of our own.

    `options` are those of `Lab`; where one is None, whatever is there will do. Raises LabError if it does not fit.
    """
    asked = {name: value for name, value in options.items() if value is not None}
    if (shape := kept()) is None:
        with Lab(**asked) as lab:
            yield lab
        return
    for name, value in asked.items():
        there = getattr(shape, name)
        if there < value if name in ("workers", "shadows") else there != value:
            raise LabError(f"the lab that is up does not fit ({shape}); take it down first: checkmate lab down")
    network.require(shape)
    with lock():
        found = existing()
        if found is None or found.shape != shape:
            raise LabError("the lab that was up has just been taken down; try again")
        hosts = {name: value for name, value in asked.items() if name in ("workers", "shadows")}
        found.shape = replace(shape, **hosts)
        network.end_losses()
        yield found


def kept() -> Shape | None:
    """The shape of the lab that was left up. After a reboot there is none: both places are in memory."""
    try:
        shape = Shape(**json.loads((STATE / KEPT).read_text())["shape"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    there = {plan.SWITCH, *(host.namespace for host in plan.hosts(shape))}
    return shape if there <= set(network.namespaces()) else None


@contextmanager
def lock() -> Iterator[None]:
    """Hold the machine's lab. The kernel lets go of it when this process ends, however it ends."""
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise LabError(f"process {file.read().strip() or '?'} is using the lab; wait for it or end it") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
