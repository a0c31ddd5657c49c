"""Finds what was changed outside the optimizer: clamped weights, pruning, ``load_state_dict`` in mid-run.

After each update, and again before the next, every parameter and optimizer state tensor is looked at: its address, its
version counter and, for parameters on the CPU, a sample of its values, because ``p.data.clamp_()`` escapes the counter.
Parameters of up to `SAMPLE` elements are sampled whole. What touches only few elements of a large one through ``.data``
is left for the rolling audit to find.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

SAMPLE = 512

#: Integers of the same width, to compare bits: NaN differs from itself.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Look = list[tuple[int, int, int]]


class Watch:
    """Looks at `params` (by block number) and at their state in the optimizer that has them, if any."""

    def __init__(self, params: Sequence[torch.Tensor], optimizer_of: Sequence[torch.optim.Optimizer | None]) -> None:
        self._params = params
        self._optimizer_of = list(optimizer_of)
        self._looks: list[Look] = [[] for _ in params]
        self._views: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * len(params)
        self._samples: dict[tuple[int, ...], torch.Tensor] = {}  #: disjoint groups of blocks, each sampled into one
        self.mark(range(len(params)))

    def adopt(self, block: int, optimizer: torch.optim.Optimizer) -> None:
        """The block belongs to this optimizer from now on."""
        self._optimizer_of[block] = optimizer

    def mark(self, blocks: Iterable[int]) -> None:
        """What these blocks hold now is known to the shadow, or will be by replay."""
        group = tuple(blocks)
        for block in group:
            look = self._look(block)
            if not self._looks[block] or self._looks[block][0][:2] != look[0][:2]:
                self._views[block] = _view(self._params[block].detach())
            self._looks[block] = look
        if group not in self._samples:
            self._regroup(set(group))
        self._samples[group] = self._sample(group)

    def _regroup(self, taken: set[int]) -> None:
        """Keep groups disjoint. What stays of a group that is cut is as it was marked."""
        for group in [g for g in self._samples if taken.intersection(g)]:
            pieces = self._split(group, self._samples.pop(group))
            if rest := tuple(block for block in group if block not in taken):
                self._samples[rest] = torch.cat([pieces[block] for block in rest])

    def changed(self) -> set[int]:
        """Blocks that differ from what was marked."""
        found = {block for block, look in enumerate(self._looks) if look != self._look(block)}
        for group, then in self._samples.items():
            now = self._sample(group)
            if not torch.equal(now, then):
                before, after = self._split(group, then), self._split(group, now)
                found.update(block for block in group if not torch.equal(before[block], after[block]))
        return found

    def _look(self, block: int) -> Look:
        param = self._params[block]
        look = [(id(param), param.data_ptr(), param._version)]
        optimizer = self._optimizer_of[block]
        if optimizer is not None and param in optimizer.state:
            for value in optimizer.state[param].values():
                if isinstance(value, torch.Tensor):
                    look.append((id(value), value.data_ptr(), value._version))
        return look

    def _sample(self, group: tuple[int, ...]) -> torch.Tensor:
        return torch.cat([self._views[block] for block in group]) if group else torch.empty(0)

    def _split(self, group: tuple[int, ...], joined: torch.Tensor) -> dict[int, torch.Tensor]:
        return dict(zip(group, joined.split([len(self._views[block]) for block in group]), strict=True))


def _view(param: torch.Tensor) -> torch.Tensor:
    """Evenly spread elements as integers, sharing the memory; none where a look would cost a device sync."""
    if param.device.type != "cpu" or param.numel() == 0 or param.element_size() not in _BITS:
        return torch.empty(0, dtype=torch.uint8)
    every = -(-param.numel() // SAMPLE)
    dense = param if param.is_contiguous() else param.as_strided((param.numel(),), (1,), param.storage_offset())
    return dense.view(-1)[::every].view(_BITS[param.element_size()])
