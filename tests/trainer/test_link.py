"""The link's threads live beside the training loop, and must leave what is the loop's alone."""

from __future__ import annotations

import random
import threading

import torch
from torch import nn

import checkmate
from checkmate import values
from checkmate.shadow.daemon import Daemon
from checkmate.trainer import rng
from checkmate.transport.tcp import Address, listen


def test_reconnecting_and_closing_draw_none_of_the_users_random_numbers() -> None:
    daemon = Daemon()
    listener = listen(Address("127.0.0.1", 0))
    server = threading.Thread(target=daemon.serve, args=(listener,), daemon=True)
    server.start()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    address = str(Address(*listener.getsockname()[:2]))
    ckpt = checkmate.attach(model, optimizer, shadow=address, run="r")
    ckpt.restore(timeout=20)
    before = values.dumps(rng.capture())

    link = ckpt._link
    assert link is not None
    for _ in range(3):
        control = link._control
        assert control is not None
        control.close()
        assert link.wait_for(lambda lost=control: link.streaming and link._control is not lost, 20)
    ckpt.close()
    for thread in link._threads:
        thread.join(20)
    daemon.stop()
    server.join(20)

    assert values.dumps(rng.capture()) == before
    random.random()
    assert values.dumps(rng.capture()) != before
