"""A shadow in this process, whose memory tests may look at, and ranks in processes of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from checkmate.shadow.daemon import Daemon
from checkmate.shadow.run import Limits
from checkmate.transport.tcp import Address, listen

from .pool import Pool


class Shadow(Daemon):
    """`address` is where it listens. It joins their groups on loopback and, as root, captures what ranks send there."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits, capture="lo" if os.geteuid() == 0 else None, multicast="lo")
        listener = listen(Address("127.0.0.1", 0))
        self.address = str(Address(*listener.getsockname()[:2]))
        threading.Thread(target=self.serve, args=(listener,), daemon=True).start()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def shadow() -> Iterator[Shadow]:
    daemon = Shadow()
    yield daemon
    daemon.stop()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Jobs in this process set the number of threads, and so does the shadow as it replays."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
