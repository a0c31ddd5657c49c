"""Tensors as bytes, and dtypes by name: what the wire and the memory of a run have in common."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .errors import Mismatch
from .wire.messages import Fingerprint


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


def differs(ours: Fingerprint, theirs: Fingerprint) -> str:
    """Why a trainer and a shadow with these numerics may not give the same bits; "" if they do.

    Threads and denormal mode are not compared: the shadow takes over the trainer's.
    """
    if ours.device != "cpu":
        return f"the trainer's optimizer runs on {ours.device}, the shadow's on the CPU"
    if (ours.torch, ours.capability) != (theirs.torch, theirs.capability):
        return (
            f"trainer and shadow compute differently: torch {ours.torch} ({ours.capability}) and "
            f"{theirs.torch} ({theirs.capability})"
        )
    return ""


def fingerprint(params: Iterable[torch.Tensor] = ()) -> Fingerprint:
    """The numerics of the calling thread, and where the parameters live."""
    denormal = torch.full((1,), 1e-40) * 1.0
    device = next((p.device.type for p in params if p.device.type != "cpu"), "cpu")
    return Fingerprint(
        str(torch.__version__),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        denormal.item() == 0.0,
        device,
    )
