"""Settings for every test."""

import pytest
from hypothesis import settings

# No deadline per example, for the machine may be busy; a failure prints how to repeat it.
settings.register_profile("checkmate", deadline=None, max_examples=60, print_blob=True)
settings.register_profile("few", deadline=None, max_examples=3)
settings.load_profile("checkmate")

#: Files that take longest go first, or one process would be left with them while the other has nothing to do. Those
#: that want the lab, of which a machine has one, take turns with those that do not.
LONGEST = (
    "exactness/test_matrix.py",
    "bench/test_bench.py",
    "exactness/test_sigkill.py",
    "lab/test_job.py",
    "faults/test_mirror.py",
    "lab/test_multicast_job.py",
    "faults/test_multicast.py",
    "trainer/test_data.py",
    "exactness/test_stages.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get("/".join(item.path.parts[-2:]), len(LONGEST)))
