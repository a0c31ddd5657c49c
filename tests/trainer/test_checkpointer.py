"""The `Checkpointer` beside odd users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkmate import UsageError

from .conftest import Loop


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
