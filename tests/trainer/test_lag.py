"""With ``on_lag="block"``: how long one step may wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from checkmate.trainer import lag
from checkmate.trainer.lag import Lag
from checkmate.trainer.staging import Pool

BLOCK_S = 100.0
ROOM_AFTER_S = 40.0


class SlowLink:
    """A link whose staging memory has room again after 40 s, and is full again at once. Time is what was waited."""

    fatal, trouble, streaming, ack, wanted = None, "", True, None, 0

    def __init__(self) -> None:
        self.now, self._left_s = 0.0, ROOM_AFTER_S
        self.reports: deque[Any] = deque()

    def wait_for(self, until: Callable[[], bool], timeout_s: float) -> bool:
        waited = max(0.0, min(timeout_s, self._left_s))
        self.now += waited
        self._left_s -= waited
        if self._left_s > 0:
            return False
        self._left_s = ROOM_AFTER_S
        return True


def test_all_waits_of_a_step_together_end_at_block_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder: Any = SimpleNamespace(gap=False, epoch=0, lacking=0)
    link: Any = SlowLink()
    waits = Lag(recorder, Pool(100), "shadow", 0, BLOCK_S)
    waits.link = link
    monkeypatch.setattr(lag, "time", SimpleNamespace(monotonic=lambda: link.now))
    for step in range(3):  # a step that waits less than it may leaves the next as much
        assert [waits.on_full(1), waits.on_full(1)] == [True, True]
        assert waits.waited_s == pytest.approx(80 * (step + 1))
        waits.tell(step)
    assert [waits.on_full(1) for _ in range(5)] == [True, True, False, False, False]
    assert waits.waited_s == pytest.approx(3 * 80 + BLOCK_S)
