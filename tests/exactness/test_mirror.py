"""The network tap in the hands of users: what it refuses, what it bears, and what it does to gradients that change.

Ranks are real processes. As root the shadow captures what they send each other; otherwise all of that is repaired. What
they multicast it hears in any case.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.trainer import mirror, peers
from checkmate.trainer.multicast import Group
from checkmate.trainer.recorder import Recorder
from checkmate.wire.datagrams import GROUPS

from .compare import differences
from .conftest import Shadow
from .pool import Pool

pytestmark = pytest.mark.processes

WIDTH = 40
#: Both ways by which the network brings gradients.
by_tap = pytest.mark.parametrize("tap", ["mirror", "multicast"])


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).to(dtype)


class Warnings(logging.Handler):
    """What Checkmate says to the user of this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def __enter__(self) -> Warnings:
        logging.getLogger("checkmate").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("checkmate").removeHandler(self)


class Run:
    """A model in `DistributedDataParallel`, attached and restored. Ranks train on different data."""

    def __init__(
        self, rank: int, shadow: str, run: str, inner: nn.Module | None = None, ddp: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.rank, self.net = rank, inner or net()
        self.model: nn.Module = DistributedDataParallel(self.net, **(ddp or {}))
        self.optimizer = optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.ckpt = checkmate.attach(
            self.model, self.optimizer, shadow=shadow, run=run, **{"tap": "mirror", "fresh": True, **options}
        )
        self.step = self.ckpt.restore()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * self.step + self.rank)
        x = torch.randn(6, WIDTH, generator=generator)
        self.model(x.to(next(self.net.parameters()).dtype)).float().square().sum().backward()

    def train(self, steps: int = 1, edit: Callable[[list[torch.Tensor]], object] = lambda grads: None) -> Run:
        for _ in range(steps):
            self.backward()
            edit([p.grad for p in self.net.parameters() if p.grad is not None])
            self.optimizer.step()
            self.ckpt.step()
            self.step += 1
        return self

    def found(self) -> dict[str, Any]:
        """What the shadow holds wrongly, and then, as a negative control, after a bit here was changed."""
        self.ckpt.wait(timeout=60)
        dist.barrier()
        stats, differing = self.ckpt.stats(), self.ckpt.audit()["differing"]
        first = next(self.net.parameters())
        with torch.no_grad():
            first[(0,) * first.dim()] += 1
        control = self.ckpt.audit()["differing"]
        with torch.no_grad():
            first[(0,) * first.dim()] -= 1
        dist.barrier()
        return {"stats": stats, "differing": differing, "control": control}


def check(found: dict[str, Any]) -> dict[str, Any]:
    """Its stats, if the shadow holds what training holds."""
    assert found["differing"] == []
    assert found["control"] != []
    stats: dict[str, Any] = found["stats"]
    return stats


# ------------------------------------------------------------------------------ what is refused


def refused(rank: int, shadow: str, what: str, tap: str = "mirror") -> tuple[str, str]:
    inner: nn.Module = net()
    model: nn.Module = inner if what == "bare" else DistributedDataParallel(inner)
    if what == "parts":
        model = inner = nn.Sequential(net(), net())
        wrapped = [DistributedDataParallel(each) for each in inner]
        assert wrapped
    if what == "sparse":
        inner = nn.Embedding(4, 2, sparse=True)
        model = DistributedDataParallel(inner)
    if what == "hook" and rank:
        model.register_comm_hook(None, averaging)  # type: ignore[operator]
    options = {"interface": "nope0"} if what == "interface" and rank else {}
    try:
        checkmate.attach(
            model, optim.SGD(inner.parameters(), lr=0.1), shadow=shadow, run=f"refused {what}", tap=tap,
            **options,  # type: ignore[arg-type]
        ).close()  # fmt: skip
    except checkmate.CheckmateError as error:
        return type(error).__name__, str(error)
    return "", ""


def averaging(_, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("bare", ["the network tap", "wrap the whole model"]),
        ("parts", ["the network tap", "wrap the whole model"]),
        ("hook", ["communication hook already (averaging)", "register none"]),
        ("sparse", ["sparse gradients", "sparse=False"]),
        ("interface", ["nope0", "lo"]),
    ],
)
@by_tap
def test_refused_on_every_rank_with_a_reason_and_a_remedy(
    pool: Pool, shadow: Shadow, what: str, words: list[str], tap: str
) -> None:
    for _, text in pool.call(2, refused, shadow.address, what, tap):
        assert [word for word in words if word not in text] == [], text
    assert f"refused {what}" not in shadow.runs


def attach_fails(rank: int, shadow: str, tap: str) -> tuple[str, bool]:
    """One rank cannot connect; then training goes on as if nobody had asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "CONNECT_S", 1.0)
        if rank == 1:
            patch.setattr(peers, "_connect", unreachable)
        model = DistributedDataParallel(net())
        try:
            checkmate.attach(model, optim.SGD(model.parameters(), lr=0.1), shadow=shadow, run="fails", tap=tap)
        except checkmate.CheckmateError as error:
            text = str(error)
    gc.collect()
    model(torch.full((2, WIDTH), 1.0 + rank)).square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [g.tolist() for g in grads])
    return text, not model._comm_hooks and all(each == gathered[0] for each in gathered)


def unreachable(*_: object) -> Any:
    raise checkmate.Unreachable("cannot connect to a peer at nowhere")


@by_tap
def test_attach_that_fails_on_one_rank_leaves_ddp_as_it_was(pool: Pool, shadow: Shadow, tap: str) -> None:
    for text, untouched in pool.call(2, attach_fails, shadow.address, tap):
        assert re.search("nowhere|not every peer has connected|cannot connect", text)
        assert untouched


def in_two_groups(rank: int, shadow: str) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(net(), process_group=groups[rank // 2])
    try:
        checkmate.attach(model, optim.SGD(model.parameters(), lr=0.1), shadow=shadow, run="groups", tap="mirror")
    except checkmate.CheckmateError as error:
        return str(error)
    return ""


def test_group_that_does_not_hold_all_replicas_is_refused(pool: Pool, shadow: Shadow) -> None:
    for rank, text in enumerate(pool.call(4, in_two_groups, shadow.address)):
        mine = [0, 1] if rank < 2 else [2, 3]
        assert f"averages over ranks {mine}, but ranks [0, 1, 2, 3] hold the same parameters" in text


@by_tap
def test_nothing_is_refused_without_reason(pool: Pool, shadow: Shadow, tap: str) -> None:
    """The negative control."""
    assert pool.call(2, refused, shadow.address, "nothing", tap) == [("", "")] * 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dscp": 0}, "a mark is 1 to 63"),
        ({"dscp": 64}, "a mark is 1 to 63"),
        ({"dscp": "43"}, "no str for dscp"),
        ({"interface": 5}, "no int for interface"),
        ({"tap": "tap"}, "tap='tap' is not available"),
        ({"ttl": 0}, "ttl=0: it is 1 to 255"),
        ({"ttl": 256}, "ttl=256: it is 1 to 255"),
        ({"ttl": "1"}, "no str for ttl"),
        ({"groups": 239}, "no int for groups"),
        ({"groups": "239.77.0.0/33"}, "write a range such as 239.77.0.0/24"),
        ({"groups": "239.77.0.1/24"}, "has host bits set; write a range such as 239.77.0.0/24"),
        ({"groups": "10.77.0.0/24"}, "are no multicast addresses; those are in 224.0.0.0/4"),
        ({"groups": "224.0.0.0/24"}, "switches send 224.0.0.0/24 to everybody"),
        ({"groups": "ff02::/16"}, "write a range such as 239.77.0.0/24"),
    ],
)
def test_wrong_argument_is_named(options: dict[str, Any], match: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(checkmate.UsageError, match=match):
        checkmate.attach(
            model, optim.SGD(model.parameters(), lr=0.1), shadow="tcp://127.0.0.1:1", run="r",
            **{"tap": "mirror", **options},
        )  # fmt: skip


def early(rank: int, shadow: str) -> list[str]:
    model = DistributedDataParallel(net())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    ckpt = checkmate.attach(model, optimizer, shadow=shadow, run="early", tap="mirror")
    told = []
    for act in (
        ckpt.step,
        ckpt.wait,
        ckpt.audit,
        lambda: checkmate.attach(model, optim.SGD(model.parameters(), lr=0.1), shadow=shadow, run="r", tap="mirror"),
    ):
        with pytest.raises(checkmate.UsageError) as caught:
            act()
        told.append(str(caught.value))
    model(torch.ones(1, WIDTH)).sum().backward()  # the collective works, whoever listens
    ckpt.restore()
    ckpt.close()
    return told


def test_calls_in_the_wrong_order_are_errors_of_the_user(pool: Pool, shadow: Shadow) -> None:
    for told in pool.call(2, early, shadow.address):
        assert "call restore() before the first step()" in told[0]
        assert "before restore()" in told[1]
        assert "before restore()" in told[2]
        assert "attached already; close() the other Checkpointer first" in told[3]


def joining(rank: int, shadow: str, join: bool) -> str:
    made = Run(rank, shadow, f"join {join}")
    try:
        with made.model.join(enable=join):  # type: ignore[operator]
            made.train(2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        made.ckpt.close(timeout=0)
    return ""


def test_join_is_refused_in_the_first_backward(pool: Pool, shadow: Shadow) -> None:
    for text in pool.call(2, joining, shadow.address, True):
        assert "join()" in text
        assert "the same number of batches" in text
    assert pool.call(2, joining, shadow.address, False) == [""] * 2


# ------------------------------------------------------------------------------ who takes part


def alone(rank: int, shadow: str) -> Any:
    made = net()
    optimizer = optim.SGD(made.parameters(), lr=0.1)
    with checkmate.attach(made, optimizer, shadow=shadow, run="alone", tap="mirror", fresh=True) as ckpt:
        ckpt.restore()
        for _ in range(3):
            optimizer.zero_grad()
            made(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            ckpt.step()
        ckpt.wait(timeout=60)
        return ckpt.audit()["differing"], ckpt.stats()["bytes_tagged"], ckpt.stats()["step"]


def test_one_rank_alone_uses_the_step_tap(pool: Pool, shadow: Shadow) -> None:
    assert pool.call(1, alone, shadow.address) == [([], 0, 3)]


def in_groups(rank: int, shadow: str, tap: str) -> Any:
    """Ranks 0 and 2 are the replicas of one stage, rank 1 is another by itself, with or without a wrapper."""
    found = []
    both, other = dist.new_group([0, 2]), dist.new_group([1])
    for wrapped in (True, False):
        torch.manual_seed(rank % 2)
        inner = nn.ModuleDict({f"stage{rank % 2}": nn.Linear(WIDTH, WIDTH + rank % 2)})
        layer: Any = inner[f"stage{rank % 2}"]

        class Stage(nn.Module):
            def __init__(self, inner: nn.ModuleDict) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return next(iter(self.inner.values()))(x)  # type: ignore[no-any-return]

        model: nn.Module = Stage(inner)
        if rank != 1 or wrapped:
            model = DistributedDataParallel(model, process_group=other if rank == 1 else both)
        optimizer = optim.AdamW(layer.parameters(), lr=0.1)
        run = f"groups {wrapped} {tap}"
        with checkmate.attach(model, optimizer, shadow=shadow, run=run, tap=tap, fresh=True) as ckpt:  # type: ignore[arg-type]
            ckpt.restore()
            for step in range(4):
                optimizer.zero_grad()
                model(torch.full((2, WIDTH), 1.0 + step + rank)).square().sum().backward()
                optimizer.step()
                ckpt.step()
            ckpt.wait(timeout=60)
            dist.barrier()
            differing = ckpt.audit()["differing"]
            dist.barrier()
            stats = ckpt.stats()
            found.append((differing, stats["fallbacks"], stats["bytes_tagged"] > 0, sorted(stats["reports"])))
    return found


@by_tap
def test_ranks_outside_the_group_send_as_with_the_step_tap(pool: Pool, shadow: Shadow, tap: str) -> None:
    for rank, found in enumerate(pool.call(3, in_groups, shadow.address, tap)):
        for differing, fallbacks, tagged, reports in found:
            assert (differing, fallbacks, tagged) == ([], 0, rank != 1)
            assert [kind for kind in reports if kind != "note"] == []


# ------------------------------------------------------------------------------ close, forget, attach again


def closed(rank: int, shadow: str, tap: str) -> Any:
    made = Run(rank, shadow, f"closed {tap}", tap=tap).train(3)
    made.ckpt.close()
    before = [p.detach().clone() for p in made.net.parameters()]
    made.backward()  # training goes on, on all ranks with the same gradient
    made.optimizer.step()
    grads = [p.grad for p in made.net.parameters()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, grads)
    same = all(torch.equal(a, b) for theirs in gathered for a, b in zip(grads, theirs, strict=True))
    old = made.ckpt._mirror
    made.ckpt = checkmate.attach(made.model, made.optimizer, shadow=shadow, run=f"closed {tap}", tap=tap)  # type: ignore[arg-type]
    step = made.ckpt.restore()
    back = differences(before, [p.detach() for p in made.net.parameters()])
    made.step = step
    found = made.train(3).found()
    made.ckpt.close()
    assert old is not None
    return {"same": same, "step": step, "back": back, "found": found, "old": old.collective._closed}


@by_tap
def test_training_goes_on_after_close_and_the_model_can_be_attached_again(pool: Pool, shadow: Shadow, tap: str) -> None:
    for told in pool.call(2, closed, shadow.address, tap):
        assert (told["same"], told["step"], told["back"], told["old"]) == (True, 3, [], True)
        assert check(told["found"])["bytes_tagged"] > 0


def forgotten(rank: int, shadow: str, tap: str) -> tuple[list[str], int]:
    def ours() -> list[str]:
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("checkmate"))

    def sockets() -> int:
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return sum("socket:" in link for link in links)

    gc.collect()
    dist.barrier()
    threads, open_before = ours(), sockets()
    made: Run | None = Run(rank, shadow, "forgotten", tap=tap).train(2)
    during = len(ours())
    del made
    deadline = time.monotonic() + 20
    while (ours() != threads or sockets() > open_before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert during > len(threads) + 5
    dist.barrier()
    return [name for name in ours() if name not in threads], max(0, sockets() - open_before)  # some ended of others


@by_tap
def test_forgotten_model_ends_its_connections_and_threads(pool: Pool, shadow: Shadow, tap: str) -> None:
    assert pool.call(2, forgotten, shadow.address, tap) == [([], 0)] * 2


# ------------------------------------------------------------------------------ gradients that change


def edited(rank: int, shadow: str, what: str) -> Any:
    dtype = torch.bfloat16 if "bfloat16" in what else torch.float32
    with Warnings() as warnings:
        made = Run(rank, shadow, f"edited, {what}", net(dtype))
        params = list(made.net.parameters())
        edit: Callable[[list[torch.Tensor]], object] = lambda grads: None  # noqa: E731
        if "norm" in what:
            edit = lambda grads: nn.utils.clip_grad_norm_(params, 0.05)  # noqa: E731
        elif "value" in what:
            edit = lambda grads: nn.utils.clip_grad_value_(params, 0.01)  # noqa: E731
        elif "some" in what:
            edit = lambda grads: grads[-1].clamp_(max=0.0)  # noqa: E731
        found = made.train(5, edit).found()
        made.ckpt.close()
    return found, warnings.found


@pytest.mark.parametrize(
    "what", ["nothing", "norm", "norm, bfloat16", "value", "value, bfloat16", "some"]
)  # fmt: skip
def test_what_no_factor_explains_goes_by_the_step_tap_with_one_warning(pool: Pool, shadow: Shadow, what: str) -> None:
    for found, warnings in pool.call(2, edited, shadow.address, what):
        told = [text for text in warnings if "another gradient of" in text]
        fallbacks = check(found)["fallbacks"]
        if "value" in what or "some" in what:
            assert fallbacks >= 1 or not told
        else:
            assert fallbacks == 0
        assert len(told) == (fallbacks > 0)
        if what == "some" and told:
            assert fallbacks <= 5
            assert "2.bias" in told[0]
    if "value" in what:
        assert sum(found["stats"]["fallbacks"] for found, _ in pool.call(2, edited, shadow.address, what)) >= 10


def strided(rank: int, shadow: str, as_views: bool) -> Any:
    torch.manual_seed(4)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2))
    inner = convolutions.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    made = Run(rank, shadow, f"channels last {as_views}", inner, {"gradient_as_bucket_view": as_views})
    for _ in range(4):
        made.optimizer.zero_grad()
        image = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(100 * made.step + rank))
        made.model(image.to(memory_format=torch.channels_last)).square().sum().backward()
        made.optimizer.step()
        made.ckpt.step()
        made.step += 1
    found = made.found()
    made.ckpt.close()
    return found


def summed_alone(rank: int, tap: str) -> tuple[bool, bool, int]:
    model = DistributedDataParallel(net())
    group = Group(GROUPS, "alone", 1) if tap == "multicast" else None
    alone = mirror.collective_alone(model, optim.SGD(model.parameters(), lr=0.1), multicast=group)
    made = [torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    each = []
    for x in made:
        inner = net()
        inner(x).square().sum().backward()
        each.append([p.grad for p in inner.parameters()])
    model(made[rank]).square().sum().backward()
    expected = [grads[0] / 3 + grads[1] / 3 + grads[2] / 3 for grads in zip(*each, strict=True)]  # in rank order
    otherwise = [grads[2] / 3 + grads[1] / 3 + grads[0] / 3 for grads in zip(*each, strict=True)]
    found = [p.grad for p in model.parameters()]
    same = [all(map(torch.equal, found, wanted)) for wanted in (expected, otherwise)]
    dist.barrier()
    return same[0], same[1], alone.collective.bytes_tagged


@by_tap
def test_collective_without_a_checkpointer_sums_as_with_one(pool: Pool, tap: str) -> None:
    for same, otherwise, tagged in pool.call(3, summed_alone, tap):
        assert same
        assert not otherwise  # the negative control
        assert tagged > 0


def many_updates(rank: int, shadow: str) -> Any:
    """More updates in one step than a header can count, if it could count to three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror, "_MOST", 3)
        made = Run(rank, shadow, "many updates")
        for _ in range(6):
            made.backward()
            made.optimizer.step()
        made.ckpt.step()
        made.step += 1
        made.train()
        return made.found()


def test_step_of_very_many_updates_goes_by_without_the_network(pool: Pool, shadow: Shadow) -> None:
    for found in pool.call(2, many_updates, shadow.address):
        late, rest = divmod(check(found)["fallbacks"], 3)  # of three updates: their rounds are 4 to 6
        assert late > 0
        assert rest == 0


@pytest.mark.parametrize("as_views", [False, True])
def test_weights_in_channels_last_order(pool: Pool, shadow: Shadow, as_views: bool) -> None:
    for found in pool.call(2, strided, shadow.address, as_views):
        assert check(found)["bytes_tagged"] > 0


# ------------------------------------------------------------------------------ no room, and a shadow that is slow


def starved(rank: int, shadow: str, tap: str, flags: str) -> Any:
    with Warnings() as warnings:
        made = Run(rank, shadow, f"starved {tap}", staging_bytes=1, tap=tap)
        for _ in range(3):  # slowly, or there is no room already
            before = made.ckpt.stats()["bytes_tagged"]
            made.train().ckpt.wait(timeout=60)
            dist.barrier()
        if rank == 0:
            Path(flags, "ready").touch()
        while not Path(flags, "held").exists():
            time.sleep(0.005)
        tagged = made.ckpt.stats()["bytes_tagged"]
        each = tagged - before
        made.train(12)
        during = made.ckpt.stats()
        dist.barrier()
        if rank == 0:
            Path(flags, "done").touch()
        for _ in range(300):
            whole = torch.tensor([made.ckpt.stats()["lag_steps"] == 0 and made.ckpt.stats()["state"] == "streaming"])
            dist.all_reduce(whole, dist.ReduceOp.MIN)
            if whole:
                break
            made.train()
            time.sleep(0.02)
        found = made.found()
        made.ckpt.close()
    return found, each, during["bytes_tagged"] - tagged, during, warnings.found


@by_tap
def test_where_staging_is_full_there_is_a_gap_and_then_it_is_whole_again(
    pool: Pool, shadow: Shadow, tmp_path: Path, tap: str
) -> None:
    def hold() -> None:
        """Acknowledge nothing meanwhile."""
        while not (tmp_path / "ready").exists():
            time.sleep(0.005)
        with shadow.runs[f"starved {tap}"].changed:
            (tmp_path / "held").touch()
            while not (tmp_path / "done").exists():
                time.sleep(0.005)

    holding = threading.Thread(target=hold)
    holding.start()
    answers = pool.call(2, starved, shadow.address, tap, str(tmp_path))
    holding.join()
    for found, each, tagged, during, warnings in answers:
        assert during["gaps"] == 1
        assert during["step"] - during["recovery_step"] >= 8
        assert tagged == 12 * each  # the collective is the same, kept or not
        assert check(found)["state"] == "streaming"
        assert not [text for text in warnings if "another gradient" in text]  # memory was short, no gradient changed


@by_tap
def test_the_recorder_is_asked_for_pieces_only_where_they_are_needed(pool: Pool, shadow: Shadow, tap: str) -> None:
    """What is claimed is not staged: memory for it would be copied for nothing."""
    assert "claim" in Recorder.before.__code__.co_names
    for staged in pool.call(2, staging, shadow.address, tap):
        assert staged == [0, 0, 0]


def staging(rank: int, shadow: str, tap: str) -> list[int]:
    made = Run(rank, shadow, "staging", tap=tap)
    counts: list[int] = []
    stage = Recorder._stage

    def counting(self: Recorder, number: int, step: int, pieces: Any, grads: Any) -> None:
        counts.append(len(pieces))
        stage(self, number, step, pieces, grads)

    Recorder._stage = counting  # type: ignore[method-assign]
    try:
        made.train(3)
    finally:
        Recorder._stage = stage  # type: ignore[method-assign]
    made.ckpt.close()
    dist.barrier()
    return counts
