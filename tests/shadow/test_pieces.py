"""Replay in pieces gives the bits of replay in one; the table of combinations for which it does is derived here."""

from __future__ import annotations

import itertools

import pytest
import torch

from checkmate.invariant import DTYPES, INVARIANT
from checkmate.shadow import pieces as module
from checkmate.shadow.pieces import Pieces, may_cut
from checkmate.tensors import dtype_of

VARIANTS: dict[str, list[dict[str, object]]] = {
    "ASGD": [{}, {"weight_decay": 0.01, "t0": 2}],
    "Adadelta": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}],
    "Rprop": [{}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}],
}
CASES = [(name, options) for name, variants in VARIANTS.items() for options in variants]


def train(
    name: str, options: dict[str, object], dtype: torch.dtype, seed: int, piece: int | None
) -> tuple[torch.nn.Parameter, dict[str, object]]:
    """Six steps of one parameter, whole (piece None) or in pieces of so many elements."""
    generator = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(37, 19, generator=generator).to(dtype))
    optimizer = getattr(torch.optim, name)([param], lr=0.01, **options)
    cut = Pieces(optimizer)
    for _ in range(6):
        param.grad = torch.randn(37, 19, generator=generator).to(dtype)
        optimizer.param_groups[0]["params"] = parts = [param] if piece is None else cut.of(param)
        optimizer.step()
        if parts[0] is not param:
            cut.collect(param)
    return param, optimizer.state[param]


def same(a: tuple[torch.nn.Parameter, dict[str, object]], b: tuple[torch.nn.Parameter, dict[str, object]]) -> bool:
    state = all(
        torch.equal(a[1][key], b[1][key]) if torch.is_tensor(a[1][key]) else a[1][key] == b[1][key]  # type: ignore[arg-type]
        for key in a[1]
    )
    return a[1].keys() == b[1].keys() and state and torch.equal(a[0], b[0])


def test_every_invariant_optimizer_is_tried() -> None:
    assert set(VARIANTS) == INVARIANT


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("dtype", [dtype_of(name) for name in sorted(DTYPES)], ids=str)
def test_pieces_of_any_size_give_the_bits_of_the_whole(
    name: str, options: dict[str, object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, piece in itertools.product((0, 1), (1, 7, 64, 333)):
        monkeypatch.setattr(module, "PIECE", piece)
        assert same(train(name, options, dtype, seed, None), train(name, options, dtype, seed, piece)), (seed, piece)


def test_a_step_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 64)
    monkeypatch.setattr(Pieces, "collect", lambda self, param: None)  # step counts stay behind
    assert not same(train("AdamW", {}, torch.float32, 0, None), train("AdamW", {}, torch.float32, 0, 64))


def test_half_precision_would_change_bits_in_fused_kernels() -> None:
    """Why bfloat16 is not in the table: a fused loop's vector body and scalar tail round differently."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(4099, generator=generator).bfloat16()
    grads = [torch.randn(4099, generator=generator).bfloat16() for _ in range(5)]
    results = []
    for cuts in ([0, 4099], [0, 1001, 4099]):
        params = [torch.nn.Parameter(start[a:b].clone()) for a, b in itertools.pairwise(cuts)]
        optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)
        for grad in grads:
            for param, (a, b) in zip(params, itertools.pairwise(cuts), strict=True):
                param.grad = grad[a:b].clone()
            optimizer.step()
        results.append(torch.cat([param.detach() for param in params]))
    assert not torch.equal(*results)
    assert "bfloat16" not in DTYPES


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_multi_tensor_steps_are_not_cut(flag: str) -> None:
    param = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.AdamW([param], **{flag: True})
    assert not may_cut(optimizer, optimizer.param_groups[0])
    assert may_cut(torch.optim.AdamW([param]), torch.optim.AdamW([param]).param_groups[0])


def test_subclasses_and_whole_tensor_optimizers_are_not_cut() -> None:
    class Mine(torch.optim.AdamW):
        pass

    param = torch.nn.Parameter(torch.zeros(8, 8))
    for optimizer in (Mine([param]), torch.optim.Adafactor([param]), torch.optim.Muon([param])):
        assert not may_cut(optimizer, optimizer.param_groups[0])


def in_rows(cuts: list[int], name: str, dtype: torch.dtype, **flags: bool) -> list[torch.Tensor]:
    """Parameter and optimizer state after six steps, each range of rows a parameter of its own; put together again."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(37, 19, generator=generator).to(dtype)
    params = [torch.nn.Parameter(start[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    try:
        optimizer = getattr(torch.optim, name)(params, lr=0.01, **flags)
    except (TypeError, RuntimeError):
        pytest.skip(f"torch has no {name} with {flags}")
    for _ in range(6):
        grad = torch.randn(37, 19, generator=generator).to(dtype)
        for param, (a, b) in zip(params, itertools.pairwise(cuts), strict=True):
            param.grad = grad[a:b].clone()
        optimizer.step()
    states = [optimizer.state[param] for param in params]
    spread = [torch.cat([s[k] for s in states]) for k, v in states[0].items() if torch.is_tensor(v) and v.dim()]
    return [torch.cat([param.detach() for param in params]), *spread]


@pytest.mark.parametrize("flag", ["foreach", "fused"])
@pytest.mark.parametrize("name", sorted(INVARIANT))
@pytest.mark.parametrize("dtype", [dtype_of(name) for name in sorted(DTYPES)], ids=str)
def test_rows_cut_at_cache_lines_give_the_bits_of_the_whole(name: str, flag: str, dtype: torch.dtype) -> None:
    """As partitions hold them, whichever kernels the trainer uses."""
    whole, cut = (in_rows(cuts, name, dtype, **{flag: True}) for cuts in ([0, 37], [0, 16, 32, 37]))
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_rows_cut_elsewhere_do_not_where_a_kernel_is_fused() -> None:
    """The second moment of fused Adam differs in odd elements at the end of a tensor, in float32 too."""
    whole, cut = (in_rows(cuts, "Adam", torch.float32, fused=True) for cuts in ([0, 37], [0, 1, 18, 37]))
    assert not all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
