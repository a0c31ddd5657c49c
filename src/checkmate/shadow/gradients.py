"""The gradients of one step, put together from where they arrived: sent for an update, or copied by the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from ..layout import Layout
from ..wire.frames import Kind
from ..wire.messages import Part, Shard
from .buffers import Key
from .replay import empty_like


class Gradients:
    """Called with the number of an update and a block, gives that gradient; once for each, in any order."""

    def __init__(self, layout: Layout, parts: Mapping[int, Part], tensors: Mapping[Key, torch.Tensor]) -> None:
        self._layout, self._tensors = layout, tensors
        self._shards: dict[tuple[int, int], list[Shard]] = {}
        for part in parts.values():
            for number, update in enumerate(part.updates):
                for shard in update.shards or ():
                    self._shards.setdefault((number, shard.block), []).append(shard)
        #: In how many updates each copy by the network is still to be used.
        self._uses = Counter(
            key for shards in self._shards.values() for key in {_source(shard) for shard in shards if shard.round}
        )

    def __call__(self, number: int, block: int) -> torch.Tensor:
        sent = self._tensors.get((Kind.GRAD, block, number, False))
        shards = self._shards.get((number, block), [])
        copied = {_source(shard) for shard in shards if shard.round}
        if not copied:
            return sent if sent is not None else empty_like(self._layout.blocks[block])
        whole = self._tensors[next(iter(copied))]
        self._uses.subtract(copied)
        if any(self._uses[key] for key in copied):
            whole = whole.clone()
        for shard in shards:
            size = whole.element_size()
            mine = slice(shard.offset // size, (shard.offset + shard.nbytes) // size)
            source = self._tensors[_source(shard)] if shard.round else sent
            if source is not None and source is not whole:
                whole.view(-1)[mine] = source.view(-1)[mine]
            if shard.factor != 1.0:
                whole.view(-1)[mine].mul_(shard.factor)
        return whole


def _source(shard: Shard) -> Key:
    return (Kind.GRAD, shard.block, shard.update, True)
