"""The link's threads live beside the training loop, and must leave what is the loop's alone."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from checkmate import CheckmateError, Unreachable, values
from checkmate.shadow.daemon import Daemon
from checkmate.trainer import rng
from checkmate.trainer.link import FAILURES, FAILURES_STEPS, Link
from checkmate.transport.base import Channel
from checkmate.transport.tcp import Address, listen
from checkmate.wire.messages import Audit, Report

from .conftest import Loop


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


def refuse(link: Link, step: int) -> None:
    with link.changed:
        link._take(Report("refused", f"the shadow cannot apply step {step}", step, fatal=True))


def test_a_shadow_that_cannot_apply_steps_is_given_up_with_one_warning(
    loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture
) -> None:
    made = loop().restore()
    for step in range(1, FAILURES + 1):
        assert made.link.fatal is None
        refuse(made.link, step)
    for _ in range(30):
        made.train()
    assert made.ckpt.stats()["state"] == "refused"
    told = [r.getMessage() for r in caplog.records if "Training goes on" in r.getMessage()]
    assert len(told) == 1
    assert f"the shadow cannot apply step {FAILURES}" in told[0]


def test_steps_refused_once_in_a_while_are_borne(loop: Callable[..., Loop]) -> None:
    made = loop().restore()
    for count in range(10):
        refuse(made.link, 1 + count * FAILURES_STEPS)
    with made.link.changed:
        made.link._take(Report("replicas", "ranks differ", 1, fatal=True))
    assert made.link.fatal is None


def test_an_audit_of_many_tensors_leaves_the_connection_whole(loop: Callable[..., Loop]) -> None:
    made = loop().restore()
    made.train()
    made.ckpt.wait(timeout=20)
    control = made.link._control
    assert control is not None
    stream: Any = control.stream
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of a message, only a part fits
    digests = made.ckpt._recorder.digests() * 10_000
    answer = made.link.audit(Audit(1, digests), 20)
    assert answer is not None
    assert (answer.compared, answer.differing) == (len(digests), [])
    assert made.link._control is control
    assert not control.closed


def test_giving_up_frees_what_is_being_sent_and_ends_the_connection(
    loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loop().restore()
    link, goes_on, sends = made.link, threading.Event(), threading.Event()
    send_frames = Channel.send_frames

    def slow(self: Channel, frames: Any) -> None:
        if self is link._data:
            sends.set()
            assert goes_on.wait(20)
        send_frames(self, frames)

    monkeypatch.setattr(Channel, "send_frames", slow)
    made.train()
    assert sends.wait(20)
    link.give_up(CheckmateError("enough"))
    began = time.monotonic()
    made.ckpt.close(timeout=10)  # streaming still, but nothing will become safe
    assert time.monotonic() - began < 5
    goes_on.set()
    for thread in link._threads:
        thread.join(20)
    assert link.backlog == 0
    assert made.ckpt.stats()["staging_used_bytes"] == 0


def test_after_giving_up_nothing_is_heard_any_more(loop: Callable[..., Loop]) -> None:
    made = loop().restore()
    made.link.give_up(CheckmateError("enough"))
    assert made.link.wait_for(lambda: made.link._control is None and made.link._data is None, 20)
    made.link._threads[0].join(20)
    assert not made.link._threads[0].is_alive()


def test_closing_while_it_connects_leaves_no_connection(
    loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Channel] = []
    open_ = Link._open

    def closing(self: Link, role: str) -> Channel:
        opened.append(open_(self, role))
        self._closed = role == "data"
        return opened[-1]

    monkeypatch.setattr(Link, "_open", closing)
    with pytest.raises(Unreachable):
        loop().ckpt.restore(timeout=1)
    assert len(opened) == 2
    assert all(channel.closed for channel in opened)


def test_a_warning_says_why_the_shadow_takes_in_the_state_anew(loop: Callable[..., Loop]) -> None:
    made = loop().restore()
    lag = made.ckpt._lag
    assert lag._why(made.link) == "the shadow is behind"
    with made.link.changed:
        made.link._want(made.link.wanted + 1, "its disk is on fire")
    assert "its disk is on fire" in lag._why(made.link)
