"""Which refusals `restore` waits out."""

from __future__ import annotations

import time
from typing import Any

import pytest

from checkmate.errors import Refused
from checkmate.trainer import rendezvous
from checkmate.trainer.rendezvous import Rendezvous, attempt
from checkmate.transport.tcp import Address
from checkmate.wire.messages import Incarnation, Prepared


class Closable:
    def close(self) -> None: ...


def answered_by(monkeypatch: pytest.MonkeyPatch, answers: list[Any], timeout_s: float) -> Rendezvous:
    spec: Any = None
    meeting = Rendezvous(Address("127.0.0.1", 1), "r", spec, None, time.monotonic() + timeout_s)
    monkeypatch.setattr(rendezvous, "open_channel", lambda *args: Closable())

    def answer(channel: Any, request: Any, timeout_s: float) -> Any:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(rendezvous, "call", answer)
    return meeting


@pytest.mark.parametrize("kind", ["live", "busy"])
def test_a_run_that_is_taken_at_this_moment_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    me = attempt()
    prepared = Prepared(Incarnation(1, me.id), [], 0)
    meeting = answered_by(monkeypatch, [Refused("not now", kind), prepared], 20)
    assert meeting._prepare(me, False) is prepared


@pytest.mark.parametrize(("kind", "timeout_s"), [("live", 0.2), ("busy", 0.2), ("superseded", 20)])
def test_others_and_those_that_last_are_raised(monkeypatch: pytest.MonkeyPatch, kind: str, timeout_s: float) -> None:
    meeting = answered_by(monkeypatch, [Refused("no", kind)], timeout_s)
    began = time.monotonic()
    with pytest.raises(Refused, match="no"):
        meeting._prepare(attempt(), False)
    assert time.monotonic() - began < 10
