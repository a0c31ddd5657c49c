"""A shadow in this process, and small training loops that it follows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import checkmate
from checkmate.recovery import Reader
from checkmate.shadow.daemon import Daemon
from checkmate.tensors import bytes_of
from checkmate.trainer.link import Link
from checkmate.transport.tcp import Address, listen, parse_address

RUN = "r"


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Loop:
    """A model of four blocks, its optimizer and its Checkpointer."""

    def __init__(self, address: str, optimizer: Callable[[Any], Optimizer] = sgd, **options: Any) -> None:
        torch.manual_seed(0)
        self.address = address
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.optimizer = optimizer(self.model.parameters())
        self.ckpt = checkmate.attach(self.model, self.optimizer, shadow=address, run=RUN, **options)

    def restore(self) -> Loop:
        self.ckpt.restore(timeout=20)
        return self

    @property
    def link(self) -> Link:
        assert self.ckpt._link is not None
        return self.ckpt._link

    def backward(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.update()
            self.ckpt.step()

    def differing(self) -> list[str]:
        """Parameters that differ from those of the newest step, which the shadow has to hold."""
        step = self.ckpt.wait(timeout=20)
        assert self.link.wait_for(lambda: self.link.ack is not None and self.link.ack.applied >= step, 20)
        found = []
        with Reader(parse_address(self.address), RUN, step) as reader:
            for block, held in enumerate(reader.leased.held):
                theirs = torch.empty(held.block.sizes)
                reader.read([(block, 0, 0, bytes_of(theirs))])
                if not torch.equal(theirs, self.model.get_parameter(held.block.fqn)):
                    found.append(held.block.fqn)
        return found


@pytest.fixture(scope="module")
def daemon_address() -> Iterator[tuple[Daemon, str]]:
    before = threading.enumerate()
    daemon = Daemon()
    listener = listen(Address("127.0.0.1", 0))
    threading.Thread(target=daemon.serve, args=(listener,), daemon=True).start()
    yield daemon, str(Address(*listener.getsockname()[:2]))
    daemon.stop()
    for thread in set(threading.enumerate()).difference(before):  # they close their connections
        thread.join(20)


@pytest.fixture
def loop(daemon_address: tuple[Daemon, str]) -> Iterator[Callable[..., Loop]]:
    """Makes loops, each in a run of its own: the one before is closed and forgotten."""
    daemon, address = daemon_address
    loops: list[Loop] = []

    def make(*args: Any, **options: Any) -> Loop:
        loops.append(Loop(address, *args, **options))
        return loops[-1]

    yield make
    for made in loops:
        made.ckpt.close(timeout=0)
    if RUN in daemon.runs:
        daemon._remove(RUN, force=True)
