"""What Checkmate raises, by whose fault it is.

    CheckmateError
    ├── UsageError             the caller's: wrong order of calls, wrong argument
    ├── Unsupported            the model or optimizer cannot be shadowed; says what to do instead
    │   └── ReplicasDiffer     ranks that should hold the same gradient do not
    ├── Mismatch               what the shadow holds does not fit this model or optimizer
    ├── StepNotFound           the step asked for is not held by the shadow
    ├── Unreachable            no answer within the time given; never taken for "empty"
    ├── Refused                the shadow answered no, with its reason
    │   └── Superseded         a newer attempt of the same run has taken over
    └── ProtocolError          bytes that no peer of ours sends; the connection is closed

Nothing else of ours crosses into user code; a failed ``assert`` is a bug of ours.
"""

from __future__ import annotations


class CheckmateError(Exception):
    """Base of everything that Checkmate raises."""


class UsageError(CheckmateError):
    """The call is wrong here, whatever the shadow holds."""


class Unsupported(CheckmateError):
    """This model, optimizer or loop cannot be shadowed."""


class ReplicasDiffer(Unsupported):
    """Data-parallel ranks hold different gradients or take different steps."""


class Mismatch(CheckmateError):
    """The shadow's state and this model differ in names, shapes, dtypes or optimizer."""


class StepNotFound(CheckmateError):
    """The shadow does not hold the step that was asked for."""


class Unreachable(CheckmateError):
    """A shadow did not answer in time. Nothing is known about what it holds."""


class Refused(CheckmateError):
    """The shadow declined, and said why. `kind` is one of ``wire.messages.REFUSALS``."""

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind


class Superseded(Refused):
    """A newer attempt of this run has taken over; this one is fenced."""


class ProtocolError(CheckmateError):
    """Malformed, oversized, corrupted or out-of-place bytes from the peer."""
