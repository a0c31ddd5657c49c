"""What tests of the network need: root, ``nft`` and ``ip``. Where these lack, they are skipped with the reason."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REQUIRED = os.environ.get("CHECKMATE_NETWORK_TESTS") == "required"


def lacking() -> str:
    """Why tests of the network cannot run here; "" if they can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [tool for tool in ("nft", "ip") if shutil.which(tool) is None]
    return f"needs {' and '.join(absent)}; on Debian or Ubuntu: apt install nftables iproute2" if absent else ""


#: For ``pytestmark`` or as decorators. With CHECKMATE_NETWORK_TESTS=required nothing is skipped, so a lack fails.
requires_network = [pytest.mark.network, pytest.mark.skipif(bool(lacking()) and not REQUIRED, reason=lacking())]


@contextmanager
def one_lab() -> Iterator[None]:
    """For tests that bring up a lab, of which a machine has one: those of other processes wait."""
    with (Path(tempfile.gettempdir()) / "checkmate-tests-of-the-lab").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
