"""Leads the probes on all hosts through one examination, and gathers what they observe. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import CheckmateError
from ..switch import nft
from ..switch.cluster import Cluster, Shadow, Sonic, Worker
from ..switch.rules import plan, rules
from . import KINDS
from .judge import Arrival, Facts, Observations, Probe, Rules, Sightings
from .probe import COOKIE_BYTES

#: For a host to answer at all: a connection by ssh, and the start of Python.
REACH_S = 20.0
#: For a probe to send, with all that it waits for itself, or to end.
ANSWER_S = 30.0
#: For the last copies to arrive.
SETTLE_S = 0.3
ENDING_S = 2.0


def everyone(cluster: Cluster) -> list[Worker | Shadow]:
    return [*cluster.workers, *cluster.shadows]


def prefix(cluster: Cluster, host: Worker | Shadow) -> list[str]:
    """What goes before a command so that it runs on `host`."""
    return [word.format(name=host.name, address=host.address) for word in shlex.split(cluster.exec)]


class NoAnswer(Exception):
    """The host did not do what it was asked; says why."""


class Remote:
    """A probe on a host, and what was said on its standard output and error that is no answer of ours."""

    def __init__(self, argv: list[str]) -> None:
        self._said: list[str] = []
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is ours
            )
        except OSError as error:
            raise NoAnswer(f"{argv[0]}: {error.strerror}") from None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._answers.put(json.loads(line)["checkmate"])
            except (ValueError, TypeError, KeyError):
                self._said = [*self._said[-20:], line.strip()]
        self._answers.put(None)

    def ask(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:  # it has ended: `answer` will say so
            return

    def answer(self, deadline: float) -> dict[str, Any]:
        """Raises NoAnswer if the probe ends before it, or has none at the deadline (of `time.monotonic`)."""
        late = False
        found = None
        try:
            found = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            late = True
        if found is not None:
            return found
        said = next((line for line in reversed(self._said) if line), "")
        if late:
            raise NoAnswer("no answer in time" + (f"; it says: {said}" if said else ""))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        raise NoAnswer(said or f"it ended without a word, exit code {self._process.poll()}")

    def hang_up(self) -> None:
        """The probe ends with its input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self, deadline: float) -> None:
        """Wait for its end until the deadline, then force it."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(ENDING_S)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def start(cluster: Cluster, module: str, python: str, silent: dict[str, str]) -> Iterator[dict[str, Remote]]:
    """Probes on all hosts, by name, for as long as they are needed. Who has none is in `silent`, which says why."""
    remotes: dict[str, Remote] = {}
    try:
        for host in everyone(cluster):
            try:
                remotes[host.name] = Remote([*prefix(cluster, host), python, "-m", module])
            except NoAnswer as error:
                silent[host.name] = str(error)
        yield remotes
    finally:
        for remote in remotes.values():  # all at the same time
            remote.hang_up()
        deadline = time.monotonic() + ENDING_S
        for remote in remotes.values():
            remote.close(deadline)


def observe(cluster: Cluster, python: str = sys.executable, reach_s: float = REACH_S) -> Observations:
    """Examine a cluster: send packets with a cookie from each worker to the next, and gather what all hosts saw."""
    silent: dict[str, str] = {}
    with start(cluster, "checkmate.doctor.probe", python, silent) as remotes:
        asked = {
            host.name: {
                "do": "begin",
                "role": "worker" if isinstance(host, Worker) else "shadow",
                "interface": host.interface,
                "address": host.address,
            }
            for host in everyone(cluster)
        }
        begun = ask_all(remotes, asked, silent, reach_s)
        facts = {name: facts_of(answer) for name, answer in begun.items()}
        senders = [worker for worker in cluster.workers if "port" in begun.get(worker.name, {})]
        cookies = {worker.name: secrets.token_hex(COOKIE_BYTES) for worker in senders}
        following = dict(zip(senders, [*senders[1:], *senders[:1]], strict=True)) if len(senders) > 1 else {}
        orders = {
            worker.name: {
                "do": "send",
                "host": target.address,
                "port": begun[target.name]["port"],
                "dscp": cluster.dscp,
                "cookie": cookies[worker.name],
            }
            for worker, target in following.items()
        }
        sent = ask_all(remotes, orders, silent, ANSWER_S)
        time.sleep(SETTLE_S)
        ended = ask_all(remotes, {name: {"do": "end"} for name in begun}, silent, ANSWER_S)
    owner = {cookie: name for name, cookie in cookies.items()}
    probes = {
        worker.name: _probe(worker.name, target.name, sent[worker.name], ended.get(target.name, {}), cookies)
        for worker, target in following.items()
        if worker.name in sent
    }
    sightings = {
        shadow.name: _sightings(ended[shadow.name], owner)
        for shadow in cluster.shadows
        if "seen" in ended.get(shadow.name, {})
    }
    return Observations(silent, facts, probes, sightings, read_rules(cluster), python)


def ask_all(
    remotes: Mapping[str, Remote], requests: Mapping[str, Mapping[str, Any]], silent: dict[str, str], timeout_s: float
) -> dict[str, dict[str, Any]]:
    """Ask several hosts at the same time. Who does not answer is not among the answers, but in `silent`."""
    deadline = time.monotonic() + timeout_s
    asked = [name for name in requests if name in remotes and name not in silent]
    for name in asked:
        remotes[name].ask(requests[name])
    answers = {}
    for name in asked:
        try:
            answers[name] = remotes[name].answer(deadline)
        except NoAnswer as error:
            silent[name] = str(error)
    return answers


def facts_of(answer: Mapping[str, Any]) -> Facts:
    buffers = {name: answer[name] for name in ("rmem_max", "wmem_max") if answer[name] is not None}
    return Facts(
        mtu=answer["mtu"],
        up=answer["up"],
        interfaces=tuple(answer["interfaces"]),
        buffers=buffers,
        foreign_buffers=tuple(name for name in buffers if not answer[f"{name}_is_ours"]),
        trouble=answer.get("trouble", ""),
        said=answer.get("said", ""),
    )


def _probe(
    name: str, target: str, sent: Mapping[str, Any], received: Mapping[str, Any], cookies: Mapping[str, str]
) -> Probe:
    mine = [found for found in received.get("arrived", ()) if found["cookie"] == cookies[name]]
    return Probe(
        target=target,
        error=sent.get("error", ""),
        lost=tuple(sent.get("lost", ())),
        path_mtu=sent.get("path_mtu"),
        arrived=tuple(Arrival(found["kind"], found["dscp"]) for found in mine),
    )


def _sightings(ended: Mapping[str, Any], owner: Mapping[str, str]) -> Sightings:
    """Packets of others who try the doctor at the same time are not ours."""
    seen: dict[str, dict[tuple[str, int], dict[int, int]]] = {}
    for cookie, kind, number, dscp, count in ended["seen"]:
        if cookie in owner and kind in KINDS:
            seen.setdefault(owner[cookie], {}).setdefault((kind, number), {})[dscp] = count
    return Sightings(seen, ended["dropped"])


def read_rules(cluster: Cluster) -> Rules:
    """What the switch has, as far as it can be asked from here."""
    if cluster.switch.sonic != Sonic():
        return Rules(
            unknown="a SONiC switch is not asked; checkmate switch show --target sonic --config-db FILE compares"
        )
    if not cluster.switch.exec and shutil.which("nft") is None:
        return Rules(unknown="nft is not here, and the description has no switch.exec")
    try:
        found = nft.read(cluster)
        lacking = nft.missing(cluster, [port for rule in rules(cluster) for port in (rule.port, *rule.copies)])
    except CheckmateError as error:
        return Rules(error=str(error)) if cluster.switch.exec else Rules(unknown=str(error))
    if lacking and not cluster.switch.exec and not found.state:
        return Rules(unknown="this machine is not the switch, and the description has no switch.exec")
    differences = tuple(str(operation) for operation in plan(found.state, nft.desired(cluster)))
    return Rules(differences=differences, lacking=tuple(lacking))
