"""How far behind the shadow is, who is told, and who waits: one warning, one line when it is over, no wait unasked."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from .link import Link
from .recorder import Recorder
from .staging import Pool

log = logging.getLogger("checkmate")

#: A recovery point that is older than this many steps is not up to date.
LAG_STEPS = 2
#: And one that is older than this many is worth a warning while everything is connected.
LATE_STEPS = 10
#: So many reports of one kind are shown; the rest are counted.
REPORTS = 5
#: With on_lag="block": seconds between messages about waiting.
QUIET_S = 60.0


class Lag:
    """See the module. `block_s` is how long training may be made to wait, 0 for never; `log` lines come from rank 0."""

    def __init__(self, recorder: Recorder, pool: Pool, address: str, rank: int, block_s: float) -> None:
        self.link: Link | None = None
        self.waited_s = 0.0
        self.reports: Counter[str] = Counter()  #: by kind
        self._recorder, self._pool, self._address, self._rank = recorder, pool, address, rank
        self._block_s = block_s
        self._patient = True  #: until one wait was in vain
        self._left_s = block_s  #: of what all waits of one step may take
        self._quiet_until = 0.0
        self._told = False  #: the user knows that the recovery point is old
        self._told_fatal = False  #: and that it will stay so

    # ------------------------------------------------------------ where it stands

    @property
    def recovery_step(self) -> int | None:
        """The step that a restart would resume; None while that is not known, or there is none."""
        ack = self.link.ack if self.link is not None else None
        return ack.recovery if ack is not None and ack.recovery >= 0 else None

    def safe(self, step: int) -> bool:
        recovery = self.recovery_step
        return recovery is not None and recovery >= step

    @property
    def hopeless(self) -> bool:
        """Without further steps, the newest will not become safe: the shadow lacks state, which travels with them."""
        return self._degraded or self._recorder.lacking > 0

    @property
    def _degraded(self) -> bool:
        """Steps are not kept until this rank takes up the epoch that the shadow wants."""
        assert self.link is not None
        return self._recorder.gap or self.link.wanted > self._recorder.epoch

    @property
    def state(self) -> str:
        """The shadow as this rank sees it."""
        link = self.link
        if link is None:
            return "attached"
        if link.fatal is not None:
            return "refused"
        if not link.streaming:
            return "gone"
        if self._degraded:
            return "degraded"
        return "anchoring" if self._recorder.lacking else "streaming"

    # ------------------------------------------------------------ telling

    def tell(self, step: int) -> None:
        """After `step`: one warning when the recovery point falls behind, one line when it is up again; reports."""
        link = self.link
        assert link is not None
        self._left_s = self._block_s
        while link.reports:
            report = link.reports.popleft()
            self.reports[report.kind] += 1
            if self._rank == 0 and self.reports[report.kind] <= REPORTS:
                more = "; more of this kind are only counted" if self.reports[report.kind] == REPORTS else ""
                log.warning("checkmate: %s%s", report.text, more)
        recovery = self.recovery_step
        behind = recovery is None or step - recovery > LAG_STEPS
        lost = self._recorder.gap or not link.streaming or link.fatal is not None
        if link.fatal is not None and not self._told_fatal:
            self._told = self._told_fatal = True
            self._warn(link, step, recovery)
        elif not self._told and (lost or (behind and step - (recovery or 0) > LATE_STEPS)):
            self._told = True
            self._warn(link, step, recovery)
        elif self._told and not behind and not lost and not self.hopeless:
            self._told = False
            if self._rank == 0:
                log.warning("checkmate: whole again: a restart would resume at step %d", recovery)

    def _warn(self, link: Link, step: int, recovery: int | None) -> None:
        point = "whether the shadow holds a step is unknown"
        if recovery is not None:
            point = f"a restart would resume at step {recovery}"
        if self._rank == 0:
            going = "" if self._block_s and self._patient else " Training goes on."
            log.warning("checkmate: step %d: %s (%s).%s", step, point, self._why(link), going)
        else:
            log.info("checkmate: rank %d, step %d: %s (%s)", self._rank, step, point, self._why(link))

    def _why(self, link: Link) -> str:
        if link.fatal is not None:
            return str(link.fatal)
        if self._recorder.gap_reason:
            return self._recorder.gap_reason
        if self._recorder.gap:
            why = f"the shadow does not keep up, and staging ({self._pool.limit_bytes:,} bytes) is full"
            if self._recorder.at_once:
                why += "; it cannot replay as fast as training steps, so it takes the whole state from time to time"
            return why
        if not link.streaming:
            return link.trouble or "no connection"
        if link.wanted_reason and self.hopeless:
            return f"the shadow takes in the state anew: {link.wanted_reason}"
        return "the shadow is behind"

    # ------------------------------------------------------------ waiting, where the user asked for it

    def on_full(self, nbytes: int) -> bool:
        """There is no staging memory for so many bytes. True: try again."""
        link = self.link
        if not self._block_s or link is None or link.fatal is not None or nbytes > self._pool.limit_bytes:
            return False
        return self._pause(
            link, lambda: link.fatal is not None or self._pool.has_room(nbytes), "staging memory is full"
        )

    def wait_after(self, step: int) -> None:
        """With back-pressure: until every step but this one is safe."""
        link = self.link
        if not self._block_s or link is None:
            return

        def caught_up() -> bool:
            ack = link.ack
            if link.fatal is not None or link.wanted > self._recorder.epoch:
                return True  # the next step brings it on
            return ack is not None and ack.epoch == self._recorder.epoch and ack.stable >= step - 1

        if caught_up():
            self._patient = True
        elif not self._recorder.gap:
            self._pause(link, caught_up, "the shadow is behind")

    def _pause(self, link: Link, until: Callable[[], bool], why: str) -> bool:
        """Wait for the shadow, for `block_s` in one step at most; after that no more until it has caught up."""
        if not self._patient:
            return False
        began, limit_s = time.monotonic(), self._left_s
        done, told = link.wait_for(until, min(1.0, limit_s)), False
        if not done:
            told = self._rank == 0 and began >= self._quiet_until
            if told:
                self._quiet_until = began + QUIET_S
                trouble = link.trouble or "connected"
                log.warning("checkmate: training waits for %s (%s; %s)", self._address, why, trouble)
            done = link.wait_for(until, limit_s - 1.0)
        waited = time.monotonic() - began
        self.waited_s += waited
        self._left_s -= waited
        if done and told:
            log.warning("checkmate: training goes on after %.1f s", waited)
        elif not done:
            self._patient = False
            in_all = self._block_s - self._left_s
            log.warning("checkmate: waited %.1f s for %s; training goes on without it", in_all, self._address)
        return done
