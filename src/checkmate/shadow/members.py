"""The control connections of the attempt that trains a run: who lives, who is told. Guarded by the run's `changed`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from ..transport.base import Channel
from ..wire.messages import LEASE_S, Control
from ..wire.packets import Flow

log = logging.getLogger("checkmate.shadow")


@dataclass(slots=True)
class Member:
    """The control connection of one rank."""

    channel: Channel
    heard: float = field(default_factory=time.monotonic)
    lease_s: float = field(default_factory=lambda: LEASE_S)
    step: int = -1  #: newest that this rank says it has closed
    flow: Flow | None = None  #: its tagged connection, whose packets the network copies
    closed: bool = False

    @property
    def live(self) -> bool:
        return not self.closed and time.monotonic() - self.heard < self.lease_s

    def send(self, message: Control) -> None:
        if self.closed:
            return
        try:
            self.channel.send_nowait(message)
        except OSError as error:
            log.warning("control connection to %s is closed: %s", self.channel.peer, error)
            self.close()

    def close(self) -> None:
        self.closed = True
        self.channel.close()


class Members:
    """One member per rank that has joined, and before that the one that claims the run for its attempt."""

    def __init__(self) -> None:
        self.claim: Member | None = None
        self._ranks: dict[int, Member] = {}

    def admit(self, rank: int, member: Member) -> None:
        """In place of that rank's older connection."""
        if (old := self._ranks.get(rank)) is not None and old is not member:
            old.close()
        self._ranks[rank] = member
        if self.claim is member:
            self.claim = None

    def fence(self) -> None:
        """End all but the claim."""
        for member in self._ranks.values():
            if member is not self.claim:
                member.close()
        self._ranks.clear()

    def tell(self, message: Control) -> None:
        for member in self._ranks.values():
            member.send(message)

    def tell_one(self, rank: int, message: Control) -> None:
        if (member := self._ranks.get(rank)) is not None:
            member.send(message)

    @property
    def flows(self) -> list[Flow]:
        return [member.flow for member in self._ranks.values() if member.flow is not None and not member.closed]

    @property
    def steps(self) -> list[int]:
        """The newest step that each rank says it has closed."""
        return [member.step for member in self._ranks.values()]

    @property
    def live(self) -> bool:
        """Whether anybody has been heard within the lease."""
        return any(member.live for member in self._all())

    @property
    def closed(self) -> bool:
        """Whether nobody is connected."""
        return all(member.closed for member in self._all())

    @property
    def silent_s(self) -> float:
        """Seconds since anybody was heard who is still connected."""
        return time.monotonic() - max((m.heard for m in self._all() if not m.closed), default=0.0)

    def _all(self) -> list[Member]:
        return [*self._ranks.values(), *([self.claim] if self.claim else [])]
