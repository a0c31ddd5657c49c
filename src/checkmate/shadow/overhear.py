"""What the network brings to this shadow, on its way to the runs that it is for.

A frame counts if it proves itself: its checksums hold, it is of the present incarnation of a run, and with a token its
seal was made by one who has that. Whatever else comes is counted and forgotten.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from ..wire.frames import Header
from ..wire.messages import Incarnation
from ..wire.packets import Flow
from ..wire.seal import TRAILER_BYTES, Seal
from .capture import Capture
from .listening import Listening
from .run import Run


class Overhearing:
    """What one shadow process captures on one interface, and listens to on another. Raises UsageError if it cannot."""

    def __init__(
        self, capture: str | None, multicast: str | None, runs: Callable[[], Iterable[Run]], token: bytes | None
    ) -> None:
        self._runs, self._token = runs, token
        self._seals: dict[bytes, Seal] = {}
        self._counts: Counter[str] = Counter()
        self._following = threading.Lock()  # two connections at once
        trailer_bytes = 0 if token is None else TRAILER_BYTES
        self._listening = None if multicast is None else Listening(multicast, self._frame, self._idle, trailer_bytes)
        self._capture = None if capture is None else Capture(capture, self._frame, self._idle, trailer_bytes)
        if self._capture is not None:
            self._capture.start()

    def follow(self) -> None:
        """Listen to the flows of all ranks that have joined by now."""
        with self._following:
            flows = [flow for run in self._runs() for flow in run.flows]
            if self._capture is not None:
                self._capture.set_flows([flow for flow in flows if not flow.multicast])
            if self._listening is not None:
                self._listening.set_flows([flow for flow in flows if flow.multicast])
            current = {run.incarnation.id for run in self._runs() if run.incarnation is not None}
            self._seals = {key: seal for key, seal in self._seals.items() if key in current}

    def close(self) -> None:
        for source in (self._capture, self._listening):
            if source is not None:
                source.close()

    def status(self) -> dict[str, Any]:
        """Counts since this shadow began. ``foreign_frames``: of no run here; ``forged_frames``: without proof."""
        found = {name: self._counts[name] for name in ("foreign_frames", "forged_frames", "unwanted_frames")}
        status = {}
        if self._capture is not None:
            status["capture"] = {"interface": self._capture.interface, **self._capture.statistics()._asdict(), **found}
        if self._listening is not None:
            status["multicast"] = {**self._listening.status(), **found}
        return status

    def _frame(self, flow: Flow, header: Header, head: memoryview, payload: memoryview, trailer: memoryview) -> None:
        run = next(
            (r for r in self._runs() if (inc := r.incarnation) is not None and inc.id == header.incarnation), None
        )
        if run is None or run.incarnation is None:
            self._counts["foreign_frames"] += 1
        elif self._token is not None and not self._seal(run, run.incarnation).holds(
            header.rank, head, payload, trailer
        ):
            self._counts["forged_frames"] += 1
        elif not run.overheard(header, payload, time.monotonic()):
            self._counts["unwanted_frames"] += 1

    def _seal(self, run: Run, incarnation: Incarnation) -> Seal:
        if (seal := self._seals.get(incarnation.id)) is None:
            assert self._token is not None
            seal = self._seals[incarnation.id] = Seal(self._token, run.name, incarnation.id)
        return seal

    def _idle(self, now: float) -> None:
        for run in self._runs():
            run.repair(now)
