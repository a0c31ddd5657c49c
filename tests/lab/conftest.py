"""The machine's one lab, for one test at a time, and the command line as a user has it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from checkmate.lab import LabError, cluster
from tests.network import lacking, one_lab

PATIENCE_S = 30.0


class Command(subprocess.Popen[str]):
    """``checkmate lab ARGUMENTS``, with what it prints."""

    def __init__(self, *arguments: object) -> None:
        argv = [sys.executable, "-m", "checkmate", "lab", *map(str, arguments)]
        super().__init__(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def read_until(self, text: str) -> str:
        """The line of its standard output with this text in it."""
        assert self.stdout is not None
        for line in self.stdout:
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r}; on stderr: {self.communicate()[1]}")


class Ran:
    def __init__(self, *arguments: object) -> None:
        with Command(*arguments) as command:
            self.out, self.err = command.communicate(timeout=60)
        self.code = command.returncode


@contextmanager
def started(*arguments: object) -> Iterator[Command]:
    command = Command(*arguments)
    try:
        yield command
    finally:
        command.kill()
        command.communicate()


def wait_until(fact: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not fact():
        assert time.monotonic() < deadline, "too late; is there a lab of somebody else?"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_lab() -> Iterator[None]:
    """There is none before a test, and none of it afterwards. That of somebody who works here is left alone."""
    if lacking():  # then the test is skipped, fails, or needs none
        yield
        return
    with one_lab():
        wait_until(lambda: not cluster.kept() and gone())
        yield
        gone()


def gone() -> bool:
    """False if a process is using it."""
    try:
        cluster.down()
    except LabError:
        return False
    return True
