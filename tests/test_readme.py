"""The README's program, as a reader would paste it, and the smaller of the examples."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PATIENCE_S = 120
ADDRESS = "tcp://127.0.0.1:7070"

pytestmark = pytest.mark.processes


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """``python ARGUMENTS``; killed in the end, if it has not ended before."""
    child = subprocess.Popen(
        [sys.executable, "-u", *arguments],
        env=ENVIRONMENT | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def read_until(child: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Read lines until one has the pattern; fail with what came instead."""
    lines: list[str] = []
    assert child.stdout is not None
    while not lines or (found := re.search(pattern, lines[-1])) is None:
        ready, _, _ = select.select([child.stdout], [], [], PATIENCE_S)
        line = child.stdout.readline() if ready else ""
        assert line, f"no line with {pattern!r} in:\n{''.join(lines)}"
        lines.append(line)
    return found


@pytest.fixture(scope="module")
def shadow() -> Iterator[str]:
    with process("-m", "checkmate", "shadow", "--listen", "127.0.0.1:0") as child:
        yield read_until(child, r"^checkmate shadow listening on (\S+)$")[1]
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == 0


def test_program_in_the_readme_goes_on_where_it_was_killed(shadow: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (program,) = (block for block in blocks if "STEPS" in block)
    assert len(program.splitlines()) <= 45
    for here, there in ((ADDRESS, shadow), ("STEPS = 2000", "STEPS = 500")):
        assert program.count(here) == 1
        program = program.replace(here, there)
    (tmp_path / "train.py").write_text(program)

    with process(str(tmp_path / "train.py")) as first:
        assert read_until(first, r"going on from step (\d+)")[1] == "0"
        killed_after = int(read_until(first, r"^step (\d+): loss")[1])
        first.kill()
    with process(str(tmp_path / "train.py")) as second:
        resumed = int(read_until(second, r"going on from step (\d+)")[1])
        assert killed_after - 1 <= resumed < 500
        assert read_until(second, r"^step (500): loss \d")
        assert second.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("example", ["ddp", "gpt"])
def test_torchrun_leaves_the_options_of_the_examples_alone(example: str) -> None:
    def for_the_script(*arguments: str) -> list[str]:
        found: list[str] = get_args_parser().parse_args(["script.py", *arguments]).training_script_args
        return found

    options = re.findall(r'add(?:_argument)?\("(--\w+)"', (ROOT / "examples" / f"{example}.py").read_text())
    assert {"--shadow", "--name", "--steps"} <= set(options)
    for option in options:
        assert for_the_script(option, "1") == [option, "1"]
    with pytest.raises(SystemExit):  # the negative control
        for_the_script("--run", "1")


def test_example_stops_all_ranks_at_one_step_and_goes_on_from_there(shadow: str) -> None:
    example = str(ROOT / "examples" / "ddp.py")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def rank(number: int, steps: int):  # type: ignore[no-untyped-def]
        return process(example, "--shadow", shadow, "--steps", str(steps), RANK=str(number), **launcher)

    with rank(0, 100_000) as zero, rank(1, 100_000) as one:
        assert read_until(zero, r"going on from step (\d+)")[1] == "0"
        read_until(zero, r"^step 50: loss")
        one.send_signal(signal.SIGTERM)  # to one of them only
        stopped = int(read_until(zero, r"^SIGTERM in step (\d+)$")[1])
        assert int(read_until(zero, r"^step (\d+) is safe$")[1]) == stopped
        assert (zero.wait(PATIENCE_S), one.wait(PATIENCE_S)) == (0, 0)
    with rank(0, stopped + 1) as zero, rank(1, stopped + 1) as one:
        assert int(read_until(zero, r"going on from step (\d+)")[1]) == stopped
        assert int(read_until(zero, r"^step (\d+) is safe$")[1]) == stopped + 1
        assert (zero.wait(PATIENCE_S), one.wait(PATIENCE_S)) == (0, 0)
