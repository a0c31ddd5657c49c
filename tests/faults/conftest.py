"""One zygote for the session, one `Lab` per test.

``FAULTS_SEED=n`` repeats a run; ``FAULTS_STOP_S=20`` stops shadows for that long, with TCP's own patience.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from tests.faults.helpers import Lab, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="session")
def references() -> dict[int, list[str]]:
    return {}


@pytest.fixture
def lab(zygote: Zygote, references: dict[int, list[str]]) -> Iterator[Lab]:
    seed = int(os.environ.get("FAULTS_SEED") or random.randrange(10**6))
    print(f"FAULTS_SEED={seed}")
    made = Lab(zygote, seed, references)
    yield made
    made.close()
