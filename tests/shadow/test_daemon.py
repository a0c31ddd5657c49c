"""The shadow's process, where the machine has no more to give."""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import sys
import time

import pytest

from checkmate.transport.base import call, greet
from checkmate.transport.tcp import connect, parse_address
from checkmate.wire import messages as m

from .job import PATIENCE_S

FILES = 48


@pytest.mark.processes
def test_shadow_without_file_descriptors_waits_for_some_and_serves_again() -> None:
    command = [sys.executable, "-m", "checkmate", "shadow", "--listen", "127.0.0.1:0"]
    limit = (FILES, FILES)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
    ) as shadow:  # fmt: skip
        try:
            assert shadow.stdout is not None
            found = next(filter(None, (re.search(r"listening on (\S+)", line) for line in shadow.stdout)))
            address = parse_address(found[1])
            crowd = [socket.create_connection(address, PATIENCE_S) for _ in range(2 * FILES)]
            said = next(line for line in shadow.stdout if "cannot take another connection" in line)
            assert "ulimit -n" in said
            for stranger in crowd:
                stranger.close()
            deadline = time.monotonic() + PATIENCE_S
            while True:
                channel = connect(address, PATIENCE_S)
                try:
                    greet(channel, "reader", None, PATIENCE_S)
                    assert isinstance(call(channel, m.GetStatus(), PATIENCE_S), m.Status)
                    break
                except OSError:
                    assert time.monotonic() < deadline
                finally:
                    channel.close()
            assert shadow.poll() is None
        finally:
            shadow.terminate()
            assert shadow.wait(PATIENCE_S) == 0
