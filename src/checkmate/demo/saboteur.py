"""Kills all ranks at a planned moment, and notes what the checkpointer had promised until then.

`Watched` stands between the training script and its checkpointer, and neither need know of it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from .journal import Closed, Journal, Killed, Restored
from .plan import ANYWHERE, BACKWARD, BETWEEN, Kill

#: How long a step is taken to last until one has been timed.
FIRST_STEP_S = 0.5


class Watched:
    """A `Checkpointer` that notes its progress and strikes when the planned step is under way."""

    def __init__(self, ckpt: Any, journal: Journal, ambush: Ambush | None) -> None:
        self._ckpt = ckpt
        self._journal = journal
        self._ambush = ambush
        self._finished = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ckpt, name)

    def restore(self) -> int:
        began = time.perf_counter()
        self._finished = self._ckpt.restore()
        self._journal.write(Restored(self._finished, time.perf_counter() - began))
        self._next()
        return self._finished

    def step(self) -> None:
        if self._ambush:
            self._ambush.optimizer_stepped(self._finished + 1)
        self._ckpt.step()
        self._finished += 1
        self._journal.write(Closed(self._finished))
        self._next()

    def _next(self) -> None:
        if self._ambush:
            self._ambush.step_begins(self._finished + 1)


class Ambush:
    """One kill, lying in wait on the rank that pulls the trigger.

    `pids` tells the process ids of all ranks at the moment of the kill.
    """

    def __init__(self, kill: Kill, model: nn.Module, journal: Journal, pids: Callable[[], list[int]]) -> None:
        self._kill = kill
        self._journal = journal
        self._pids = pids
        self._step = 0
        self._began = time.perf_counter() - FIRST_STEP_S
        if kill.moment == BACKWARD:
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            parameters[int(kill.fraction * len(parameters))].register_hook(self._gradient_computed)

    def step_begins(self, step: int) -> None:
        now = time.perf_counter()
        self._step, self._began, previous = step, now, now - self._began
        if self._strikes(step, ANYWHERE):
            threading.Timer(self._kill.fraction * previous, self._strike).start()

    def optimizer_stepped(self, step: int) -> None:
        if self._strikes(step, BETWEEN):
            self._strike()

    def _gradient_computed(self, _: Tensor) -> None:
        if self._strikes(self._step, BACKWARD):
            self._strike()

    def _strikes(self, step: int, moment: str) -> bool:
        return (step, moment) == (self._kill.step, self._kill.moment)

    def _strike(self) -> None:
        self._journal.write(Killed(self._step, self._kill.moment))  # the clock may strike a step late
        own = os.getpid()
        for pid in sorted(self._pids(), key=own.__eq__):  # itself last
            with suppress(ProcessLookupError):  # a clock that strikes after the last step
                os.kill(pid, signal.SIGKILL)
