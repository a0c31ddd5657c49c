"""The factor between what a collective brought and what the optimizer used is found, and only where it is one."""

from __future__ import annotations

import random

import pytest
import torch

from checkmate.trainer.factor import find_factor, same_bits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SEED = random.SystemRandom().randrange(2**32)


@pytest.fixture(params=DTYPES, ids=str)
def sent(request: pytest.FixtureRequest) -> torch.Tensor:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    return (torch.randn(20_000, dtype=torch.float64) * 0.01).to(request.param)


@pytest.mark.parametrize("factor", [1.0, 0.3, 1 / 3, 0.9999, 1 / 64, 7.25, -2.0])
def test_a_factor_is_found(sent: torch.Tensor, factor: float) -> None:
    used = sent * factor
    found = find_factor(sent, used)
    assert found is not None
    assert same_bits(sent.mul(found), used)


def test_the_factor_of_clip_grad_norm_is_found(sent: torch.Tensor) -> None:
    param = torch.nn.Parameter(torch.zeros_like(sent))
    param.grad = sent.clone()
    torch.nn.utils.clip_grad_norm_([param], 0.37)
    assert not same_bits(sent, param.grad)
    found = find_factor(sent, param.grad)
    assert found is not None
    assert same_bits(sent.mul(found), param.grad)


def test_unscaling_and_clipping_together_are_one_factor(sent: torch.Tensor) -> None:
    used = (sent * 1024.0) * (1 / 1024.0) * 0.7
    assert find_factor(sent, used) is not None


@pytest.mark.parametrize("at", [0, 1, 12_345, 19_999])
def test_one_other_bit_in_one_element_is_no_factor(sent: torch.Tensor, at: int) -> None:
    used = sent * 0.5
    used.view(torch.uint8)[at * sent.element_size()] ^= 1
    assert find_factor(sent, used) is None


def test_what_is_no_multiple_is_none(sent: torch.Tensor) -> None:
    assert find_factor(sent, sent.clamp(-0.005, 0.005)) is None
    assert find_factor(sent, sent + 0.001) is None
    assert find_factor(sent, torch.full_like(sent, float("nan"))) is None


def test_zeros_and_guesses(sent: torch.Tensor) -> None:
    zeros = torch.zeros_like(sent)
    assert find_factor(zeros, zeros) == 1.0
    assert find_factor(zeros, -zeros) == -1.0 or find_factor(zeros, -zeros) is None
    assert find_factor(sent, zeros) in (0.0, None)
    assert find_factor(sent, sent * 0.25, guess=0.25) == 0.25
    assert find_factor(sent[:0], sent[:0]) == 1.0


def test_where_denormals_are_flushed_what_was_multiplied_by_one_is_not_what_was_sent() -> None:
    sent = torch.tensor([1.0, 1e-40, 2.0])
    torch.set_flush_denormal(True)
    try:
        assert find_factor(sent, sent.mul(1.0)) is None
        assert find_factor(sent, sent.clone()) == 1.0  # the negative control
    finally:
        torch.set_flush_denormal(False)


def test_factor_of_a_gradient_that_is_nearly_all_zeros() -> None:
    sent = torch.zeros(1 << 16)
    sent[torch.arange(77, 1 << 16, 501)] = torch.rand(131, generator=torch.Generator().manual_seed(1)) + 0.5
    found = find_factor(sent, sent.mul(0.123))
    assert found is not None
    assert same_bits(sent.mul(found), sent.mul(0.123))
