"""The state of random number generators as plain values: read in every `ckpt.step()`, written at restore.

A state is read by value, shares no memory with its generator, and holds only what `checkmate.values` encodes.
"""

from __future__ import annotations

import random
from array import array
from typing import Any, TypeGuard

import numpy as np
import torch

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def capture() -> dict[str, Any]:
    """The global generators of this process: Python's, NumPy's, torch's for the CPU and, once CUDA is
    initialised, for each visible device (waiting for none of them). Takes about 50 µs.
    """
    state = {"python": read(random), "numpy": read(np.random), "torch": read(torch.default_generator)}
    if torch.cuda.is_initialized():
        state["cuda"] = [read(generator) for generator in torch.cuda.default_generators]
    return state


def install(state: dict[str, Any]) -> None:
    """Put back what `capture` returned; a device that is not there, or that `state` lacks, is left alone."""
    write(random, state["python"])
    write(np.random, state["numpy"])
    write(torch.default_generator, state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.init()
        for generator, value in zip(torch.cuda.default_generators, state["cuda"], strict=False):
            write(generator, value)


def is_generator(value: object) -> TypeGuard[Generator]:
    """Whether `read` and `write` know it. Not SystemRandom, which has no state."""
    return isinstance(value, Generator) and not isinstance(value, random.SystemRandom)


def read(generator: Any) -> Any:
    """The state of one generator, or of the global one of the modules `random` and `numpy.random`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    version, words, gauss = generator.getstate()
    return version, array("I", words).tobytes(), gauss  # 625 words; as a tuple they are slow to encode


def write(generator: Any, state: Any) -> None:
    """Make `generator` continue from `state`, which `read` returned for one of the same class."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        version, words, gauss = state
        generator.setstate((version, tuple(array("I", words)), gauss))
