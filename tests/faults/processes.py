"""What runs in the processes that these tests kill: trainers, shadows, and a reference without Checkmate.

Importing torch takes seconds, so one process imports everything and then forks on request (`serve`). What it forks are
real processes: with their own pid, pipes, sockets and interpreter exit. Run as ``python -m tests.faults.processes FD``.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import logging
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest as xxh3

import checkmate
import checkmate.recovery
import checkmate.trainer.checkpointer
from checkmate import cli
from checkmate.shadow import capture, listening, members, replay
from checkmate.shadow import run as run_module
from checkmate.trainer import recorder, rendezvous
from checkmate.trainer.model import describe
from checkmate.transport import tcp
from checkmate.wire.messages import Incarnation


class Milestone:
    """State that changes once, and must be remembered although it is sent but once."""

    value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Training:
    """A small job in which every kind of state matters: dropout and data from the RNG, moments, schedule, an object."""

    def __init__(self, width: int = 48) -> None:
        torch.manual_seed(7)
        self.width = width
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(2 * width, width)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [10, 40, 80, 160], 0.8)
        self.milestone = Milestone()

    def step(self, model: torch.nn.Module | None = None) -> None:
        x = torch.randn(4, self.width)
        self.optimizer.zero_grad()
        ((model or self.model)(x) - x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        if self.scheduler.last_epoch == 3:
            self.milestone.value = 3

    def digest(self) -> str:
        """Of all that the next step depends on."""
        tensors = [p.detach() for p in self.model.parameters()]
        for param in self.model.parameters():
            tensors += [value for _, value in sorted(self.optimizer.state[param].items())]
        data = b"".join(t.numpy().tobytes() for t in [*tensors, torch.get_rng_state()])
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return xxh3(data + repr((rates, self.scheduler.state_dict(), self.milestone.value)).encode())


def say(event: str, **fields: Any) -> None:
    """One line of JSON on stdout, whole or not at all, whoever else writes."""
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


def reference(steps: int, width: int) -> None:
    """The digests of steps 0, 1, … of an uninterrupted training without Checkmate."""
    training = Training(width)
    digests = [training.digest()]
    for _ in range(steps):
        training.step()
        digests.append(training.digest())
    say("reference", digests=digests)


def command(args: list[str], lease_s: float | None = None, loss: tuple[float, int] | None = None) -> None:
    """``checkmate`` with these arguments. `loss`: the part of packets that is lost before it hears them, and a seed."""
    if loss is not None:
        chance, receive, split = random.Random(loss[1]), capture._Batch.receive, listening.split
        capture._Batch.receive = lambda batch: [0 if chance.random() < loss[0] else n for n in receive(batch)]
        listening.split = lambda *data: (found for found in split(*data) if chance.random() >= loss[0])
    if lease_s is not None:
        members.LEASE_S = run_module.LEASE_S = lease_s
        run_module.GRACE_S = run_module.DRAIN_S = lease_s / 2
    sys.argv = ["checkmate", *args]
    cli.main()


def trainer(
    address: str,
    run: str,
    *,
    width: int = 48,
    step_s: float = 0.0,
    user_timeout_ms: int | None = None,
    anchor_bytes: int = 1000,
    lease_s: float | None = None,
    step_every: int = 1,
    close_s: float | None = None,
    restore: dict[str, Any] | None = None,
    world: tuple[int, int, str] | None = None,
    group_timeout_s: float = 1800.0,
    **attach: Any,
) -> None:
    """Attach, restore, then obey lines on stdin: ``train N``, ``pause``, ``wait S``, ``close S``, ``raise``, ``end``.

    Reports every step, from a thread every change of what ``stats()`` says of the recovery point, and at the end how
    long Checkmate has held up the exit.
    """
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
    faulthandler.register(signal.SIGUSR1)
    if user_timeout_ms is not None:
        tcp.USER_TIMEOUT_MS = user_timeout_ms
    if lease_s is not None:
        rendezvous.LEASE_S = lease_s
    if close_s is not None:
        checkmate.Checkpointer.close.__defaults__ = (close_s,)
    recorder.ANCHOR_BYTES_PER_STEP = anchor_bytes  # by default one block per step, so that re-anchoring takes several
    if world is not None:
        rank, size, store = world
        wait = timedelta(seconds=group_timeout_s)
        torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=wait)
    training = Training(width)
    model = training.model if world is None else torch.nn.parallel.DistributedDataParallel(training.model)
    exiting = [0.0]
    atexit.register(lambda: say("exit", took=time.perf_counter() - exiting[0]))  # after Checkmate's own
    try:
        stateful = {"scheduler": training.scheduler, "milestone": training.milestone}
        ckpt = checkmate.attach(model, training.optimizer, shadow=address, run=run, stateful=stateful, **attach)
        atexit.register(lambda: exiting.__setitem__(0, time.perf_counter()))  # before it
        threading.Thread(target=_watch, args=(ckpt,), daemon=True).start()
        say("attached")
        step = ckpt.restore(**(restore or {}))
    except checkmate.CheckmateError as error:
        say("failed", type=type(error).__name__, text=str(error))
        sys.exit(1)
    say("restored", step=step, digest=training.digest(), stats=ckpt.stats())
    _obey(lambda: training.step(model), training, ckpt, step, step_s, step_every)


def _watch(ckpt: checkmate.Checkpointer) -> None:
    told = None
    while True:
        if (now := ckpt.stats()["recovery_step"]) != told:
            told = now
            say("recovery", step=now)
        time.sleep(0.001)


def _obey(
    train: Callable[[], None],
    training: Training,
    ckpt: checkmate.Checkpointer,
    step: int,
    step_s: float,
    step_every: int,
) -> None:
    until, waiting = step, b""
    while True:
        if step >= until or select.select([0], [], [], 0)[0]:
            if not (more := os.read(0, 4096)):
                return
            waiting += more
            while b"\n" in waiting:
                line, _, waiting = waiting.partition(b"\n")
                verb, *rest = line.decode().split()
                if verb == "train":
                    until = int(rest[0])
                elif verb == "pause":
                    until = step
                    say("paused", step=step, digest=training.digest(), stats=ckpt.stats())
                elif verb == "raise":
                    raise RuntimeError("as asked")
                elif verb == "end":
                    return
                else:
                    _call(ckpt, verb, float(rest[0]) if rest else None)
            continue
        began = time.perf_counter()
        try:
            train()
        except Exception:
            say("raised", took=time.perf_counter() - began)
            raise
        step += 1
        if step % step_every == 0:
            ckpt.step()
        took = time.perf_counter() - began
        say("step", step=step, took=took, digest=training.digest(), stats=ckpt.stats())
        time.sleep(max(0.0, step_s - (time.perf_counter() - began)))


def _call(ckpt: checkmate.Checkpointer, verb: str, timeout: float | None) -> None:
    say("calling", verb=verb)
    began = time.perf_counter()
    answer: Any = None
    error = None
    try:
        answer = getattr(ckpt, verb)(**({} if timeout is None else {"timeout": timeout}))
    except checkmate.CheckmateError as caught:
        error = f"{type(caught).__name__}: {caught}"
    say("called", verb=verb, answer=answer, error=error, took=time.perf_counter() - began)


def warm_up() -> None:
    """Let torch import what it imports at first use. No backward: autograd's threads would not survive a fork."""
    training = Training()
    for param in training.model.parameters():
        param.grad = torch.zeros_like(param)
    training.optimizer.step()
    shadowed = describe(training.model, [training.optimizer], "match")
    replay.State(shadowed.spec, (), Incarnation(1, bytes(16)))


MAINS: dict[str, Callable[..., None]] = {"trainer": trainer, "command": command, "reference": reference}


def serve(requests: socket.socket) -> Callable[[], None] | None:
    """Fork one child per request; returns in the child with what it is to do, and in the parent at the end."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    gc.freeze()  # children do not go through all of torch's objects when they end
    while True:
        ready, _, _ = select.select([requests, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    requests.send(json.dumps({"pid": ended[0], "status": os.waitstatus_to_exitcode(ended[1])}).encode())
        if requests not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(requests, 65536, 3)
        if not data:
            return None
        request = json.loads(data)
        if pid := os.fork():
            for fd in fds:
                os.close(fd)
            requests.send(json.dumps({"pid": pid}).encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        return lambda: MAINS[request["main"]](*request["args"], **request["options"])


if __name__ == "__main__":
    warm_up()
    if job := serve(socket.socket(fileno=int(sys.argv[1]))):
        job()
