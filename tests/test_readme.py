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
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from checkmate.cli.status import ask
from checkmate.wire.messages import GetStatus

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


@pytest.mark.parametrize("example", ["ddp", "gpt", "pipeline"])
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


@contextmanager
def ranks(example: str, count: int, *options: str) -> Iterator[list[subprocess.Popen[str]]]:
    """All ranks of an example, without a launcher, which takes seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with ExitStack() as stack:
        script = str(ROOT / "examples" / f"{example}.py")
        yield [stack.enter_context(process(script, *options, RANK=str(r), **launcher)) for r in range(count)]


def test_example_stops_all_ranks_at_one_step_and_goes_on_from_there(shadow: str) -> None:
    options = ["--shadow", shadow, "--steps"]
    with ranks("ddp", 2, *options, "100000") as (zero, one):
        assert read_until(zero, r"going on from step (\d+)")[1] == "0"
        read_until(zero, r"^step 50: loss")
        one.send_signal(signal.SIGTERM)  # to one of them only
        stopped = int(read_until(zero, r"^SIGTERM in step (\d+)$")[1])
        assert int(read_until(zero, r"^step (\d+) is safe$")[1]) == stopped
        assert (zero.wait(PATIENCE_S), one.wait(PATIENCE_S)) == (0, 0)
    with ranks("ddp", 2, *options, str(stopped + 1)) as (zero, one):
        assert int(read_until(zero, r"going on from step (\d+)")[1]) == stopped
        assert int(read_until(zero, r"^step (\d+) is safe$")[1]) == stopped + 1
        assert (zero.wait(PATIENCE_S), one.wait(PATIENCE_S)) == (0, 0)


@pytest.fixture(scope="module")
def listening() -> Iterator[str]:
    """A shadow that hears, as root, what ranks send each other on this machine."""
    capture = ["--capture", "lo"] if os.geteuid() == 0 else []
    with process("-m", "checkmate", "shadow", "--listen", "127.0.0.1:0", *capture) as child:
        yield read_until(child, r"^checkmate shadow listening on (\S+)$")[1]


def copied(address: str, run: str) -> int:
    """Bytes of gradients that the network has brought to a shadow."""
    found = ask(address, None, 20.0, GetStatus())
    return next(int(each["bytes_overheard"]) for each in found.runs if each["run"] == run)


def test_the_network_tap_is_one_changed_argument(listening: str) -> None:
    options = ["--shadow", listening, "--steps", "50", "--tap", "mirror"]
    with ranks("ddp", 2, *options) as (zero, one):
        assert read_until(zero, r"^step (\d+) is safe$")[1] == "50"
        assert (zero.wait(PATIENCE_S), one.wait(PATIENCE_S)) == (0, 0)
    assert (copied(listening, "ddp") > 0) == (os.geteuid() == 0)


def test_pipeline_of_stages_with_replicas_goes_on_where_it_was_killed(listening: str) -> None:
    options = ["--shadow", listening, "--tap", "mirror", "--steps"]
    with ranks("pipeline", 4, *options, "100000") as (*_, last):
        assert read_until(last, r"going on from step (\d+)")[1] == "0"
        killed_after = int(read_until(last, r"^step (\d+): loss")[1])
    with ranks("pipeline", 4, *options, str(killed_after + 200)) as trained:
        assert killed_after - 1 <= int(read_until(trained[-1], r"going on from step (\d+)")[1])
        assert int(read_until(trained[-1], r"^step (\d+) is safe$")[1]) == killed_after + 200
        assert [rank.wait(PATIENCE_S) for rank in trained] == [0] * 4
    assert (copied(listening, "pipeline") > 0) == (os.geteuid() == 0)
