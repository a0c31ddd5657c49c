"""Sidecars: what belongs to a step and is not a gradient, taken by value as the step is closed.

Entries are named: ``rng``, ``buffer:<fqn>``, ``stateful:<name>``, ``batches:<n>``, ``buckets``, ``grads``. Only those
that changed are sent. What replicas have alike is sent by the first of them alone: buffers that DDP broadcasts anyway,
the order of its buckets, and which gradients are kept.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from xxhash import xxh3_64_intdigest as xxh3

from .. import values
from ..errors import UsageError
from ..tensors import host_bytes
from . import rng
from .model import Slot

log = logging.getLogger("checkmate")

#: Entries that the first of several replicas sends for all, besides buffers.
SHARED = frozenset(("buckets", "grads"))
SLOW_S, LARGE_BYTES = 1e-3, 1 << 20
#: Slow so many times in a row: on a busy machine anything is slow once.
SLOW_TIMES = 5


class Stateful(Protocol):
    """As ``torch.distributed.checkpoint.stateful.Stateful``."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def check_stateful(stateful: Mapping[Any, Any] | None) -> dict[str, Stateful]:
    """Raises UsageError for an object that cannot give and take its state."""
    if stateful is not None and not isinstance(stateful, Mapping):
        raise UsageError(f"stateful is a dict of names and objects, not a {type(stateful).__name__}")
    found = dict(stateful or {})
    if odd := [name for name in found if not isinstance(name, str) or not name]:
        raise UsageError(f"the names of stateful objects are strings, not {odd[0]!r}")
    for name, item in found.items():
        if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
            raise UsageError(
                f"stateful[{name!r}] is a {type(item).__name__} without state_dict() and load_state_dict()"
            )
    return found


class Sidecars:
    """Takes this rank's entries, and remembers what of them the shadow has."""

    def __init__(self, stateful: Mapping[str, Stateful], buffers: Mapping[str, Slot]) -> None:
        self.stateful = dict(stateful)
        self.buffers = dict(buffers)
        self.extra: dict[str, Callable[[], Any]] = {}
        self._known: dict[str, bytes | int] = {}
        self._slow: Counter[str] = Counter()  #: times in a row
        self._warned: set[str] = set()

    def forget(self) -> None:
        """The shadow has nothing of ours: the next `take` is complete."""
        self._known.clear()

    def take(self) -> dict[str, bytes]:
        """Entries that differ from what was taken last, by value."""
        changed: dict[str, bytes] = {}
        for name, give in self._sources():
            data = give()
            if self._known.get(name) != data:
                changed[name] = data
                self._known[name] = data
        for fqn, slot in self.buffers.items():
            if (buffer := slot.tensor) is None:
                continue
            name = f"buffer:{fqn}"
            digest = xxh3(host_bytes(buffer))
            if self._known.get(name) != digest:
                changed[name] = values.dumps(buffer.detach())
                self._known[name] = digest
        return changed

    def _sources(self) -> list[tuple[str, Callable[[], bytes]]]:
        sources: list[tuple[str, Callable[[], bytes]]] = [("rng", lambda: values.dumps(rng.capture()))]
        for name, item in self.stateful.items():
            sources.append((f"stateful:{name}", lambda name=name, item=item: self._state_of(name, item)))  # type: ignore[misc]
        for name, give in self.extra.items():
            sources.append((name, lambda give=give: values.dumps(give())))  # type: ignore[misc]
        return sources

    def _state_of(self, name: str, item: Stateful) -> bytes:
        began = time.thread_time()
        data = values.dumps(item.state_dict())
        took = time.thread_time() - began
        self._slow[name] = self._slow[name] + 1 if took > SLOW_S else 0
        if name not in self._warned and (self._slow[name] == SLOW_TIMES or len(data) > LARGE_BYTES):
            self._warned.add(name)
            log.warning(
                "checkmate: state_dict() of stateful[%r] (%s) takes %.1f ms and %d bytes in every step; "
                "keep there only what a restart needs", name, type(item).__name__, took * 1e3, len(data),
            )  # fmt: skip
        return data

    def restore(self, entries: Mapping[str, bytes]) -> dict[str, Any]:
        """Put buffers and the user's objects back; returns the decoded entries that are for the caller to install."""
        rest: dict[str, Any] = {}
        for name, data in entries.items():
            kind, _, key = name.partition(":")
            if kind == "buffer" and key in self.buffers:
                found = values.loads(data)
                buffer = self.buffers[key].tensor
                with torch.no_grad():
                    if buffer is not None and (buffer.shape, buffer.dtype) == (found.shape, found.dtype):
                        buffer.copy_(found)
                    else:  # training had put another in its place
                        owner, attribute = self.buffers[key]
                        owner._buffers[attribute] = found.to(buffer.device) if buffer is not None else found
            elif kind == "stateful":
                if key in self.stateful:
                    self.stateful[key].load_state_dict(values.loads(data))
                else:
                    log.warning(
                        "checkmate: the checkpoint has a stateful object %r that attach() was not given; it is ignored",
                        key,
                    )
            elif kind != "buffer":
                rest[name] = values.loads(data)
        for key in self.stateful:
            if f"stateful:{key}" not in entries:
                log.warning("checkmate: the checkpoint has no state for stateful[%r]; it stays as it is", key)
        return rest
