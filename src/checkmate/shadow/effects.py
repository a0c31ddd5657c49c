"""What `partition.Partition` wants done, for `run.Run` to do.

They must be performed in the order in which they come: a step is put in the queue of the replayer before it is
acknowledged, because an acknowledged step must survive everything but the shadow's death.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..wire.messages import Part


@dataclass(frozen=True, slots=True)
class Apply:
    """Replay this step; its parts and buffers are complete and stable. Report back with `Partition.applied`."""

    epoch: int
    step: int
    parts: dict[int, Part] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Freeze:
    """After everything queued before: keep the state as the recovery point and begin an empty one beside it.

    `keep` is False when the state never became whole: it is dropped, and what was frozen before stays.
    """

    epoch: int
    keep: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """The buffers of this step are free. If it is `void`, a connection may still be filling one of them."""

    step: int
    void: bool = False


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell every rank where this shadow stands."""


@dataclass(frozen=True, slots=True)
class AskResume:
    """Tell every rank to stream as `epoch`."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class AskAnchors:
    """Tell every rank to anchor the blocks that it owns, at steps from `step` on."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Report to the user, on the ranks named."""

    kind: str
    text: str
    step: int
    fatal: bool = False


Effect = Apply | Freeze | Drop | Acknowledge | AskResume | AskAnchors | Tell
