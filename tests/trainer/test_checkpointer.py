"""The `Checkpointer` beside odd users."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkmate import Unreachable, UsageError
from checkmate.shadow.daemon import Daemon

from .conftest import RUN, Loop


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_an_optimizer_without_a_learning_rate_may_step_before_restore(loop: Callable[..., Loop]) -> None:
    made = loop(WithoutRate)
    made.update()
    with pytest.raises(UsageError, match="after training has begun"):
        made.ckpt.restore()


def test_wait_says_at_once_that_state_travels_with_further_steps(
    loop: Callable[..., Loop], daemon_address: tuple[Daemon, str]
) -> None:
    made = loop().restore()
    made.train(3)
    assert made.ckpt.wait(timeout=20) == 3
    run = daemon_address[0].runs[RUN]
    with run.changed:
        assert run.partition is not None
        run._perform(run.partition.end_epoch("as the test wants it"))
    assert made.link.wait_for(lambda: made.link.wanted > 1, 20)
    made.train()  # of which the shadow gets nothing
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"step 4 is not safe .*call step\(\) on all ranks.* resume at step 3"):
        made.ckpt.wait(timeout=60)
    assert time.monotonic() - began < 30
    assert made.ckpt.stats()["state"] in ("anchoring", "degraded")
    for _ in range(100):  # without an update
        made.ckpt.step()
        if made.ckpt.stats()["state"] == "streaming":
            break
        time.sleep(0.05)
    assert made.ckpt.wait(timeout=20) == made.ckpt.stats()["step"]
    assert made.differing() == []
