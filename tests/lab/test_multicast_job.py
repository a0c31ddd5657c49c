"""Training by multicast in the lab, with real packets that get lost, come twice or come late, and peers that do."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from checkmate.lab import Lab, job, plan
from checkmate.trainer.gather import PROBE_S
from tests.network import requires_network

pytestmark = requires_network

STEPS = 8
WORKERS = 3

#: Trains once for each line "NAME STEPS" of ``tasks``; says what came of it in a line of JSON.
TRAIN = """
import hashlib, json, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import checkmate
from checkmate.trainer.gather import Gather

folder, timeout_s, probe_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
Gather.probe.__defaults__ = (probe_s,)
dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
rank = dist.get_rank()

def say(event, **fields):
    os.write(1, (json.dumps({"event": event, "rank": rank, **fields}) + "\\n").encode())

def digest(model, optimizer):
    found = hashlib.sha256()
    for param in model.parameters():
        for tensor in (param.detach(), *(value for _, value in sorted(optimizer.state[param].items()))):
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()

def train(name, steps):
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 300))
    model = DistributedDataParallel(net, bucket_cap_mb=0.2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    began = time.monotonic()
    try:
        ckpt = checkmate.attach(model, optimizer, shadow=os.environ["CHECKMATE_SHADOW"], run=name, tap="multicast")
    except checkmate.CheckmateError as error:
        say("failed", type=type(error).__name__, text=str(error), took=time.monotonic() - began)
        return
    first = ckpt.restore()
    say("restored", step=first, digest=digest(net, optimizer))
    for step in range(first, steps):
        x = torch.randn(8, 300, generator=torch.Generator().manual_seed(100 * step + rank))
        began = time.monotonic()
        optimizer.zero_grad()
        try:
            model(x).square().mean().backward()
        except Exception as error:
            say("raised", took=time.monotonic() - began)
            raise
        optimizer.step()
        ckpt.step()
        say("step", step=step + 1, took=time.monotonic() - began, digest=digest(net, optimizer))
    ckpt.wait(timeout=60)
    dist.barrier()
    gather, stats = ckpt._mirror.collective._multicast, ckpt.stats()
    say(
        "done", digest=digest(net, optimizer), differing=ckpt.audit()["differing"], gaps=stats["gaps"],
        resent=gather.sender.resent_bytes, duplicates=sum(r.duplicates for r in gather._receivers.values()),
    )
    ckpt.close()
    dist.barrier()

def tasks():
    with open(os.path.join(folder, "tasks")) as file:
        while True:
            if line := file.readline():
                yield line.split()
            time.sleep(0.01)

for name, steps in tasks():
    if name == "end":
        break
    train(name, int(steps))
dist.destroy_process_group()
"""


class Workers:
    """The job on all workers; `events` is what they say, by rank."""

    def __init__(self, lab: Lab, folder: Path, timeout_s: float = 60.0, probe_s: float = PROBE_S) -> None:
        self.lab, self.folder = lab, folder
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        (folder / "train.py").write_text(TRAIN)
        (folder / "tasks").touch()
        self._argv = [sys.executable, str(folder / "train.py"), str(folder), str(timeout_s), str(probe_s)]

    def emit(self, host: str, line: str) -> None:
        if line.startswith("{"):
            self.events.append(json.loads(line))
        else:
            self.lines.append(f"[{host}] {line}")

    @contextmanager
    def running(self, shadows: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Their processes, by rank."""
        self.events = []
        with job.Commands(self.lab, self.emit) as commands:
            for rank, host in enumerate(self.lab.workers):
                commands.start(host.name, self._argv, job.environment(self.lab, rank, shadows))
            yield [process for _, process, _ in commands._started]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event["event"] == kind]

    def until(self, what: str, fact: Callable[[], object], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while not fact():
            said = "\n".join(self.lines[-40:])
            assert time.monotonic() < deadline, f"{what}: not within {patience_s:g} s; {self.events[-6:]}\n{said}"
            time.sleep(0.01)

    def train(self, name: str, steps: int = STEPS, patience_s: float = 60.0) -> list[dict[str, Any]]:
        """What every rank says at the end."""
        self.events = []
        self.tell(name, steps)
        self.until(f"the end of {name}", lambda: len(self.of("done")) == len(self.lab.workers), patience_s)
        return sorted(self.of("done"), key=lambda event: int(event["rank"]))

    def tell(self, name: str, steps: int) -> None:
        with (self.folder / "tasks").open("a") as file:
            file.write(f"{name} {steps}\n")


# ---------------------------------------------------------------- what happens to packets


def at_switch(*argv: str, text: str = "") -> None:
    subprocess.run([*plan.within(plan.SWITCH), *argv], input=text or None, text=True, check=True)


@contextmanager
def rules(hook: str, port: str, *found: str) -> Iterator[None]:
    """In the switch; `hook` is ingress or egress of a port."""
    table = f"netdev disturb-{port}"
    lines = (f"type filter hook {hook} device {port} priority 10; policy accept;", *found)
    at_switch("nft", "-f", "-", text="\n".join((f"table {table} {{", "chain c {", *lines, "}", "}", "")))
    try:
        yield
    finally:
        at_switch("nft", "delete", "table", *table.split())


@contextmanager
def losing(lab: Lab, hosts: list[str], percent: float) -> Iterator[None]:
    for host in hosts:
        lab.drop(host, percent)
    try:
        yield
    finally:
        for host in hosts:
            lab.drop(host, 0)


@contextmanager
def doubling(percent: int) -> Iterator[None]:
    """Some of what rank 0 says comes twice to rank 1 and to the shadow."""
    some = f"udp dport 7079 numgen random mod 100 < {percent} dup to"
    with rules("ingress", "w0", f"{some} w1", f"{some} s0"):
        yield


@contextmanager
def delaying(ports: list[str], percent: int) -> Iterator[None]:
    """Some packets towards these ports wait in a slow queue of their own, and others overtake them."""
    for port in ports:
        at_switch("tc", "qdisc", "add", "dev", port, "root", "handle", "1:", "htb", "default", "1")
        for number, rate in ((1, "10gbit"), (2, "4mbit")):
            limits = ["rate", rate, "burst", "100k" if number == 1 else "1600", "quantum", "1600"]
            at_switch("tc", "class", "add", "dev", port, "parent", "1:", "classid", f"1:{number}", "htb", *limits)
    some = f"ip protocol udp numgen random mod 100 < {percent} meta priority set 1:2"
    try:
        with together([rules("egress", port, some) for port in ports]):
            yield
    finally:
        for port in ports:
            at_switch("tc", "qdisc", "del", "dev", port, "root")


@contextmanager
def together(disturbances: list[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for disturbance in disturbances:
            stack.enter_context(disturbance)
        yield


LEGS = {"workers": ["w0", "w1", "w2"], "shadow": ["s0"], "all": ["w0", "w1", "w2", "s0"]}


def overheard(lab: Lab) -> dict[str, tuple[int, int]]:
    """Of each run, the bytes that the shadow has heard, and those that were repaired."""
    asked = [sys.executable, "-m", "checkmate", "status", f"{lab.shadows[0].management}:{plan.CONTROL_PORT}", "--json"]
    with lab.run_in("s0", asked, stdout=subprocess.PIPE) as status:
        answer, _ = status.communicate(timeout=60)
    return {run["run"]: (run["bytes_overheard"], run["bytes_repaired"]) for run in json.loads(answer)["runs"]}


def test_what_becomes_of_packets_changes_no_bit(tmp_path: Path) -> None:
    """Each run ends with the bits of the first, which nobody disturbed, and the shadow holds the same."""
    disturbances = {f"loss-{leg}-{percent}": (leg, percent) for leg in LEGS for percent in (0.1, 1, 5)}
    told: dict[str, list[dict[str, Any]]] = {}
    with Lab(WORKERS, 1, offloads=False, multicast=True) as lab:
        workers = Workers(lab, tmp_path)
        with job.shadows(lab, workers.emit) as shadows, workers.running(shadows):
            told["calm"] = workers.train("calm")
            longer = workers.train("longer", STEPS + 1)
            for name, (leg, percent) in disturbances.items():
                with losing(lab, LEGS[leg], percent):
                    told[name] = workers.train(name)
            with doubling(30):
                told["twice"] = workers.train("twice")
            with delaying(LEGS["all"], 20):
                told["late"] = workers.train("late")
            with losing(lab, LEGS["all"], 2), doubling(30), delaying(["w1"], 20):
                told["everything"] = workers.train("everything")
            heard = overheard(lab)
            workers.tell("end", 0)
    for name, ranks in told.items():
        print(name, heard[name], [(rank["resent"], rank["duplicates"]) for rank in ranks])
    gradient = STEPS * 4 * (2 * 300 * 300 + 2 * 300)
    for name, ranks in told.items():
        for rank in ranks:
            found = rank["digest"], rank["differing"], rank["gaps"]
            assert (name, *found) == (name, told["calm"][0]["digest"], [], 0)
        assert sum(heard[name]) == gradient
    # The negative controls: a step more gives other bits, and the disturbances were felt by those whom they concern.
    assert longer[0]["digest"] != told["calm"][0]["digest"]
    assert heard["calm"][1] == 0
    for name, (leg, percent) in disturbances.items():
        assert any(rank["resent"] for rank in told[name]) == (leg != "shadow") or percent < 1
        assert bool(heard[name][1]) == (leg != "workers") or percent < 5
    assert told["twice"][1]["duplicates"] > 0
    assert all(rank["duplicates"] > 0 for rank in told["late"])


# ---------------------------------------------------------------- peers that are gone


TIMEOUT_S = 5.0
ENDLESS = 100_000


def test_peers_that_are_gone_or_stand_still(tmp_path: Path) -> None:
    """One of three stands still for a while, then one is killed, and after a restart one stands still for good."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with Lab(WORKERS, 1, offloads=False, multicast=True) as lab:
        workers = Workers(lab, tmp_path, TIMEOUT_S)
        with job.shadows(lab, workers.emit) as shadows:
            with workers.running(shadows) as processes:
                begin(workers, chance)
                stand_still(workers, processes[chance.randrange(WORKERS)], TIMEOUT_S - 2)
                time.sleep(chance.uniform(0, 0.05))
                victim = chance.randrange(WORKERS)
                processes[victim].kill()
                others_raise(workers, victim, 0.0)
            expected = digests(workers)
            with workers.running(shadows) as processes:
                begin(workers, chance)
                victim = chance.randrange(WORKERS)
                processes[victim].send_signal(signal.SIGSTOP)
                others_raise(workers, victim, TIMEOUT_S)
                processes[victim].kill()
            restored = {(event["step"], event["digest"]) for event in workers.of("restored")}
            ((first, digest),) = restored
            finished = min(max(step for step, of in expected.items() if rank in of) for rank in range(WORKERS))
            assert finished - 1 <= first <= finished + 1
            after = digests(workers)
            found = {step: set(of.values()) for step, of in (expected | after).items()}
            assert found.get(first, {digest}) == {digest}
            with workers.running(shadows):  # as nobody ever disturbed it
                (tmp_path / "tasks").write_text("")
                workers.train("whole", max(found))
                whole = {step: set(of.values()) for step, of in digests(workers).items()}
    assert {step: whole[step] for step in found} == found
    assert len(set().union(*whole.values())) == len(whole)  # the negative control: steps differ


def begin(workers: Workers, chance: random.Random) -> None:
    """Train, and stop looking anywhere in a step."""
    (workers.folder / "tasks").write_text(f"job {ENDLESS}\n")
    workers.until("training", lambda: len(workers.of("step")) > 20 * WORKERS, 60.0)
    time.sleep(chance.uniform(0, 0.05))


def digests(workers: Workers) -> dict[int, dict[int, str]]:
    """After each step, of each rank."""
    found: dict[int, dict[int, str]] = {}
    for event in workers.of("step"):
        found.setdefault(event["step"], {})[event["rank"]] = event["digest"]
    return found


def others_raise(workers: Workers, victim: int, after_s: float) -> None:
    workers.until("errors", lambda: len(workers.of("raised")) == WORKERS - 1, after_s + 20)
    for event in workers.of("raised"):
        assert event["rank"] != victim
        assert after_s - 0.5 < event["took"] < after_s + 1.5, event  # since its step began


def stand_still(workers: Workers, stopped: subprocess.Popen[bytes], for_s: float) -> None:
    stopped.send_signal(signal.SIGSTOP)
    at = len(workers.of("step"))
    time.sleep(for_s)
    assert len(workers.of("step")) < at + 3 * WORKERS
    stopped.send_signal(signal.SIGCONT)
    workers.until("more steps", lambda: len(workers.of("step")) > at + 20 * WORKERS, 20.0)
    assert max(event["took"] for event in workers.of("step")) > for_s - 1
    assert workers.of("raised") == []


# ---------------------------------------------------------------- a network that does not carry the group


def test_network_that_does_not_carry_the_group_is_said_on_every_rank(tmp_path: Path) -> None:
    everybody = [(rank, [other for other in range(WORKERS) if other != rank]) for rank in range(WORKERS)]
    with Lab(WORKERS, 1, offloads=False, multicast=True) as lab:
        workers = Workers(lab, tmp_path, probe_s=3.0)
        with job.shadows(lab, workers.emit) as shadows, workers.running(shadows):
            with rules("egress", "w2", "udp dport 7079 drop"):
                check_unreachable(workers, "deaf", [(0, [2]), (1, [2])])
            with rules("ingress", "w1", "udp dport 7079 drop"):
                check_unreachable(workers, "mute", [(1, [0, 2])])
            workers.train("well")  # the negative control; and attaching is possible in the same processes
            at_switch("ip", "link", "set", plan.DATA[2], "type", "bridge", "mcast_querier", "0")
            check_unreachable(workers, "unasked", everybody)
            workers.tell("end", 0)


def check_unreachable(workers: Workers, name: str, deaf: list[tuple[int, list[int]]]) -> None:
    workers.events = []
    workers.tell(name, STEPS)
    workers.until("refusals", lambda: len(workers.of("failed")) == WORKERS, 20.0)
    told = "; ".join(f"what rank {rank} sends does not reach ranks {others}" for rank, others in deaf)
    for event in workers.of("failed"):
        assert event["type"] == "Unreachable"
        assert f"between all ranks: {told}." in event["text"]
        assert "IGMP snooping with a querier" in event["text"]
        assert event["took"] < 3.0 + 2.0
