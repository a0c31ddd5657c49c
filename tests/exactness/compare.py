"""Equality to the bit, of everything that the next step of a training run depends on."""

from __future__ import annotations

import collections
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device)
_SEQUENCES = (list, tuple, collections.deque)


def differences(expected: object, found: object) -> list[str]:
    """Paths at which two nested values differ, each with what is there; empty for equal ones.

    Classes, dtypes and shapes count, and so do the bits of a NaN and the sign of a zero. What does not: the order of
    a dict's keys, and how a tensor lies in memory.
    """
    ours, theirs = dict(_leaves(expected, "")), dict(_leaves(found, ""))
    differing = (path for path in ours.keys() | theirs.keys() if _key(ours.get(path)) != _key(theirs.get(path)))
    return [f"{path}: expected {_show(ours, path)}, found {_show(theirs, path)}" for path in sorted(differing)]


def paths(differing: Iterable[str]) -> list[str]:
    """Of what `differences` returned, the paths alone."""
    return [text.partition(": expected ")[0] for text in differing]


class _Class:
    """Stands for a container beside its members, so that an empty list differs from an empty tuple."""

    def __init__(self, value: Any) -> None:
        self.key = (type(value).__name__, len(value))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield f"{path}{{}}", _Class(value)
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, _SEQUENCES):
        yield f"{path}[]", _Class(value)
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _key(leaf: Any) -> Any:
    if isinstance(leaf, _Class):
        return leaf.key
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype, leaf.shape, leaf.tobytes()
    if isinstance(leaf, float):
        return "float", struct.pack("d", leaf)
    if isinstance(leaf, _PLAIN):
        return type(leaf).__name__, leaf
    raise TypeError(f"no rule to compare a {type(leaf).__name__}")


def _show(leaves: dict[str, Any], path: str) -> str:
    if path not in leaves:
        return "nothing"
    leaf = leaves[path]
    if isinstance(leaf, torch.Tensor):
        values = leaf.detach().reshape(-1)[:4].tolist()
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} {values}{'…' if leaf.numel() > 4 else ''}"
    return str(leaf.key) if isinstance(leaf, _Class) else repr(leaf)[:80]
