"""Pipeline stages with replicas of their own, as one run: what is restored is one step on all stages, to the bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.recovery import Reader

from .compare import differences, paths
from .conftest import Shadow
from .pool import Pool
from .stages import STEPS, Replicas, cut_off, net, restored, whole

ROOT = Path(__file__).parents[2]
PATIENCE_S = 200.0

pytestmark = pytest.mark.processes


def name(replicas: Replicas) -> str:
    return f"{replicas[0]} to {replicas[1]}"


# With three replicas the order of DDP's buckets matters, which only the first of this stage can tell.
@pytest.mark.parametrize("replicas", [(2, 2), (1, 2), (1, 3)], ids=name)
def test_stages_go_on_with_the_bits_of_a_run_that_nobody_disturbed(
    pool: Pool, shadow: Shadow, replicas: Replicas
) -> None:
    run = f"stages {name(replicas)}"
    expected = pool.call(sum(replicas), whole, replicas)
    found = pool.call(sum(replicas), cut_off, replicas, shadow.address, run, (1, 3, 4))
    for rank, (states, (resumed, drift)) in enumerate(zip(expected, found, strict=True)):
        assert drift == []
        for step in range(STEPS + 1):
            assert (rank, step, differences(states[step], resumed[step])) == (rank, step, [])


@pytest.mark.parametrize("tap", ["mirror", "multicast"])
@pytest.mark.parametrize("replicas", [(2, 2), (1, 2)], ids=name)
def test_stages_whose_gradients_the_network_brings(pool: Pool, shadow: Shadow, replicas: Replicas, tap: str) -> None:
    run = f"stages {name(replicas)}, {tap}"
    expected = pool.call(sum(replicas), whole, replicas)
    found = pool.call(sum(replicas), cut_off, replicas, shadow.address, run, (1, 3, 4), "", tap)
    for rank, (states, (resumed, drift)) in enumerate(zip(expected, found, strict=True)):
        assert drift == []
        for step in range(STEPS + 1):
            assert (rank, step, differences(states[step], resumed[step])) == (rank, step, [])
    assert differences(expected[0][STEPS - 1], found[0][0][STEPS]) != []  # the negative control


def test_without_its_groups_a_stage_goes_on_with_other_bits(pool: Pool, shadow: Shadow) -> None:
    expected = pool.call(3, whole, (1, 2))
    found = pool.call(3, cut_off, (1, 2), shadow.address, "stages, control", (3,), "_install_groups")
    for states, (resumed, _) in zip(expected, found, strict=True):
        assert differences(states[2], resumed[2]) == []
        assert any(path.startswith("groups") for path in paths(differences(states[4], resumed[4])))


def test_fewer_replicas_of_the_first_stage_shift_the_ranks_of_the_second(pool: Pool, shadow: Shadow) -> None:
    run = "stages, fewer"
    *_, last = zip(*(states for states, _ in pool.call(4, cut_off, (2, 2), shadow.address, run, ())), strict=True)
    found = pool.call(3, restored, (1, 2), shadow.address, run)
    for was, now in ((0, 0), (2, 1), (3, 2)):
        assert (was, differences(last[was], found[now])) == (was, [])
    assert differences(last[1], found[1]) != []


def test_one_process_loads_all_stages_through_dcp(pool: Pool, shadow: Shadow) -> None:
    run = "stages, dcp"
    states = [states[-1] for states, _ in pool.call(3, cut_off, (1, 2), shadow.address, run, ())]
    model = nn.ModuleList([net(0), net(1)])
    tensors = {key: value for part in model for key, value in part.state_dict().items()}
    moments = {
        key: {entry: torch.empty_like(value) for entry, value in state.items() if torch.is_tensor(value)}
        for rank in (0, 1)
        for key, state in states[rank]["optimizer"].items()
    }
    reader = checkmate.ShadowReader(shadow.address, run)
    dcp.load({"model": tensors, "optimizer": {"state": moments}}, storage_reader=reader, no_dist=True)
    reader.close()
    whole = {**states[0]["model"], **states[0]["buffers"], **states[1]["model"], **states[1]["buffers"]}
    assert differences(whole, tensors) == []
    assert differences({**states[0]["optimizer"], **states[1]["optimizer"]}, moments) == []
    with Reader(shadow.address, run) as reading:
        groups = reading.groups()
        assert groups == [states[0]["groups"], states[1]["groups"]]
        assert [[group["lr"] for group in of_stage] for of_stage in groups] == [[0.0025], [0.0125, 0.025]]


def tied(rank: int, shadow: str, other_rate: float = 0.1) -> list[Any]:
    """Two ranks share one parameter, whose gradient they average by hand; each has one of its own beside it."""
    found = []
    for attempt in range(2):
        torch.manual_seed(attempt)
        both, own = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(3) + rank)
        model = nn.ParameterDict({"both": both, f"own{rank}": own})
        groups = [{"params": [both]}, {"params": [own], "lr": 0.2 + rank}]
        optimizer = optim.SGD(groups, lr=0.1 if rank == 0 else other_rate, momentum=0.9)
        with checkmate.attach(model, optimizer, shadow=shadow, run=f"tied {other_rate}") as ckpt:
            step = ckpt.restore()
            restored = [
                t.clone()
                for t in (both.detach(), own.detach(), *(s["momentum_buffer"] for s in optimizer.state.values()))
            ]
            found.append((step, restored, [group["lr"] for group in optimizer.param_groups]))
            while step < 4 * (attempt + 1):
                step += 1
                both.grad, own.grad = torch.full((5, 4), float(step + rank)), torch.full((3,), float(step))
                dist.all_reduce(both.grad)
                optimizer.step()
                ckpt.step()
            ckpt.wait(timeout=60)
            dist.barrier()
            found.append(ckpt.audit()["differing"] or sorted(ckpt.stats()["reports"]))
            found.append(
                [t.detach().clone() for t in (both, own, *(s["momentum_buffer"] for s in optimizer.state.values()))]
            )
        dist.barrier()
    return found


def test_parameter_that_two_stages_share_is_one_block(pool: Pool, shadow: Shadow) -> None:
    ranks = pool.call(2, tied, shadow.address)
    for rank, (_, told, trained, (step, found, rates), told_again, _) in enumerate(ranks):
        assert (step, told, told_again, rates) == (4, [], [], [0.1, 0.2 + rank])
        assert differences(trained, found) == []
    assert differences(ranks[0][5][:1], ranks[1][5][:1]) == []
    with Reader(shadow.address, "tied 0.1") as reading:
        assert [held.block.fqn for held in reading.leased.held] == ["both", "own0", "own1"]


def test_two_stages_that_step_a_shared_parameter_differently_are_reported(pool: Pool, shadow: Shadow) -> None:
    told = [text for _, of_rank, *_ in pool.call(2, tied, shadow.address, 0.3) for text in of_rank]
    assert "both" in told or "differs" in told


def late(rank: int, shadow: str) -> list[str]:
    """The second stage, on ranks 1 and 2, takes its first update when the first stage has taken two."""
    torch.manual_seed(1)
    net = nn.Linear(4, 2) if rank else nn.Linear(2, 4)
    model = nn.ModuleDict({f"stage{int(rank > 0)}": net})
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    with checkmate.attach(model, optimizer, shadow=shadow, run="late") as ckpt:
        ckpt.restore()
        for step in range(4):
            if rank == 0 or step >= 2:
                net(torch.ones(1, net.in_features)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            ckpt.step()
            dist.barrier()
        ckpt.wait(timeout=60)
        dist.barrier()
        return ckpt.audit()["differing"] + sorted(ckpt.stats()["reports"])


def test_stages_may_take_their_updates_in_different_steps(pool: Pool, shadow: Shadow) -> None:
    assert pool.call(3, late, shadow.address) == [[]] * 3


# ------------------------------------------------------------------------------ names


def collide(rank: int, shadow: str, widths: tuple[int, int]) -> tuple[str, str]:
    """Two stages that both call their parameters weight and bias; what attach or the first update says."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    stage = int(rank > 0)
    torch.manual_seed(stage)
    part = nn.Linear(4, widths[stage])
    model = DistributedDataParallel(part, process_group=groups[stage])
    optimizer = optim.SGD(part.parameters(), lr=0.1)
    try:
        with checkmate.attach(model, optimizer, shadow=shadow, run=f"collide {widths}") as ckpt:
            ckpt.restore()
            model(torch.full((2, 4), 1.0 + stage)).square().sum().backward()
            optimizer.step()
    except checkmate.CheckmateError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(("widths", "kind"), [((3, 5), "Unsupported"), ((3, 3), "ReplicasDiffer")])
def test_one_name_for_two_parameters_is_refused_on_every_rank(
    pool: Pool, shadow: Shadow, widths: tuple[int, int], kind: str
) -> None:
    for told, text in pool.call(3, collide, shadow.address, widths):
        assert told == kind
        for word in ("ranks 0 and 1" if kind == "ReplicasDiffer" else "on rank 1", "weight", "nn.ModuleDict"):
            assert word in text


def differ_in(rank: int, shadow: str, what: str) -> tuple[str, str]:
    part = nn.Linear(4, 3)
    params = list(part.parameters())
    split = [{"params": params[:1]}, {"params": params[1:]}] if rank and what == "groups" else params
    made: Any = optim.AdamW(split) if rank and what == "class" else optim.SGD(split, lr=0.1)
    if rank and what == "model":
        part.weight = nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64))
    with pytest.raises(checkmate.CheckmateError) as caught:
        checkmate.attach(part, made, shadow=shadow, run="differ")
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("what", ["groups", "class", "model"])
def test_replicas_with_other_optimizers_or_a_bad_parameter_are_refused_on_every_rank(
    pool: Pool, shadow: Shadow, what: str
) -> None:
    words = {"groups": "bias is in group 0", "class": "(AdamW) on rank 1", "model": "weight is complex"}
    for _, text in pool.call(2, differ_in, shadow.address, what):
        assert words[what] in text


# ------------------------------------------------------------------------------ SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(2, 2), (1, 2)], ids=name)
def test_stages_that_were_all_killed_end_with_the_bits_of_those_that_were_not(
    pool: Pool, shadow: Shadow, tmp_path: Path, replicas: Replicas
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    ranks = sum(replicas)
    torchrun = ["torch.distributed.run", "--standalone", "--monitor-interval=0.1", f"--nproc-per-node={ranks}"]
    torchrun += ["--max-restarts=1", "-m", "tests.exactness.stages", str(tmp_path), shadow.address]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    shadow.runs.pop("killed", None)
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *torchrun, *map(str, replicas), str(seed)],
            cwd=ROOT, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(40)
            raise
        finally:
            print(output.read_text(errors="replace")[-10000:])
    assert code == 0
    steps = {int((tmp_path / f"restored-1-{rank}").read_text()) for rank in range(ranks)}
    closed = [tmp_path / f"finished-0-{rank}" for rank in range(ranks)]
    finished = [int(path.read_text().split()[-1]) if path.exists() else 0 for path in closed]
    print(f"{steps=} {finished=}")
    assert len(steps) == 1
    assert min(finished) - 1 <= min(steps) <= min(finished) + 1
    for rank, states in enumerate(pool.call(ranks, whole, replicas)):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert differences(states[STEPS], found) == []
        assert differences(states[STEPS - 1], found) != []
