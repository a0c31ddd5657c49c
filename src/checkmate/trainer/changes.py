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

Look = tuple[tuple[int, int, int], ...]


class Watch:
    """Looks at `params` (by block number) and at their state in the optimizer that has them, if any."""

    def __init__(self, params: Sequence[torch.Tensor], optimizer_of: Sequence[torch.optim.Optimizer | None]) -> None:
        self._params = params
        self._optimizer_of = list(optimizer_of)
        self._looks: list[Look] = [()] * len(params)
        self._views: dict[int, tuple[int, torch.Tensor]] = {}
        self._samples: dict[
            tuple[int, ...], torch.Tensor
        ] = {}  #: disjoint groups of blocks, each sampled into one tensor
        self.mark(range(len(params)))

    def adopt(self, block: int, optimizer: torch.optim.Optimizer) -> None:
        """The block belongs to this optimizer from now on."""
        self._optimizer_of[block] = optimizer

    def mark(self, blocks: Iterable[int]) -> None:
        """What these blocks hold now is known to the shadow, or will be by replay."""
        group = tuple(blocks)
        for block in group:
            self._looks[block] = self._look(block)
        if group not in self._samples:
            self._regroup(set(group))
        self._samples[group] = self._sample(group)

    def _regroup(self, taken: set[int]) -> None:
        """Keep groups disjoint. What stays of a group that is cut is as it was marked."""
        for group in [g for g in self._samples if taken.intersection(g)]:
            sizes = [self._size(block) for block in group]
            pieces = dict(zip(group, self._samples.pop(group).split(sizes), strict=True))
            if rest := tuple(block for block in group if block not in taken):
                self._samples[rest] = torch.cat([pieces[block] for block in rest])

    def changed(self) -> set[int]:
        """Blocks that differ from what was marked."""
        found = {block for block, look in enumerate(self._looks) if look != self._look(block)}
        for group, then in self._samples.items():
            now = self._sample(group)
            if now.shape == then.shape and torch.equal(now, then):
                continue
            sizes = [self._size(block) for block in group]
            if now.shape == then.shape:
                pairs = zip(group, now.split(sizes), then.split(sizes), strict=True)
                found.update(block for block, a, b in pairs if not torch.equal(a, b))
            else:
                found.update(group)
        return found

    def _look(self, block: int) -> Look:
        param = self._params[block]
        optimizer = self._optimizer_of[block]
        tensors = [param]
        if optimizer is not None and param in optimizer.state:
            tensors += [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
        return tuple((id(t), t.data_ptr(), t._version) for t in tensors)

    def _size(self, block: int) -> int:
        view = self._view(block)
        return 0 if view is None else view.numel()

    def _sample(self, group: tuple[int, ...]) -> torch.Tensor:
        views = [view for block in group if (view := self._view(block)) is not None]
        return torch.cat(views) if views else torch.empty(0, dtype=torch.uint8)

    def _view(self, block: int) -> torch.Tensor | None:
        """Evenly spread elements as integers, sharing the memory; None where it would cost a device sync."""
        param = self._params[block].detach()
        if param.device.type != "cpu" or param.numel() == 0 or param.element_size() not in _BITS:
            return None
        cached = self._views.get(block)
        if cached is None or cached[0] != param.data_ptr():
            every = -(-param.numel() // SAMPLE)
            dense = param if param.is_contiguous() else param.as_strided((param.numel(),), (1,), param.storage_offset())
            bits = dense.view(-1)[::every].view(_BITS[param.element_size()])
            cached = self._views[block] = (param.data_ptr(), bits)
        return cached[1]
