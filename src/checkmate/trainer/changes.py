"""Finds what was changed outside the optimizer: clamped weights, pruning, ``load_state_dict`` in mid-run.

After each update, and again before the next, every parameter and optimizer state tensor is looked at: its address, its
version counter and, for parameters on the CPU, a sample of its values, because ``p.data.clamp_()`` escapes the counter.
Parameters of up to `SAMPLE` elements are sampled whole. What touches only few elements of a large one through ``.data``
is left for the rolling audit to find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

SAMPLE = 512

#: Integers of the same width, to compare bits: NaN differs from itself.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """Looks at `params` (by block number) and at their state in the optimizer that has them, if any."""

    def __init__(self, params: Mapping[int, torch.Tensor], optimizer_of: Mapping[int, torch.optim.Optimizer]) -> None:
        self._params = params
        self._optimizer_of = dict(optimizer_of)
        self._looks: dict[tuple[int, ...], _Look] = {}
        self.mark(params)

    def adopt(self, block: int, optimizer: torch.optim.Optimizer) -> None:
        """The block belongs to this optimizer from now on."""
        self._optimizer_of[block] = optimizer

    def mark(self, blocks: Iterable[int]) -> None:
        """What these blocks hold now is known to the shadow, or will be by replay."""
        group = tuple(blocks)
        if group not in self._looks:
            self._separate(group)
        self._looks[group] = self._look(group, self._looks.get(group))

    def mark_all(self) -> None:
        for group in self._looks:
            self._looks[group] = self._look(group, self._looks[group])

    def changed(self) -> set[int]:
        """Blocks that differ from what was marked."""
        found: set[int] = set()
        for group, then in self._looks.items():
            now = self._look(group, then)
            if now.facts != then.facts or not torch.equal(now.sample, then.sample):
                for block, (facts, sample), (old, was) in zip(group, now.blocks(), then.blocks(), strict=True):
                    if facts != old or not torch.equal(sample, was):
                        found.add(block)
        return found

    def _separate(self, group: tuple[int, ...]) -> None:
        """Blocks are in one group each. Those that lose members are looked at again, just after `changed` was asked."""
        taken = set(group)
        for old in [old for old in self._looks if taken.intersection(old)]:
            del self._looks[old]
            if rest := tuple(block for block in old if block not in taken):
                self._looks[rest] = self._look(rest, None)

    def _look(self, group: tuple[int, ...], last: _Look | None) -> _Look:
        params = [self._params[block] for block in group]
        counts, entries = [], []
        for block, param in zip(group, params, strict=True):
            optimizer = self._optimizer_of.get(block)
            state = optimizer.state.get(param, ()) if optimizer is not None else ()
            counts.append(len(state))
            if state:
                entries += state.values()
        facts = [
            [param.data_ptr() for param in params],
            [param._version for param in params],
            counts,
            list(map(id, entries)),
            [entry._version if isinstance(entry, torch.Tensor) else 0 for entry in entries],
        ]
        views = last.views if last is not None and last.facts[0] == facts[0] else [_view(p.detach()) for p in params]
        return _Look(facts, views, torch.cat(views) if views else torch.empty(0))


class _Look(NamedTuple):
    """What a group of blocks looked like. Few lists, however many blocks: each is work for the garbage collector."""

    facts: list[list[int]]  #: address, version, number of state entries of each block; identity, version of each entry
    views: list[torch.Tensor]
    sample: torch.Tensor

    def blocks(self) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
        """One block after the other: its facts, and its part of the sample."""
        addresses, versions, counts, ids, entry_versions = self.facts
        samples = self.sample.split([len(view) for view in self.views])
        first = 0
        for address, version, count, sample in zip(addresses, versions, counts, samples, strict=True):
            entries = slice(first, first + count)
            first += count
            yield (address, version, ids[entries], entry_versions[entries]), sample


def _view(param: torch.Tensor) -> torch.Tensor:
    """Evenly spread elements as integers, sharing the memory; none where a look would cost a device sync."""
    if param.device.type != "cpu" or param.numel() == 0 or param.element_size() not in _BITS:
        return torch.empty(0, dtype=torch.uint8)
    every = -(-param.numel() // SAMPLE)
    dense = param if param.is_contiguous() else param.as_strided((param.numel(),), (1,), param.storage_offset())
    return dense.view(-1)[::every].view(_BITS[param.element_size()])
