"""The step tap: tells when an optimizer really steps, and takes its gradients as it will use them.

The step pre-hook runs after clipping, ``unscale_``, accumulation and schedulers. With ``optimizer.step(closure)`` the
backward runs inside the step, so there the closure is wrapped and the gradient taken when it returns.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import Unsupported, UsageError

_tapped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def check_untapped(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises UsageError if one of these is attached already: every update would count twice."""
    for optimizer in optimizers:
        if optimizer in _tapped:
            raise UsageError(
                f"this {type(optimizer).__name__} is attached already; close() the other Checkpointer first"
            )


class Tap:
    """Hooks of one optimizer. `before` is called once per update, when its gradients are final; `after`, when it is
    over.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        _tapped.add(optimizer)
        self.optimizer = optimizer
        self._before, self._after = before, after
        self._depth = 0
        self._pre = optimizer.register_step_pre_hook(
            torch._dynamo.disable(self._pre_hook) if _dynamo_loaded() else self._pre_hook
        )
        self._post = optimizer.register_step_post_hook(self._post_hook)
        # Before the user's: what theirs change, replay will not.
        posts: OrderedDict[int, Any] = optimizer._optimizer_step_post_hooks  # type: ignore[assignment]
        posts.move_to_end(self._post.id, last=False)

    def _pre_hook(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._depth += 1
        if self._depth > 1:  # a subclass that calls super().step(): the outermost call is the update
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._before()
            return None
        calls = 0

        def wrapped() -> Any:
            nonlocal calls
            loss = closure()
            calls += 1
            if calls > 1:
                raise Unsupported(
                    f"{type(optimizer).__name__} called its closure {calls} times in one step; that cannot be replayed"
                )
            self._before()
            return loss

        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _post_hook(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._after()

    def settle(self) -> bool:
        """Between steps: False if one has raised, so that what `before` was told may not have happened."""
        ended, self._depth = self._depth == 0, 0
        return ended

    def move_last(self) -> bool:
        """Between steps: other pre-hooks, which may edit gradients, go before ours. False if ours was not last."""
        hooks: OrderedDict[int, Any] = self.optimizer._optimizer_step_pre_hooks  # type: ignore[assignment]
        if next(reversed(hooks)) == self._pre.id:
            return True
        hooks.move_to_end(self._pre.id)
        return False

    def remove(self) -> None:
        self._pre.remove()
        self._post.remove()
        _tapped.discard(self.optimizer)


def _dynamo_loaded() -> bool:
    return hasattr(torch, "_dynamo")
