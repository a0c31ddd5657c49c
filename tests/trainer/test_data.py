"""`Batches` against the loop of a run without Checkmate: the same batches, and the same random numbers afterwards.

Every sample is augmented with draws from all global generators, wherever it is made, and the training loop draws
from them before and after each batch, as dropout would. Warnings are errors here, so a row that resumes without
`pytest.warns` is claimed to be exact.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from checkmate import values
from checkmate.errors import Mismatch, UsageError
from checkmate.trainer import data, rng
from checkmate.trainer.data import Batches, InexactData, NotRestartable

N = 14  # samples; with 4 in a batch: three whole batches and one of two
STEPS = 11  # into the third epoch

Made = Callable[[], Any]
Saved = bytes


# ------------------------------------------------------------------------------------------ what is loaded


def noise() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Plain(Dataset[list[float]]):
    """Sample i is i. `loads` counts what was loaded in this process."""

    def __init__(self, n: int = N) -> None:
        self.n = n
        self.loads = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> list[float]:
        self.loads += 1
        return [float(index)]


class Augmented(Plain):
    def __getitem__(self, index: int) -> list[float]:
        return super().__getitem__(index) + noise()


class WithGenerators(Plain):
    """Draws from generators of its own, one of which `set_epoch` replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy, self.torch = random.Random(1), np.random.default_rng(2), torch.Generator()
        self.legacy = np.random.RandomState(3)

    def set_epoch(self, epoch: int) -> None:
        self.legacy = np.random.RandomState(100 + epoch)

    def __getitem__(self, index: int) -> list[float]:
        drawn = [self.python.random(), self.numpy.random(), self.legacy.rand()]
        return [*super().__getitem__(index), *drawn, float(torch.rand((), generator=self.torch))]


class Stream(IterableDataset[list[float]]):
    """Sharded over workers. Without workers nothing is drawn, with them each sample is augmented."""

    def __iter__(self) -> Iterator[list[float]]:
        worker = get_worker_info()
        shard = range(worker.id, N, worker.num_workers) if worker else range(N)
        return ([float(i), *(noise() if worker else [])] for i in shard)


class ShuffleBuffer(IterableDataset[list[float]]):
    """What is yielded depends on what was drawn earlier in the epoch, here from Python's global generator."""

    def __init__(self, source: Any = random) -> None:
        self.rng = source

    def __iter__(self) -> Iterator[list[float]]:
        held = list(range(5))
        for i in range(5, N):
            k = self.rng.randrange(len(held))
            yield [float(held[k])]
            held[k] = i
        yield from ([float(i)] for i in held)


class StatefulStream(IterableDataset[list[float]]):
    """Has other samples in each epoch, as streams do, and keeps both its epoch and its position."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[list[float]]:
        while self.position < N:
            self.position += 1
            yield [float(self.position + 100 * self.epoch)]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class StreamIterator(Iterator[list[float]]):
    def __init__(self) -> None:
        worker = get_worker_info()
        self.position, self.start, self.step = 0, *((worker.id, worker.num_workers) if worker else (0, 1))

    def __next__(self) -> list[float]:
        index = self.start + self.step * self.position
        if index >= N:
            raise StopIteration
        self.position += 1
        return [float(index)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class StatefulIteratorStream(IterableDataset[list[float]]):
    def __iter__(self) -> Iterator[list[float]]:
        return StreamIterator()


class LazySampler(Sampler[int]):
    """Draws each index as it is asked for it, from those that are left."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(N))
        while left:
            yield left.pop(random.randrange(len(left)))

    def __len__(self) -> int:
        return N


class Restartable:
    """No DataLoader, but each iter() begins anew."""

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[list[float]]:
        order = list(range(N))
        random.shuffle(order)
        return ([float(i), self.rng.random()] for i in order)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i for i in range(N)], N)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def shared_generator(workers: int) -> DataLoader[Any]:
    """One generator for the order, the seeds of workers and, lazily in mid-epoch, the samples."""
    own, dataset = generator(), Augmented()
    sampler = RandomSampler(dataset, replacement=True, num_samples=40, generator=own)
    return DataLoader(dataset, 10, sampler=sampler, generator=own, num_workers=workers)


def distributed(dataset: Any, kind: type[DistributedSampler[Any]] = DistributedSampler) -> Any:
    return kind(dataset, num_replicas=2, rank=1, seed=3)


EXACT: dict[str, Made] = {
    "sequential": lambda: DataLoader(Augmented(), 4),
    "shuffled": lambda: DataLoader(Augmented(), 4, shuffle=True),
    "shuffled, drop_last": lambda: DataLoader(Augmented(), 4, shuffle=True, drop_last=True),
    "shuffled, unbatched": lambda: DataLoader(Augmented(4), None, shuffle=True),
    "subset": lambda: DataLoader(Subset(Augmented(), range(2, 13)), 4, shuffle=True),
    "distributed": lambda: DataLoader(Augmented(), 2, sampler=distributed(Augmented())),
    "weighted": lambda: DataLoader(Augmented(), 4, sampler=weighted()),
    "subset sampler": lambda: DataLoader(Augmented(), 4, sampler=SubsetRandomSampler(range(1, N))),
    "batch sampler": lambda: DataLoader(Augmented(), batch_sampler=BatchSampler(weighted(), 4, True)),
    "distributed batch sampler": lambda: DataLoader(
        Augmented(), batch_sampler=BatchSampler(distributed(Augmented()), 2, False)
    ),
    "generator": lambda: DataLoader(Augmented(), 4, shuffle=True, generator=generator()),
    "generator drawn from in mid-epoch": lambda: shared_generator(0),
    "dataset with generators": lambda: DataLoader(WithGenerators(), 4, shuffle=True),
    "iterable": lambda: DataLoader(Stream(), 4),
    "iterable, drop_last": lambda: DataLoader(Stream(), 4, drop_last=True),
    "iterable with generator": lambda: DataLoader(ShuffleBuffer(random.Random(1)), 4),
    "list of batches": lambda: [[float(i)] for i in range(4)],
    "own class": Restartable,
    "stateful": lambda: StatefulDataLoader(Augmented(), 4, shuffle=True),
    "stateful, generator": lambda: StatefulDataLoader(Augmented(), 4, shuffle=True, generator=generator()),
    "stateful, weighted": lambda: StatefulDataLoader(Augmented(), 4, sampler=weighted()),
    "stateful, distributed": lambda: StatefulDataLoader(Augmented(), 2, sampler=distributed(Augmented())),
    "stateful, stateful distributed": lambda: StatefulDataLoader(
        Augmented(), 2, sampler=distributed(Augmented(), StatefulDistributedSampler)
    ),
    "stateful, iterable": lambda: StatefulDataLoader(Stream(), 4),
    "stateful, stateful iterable": lambda: StatefulDataLoader(StatefulStream(), 4),
    "stateful, stateful iterator": lambda: StatefulDataLoader(StatefulIteratorStream(), 4),
}

EXACT_IN_WORKERS: dict[str, Made] = {
    "shuffled": lambda: DataLoader(Augmented(), 4, shuffle=True, num_workers=2),
    "distributed": lambda: DataLoader(Augmented(), 2, sampler=distributed(Augmented()), num_workers=2),
    "weighted": lambda: DataLoader(Augmented(), 4, sampler=weighted(), num_workers=2, prefetch_factor=1),
    "generator": lambda: DataLoader(Augmented(), 4, shuffle=True, generator=generator(), num_workers=2),
    "generator drawn from in mid-epoch": lambda: shared_generator(2),
    "dataset with generators": lambda: DataLoader(WithGenerators(), 4, shuffle=True, num_workers=2),
    "iterable": lambda: DataLoader(Stream(), 4, num_workers=2),
    "iterable with generator": lambda: DataLoader(ShuffleBuffer(random.Random(1)), 8, num_workers=2),
}

EXACT_FOR_STATEFUL_WORKERS: dict[str, Made] = {
    "shuffled": lambda: StatefulDataLoader(Plain(), 4, shuffle=True, num_workers=2),
    "generator": lambda: StatefulDataLoader(Plain(), 4, shuffle=True, generator=generator(), num_workers=2),
    "weighted": lambda: StatefulDataLoader(Plain(), 4, sampler=weighted(), num_workers=2),
    "distributed": lambda: StatefulDataLoader(Plain(), 2, sampler=distributed(Plain()), num_workers=2),
    "every third": lambda: StatefulDataLoader(Plain(), 4, shuffle=True, num_workers=2, snapshot_every_n_steps=3),
    "iterable": lambda: StatefulDataLoader(Stream(), 4, num_workers=2),
    "stateful iterator": lambda: StatefulDataLoader(StatefulIteratorStream(), 4, num_workers=2),
}


def persistent() -> DataLoader[Any]:
    return DataLoader(Augmented(), 4, shuffle=True, num_workers=2, persistent_workers=True)


# ------------------------------------------------------------------------------------------ how it is run


def seed(n: int) -> None:
    random.seed(n)
    np.random.seed(n)
    torch.manual_seed(n)


def plain_loop(loader: Any) -> Iterator[Any]:
    """What users write, with set_epoch where DistributedSampler's documentation has it."""
    sampler = getattr(loader, "sampler", None)
    within = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for epoch in itertools.count():
        for part in {id(p): p for p in (sampler, within, getattr(loader, "dataset", None))}.values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        yield from loader


def as_plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [as_plain(item) for item in batch] if isinstance(batch, list | tuple) else batch


def train(batches: Iterator[Any], steps: int, *, draw: bool = True) -> list[Any]:
    seen = []
    for _ in range(steps):
        before = noise() if draw else []
        batch = as_plain(next(batches))
        seen.append((before, batch, noise() if draw else []))
    return seen


def train_and_save(batches: Batches[Any], steps: int, *, draw: bool = True) -> tuple[list[Any], list[Saved]]:
    """Also what `ckpt.step()` keeps at the end of each step; first of all what there is before the first."""
    seen: list[Any] = []
    saved = [save(batches)]
    for _ in range(steps):
        seen += train(batches, 1, draw=draw)
        saved.append(save(batches))
    return seen, saved


def save(batches: Batches[Any]) -> Saved:
    return values.dumps([batches.state_dict(), rng.capture()])


def uninterrupted(make: Made, steps: int = STEPS, *, draw: bool = True) -> list[Any]:
    seed(0)
    return train(plain_loop(make()), steps, draw=draw)


def from_the_start(make: Made, steps: int = STEPS, *, draw: bool = True) -> tuple[list[Any], list[Saved]]:
    seed(0)
    return train_and_save(Batches(make()), steps, draw=draw)


def resume(make: Made, saved: Saved) -> Batches[Any]:
    """As in a new process: a new loader, and generators that stand anywhere."""
    seed(99)
    noise()
    state, step_rng = values.loads(saved)
    batches = Batches(make())
    noise()
    batches.load_state_dict(state, step_rng)
    return batches


def assert_exact(make: Made, stops: Iterable[int]) -> None:
    wanted = uninterrupted(make)
    seen, saved = from_the_start(make)
    assert seen == wanted
    for stop in stops:  # in the first, middle and last batch of an epoch, and between two
        again, saved_again = train_and_save(resume(make, saved[stop]), STEPS - stop)
        assert again == wanted[stop:], f"resumed at {stop}"
        second = min(stop + 2, STEPS - 1)
        assert train(resume(make, saved_again[second - stop]), STEPS - second) == wanted[second:]


# ------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize("name", EXACT)
def test_resumed_at_any_step_is_as_never_stopped(name: str) -> None:
    assert_exact(EXACT[name], range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_IN_WORKERS)
def test_with_workers_resumed_at_any_step_is_as_never_stopped(name: str) -> None:
    assert_exact(EXACT_IN_WORKERS[name], (1, 3, 4, 6))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_FOR_STATEFUL_WORKERS)
@pytest.mark.filterwarnings("ignore::checkmate.trainer.data.InexactData")
def test_stateful_loader_with_workers_is_exact_but_for_their_random_numbers(name: str) -> None:
    assert_exact(EXACT_FOR_STATEFUL_WORKERS[name], (1, 3, 4, 6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::checkmate.trainer.data.InexactData")
def test_persistent_workers_are_exact_in_the_first_epoch() -> None:
    assert_exact(persistent, ())
    wanted = uninterrupted(persistent, 4)
    _, saved = from_the_start(persistent, 4)
    assert [train(resume(persistent, saved[stop]), 4 - stop) for stop in (1, 3)] == [wanted[1:], wanted[3:]]


def test_skipped_samples_of_an_indexed_dataset_are_not_loaded() -> None:
    _, saved = from_the_start(EXACT["shuffled"])
    batches = resume(EXACT["shuffled"], saved[3])
    assert batches._loader.dataset.loads == 0  # type: ignore[attr-defined]
    next(batches)
    assert batches._loader.dataset.loads == N % 4  # type: ignore[attr-defined]


def test_a_torch_without_the_private_iterator_is_exact_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """But cannot tell that what is drawn for a skipped sample leaves no trace."""
    monkeypatch.setattr(data, "_InProcess", None)
    wanted, saved = from_the_start(EXACT["shuffled"])
    with pytest.warns(InexactData, match=r"\(numpy, python, torch\)"):
        batches = resume(EXACT["shuffled"], saved[3])
    assert batches._loader.dataset.loads == 12  # type: ignore[attr-defined]
    assert train(batches, STEPS - 3) == wanted[3:]


def test_batches_taken_before_the_step_is_closed_belong_to_it() -> None:
    """Two per step, as with accumulation; and a step may take none."""
    make = EXACT["shuffled"]
    wanted = uninterrupted(make)
    seen, saved = from_the_start(make, 2)
    batches = resume(make, saved[2])
    seen += train(batches, 2)
    seen += train(resume(make, save(batches)), STEPS - 4)
    assert seen == wanted


@pytest.mark.parametrize("name", ["stateful", "stateful, iterable", "stateful, stateful iterable"])
def test_a_stateful_loader_may_have_been_restored_already(name: str) -> None:
    """As `attach(stateful={"loader": loader})` does."""
    make = EXACT[name]
    wanted = uninterrupted(make)
    seed(0)
    first = make()
    batches = Batches(first)
    train(batches, 2)
    saved, of_loader = save(batches), first.state_dict()

    def restored() -> Any:
        loader = make()
        loader.load_state_dict(of_loader)
        return loader

    assert train(resume(restored, saved), STEPS - 2) == wanted[2:]


def test_without_a_step_of_its_own_the_generators_stay_as_found() -> None:
    _, saved = from_the_start(EXACT["shuffled"], 3)
    state, _ = values.loads(saved[3])
    seed(5)
    found = values.dumps(rng.capture())
    Batches(EXACT["shuffled"]()).load_state_dict(state)
    assert values.dumps(rng.capture()) == found


# ------------------------------------------------------------------------------------------ negative controls


@pytest.mark.parametrize("name", ["shuffled", "weighted", "generator", "stateful, weighted", "own class"])
def test_without_the_generators_of_the_epochs_start_the_batches_differ(name: str) -> None:
    make = EXACT[name]
    wanted, saved = from_the_start(make)
    state, step_rng = values.loads(saved[2])
    seed(99)
    batches = Batches(make())
    batches.load_state_dict({**state, "start": values.dumps({**values.loads(state["start"]), **step_rng})}, step_rng)
    assert (train(batches, STEPS - 2) == wanted[2:]) == (name == "generator")  # which has its own, kept here


def test_without_the_generators_of_the_loader_the_batches_differ() -> None:
    make = EXACT["generator"]
    wanted, saved = from_the_start(make)
    state, step_rng = values.loads(saved[5])
    start = {**values.loads(state["start"]), "loader.generator": generator().get_state()}
    batches = Batches(make())
    batches.load_state_dict({**state, "start": values.dumps(start)}, step_rng)
    assert train(batches, STEPS - 5) != wanted[5:]


def test_without_the_generators_of_the_step_what_follows_differs() -> None:
    make = EXACT["shuffled"]
    wanted, saved = from_the_start(make)
    state, _ = values.loads(saved[2])
    batches = Batches(make())
    batches.load_state_dict(state)
    assert train(batches, STEPS - 2) != wanted[2:]


def test_one_batch_more_or_less_is_seen() -> None:
    make = EXACT["sequential"]
    wanted, saved = from_the_start(make)
    state, step_rng = values.loads(saved[2])
    for taken in (1, 3):
        batches = Batches(make())
        batches.load_state_dict({**state, "taken": taken}, step_rng)
        assert train(batches, STEPS - 2) != wanted[2:]


# ------------------------------------------------------------------------------------------ inexact, and said


def indices(seen: list[Any]) -> list[Any]:
    """Without what was drawn: only which samples were in which batch."""
    return [batch[0] if isinstance(batch, list) else batch for _, batch, _ in seen]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (persistent, "persistent_workers=True: what workers keep"),
        (lambda: StatefulDataLoader(Augmented(), 4, shuffle=True, num_workers=2), "StatefulDataLoader lacks the"),
    ],
    ids=["persistent workers", "stateful"],
)
def test_random_numbers_of_workers_that_cannot_be_kept_are_said_and_the_order_is_exact(make: Made, words: str) -> None:
    wanted = uninterrupted(make)
    with pytest.warns(InexactData, match=words):
        seen, saved = from_the_start(make)
    assert seen == wanted
    for stop in (5, 6):
        with pytest.warns(InexactData, match=words):
            again, saved_again = train_and_save(resume(make, saved[stop]), STEPS - stop)
        assert indices(again) == indices(wanted[stop:])
        assert again != wanted[stop:]
        with pytest.warns(InexactData, match=words):
            assert indices(train(resume(make, saved_again[2]), 1)) == indices(wanted[stop + 2 : stop + 3])


def test_workers_out_of_order_are_said() -> None:
    with pytest.warns(InexactData, match="in_order=False"):
        Batches(DataLoader(Plain(), num_workers=2, in_order=False))


@pytest.mark.parametrize(
    "make",
    [lambda: DataLoader(ShuffleBuffer(), 2), lambda: DataLoader(Plain(), 2, sampler=LazySampler())],
    ids=["shuffle buffer", "lazy sampler"],
)
def test_draws_in_mid_epoch_are_exact_unless_the_loop_draws_from_the_same_generator(make: Made) -> None:
    wanted = uninterrupted(make, draw=False)
    seen, saved = from_the_start(make, draw=False)
    assert seen == wanted
    for stop in range(STEPS):
        assert train(resume(make, saved[stop]), STEPS - stop, draw=False) == wanted[stop:]

    wanted, saved = from_the_start(make)
    assert train(resume(make, saved[1]), STEPS - 1) == wanted[1:]  # nobody drew in between
    with pytest.warns(InexactData, match=r"in mid-epoch the loader draws random numbers \(python\)"):
        batches = resume(make, saved[3])
    assert train(batches, STEPS - 3) != wanted[3:]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataLoader(Augmented(), 2, shuffle=True), "batch_size 4 -> 2, batches 4 -> 7"),
        (lambda: DataLoader(Augmented(), 4), "loader.sampler RandomSampler -> SequentialSampler"),
        (lambda: DataLoader(Augmented(), 4, shuffle=True, num_workers=1), "num_workers 0 -> 1"),
        (lambda: DataLoader(Augmented(20), 4, shuffle=True), "batches 4 -> 5"),
    ],
    ids=["batch size", "sampler", "workers", "samples"],
)
def test_another_loader_than_the_saved_one_is_said(make: Made, words: str) -> None:
    _, saved = from_the_start(EXACT["shuffled"], 1)
    with pytest.warns(InexactData, match=words):
        resume(make, saved[1])


# ------------------------------------------------------------------------------------------ the state itself


def test_state_of_a_step_draws_nothing_and_keeps_one_object_for_the_epochs_start() -> None:
    seed(0)
    batches = Batches(EXACT["stateful"]())
    before = values.dumps(rng.capture())
    assert batches.state_dict()["start"] == b""
    assert values.dumps(rng.capture()) == before
    next(batches)
    start = batches.state_dict()["start"]
    before = values.dumps(rng.capture())
    assert batches.state_dict()["start"] is start
    assert values.dumps(rng.capture()) == before
    train(batches, 3)
    assert batches.state_dict()["start"] is start
    assert (batches.epoch, batches.taken) == (0, 4)
    next(batches)
    assert batches.state_dict()["start"] != start
    assert (batches.epoch, batches.taken) == (1, 1)


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("loader", [(i for i in range(3)), iter([1]), 7], ids=["generator", "iterator", "int"])
def test_what_cannot_be_restarted_is_refused(loader: Any) -> None:
    with pytest.raises(NotRestartable, match="pass a DataLoader") as refusal:
        Batches(loader)
    assert isinstance(refusal.value, UsageError)
    assert isinstance(refusal.value, TypeError)


@pytest.mark.parametrize(
    "loader", [[], DataLoader(Plain(3), 4, drop_last=True), DataLoader([], 4)], ids=["list", "drop_last", "empty"]
)
def test_an_epoch_without_a_batch_ends_the_run(loader: Any) -> None:
    with pytest.raises(UsageError, match=r"epoch 0 .* yields no batch"):
        next(Batches(loader))


def test_a_dataset_that_lasts_one_epoch_ends_the_run_in_the_second() -> None:
    class Once:
        source = iter([1, 2])

        def __iter__(self) -> Iterator[int]:
            return self.source

    batches = Batches(Once())
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(UsageError, match=r"epoch 1 .* yields no batch"):
        next(batches)


def test_an_epoch_shorter_than_what_was_taken_is_refused_and_leaves_the_generators_of_the_step() -> None:
    _, saved = from_the_start(EXACT["iterable"], 4)
    state, step_rng = values.loads(saved[4])
    batches = Batches(DataLoader(list(range(3)), 4))
    with (
        pytest.warns(InexactData, match="not that of the saved run"),
        pytest.raises(Mismatch, match="taken 4 batches of epoch 0, which now ends after 1"),
    ):
        batches.load_state_dict(state, step_rng)
    assert values.dumps(rng.capture()) == values.dumps(step_rng)
