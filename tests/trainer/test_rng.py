"""State of random number generators: read by value, carried as plain values, written back to the bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from checkmate import values
from checkmate.trainer import rng


def draw() -> list[Any]:
    """From each global generator; gauss and normal keep half of a pair for later, which is state too."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.normal()),
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
    ]


def seed(n: int) -> None:
    random.seed(n)
    np.random.seed(n)
    torch.manual_seed(n)


def test_global_generators_continue_where_they_were_captured() -> None:
    seed(1)
    draw()
    state = values.dumps(rng.capture())
    wanted = [draw() for _ in range(3)]
    seed(2)
    assert [draw() for _ in range(3)] != wanted  # negative control
    rng.install(values.loads(state))
    assert [draw() for _ in range(3)] == wanted


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_each_global_generator_is_needed(kind: str) -> None:
    """The negative control of the test above: one generator left out is seen in what is drawn."""
    seed(1)
    state = rng.capture()
    wanted = draw()
    seed(2)
    rng.install({**state, kind: rng.capture()[kind]})
    assert draw() != wanted


def test_a_state_shares_no_memory_with_its_generator() -> None:
    state = rng.capture()
    before = values.dumps(state)
    draw()
    torch.rand(1000)
    np.random.rand(1000)
    assert values.dumps(state) == before
    assert values.dumps(rng.capture()) != before


def test_capturing_and_installing_draw_nothing() -> None:
    seed(3)
    wanted = draw()
    seed(3)
    rng.install(rng.capture())
    assert draw() == wanted


OWN = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(4, generator=g).tolist()),
    "python": (lambda: random.Random(1), lambda g: [g.random(), g.gauss(0, 1)]),
    "pcg64": (lambda: np.random.default_rng(1), lambda g: g.random(4).tolist()),
    "philox": (lambda: np.random.Generator(np.random.Philox(1)), lambda g: g.random(4).tolist()),
    "mt19937": (lambda: np.random.RandomState(1), lambda g: g.normal(size=3).tolist()),
}


@pytest.mark.parametrize("kind", OWN)
def test_own_generators_continue_where_they_were_read(kind: str) -> None:
    make, sample = OWN[kind]
    generator = make()
    assert rng.is_generator(generator)
    sample(generator)
    state = values.loads(values.dumps(rng.read(generator)))
    wanted = sample(generator)
    other = make()
    assert sample(other) != wanted
    rng.write(other, state)
    assert sample(other) == wanted


def test_what_has_no_state_is_no_generator() -> None:
    assert not any(map(rng.is_generator, [random.SystemRandom(), random, np.random, None, 7, torch.rand]))


def test_a_state_without_cuda_and_one_with_it_install_here() -> None:
    seed(4)
    state = {**rng.capture(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 9}
    state.pop("cuda") if torch.cuda.is_available() else None
    wanted = draw()
    rng.install(state)
    assert draw() == wanted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_cuda_device_continues_where_it_was_captured() -> None:
    devices = range(torch.cuda.device_count())
    torch.cuda.manual_seed_all(1)
    state = values.loads(values.dumps(rng.capture()))
    wanted = [torch.rand(4, device=device).tolist() for device in devices]
    assert [torch.rand(4, device=device).tolist() for device in devices] != wanted
    rng.install(state)
    assert [torch.rand(4, device=device).tolist() for device in devices] == wanted
