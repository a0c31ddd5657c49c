"""What was a gradient multiplied by, between the collective and the optimizer? Clipping and unscaling do that."""

from __future__ import annotations

import math

import torch

#: Bits of the significand, the leading one included.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE = 4096


def find_factor(sent: torch.Tensor, used: torch.Tensor, guess: float = 1.0) -> float | None:
    """A number by which ``sent.mul(number)`` gives `used` bit for bit; None if there is none.

    `guess` is tried first, and 1.0 means that nothing is multiplied. Both tensors are one-dimensional, of the same
    floating dtype and length. What fails on a sample is not tried on all.
    """
    step = max(1, len(sent) // _SAMPLE)
    some, some_used = sent[::step], used[::step]
    if _fits(some, some_used, guess) and _fits(sent, used, guess):
        return guess
    if sent.dtype not in _DIGITS:
        return None
    if step > 1 and int(some.count_nonzero()) < _SAMPLE // 4:  # too few say what the factor is
        found = sent.nonzero().view(-1)
        found = found[:: max(1, len(found) // _SAMPLE)]
        some, some_used = sent[found], used[found]
    there = some != 0
    for factor in _candidates(some[there].double(), some_used[there].double(), sent.dtype):
        if _fits(some, some_used, factor) and _fits(sent, used, factor):
            return factor
    return None


def _fits(sent: torch.Tensor, used: torch.Tensor, factor: float) -> bool:
    return same_bits(sent if factor == 1.0 else sent.mul(factor), used)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal as bytes: NaN is itself, and zero is not minus zero."""
    bits = _BITS.get(a.element_size())
    return torch.equal(a, b) if bits is None else torch.equal(a.view(bits), b.view(bits))


def _candidates(sent: torch.Tensor, used: torch.Tensor, dtype: torch.dtype) -> list[float]:
    """What would round to these values: float32 at most, for torch multiplies half precision by that."""
    sent, used = sent[used.isfinite()], used[used.isfinite()]
    if not len(used):
        return []
    exponent = torch.where(used == 0, -2000, torch.frexp(used)[1])
    half_ulp = torch.exp2((exponent - _DIGITS[dtype] - 1).double())
    limits = torch.finfo(dtype)
    half_ulp.clamp_(min=limits.tiny * limits.eps / 2)  # subnormal numbers lie at equal distances
    ends = torch.stack([(used - half_ulp) / sent, (used + half_ulp) / sent])
    low, high = float(ends.amin(0).max()), float(ends.amax(0).min())
    found: dict[float, None] = {}
    for value in ((low + high) / 2, low, high):  # the ends belong to it if the ties there round the right way
        exact = value if dtype is torch.float64 else float(torch.tensor(value, dtype=torch.float32))
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        around = torch.nextafter(torch.tensor([exact] * 2, dtype=kind), torch.tensor([-math.inf, math.inf], dtype=kind))
        found.update(dict.fromkeys([exact, *around.tolist()]))
    return [value for value in found if math.isfinite(value)]
