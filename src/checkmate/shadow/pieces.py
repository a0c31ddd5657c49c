"""Replay in pieces that fit the cache: an element-wise optimizer's for-loop makes a dozen passes over each parameter.

Cutting is done only where it cannot change a bit: for the combinations of `invariant`, which a test derives anew. What
is cut is memory, not state: a piece is a view into the parameter, with views into its optimizer state. State that is
one number for the whole parameter (``step``) is given to each piece as a copy, and taken back from the first.
"""

from __future__ import annotations

from typing import Any

import torch

from ..invariant import DTYPES, INVARIANT
from ..tensors import dtype_name

#: Elements per piece: parameter, gradient and two states of float32 fill one megabyte.
PIECE = 1 << 16


def may_cut(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether this group's step is a loop over parameters (not one pass over all of them) and invariant."""
    cls = type(optimizer)
    plain = not any(group.get(flag) for flag in ("foreach", "fused", "capturable", "differentiable"))
    return plain and cls.__name__ in INVARIANT and getattr(torch.optim, cls.__name__) is cls


class Pieces:
    """The pieces of one optimizer's parameters, kept from step to step while memory stays where it is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._cut: dict[torch.nn.Parameter, tuple[list[int], list[torch.nn.Parameter]]] = {}

    def of(self, param: torch.nn.Parameter) -> list[torch.nn.Parameter]:
        """What to step instead of `param`, with gradients set; `param` itself where it is not to be cut."""
        state = self._optimizer.state.get(param)
        if (
            param.numel() < 2 * PIECE
            or dtype_name(param.dtype) not in DTYPES
            or not state
            or any(v is None for v in state.values())
        ):
            return [param]  # small, or of a kind that rounds by position, or with state that this step will create
        assert param.grad is not None
        where = [param.data_ptr(), *(value.data_ptr() for value in state.values() if torch.is_tensor(value))]
        if param not in self._cut or self._cut[param][0] != where:
            self.forget(param)
            self._cut[param] = (where, self._make(param, state))
        pieces = self._cut[param][1]
        for piece, grad in zip(pieces, param.grad.view(-1).split(PIECE), strict=True):
            piece.grad = grad
        for key, value in state.items():
            if not _spread(value, param):
                for piece in pieces:
                    self._optimizer.state[piece][key] = value.clone() if torch.is_tensor(value) else value
        return pieces

    def _make(self, param: torch.nn.Parameter, state: dict[str, Any]) -> list[torch.nn.Parameter]:
        pieces = [torch.nn.Parameter(view) for view in param.detach().view(-1).split(PIECE)]
        spread = {k: v.view(-1).split(PIECE) for k, v in state.items() if _spread(v, param)}
        for number, piece in enumerate(pieces):
            self._optimizer.state[piece] = {key: views[number] for key, views in spread.items()}
        return pieces

    def collect(self, param: torch.nn.Parameter) -> None:
        """After the step: what is one number for all pieces becomes the parameter's."""
        pieces = self._cut[param][1]
        state, first = self._optimizer.state[param], self._optimizer.state[pieces[0]]
        for key, value in first.items():
            if not _spread(state.get(key), param):
                if torch.is_tensor(value):
                    state[key].copy_(value)
                else:
                    state[key] = value
        for piece in pieces:
            piece.grad = None

    def forget(self, param: torch.nn.Parameter) -> None:
        """This parameter's memory is another one now."""
        for piece in self._cut.pop(param, ([], []))[1]:
            self._optimizer.state.pop(piece, None)


def _spread(value: Any, param: torch.nn.Parameter) -> bool:
    return torch.is_tensor(value) and value.shape == param.shape and value.is_contiguous()
