"""Threads end before the interpreter does.

One that comes back from torch, or frees a tensor there, while the interpreter is being finalized is ended in the middle
of C++, which aborts the process.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable


def call_at_exit(method: Callable[[], object]) -> None:
    """Call this bound method when the process exits, if its object still lives; it is not kept alive for that."""
    atexit.register(_call, weakref.WeakMethod(method))


def _call(reference: weakref.WeakMethod[Callable[[], object]]) -> None:
    if (method := reference()) is not None:
        method()
