"""Tensors as bytes, and dtypes by name: what the wire and the memory of a run have in common."""

from __future__ import annotations

import torch

from .errors import Mismatch


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``. Raises Mismatch for anything that is not a dtype of this torch."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Mismatch(f"this torch has no dtype {name!r}")
    return dtype


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense contiguous CPU tensor, as writable bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order, on the host: its own memory where that already is so, else a copy."""
    return bytes_of(tensor.detach().cpu().contiguous())
