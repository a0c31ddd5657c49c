"""The states of one run, and the one thread that moves them on, step by step.

`state` is what steps are applied to. While a new epoch builds it from anchors, `frozen` is the last whole step of the
one before. Whatever changes or reads their tensors holds `between_steps`, which is taken before the run's `changed`;
the fields themselves are guarded by `changed`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

import torch

from ..errors import StepNotFound
from ..wire.frames import Kind
from ..wire.messages import Digest, Incarnation, Spec
from .buffers import Key, of_entry
from .effects import Apply, Freeze
from .gradients import Gradients
from .partition import Partition
from .replay import Cut, State

#: A reader waits no longer for what is safe and not yet applied.
CATCH_UP_S = 10.0


class Work(NamedTuple):
    """A step to apply: for which partition, and what has come for it."""

    apply: Apply
    partition: Partition
    tensors: Mapping[Key, torch.Tensor]


class Owner(Protocol):
    """Hears what became of each step, with `changed` held."""

    @property
    def suspects(self) -> Collection[int]:
        """Blocks whose distance from their next anchor is asked for."""

    def frozen(self) -> None: ...
    def applied(self, work: Work, distances: dict[int, float], differing: list[Digest]) -> None: ...
    def failed(self, work: Work, error: Exception) -> None: ...


class Replayer:
    """See the module."""

    def __init__(
        self, name: str, changed: threading.Condition, owner: Owner, allowed: tuple[str, ...], threads: int | None
    ) -> None:
        self.name = name
        self.between_steps = threading.Lock()
        self.state: State | None = None
        self.frozen: State | None = None
        self._changed, self._owner, self._allowed, self._threads = changed, owner, allowed, threads
        self._queue: deque[Work | Freeze | None] = deque()
        self._at_work: Work | Freeze | None = None
        self.thread = threading.Thread(target=self._replay, name=f"replay {name}", daemon=True)
        self.thread.start()

    # ------------------------------------------------------------ with `changed` held

    def put(self, work: Work | Freeze) -> None:
        self._queue.append(work)

    def end(self) -> None:
        """After the step at hand. Whatever is queued is forgotten."""
        self._queue.clear()
        self._queue.append(None)

    @property
    def idle(self) -> bool:
        return self._at_work is None and not self._queue

    def recoverable(self) -> State | None:
        """The newest whole step."""
        return self.state if self.state is not None and self.state.whole else self.frozen

    def drop_unfinished(self) -> None:
        """What is not whole is gone, what was whole stays."""
        if self.state is not None and not self.state.whole:
            self.state, self.frozen = self.frozen, None

    def forget(self) -> None:
        self.state = self.frozen = None

    def void(self, work: Work) -> list[int]:
        """What is queued after this work for the same epoch counts no more: the steps of all of it."""
        void, kept = [work.apply.step], deque[Work | Freeze | None]()
        for queued in self._queue:
            if isinstance(queued, Work) and queued.apply.epoch == work.apply.epoch:
                void.append(queued.apply.step)
            else:
                kept.append(queued)
        self._queue = kept
        return void

    @property
    def leased(self) -> bool:
        """Whether a reader holds a cut."""
        return any(state.leased for state in (self.state, self.frozen) if state is not None)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes() for state in (self.state, self.frozen) if state is not None)

    # ------------------------------------------------------------ with `changed` held, and `between_steps` before it

    def begin(self, spec: Spec, holder: Incarnation) -> None:
        """An empty state beside the newest whole one."""
        state = State(spec, self._allowed, holder)
        self.state, self.frozen = state, self.recoverable()

    def adopt(self, step: int, spec: Spec, holder: Incarnation) -> bool:
        """Go on from this step, as another attempt. False if it is not held."""
        if self.state is None or not self.state.whole or self.state.step != step:
            return False
        self.state.respec(spec)
        self.state.holder = holder
        return True

    # ------------------------------------------------------------ with no lock held

    def lease(self, step: int | None) -> Cut:
        """Hold one whole step for a reader, none older than was safe when it asked. Raises StepNotFound."""
        with self._changed:
            newest = self._queue[-1] if self._queue else self._at_work
            self._changed.wait_for(lambda: not self._ahead_of(newest), CATCH_UP_S)
        with self.between_steps, self._changed:
            held = self.recoverable()
            if held is None:
                raise StepNotFound(f"run {self.name!r} has no whole step yet")
            if step is not None and step != held.step:
                if (cut := held.cut_of(step)) is not None:
                    return cut
                raise StepNotFound(
                    f"run {self.name!r}: step {step} is not held; the one step that is whole here is {held.step}"
                )
            return held.cut()

    def _ahead_of(self, work: Work | Freeze | None) -> bool:
        """Whether this is still to be done."""
        return work is not None and any(work is each for each in (self._at_work, *self._queue))

    def release(self, cut: Cut) -> None:
        with self.between_steps:
            cut.state.release(cut)

    def differing(self, step: int, digests: list[Digest], timeout_s: float) -> list[Digest] | None:
        """Those digests that the state at `step` does not match; None if it has moved on, or is not there in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.state is None or self.state.step >= step, timeout_s)
            state = self.state
        with self.between_steps:
            return state.differing(digests) if state is not None and state.step == step else None

    # ------------------------------------------------------------ the thread

    def _replay(self) -> None:
        while True:
            with self._changed:
                self._at_work = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue)
                work = self._queue.popleft()
                if work is None:
                    self._changed.notify_all()
                    return
                self._at_work = work
                state = self.state
            if isinstance(work, Freeze):
                self._freeze(work)
            elif state is not None:
                self._apply(work, state)

    def _freeze(self, work: Freeze) -> None:
        with self.between_steps, self._changed:
            if self.state is None:
                return  # removed meanwhile
            if work.keep and self.state.whole:
                self.frozen = self.state
            self.state = State(self.state.spec, self._allowed, self.state.holder)
            self._owner.frozen()

    def _apply(self, work: Work, state: State) -> None:
        layout, parts = work.partition.layout, work.apply.parts
        gradient = Gradients(layout, parts, work.tensors)
        anchors = {a.block: a for part in parts.values() for a in part.anchors}

        def anchored(block: int, entry: int) -> torch.Tensor:
            found = work.tensors.get((Kind.ANCHOR, block, entry, False))
            return found if found is not None else of_entry(anchors[block], entry)

        with self.between_steps:
            try:
                self._set_numerics(state.spec)
                suspects = self._owner.suspects
                distances = state.apply(work.apply.step, parts, layout.leads, gradient, anchored, suspects)
                digests = [digest for part in parts.values() for digest in part.audits]
                differing = state.differing(digests) if state.whole else []
            except Exception as error:  # whatever a part may ask for: the replayer goes on
                with self._changed:  # before any reader takes a cut of that state, which is of no step any more
                    if self.state is state:
                        self.state = State(state.spec, self._allowed, state.holder)
                    self._owner.failed(work, error)
                return
        with self._changed:
            if state.whole and self.state is state:
                self.frozen = None
            self._owner.applied(work, distances, differing)

    def _set_numerics(self, spec: Spec) -> None:
        threads = spec.fingerprint.threads if spec.replay == "match" else self._threads
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        torch.set_flush_denormal(spec.fingerprint.flush_denormal)
