"""The comparison that the matrix rests on finds a single flipped bit, wherever it is."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from .cases import CASES
from .compare import differences
from .job import Job

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.tensor(1.0), torch.tensor([1.0])),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)),
        (torch.tensor(1, dtype=torch.int32), torch.tensor(1)),
        (torch.empty(0, 2), torch.empty(2, 0)),
        (torch.tensor(1.0), 1.0),
        (torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32), torch.tensor([NAN]).neg()),
        (1.0, 1),
        (True, 1),
        (0.0, -0.0),
        (None, 0),
        ([], ()),
        ([1], [1, 2]),
        ((1, 2), [1, 2]),
        ({"a": 1}, {"a": 1, "b": None}),
        ({}, []),
        ({"a": {}}, {"a": OrderedDict()}),
        ("1", b"1"),
    ],
)
def test_unlike_values_differ(one: object, other: object) -> None:
    assert differences({"x": [one]}, {"x": [other]})
    assert differences({"x": [other]}, {"x": [one]})


def test_like_values_do_not_differ() -> None:
    strided = torch.arange(6.0).view(2, 3).t()
    value = {"a": [strided, NAN, (1, None)], "b": {"c": torch.tensor(NAN), "d": b"x"}}
    same = {"b": {"d": b"x", "c": torch.tensor(NAN)}, "a": [strided.contiguous(), NAN, (1, None)]}
    assert differences(value, same) == []


def flipped(value: Any) -> Any:
    """`value` with its lowest bit flipped; itself where there is none."""
    if isinstance(value, torch.Tensor) and value.numel():
        value = value.clone()
        value.reshape(-1).view(torch.uint8)[0] ^= 1
    elif isinstance(value, np.ndarray):
        value = value ^ 1
    elif isinstance(value, (bool, int)):
        value ^= 1
    elif isinstance(value, float):
        value = math.nextafter(value, math.inf)
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of all that is not a dict or a list, the keys that lead there."""
    if not isinstance(value, (dict, list)):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [place for key, item in items for place in places(item, (*path, key))]


@pytest.mark.parametrize("name", ["schedule, LambdaLR", "dropout, one rank", "BatchNorm, one rank", "GAN"])
def test_a_flipped_bit_anywhere_in_a_jobs_state_is_found(name: str) -> None:
    job = Job(CASES[name], 0).begin()
    for _ in range(2):
        job.train()
    state = job.state()
    kinds = set()
    for path in places(state):
        other = copy.deepcopy(state)
        holder = functools.reduce(operator.getitem, path[:-1], other)
        leaf = holder[path[-1]]
        if (new := flipped(leaf)) is not leaf:
            holder[path[-1]] = new
            assert len(differences(state, other)) == 1, path
            kinds.add(path[0])
    assert {"model", "optimizers", "rng"} <= kinds
