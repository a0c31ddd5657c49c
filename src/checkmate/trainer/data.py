"""`ckpt.batches(loader)`: the batches of an uninterrupted run, from wherever the run stopped.

What is reproduced, to the bit, is the loop that a run without Checkmate would have:

    for epoch in itertools.count():
        sampler.set_epoch(epoch)  # where there is one
        for batch in loader:
            ...

Its order is decided at `iter(loader)` by the random numbers of that moment, and most loaders cannot say
where they stand. So the state is that of every generator at the start of the epoch, and the number of batches
taken since. To resume is to begin the epoch again: install the generators of its start, make the iterator,
skip what was taken, and install the generators of the restored step, which the loop has advanced meanwhile.

Where batches are made from indices in this process, to skip is to advance the sampler, and nothing is loaded.
Worker processes load what is skipped, since the random numbers that they draw for it decide those to come,
and so do iterable datasets. A loader that keeps its own position (`state_dict`, as torchdata's
StatefulDataLoader) is told to go there.

Beside the global generators, those are kept that are attributes of the loader, of its samplers or, without
workers, of its dataset. Any other state of an indexed dataset without workers may go into `stateful=`; state
that skipping itself brings back (of an iterable dataset, or in workers) must not. What may be inexact is said
by a warning, `InexactData`.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, dataloader

from .. import values
from ..errors import Mismatch, UsageError
from . import rng

T = TypeVar("T")

#: Before a loader starts workers, in seconds; starting them takes longer.
QUIET_S = 0.02

_InProcess = getattr(dataloader, "_SingleProcessDataLoaderIter", None)  # private; without it, skipping loads


class InexactData(UserWarning):
    """The batches after a resume may differ from those of an uninterrupted run; says which and why."""


class NotRestartable(UsageError, TypeError):
    """The loader can be gone through once only, and does not keep its position either."""


class Batches(Iterator[T]):
    """Endless iterator over `loader`, epoch after epoch, which can be resumed in another process.

    `epoch` counts from 0; `taken` batches of it have been given to the loop. No random number is drawn before
    the first `next`. Each epoch begins with `set_epoch(epoch)`: on the loader or, if it has none, on each of
    its samplers and its dataset that has it.

    Raises NotRestartable for a generator or another one-pass iterator without a state, and UsageError at the
    end of an epoch that yields no batch.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        methods = (getattr(loader, name, None) for name in ("state_dict", "load_state_dict"))
        self._keeps_position = all(map(callable, methods))
        if not hasattr(loader, "__iter__") or (isinstance(loader, Iterator) and not self._keeps_position):
            raise NotRestartable(
                f"batches() cannot begin a {type(loader).__name__} again, after its end or a restart: pass"
                " a DataLoader, an object whose __iter__ returns a new iterator each time, or one with"
                " state_dict() and load_state_dict()"
            )
        self.epoch = 0
        self.taken = 0
        self._loader = loader
        self._parts = _parts(loader)
        self._indexed = not isinstance(getattr(loader, "dataset", None), IterableDataset)
        self._workers: int = getattr(loader, "num_workers", 0)
        self._reuses_workers = self._workers > 0 and bool(getattr(loader, "persistent_workers", False))
        self._traits = self._find_traits()
        self._iterator: Iterator[T] | None = None
        self._start = b""  # all generators before the iter(loader) that made _iterator; one object all epoch
        self._resumed_at: Any = None  # the loader's own state, until a batch is taken after a resume
        self._say_what_is_inexact()

    def __next__(self) -> T:
        while True:
            if self._iterator is None:
                self._set_epoch()
                self._start = values.dumps(self._read_generators())
                self._iterator = self._iterate()
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self.taken == 0:
                    raise UsageError(
                        f"epoch {self.epoch} of the {type(self._loader).__name__} yields no batch: its"
                        " dataset is empty, or drop_last drops its only batch, or it lasts for one epoch only"
                    ) from None
                self._iterator = None
                self.epoch += 1
                self.taken = 0
            else:
                self.taken += 1
                self._resumed_at = None
                return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, as plain values; draws no random number, and is cheap enough for every step.

        `epoch`, `taken`: int. `start`: bytes, all generators at the start of the epoch, one object throughout
        it, empty before its first batch. `own`: the generators that are not global, as they are now.
        `loader`: the loader's own state, or None. `traits`: what must not change for the batches to be the same.
        """
        begun = self._iterator is not None
        position = self._resumed_at
        if begun and self._keeps_position and position is None:
            position = self._loader.state_dict()  # type: ignore[attr-defined]
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "start": self._start if begun else b"",
            "own": {name: rng.read(generator) for name, generator in self._own_generators().items()},
            "loader": position,
            "traits": self._traits,
        }

    def load_state_dict(self, state: dict[str, Any], rng_after: dict[str, Any] | None = None) -> None:
        """Continue after the last batch taken in `state`. Makes the iterator and skips, which may take time.

        The global generators are left at `rng_after`, the `rng.capture()` of the restored step; by default as
        they are found. Raises Mismatch if the epoch ends before as many batches were skipped.
        """
        after = {**(rng_after or rng.capture()), **state["own"]}
        self._warn_of_changes(state["traits"])
        self._iterator = self._resumed_at = None  # ends the iterator's worker processes
        self.epoch, self.taken, self._start = state["epoch"], state["taken"], state["start"]
        try:
            if self._start:
                self._iterator = self._begin_again(state["loader"], after)
        finally:
            self._write_generators(after)

    def _begin_again(self, position: Any, after: dict[str, Any]) -> Iterator[T]:
        """The iterator as it was after `taken` batches; leaves the generators anywhere."""
        start = values.loads(self._start)
        self._set_epoch()
        self._write_generators(start)
        if self._keeps_position and position is not None:
            if self._indexed or not _lacks_dataset(position):
                self._loader.load_state_dict(position)  # type: ignore[attr-defined]
                self._resumed_at = position  # asked before the next batch, some of torchdata's samplers are wrong
                return self._iterate()
            self._loader.next_iter_state = None  # type: ignore[attr-defined]  # loaded if it is in `stateful=` too
        iterator = self._iterate()
        if self._reuses_workers and self.epoch > 0:
            # That drew a seed for new workers. The epoch began with workers that were there, and drew none.
            self._write_generators(start)
            iterator = self._iterate()
        self._skip(iterator, after)
        return iterator

    def _iterate(self) -> Iterator[T]:
        """A new iterator of the loader; where that forks, at a quiet moment.

        Python 3.11 does not free all of the interpreter's own locks in a child. A thread of torch's that has just
        finished a collective, as in `restore`, and frees a tensor, may hold one: then the child never gets anywhere,
        and whoever waits for its first batch does so for ever.
        """
        forks = self._workers and getattr(self._loader, "_iterator", None) is None  # else they persist
        if forks and sys.version_info < (3, 12):
            time.sleep(QUIET_S)
        return iter(self._loader)

    def _skip(self, iterator: Iterator[T], after: dict[str, Any]) -> None:
        advance: Callable[[], object] = iterator.__next__
        if self._indexed and type(iterator) is _InProcess:
            advance = getattr(iterator, "_next_index", advance)
        first: dict[str, Any] = {}
        for skipped in range(self.taken):
            try:
                advance()
            except StopIteration:
                raise Mismatch(
                    f"the run had taken {self.taken} batches of epoch {self.epoch}, which now ends after"
                    f" {skipped}: the loader or its dataset is not that of the saved run"
                ) from None
            if skipped == 0:
                first = self._read_generators()
        # Whatever is drawn up to the first batch is drawn again in the same state. Later draws are so only if
        # nobody else drew meanwhile, and then that generator stands now where it stood in the restored step.
        last = self._read_generators() if self.taken else {}
        shared = [
            name
            for name in last.keys() & after.keys()
            if values.dumps(last[name]) not in (values.dumps(first[name]), values.dumps(after[name]))
        ]
        if shared:
            _warn(
                f"in mid-epoch the loader draws random numbers ({', '.join(sorted(shared))}) from a generator that"
                " the training loop or the dataset draws from as well: the rest of this epoch may differ from"
                " that of a run without the restart; give the sampler or the dataset a generator of its own"
            )

    def _set_epoch(self) -> None:
        for part in self._parts.values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
                if part is self._loader:
                    return

    def _read_generators(self) -> dict[str, Any]:
        own = self._own_generators()
        return {**rng.capture(), **{name: rng.read(generator) for name, generator in own.items()}}

    def _write_generators(self, state: dict[str, Any]) -> None:
        rng.install(state)
        for name, generator in self._own_generators().items():
            if name in state:
                rng.write(generator, state[name])

    def _own_generators(self) -> dict[str, Any]:
        """By where they are found, each once. Looked up anew, as `set_epoch` may have replaced them."""
        found: dict[int, tuple[str, Any]] = {}
        for path, part in self._parts.items():
            if self._workers and ".dataset" in path:
                continue  # workers draw from copies, which begin each epoch as the original stands
            for name, value in getattr(part, "__dict__", {}).items():
                if rng.is_generator(value):
                    found.setdefault(id(value), (f"{path}.{name}", value))
        return dict(found.values())

    def _find_traits(self) -> dict[str, Any]:
        traits: dict[str, Any] = {path: type(part).__name__ for path, part in self._parts.items()}
        for name in ("num_workers", "batch_size", "drop_last", "persistent_workers"):
            if isinstance(value := getattr(self._loader, name, None), int):
                traits[name] = value
        if self._indexed:  # else the length is a guess, which torch remembers and later warns about
            with contextlib.suppress(TypeError, NotImplementedError):
                traits["batches"] = len(self._loader)  # type: ignore[arg-type]
        return traits

    def _say_what_is_inexact(self) -> None:
        if not self._workers:
            return
        if not getattr(self._loader, "in_order", True):
            _warn("in_order=False: batches come as workers finish them, an order that no resume can repeat")
        if self._keeps_position:
            _warn(
                f"the state of the {type(self._loader).__name__} lacks the random numbers of its workers: samples"
                " that they augment at random, and in later epochs of persistent_workers the order of a sampler"
                " that draws from a global generator, differ from a resume to the end of its epoch; a"
                " torch.utils.data.DataLoader is resumed exactly, by loading what is skipped"
            )
        elif self._reuses_workers:
            _warn(
                "persistent_workers=True: what workers keep from epoch to epoch (random numbers, the state of"
                " their copy of the dataset) begins anew if the run is resumed in the second epoch or later;"
                " the order of samples is kept"
            )

    def _warn_of_changes(self, saved: dict[str, Any]) -> None:
        now = self._traits
        changed = [name for name in sorted(saved.keys() | now.keys()) if saved.get(name) != now.get(name)]
        if changed:
            _warn(
                "the loader is not that of the saved run, so its batches may be others: "
                + ", ".join(f"{name} {saved.get(name)} -> {now.get(name)}" for name in changed)
            )


def _warn(message: str) -> None:
    warnings.warn(message, InexactData, stacklevel=2)


def _lacks_dataset(position: Any) -> bool:
    """Whether a StatefulDataLoader says of an iterable dataset that neither it nor its iterator has a state. Then
    it would skip as we do, from the start of the epoch, and be wrong when it is resumed a second time.
    """

    def held(state: Any) -> Iterator[Any]:
        for key, value in state.items() if isinstance(state, dict) else ():
            yield from (value,) if key in ("dataset_state", "dataset_iter_state") else held(value)

    found = list(held(position))
    return bool(found) and all(value is None for value in found)


def _parts(loader: Any) -> dict[str, Any]:
    """The loader and what it reads from, by the path to it, outermost first, each once."""
    found = [("loader", loader)]
    for path, part in found:  # which grows meanwhile
        for name in ("batch_sampler", "sampler", "dataset"):
            inner = getattr(part, name, None)
            if inner is not None and path.count(".") < 4 and all(inner is not other for _, other in found):
                found.append((f"{path}.{name}", inner))
    return dict(found)
