"""Small models, each with something that a checkpoint can get wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import FEATURES


class Net(nn.Module):
    """Uses its layers in another order than it registers them, so DDP's first buckets are not its later ones."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = [(24, 17), (17, 24), (24, 24), (24, 1), (FEATURES, 24)]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in sizes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = torch.tanh(self.layers[4](x))
        if not skip:
            x = torch.tanh(self.layers[2](x))
        x = self.dropout(torch.tanh(self.layers[0](x)))
        return self.layers[3](torch.tanh(self.layers[1](x)))


class Matrices(nn.Module):
    """Has no vectors: for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, 8, bias=False)
        self.b = nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).sum(1, keepdim=True)


class Normed(nn.Module):
    """BatchNorm's buffers, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 1)
        self.register_buffer("constant", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x)))) * self.constant


class Odd(nn.Module):
    """A zero-dimensional, a one-element and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.25]))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.shift + self.none.sum()


class Strided(nn.Module):
    """A transposed parameter, one in channels-last order, and every other column of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, FEATURES).t())
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.columns = nn.Parameter(torch.randn(5, 8)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        image = F.pad(x @ self.transposed, (0, 7)).view(-1, 3, 2, 2)
        return (self.conv(image).flatten(1) * (self.columns.sum(0))).sum(1, keepdim=True)


class Gan(nn.Module):
    """Generator and discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, real: Tensor | None, noise: Tensor) -> Tensor:
        """The discriminator's loss where `real` is given, else the generator's."""
        score = self.discriminator(self.generator(noise).detach() if real is not None else self.generator(noise))
        return -score.mean() if real is None else score.mean() - self.discriminator(real).mean()


class Frozen(Net):
    """Layers 0 and 2 do not train, at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)


class Wide(nn.Module):
    """Has one parameter that is large enough for torch to use several threads; with 400, for Checkmate to cut it."""

    def __init__(self, width: int = 190) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def in_dtype(model: Any, dtype: torch.dtype) -> nn.Module:
    """`model()` in `dtype`, for input and output in float32."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model().to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.to(dtype)).float()

    return Cast()


class Mixed(nn.Module):
    """Layers of three dtypes, so that DDP keeps several kinds of buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, to, dtype=dtype)
            for width, to, dtype in [(6, 33, torch.float32), (33, 17, torch.bfloat16), (17, 1, torch.float64)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()
