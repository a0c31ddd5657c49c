"""Checkmate: every training step is a checkpoint, and training does not stop for it.

ckpt = checkmate.attach(model, optimizer, shadow="tcp://host:7070", run="gpt-small")
step = ckpt.restore()
...                     # forward, backward, optimizer.step()
ckpt.step()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        CheckmateError,
        Mismatch,
        ProtocolError,
        Refused,
        ReplicasDiffer,
        StepNotFound,
        Superseded,
        Unreachable,
        Unsupported,
        UsageError,
    )  # fmt: skip
    from .recovery import ShadowReader
    from .trainer.checkpointer import Checkpointer, attach

__all__ = [
    "CheckmateError",
    "Checkpointer",
    "Mismatch",
    "ProtocolError",
    "Refused",
    "ReplicasDiffer",
    "ShadowReader",
    "StepNotFound",
    "Superseded",
    "Unreachable",
    "Unsupported",
    "UsageError",
    "attach",
]

_HOMES = {
    "Checkpointer": "trainer.checkpointer",
    "attach": "trainer.checkpointer",
    "ShadowReader": "recovery",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the wire and the command line do without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value
