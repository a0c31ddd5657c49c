"""When to ask for what the network has not brought. Pure: time is an argument.

Frames of one rank come in order. So what is missing is lost as soon as a later frame of that rank is here; else it is
waited for a little, for the packets may still be on their way, or waiting in the capture.
"""

from __future__ import annotations

#: How long after the last news of a step its missing frames count as lost.
PATIENCE_S = 0.1
#: And how long after a repair was asked for, or the last of it came, it is asked for again.
AGAIN_S = 1.0


class Repairs:
    """Of one epoch of one run."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._news: dict[int, float] = {}  #: per step, when something of it has arrived last
        self._asked: dict[tuple[int, int], float] = {}  #: per step and rank
        self._newest: dict[int, int] = {}  #: per rank, the newest step that a copied frame was of

    def moved(self, step: int, now: float) -> None:
        """A part of this step has arrived, or a copy that was kept."""
        self._news[step] = now

    def overheard(self, rank: int, step: int) -> None:
        """The network has brought a frame, be it kept or not."""
        self._newest[rank] = max(step, self._newest.get(rank, step))

    def due(self, step: int, rank: int, now: float) -> bool:
        """Whether to ask this rank now for what is missing of `step`. True once, and again only after a while."""
        if (asked := self._asked.get((step, rank))) is not None:
            late = now - asked >= AGAIN_S
        else:
            waited = now - self._news.setdefault(step, now) >= self.patience_s
            late = waited or self._newest.get(rank, step) > step
        if late:
            self._asked[step, rank] = now
        return late

    def answered(self, step: int, rank: int, now: float) -> None:
        """Some of what this rank was asked for is here: the rest is on its way."""
        self._asked[step, rank] = now

    def done(self, step: int) -> None:
        """All steps up to this one are complete."""
        self._news = {s: at for s, at in self._news.items() if s > step}
        self._asked = {key: at for key, at in self._asked.items() if key[0] > step}

    def forget_asked(self) -> None:
        """A rank has connected anew: what it was asked before, it may not have heard."""
        self._asked.clear()
