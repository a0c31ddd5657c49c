"""`Reader` and `ShadowReader` where what is asked for is large, and where several ranks load while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import checkmate
from checkmate import recovery
from checkmate.recovery import READ_ITEMS, Reader, ShadowReader, runs
from checkmate.shadow import replayer
from checkmate.shadow.daemon import Daemon
from checkmate.shadow.gradients import Gradients
from checkmate.tensors import bytes_of
from checkmate.transport.tcp import Address, listen
from checkmate.wire import messages as m

PATIENCE_S = 20.0
WIDTH = 6

StateDict = dict[str, Any]


class Job:
    """A run "net" that is trained step by step."""

    def __init__(self, address: str, width: int = WIDTH, *, fresh: bool = False) -> None:
        torch.manual_seed(0)
        self.address = address
        self.model = nn.Linear(width, 5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ckpt = checkmate.attach(self.model, self.optimizer, shadow=address, run="net", fresh=fresh)
        self.ckpt.restore(timeout=PATIENCE_S)
        self.step = 0

    def train(self) -> None:
        """One step, up to where it is safe: from then on a reader gets it."""
        self.optimizer.zero_grad()
        self.model(torch.arange(float(self.model.in_features))).sum().backward()
        self.optimizer.step()
        self.ckpt.step()
        self.ckpt.wait(timeout=PATIENCE_S)
        self.step += 1

    def state(self) -> StateDict:
        return {"model": {k: v.clone() for k, v in self.model.state_dict().items()}, "step": self.step}


def held(address: str) -> int:
    """The newest step that a reader gets."""
    with Reader(address) as reader:
        return reader.leased.step


@pytest.fixture
def shadow() -> Iterator[str]:
    daemon = Daemon()
    listener = listen(Address("127.0.0.1", 0))
    thread = threading.Thread(target=daemon.serve, args=(listener,), daemon=True)
    thread.start()
    yield str(Address(*listener.getsockname()[:2]))
    daemon.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture
def job(shadow: str) -> Iterator[Job]:
    job = Job(shadow)
    job.train()
    yield job
    job.ckpt.close()


def blank(width: int = WIDTH) -> StateDict:
    return {"model": {"weight": torch.zeros(5, width), "bias": torch.zeros(5)}, "step": -1}


def same(a: StateDict, b: StateDict) -> bool:
    tensors = all(torch.equal(a["model"][key], b["model"][key]) for key in ("weight", "bias"))
    return tensors and a["step"] == b["step"]


# ---------------------------------------------------------------- large reads


def test_read_of_more_items_than_one_message_takes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "READ_ITEMS", 2)
    asked: list[int] = []

    def read(items: list[tuple[int, int, int, int]]) -> m.Read:
        asked.append(len(items))
        return m.Read(items)

    monkeypatch.setattr(recovery, "Read", read)
    columns = torch.zeros(5, 3)
    memory = bytes_of(columns)
    with Reader(job.address) as reader:
        items = runs([5, WIDTH], [0, 2], [5, 3])
        reader.read((0, 0, start * 4, memory[at * 4 : (at + count) * 4]) for start, at, count in items)
        reader.read([])
        assert reader.sidecar(0)  # the connection is in step
    assert asked == [2, 2, 1]
    weight = job.model.weight.detach()
    assert torch.equal(columns, weight[:, 2:5])
    assert not torch.equal(columns, weight[:, 1:4])


def test_the_largest_read_is_one_that_a_shadow_takes() -> None:
    big = (1 << 50) - 1
    largest = m.Read([(big, big, big, big)] * READ_ITEMS)
    assert m.decode(m.encode(largest)) == largest


# ---------------------------------------------------------------- several ranks


class Rank(NamedTuple):
    """One rank inside ``dcp.load``, which calls these methods in this order, with collectives between them."""

    reader: ShadowReader
    planner: DefaultLoadPlanner
    plan: dcp.LoadPlan
    state: StateDict

    @classmethod
    def begin(cls, address: str, rank: int) -> Rank:
        reader, planner, state = ShadowReader(address), DefaultLoadPlanner(), blank()
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        return cls(reader, planner, reader.prepare_local_plan(planner.create_local_plan()), state)

    def finish(self, plan: dcp.LoadPlan) -> None:
        self.reader.read_data(self.planner.finish_plan(plan), self.planner)


def globally(ranks: list[Rank]) -> list[dcp.LoadPlan]:
    plans = ranks[0].planner.create_global_plan([rank.plan for rank in ranks])
    return ranks[0].reader.prepare_global_plan(plans)


def close(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.reader.close()


def begin_apart(job: Job) -> list[Rank]:
    """Two ranks, with a step of training between their leases and one after them."""
    ranks = []
    for number in range(2):
        ranks.append(Rank.begin(job.address, number))
        job.train()
    assert [rank.reader.reader.leased.step for rank in ranks] == [1, 2]
    return ranks


@pytest.mark.parametrize("patience_s", [PATIENCE_S, 0.0])
def test_reader_gets_what_was_safe_when_it_asked(job: Job, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    def slowly(*args: Any) -> Gradients:
        time.sleep(0.5)  # as if there were much to apply; no lock is held
        return Gradients(*args)

    monkeypatch.setattr(replayer, "Gradients", slowly)
    monkeypatch.setattr(replayer, "CATCH_UP_S", patience_s)
    job.train()
    job.train()
    assert (held(job.address) == job.step) == (patience_s > 0)  # without patience an older one


def test_ranks_with_one_lease_keep_it_while_training_goes_on(job: Job) -> None:
    ranks, expected = [Rank.begin(job.address, number) for number in range(2)], job.state()
    job.train()
    plans = globally(ranks)
    job.train()
    for rank, plan in zip(ranks, plans, strict=True):
        rank.finish(plan)
    assert all(same(rank.state, expected) for rank in ranks)
    assert not same(expected, job.state())
    close(ranks)


def test_ranks_that_leased_different_steps_load_the_one_that_the_coordinator_then_finds(job: Job) -> None:
    ranks = begin_apart(job)
    for rank, plan in zip(ranks, globally(ranks), strict=True):
        rank.finish(plan)
    assert same(ranks[0].state, job.state())
    assert same(ranks[1].state, job.state())
    assert job.step == 3
    close(ranks)


def test_step_that_the_coordinator_holds_is_there_for_the_others_though_training_goes_on(job: Job) -> None:
    ranks = begin_apart(job)
    plans = globally(ranks)
    at_three = job.state()
    job.train()
    for rank, plan in zip(ranks, plans, strict=True):
        rank.finish(plan)
        assert same(rank.state, at_three)
    assert not same(job.state(), at_three)
    close(ranks)


def test_training_that_is_faster_than_the_ranks_is_named_and_they_may_load_again(job: Job) -> None:
    ranks = begin_apart(job)
    plans = globally(ranks)
    job.train()
    ranks[0].reader.close()  # else the shadow would still hold that step for it
    with pytest.raises(checkmate.StepNotFound, match=r"leased step 2 and the coordinator step 3, .*load again") as e:
        ranks[1].finish(plans[1])
    assert "step 3 is not held; the one step that is whole here is 4" in str(e.value)
    assert same(ranks[1].state, blank())
    close(ranks)

    again = blank()
    dcp.load(again, storage_reader=ranks[1].reader)
    ranks[1].reader.close()
    assert same(again, job.state())


def test_load_planned_for_another_model_is_refused(job: Job) -> None:
    ranks = [Rank.begin(job.address, 0)]
    job.ckpt.close()
    other = Job(job.address, width=WIDTH + 1, fresh=True)
    try:
        other.train()
        late = ShadowReader(job.address)
        late.read_metadata()
        plans = [ranks[0].plan, late.prepare_local_plan(ranks[0].plan)]
        with pytest.raises(checkmate.Mismatch, match=r"in step 1 model\.weight is not what it was .* load again"):
            ranks[0].reader.prepare_global_plan(plans)
        late.close()
        close(ranks)
    finally:
        other.ckpt.close()


def load_on_a_rank(rank: int, address: str, store: str, pipe: Connection) -> None:
    """Lease when told, say which step that was, load when told, and give back the state."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    state, reader = blank(), ShadowReader(address)
    pipe.recv()
    pipe.send(reader.reader.leased.step)
    pipe.recv()
    dcp.load(state, storage_reader=reader)
    pipe.send({"model": {k: v.tolist() for k, v in state["model"].items()}, "step": state["step"]})
    reader.close()
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.slow
def test_dcp_load_on_two_ranks_gives_both_one_step(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    spawn = torch.multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(2)]
    processes = [
        spawn.Process(target=load_on_a_rank, args=(rank, job.address, str(tmp_path / "store"), theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    ours = [pipe for pipe, _ in pipes]
    leased = []
    for pipe in ours:
        pipe.send("lease")
        assert pipe.poll(120)
        leased.append(pipe.recv())
        job.train()
    for pipe in ours:
        pipe.send("load")
    loaded = []
    for pipe in ours:
        assert pipe.poll(120)
        found = pipe.recv()
        found["model"] = {key: torch.tensor(value) for key, value in found["model"].items()}
        loaded.append(found)
    for process in processes:
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    assert leased == [1, 2]
    assert all(same(state, job.state()) for state in loaded)
