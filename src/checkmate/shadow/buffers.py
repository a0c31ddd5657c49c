"""Where gradients and anchors land, until their step is applied. Guarded by the run's `changed`."""

from __future__ import annotations

import torch

from ..errors import ProtocolError
from ..tensors import bytes_of, dtype_of
from ..wire.frames import Header, Kind
from ..wire.messages import Anchor
from .partition import Partition
from .replay import empty_like

#: Kind of frame, block, then the update that a gradient says it is for, or the entry of an anchor; whether of a round.
Key = tuple[Kind, int, int, bool]


class Buffers:
    """Tensors by step. Those of gradients are used again: to get memory from the system costs as much as to fill it."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[Key, torch.Tensor]] = {}
        self._free: dict[int, list[torch.Tensor]] = {}  #: by block

    def place(self, partition: Partition, header: Header) -> memoryview:
        """The bytes that this frame's payload is for."""
        number = header.update if header.kind is Kind.GRAD else header.entry
        key = (header.kind, header.block, number, header.round > 0)
        tensors = self._steps.setdefault(header.step, {})
        if (tensor := tensors.get(key)) is None:
            if header.kind is Kind.GRAD:
                free = self._free.get(header.block)
                tensor = free.pop() if free else empty_like(partition.layout.blocks[header.block])
            else:
                tensor = of_entry(*partition.anchor(header))
            tensors[key] = tensor
        return bytes_of(tensor)[header.offset : header.offset + header.length]

    def of(self, step: int) -> dict[Key, torch.Tensor]:
        """All of one step."""
        return self._steps.get(step, {})

    def drop(self, step: int, void: bool) -> None:
        """The step is applied, or never will be. Anchors are part of the state now, or of nothing.

        Memory of a void step is not used again: the rest of a frame may still come into it.
        """
        for (kind, block, _, _), tensor in self._steps.pop(step, {}).items():
            if kind is Kind.GRAD and not void:
                self._free.setdefault(block, []).append(tensor)

    def clear(self) -> None:
        self._steps.clear()
        self._free.clear()

    @property
    def nbytes(self) -> int:
        tables = [*(tensors.values() for tensors in self._steps.values()), *self._free.values()]
        return sum(tensor.nbytes for table in tables for tensor in table)


def of_entry(anchor: Anchor, entry: int) -> torch.Tensor:
    """Uninitialised memory for one entry of an anchor. Raises ProtocolError where its shape and bytes do not agree."""
    described = anchor.entries[entry]
    tensor = torch.empty(described.sizes, dtype=dtype_of(described.dtype))
    if tensor.nbytes != described.nbytes:
        raise ProtocolError(f"anchor of block {anchor.block}: entry {entry} is not {described.nbytes} bytes")
    return tensor
