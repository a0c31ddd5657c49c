"""What users do to a training loop: interrupts, forgotten objects, forks, buffers and optimizers replaced."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import checkmate
from checkmate.trainer.buckets import find_ddp
from checkmate.trainer.recorder import Recorder

from .conftest import RUN, Loop

Make = Callable[..., Loop]


def until_whole(made: Loop) -> None:
    """Train on until the newest step is safe."""
    for _ in range(200):
        made.train()
        if made.link.wait_for(lambda: made.ckpt.stats()["lag_steps"] == 0, 0.2):
            return
    raise AssertionError(f"never whole again: {made.ckpt.stats()}")


@pytest.mark.parametrize("where", ["_stage", "_choose_anchors", "_put_part"])
@pytest.mark.parametrize("done", [False, True])
def test_interrupt_within_a_step_costs_that_step_and_no_bits(
    loop: Make, monkeypatch: pytest.MonkeyPatch, where: str, done: bool
) -> None:
    made = loop().restore()
    made.train(3)
    original = getattr(Recorder, where)

    def interrupted(*args: object) -> None:
        monkeypatch.setattr(Recorder, where, original)
        if done:
            original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    until_whole(made)
    assert made.differing() == []
    assert made.ckpt.stats()["gaps"] == 1
    with torch.no_grad():
        made.model[0].weight[0, 0] += 1
    assert made.differing() == ["0.weight"]


def test_forgotten_checkpointer_lets_go_of_its_run(loop: Make, daemon_address: tuple[object, str]) -> None:
    def train() -> None:
        forgotten = Loop(daemon_address[1]).restore()
        forgotten.train(2)
        forgotten.ckpt.wait(timeout=20)

    before = threading.active_count()
    train()
    gc.collect()
    deadline = time.monotonic() + 20
    while threading.active_count() > before + 3 and time.monotonic() < deadline:  # and the shadow's, in this process
        time.sleep(0.01)
    made = loop().restore()  # not refused: nobody trains it
    assert made.ckpt.stats()["step"] == 2


def test_forked_child_ends_at_once_and_the_parent_trains_on(loop: Make) -> None:
    made = loop().restore()
    made.train()
    with made.link.changed:  # as some other thread of ours may hold it at that moment
        child = os.fork()
        if child == 0:
            made.ckpt.close()
            os._exit(0)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    made.train()
    assert made.differing() == []


def test_wait_and_audit_after_close_are_errors(loop: Make) -> None:
    made = loop().restore()
    made.train()
    made.ckpt.close()
    for late in (made.ckpt.wait, made.ckpt.audit, made.ckpt.step):
        with pytest.raises(checkmate.UsageError, match="on a closed Checkpointer"):
            late()


class Averaging(nn.Module):
    """Replaces its buffer rather than write into it."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("average", torch.zeros(3))

    def forward(self) -> torch.Tensor:
        self.average = self.average * 0.9 + self.weight.detach() * 0.1
        return (self.weight**2).sum()


def test_buffer_that_is_replaced_is_the_one_that_is_saved(daemon_address: tuple[object, str], loop: Make) -> None:
    model = Averaging()
    ckpt = checkmate.attach(
        model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), shadow=daemon_address[1], run=RUN
    )
    ckpt.restore()
    for _ in range(4):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        ckpt.step()
    ckpt.wait(timeout=20)
    ckpt.close()
    fresh = Averaging()
    again = checkmate.attach(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), shadow=daemon_address[1], run=RUN)
    assert again.restore() == 4
    assert torch.equal(fresh.average, model.average)
    assert not torch.equal(fresh.average, torch.zeros(3))
    again.close()
    loop()  # removes the run


def test_optimizer_that_was_replaced_is_told_once(loop: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = loop().restore()
    made.train(2)
    other = torch.optim.SGD(made.model.parameters(), lr=0.01)
    for _ in range(3):
        other.zero_grad()
        made.backward()
        other.step()
        other.zero_grad()
        made.ckpt.step()
    assert made.differing() == []
    told = [r.getMessage() for r in caplog.records if "without a step of an attached optimizer" in r.getMessage()]
    assert len(told) == 1
    assert "step 3" in told[0]


def test_other_default_dtype_is_drift(loop: Make) -> None:
    assert loop().ckpt.stats()["mode"] == "exact"
    torch.set_default_dtype(torch.float64)
    try:
        assert "default dtype, torch.float64" in loop().ckpt.stats()["drift"][0]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"run": None}, "no NoneType for run"),
        ({"shadow": 7070}, "no int for shadow"),
        ({"staging_bytes": "1G"}, "no str for staging_bytes"),
        ({"token": ["secret"]}, "no list for token"),
        ({"stateful": {0: object()}}, "names of stateful objects are strings, not 0"),
        ({"stateful": [object()]}, "a dict of names and objects, not a list"),
    ],
)
def test_argument_of_a_wrong_type_is_named(wrong: dict[str, object], match: str) -> None:
    model = nn.Linear(2, 2)
    options = {"shadow": "tcp://127.0.0.1:1", "run": "r", **wrong}
    with pytest.raises(checkmate.UsageError, match=match) as told:
        checkmate.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)  # type: ignore[arg-type]
    assert "secret" not in str(told.value)


def test_compiled_model_is_its_module(loop: Make) -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    ckpt = checkmate.attach(compiled, torch.optim.SGD(model.parameters(), lr=0.1), shadow="tcp://127.0.0.1:1", run="r")
    assert sorted(block.fqn for block in ckpt._shadowed.spec.blocks) == ["bias", "weight"]
    ckpt.close()


def test_wrapper_is_found_if_the_bare_module_is_given(tmp_path: os.PathLike[str]) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        outer = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        assert find_ddp(outer) == (None, False)
        part = nn.parallel.DistributedDataParallel(outer["a"])
        assert find_ddp(outer) == (None, True)
        assert find_ddp(outer["a"]) == (part, False)
        assert find_ddp(part) == (part, False)
        assert find_ddp(outer["b"]) == (None, False)
    finally:
        torch.distributed.destroy_process_group()
