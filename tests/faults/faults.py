"""What can befall a shadow or the way to it, each between `begin` and `end`."""

from __future__ import annotations

import os
import time

from tests.faults.helpers import Lab, Shadow

STEP_S = 0.01  #: of the trainers here; the throttled proxy is set by it
STEP_BYTES = 44_000  #: what such a trainer sends per step
SMALL = 500_000  #: staging memory for about a dozen steps
#: In trainers: after so long without an acknowledgement TCP gives a connection up. None: as in real life, 20 s.
USER_TIMEOUT_MS = 1500 if "FAULTS_STOP_S" not in os.environ else None
STOP_S = float(os.environ.get("FAULTS_STOP_S", "2.5"))  #: how long a shadow is stopped


class Fault:
    """`address` is where trainers find the shadow."""

    lasts_s = 1.5

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.shadow: Shadow = lab.shadow()
        self.address = self.shadow.address

    def begin(self) -> None: ...
    def end(self) -> None: ...


class Killed(Fault):
    """SIGKILL; another, empty shadow takes its port."""

    def begin(self) -> None:
        self.shadow.kill()

    def end(self) -> None:
        self.shadow = self.lab.shadow(port=self.shadow.port)


class Stopped(Fault):
    """SIGSTOP."""

    lasts_s = STOP_S

    def begin(self) -> None:
        self.shadow.stop()

    def end(self) -> None:
        self.shadow.cont()


class Proxied(Fault):
    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.proxy = lab.proxy(self.shadow.port)
        self.address = self.proxy.address


class BlackHoled(Proxied):
    """No packet arrives, for longer than TCP puts up with it."""

    lasts_s = 2.5

    def begin(self) -> None:
        self.proxy.blackhole()

    def end(self) -> None:
        self.proxy.heal()


class Stalled(Proxied):
    """Connections stand, and nothing comes through."""

    def begin(self) -> None:
        self.proxy.stall()

    def end(self) -> None:
        self.proxy.flow()


class Slow(Proxied):
    """The shadow takes half of what training gives."""

    def begin(self) -> None:
        self.proxy.bytes_per_s = 0.5 * STEP_BYTES / STEP_S

    def end(self) -> None:
        self.proxy.bytes_per_s = None


class Reset(Proxied):
    """Connections break, each in the middle of something."""

    def begin(self) -> None:
        for _ in range(4):
            breaks = self.proxy.resets + 1
            self.proxy.reset_after(self.lab.random.randrange(500, 150_000))
            deadline = time.monotonic() + 30
            while self.proxy.resets < breaks:
                assert time.monotonic() < deadline, "nothing to reset"
                time.sleep(0.01)


FAULTS = [Killed, Stopped, BlackHoled, Stalled, Slow, Reset]
