"""What a step is, and what is kept of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkmate import CheckmateError
from checkmate.trainer.staging import Batch

from .conftest import Loop


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


class Growing:
    """State of as many bytes as `floats` make, other bytes each time."""

    def __init__(self, floats: int) -> None:
        self.floats, self.taken = floats, 0

    def state_dict(self) -> dict[str, Any]:
        self.taken += 1
        return {"t": torch.full((self.floats,), float(self.taken))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize("retried", [False, True])
def test_an_update_that_raised_is_not_replayed(
    loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, retried: bool
) -> None:
    made = loop().restore()
    made.train()
    module = sys.modules["torch.optim.sgd"]  # torch.optim has no such attribute
    works = module.sgd

    def out_of_memory(*args: Any, **options: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            raise MemoryError
        works(*args, **options)  # the shadow's

    with monkeypatch.context() as patched:
        patched.setattr(module, "sgd", out_of_memory)
        with pytest.raises(MemoryError):
            made.update()
    if retried:
        made.update()
    made.ckpt.step()
    assert made.differing() == []
    made.train()
    assert made.differing() == []
    assert made.ckpt.stats()["step"] == 3


def test_an_update_whose_closure_raised_may_be_tried_again(loop: Callable[..., Loop]) -> None:
    made = loop().restore()
    made.train()
    attempts = 0

    def closure() -> float:
        nonlocal attempts
        attempts += 1
        made.optimizer.zero_grad()
        made.backward()
        if attempts == 1:
            raise MemoryError
        return 0.0

    with pytest.raises(MemoryError):
        made.optimizer.step(closure)
    made.optimizer.step(closure)
    made.ckpt.step()
    assert made.differing() == []
    assert made.ckpt.stats()["merged_steps"] == 0


def test_the_rolling_audit_goes_on_where_state_was_dropped(loop: Callable[..., Loop]) -> None:
    made = loop(adam).restore()
    made.train(3)
    recorder = made.ckpt._recorder
    assert recorder._audit_entry == 3  # the last of this block's: parameter, step and two moments
    param = made.ckpt._shadowed.params[recorder._audit_block]
    param.requires_grad_(False)
    del made.optimizer.state[param]
    made.train(4)
    assert made.differing() == []
    assert made.ckpt.stats()["state"] == "streaming"


def test_parts_take_staging_memory_and_two_steps_always_fit(
    loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = Growing(1 << 16)
    made = loop(stateful={"s": sidecar}, staging_bytes=1).restore()
    goes_on = threading.Event()

    def held(self: Batch, incarnation: bytes, rank: int) -> Iterator[Any]:
        assert goes_on.wait(20)
        return iter(())

    monkeypatch.setattr(Batch, "frames", held)
    used = []
    for _ in range(10):
        made.train()
        used.append(made.ckpt.stats()["staging_used_bytes"])
    assert made.ckpt.stats()["gaps"] == 1
    assert used[0] > 4 * sidecar.floats
    assert used[1] > 1.9 * used[0]
    assert max(used) < 2.1 * used[0]
    made.link.give_up(CheckmateError("enough"))
    goes_on.set()
    assert made.link.wait_for(lambda: made.ckpt.stats()["staging_used_bytes"] == 0, 20)


def test_staging_memory_of_parts_is_given_back(loop: Callable[..., Loop]) -> None:
    made = loop(stateful={"s": Growing(1 << 16)}, staging_bytes=1).restore()
    for _ in range(10):
        made.train()
        made.ckpt.wait(timeout=20)
    assert made.ckpt.stats()["gaps"] == 0
    assert made.link.wait_for(lambda: made.link.backlog == 0, 20)
    assert made.ckpt.stats()["staging_used_bytes"] == 0


def test_gradients_that_were_used_are_not_pending(loop: Callable[..., Loop]) -> None:
    made = loop().restore()
    made.train()
    made.ckpt.step()  # a batch that the loop skips, before it clears the gradients
    assert made.ckpt.stats()["step"] == 2
    assert made.ckpt.stats()["merged_steps"] == 0


@pytest.mark.parametrize("set_to_none", [False, True, None])
def test_gradients_that_grow_are_pending(loop: Callable[..., Loop], set_to_none: bool | None) -> None:
    made = loop().restore()
    made.train()
    if set_to_none is not None:
        made.optimizer.zero_grad(set_to_none=set_to_none)
    made.backward()
    made.ckpt.step()
    assert (made.ckpt.stats()["step"], made.ckpt.stats()["merged_steps"]) == (1, 1)
    made.backward()
    made.optimizer.step()
    made.ckpt.step()
    assert made.ckpt.stats()["step"] == 2
    assert made.differing() == []
