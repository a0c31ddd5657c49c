"""The commands as a user meets them: what they print, what they leave on disk, and their exit codes."""

from __future__ import annotations

import copy
import json
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import checkmate
from checkmate import cli
from checkmate.shadow.daemon import Daemon
from checkmate.transport.tcp import Address, listen

STEPS = 4
TOKEN = b"a secret of the tests"


class Result(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``checkmate ARGUMENTS`` in this process."""

    def command(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["checkmate", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Result(code if isinstance(code, int) else int(code is not None), *capsys.readouterr())

    return command


def serve(token: bytes | None = None) -> Iterator[str]:
    daemon = Daemon(token=token)
    listener = listen(Address("127.0.0.1", 0))
    thread = threading.Thread(target=daemon.serve, args=(listener,), daemon=True)
    thread.start()
    yield str(Address(*listener.getsockname()[:2]))
    daemon.stop()
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def shadow() -> Iterator[str]:
    """The address of an empty shadow without a token."""
    yield from serve()


class Net(nn.Module):
    """Tied weights, buffers of three kinds, and a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.norm(self.embed(x)))


class Job:
    """A model and its optimizer, as new or trained."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        groups = [
            {"params": [self.model.embed.weight], "weight_decay": 0.1},
            {"params": [self.model.norm.weight, self.model.norm.bias, self.model.unused], "lr": 3e-3},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)

    def train(self, step: int) -> None:
        x = torch.arange(6) * (step + 1) % 11
        loss = nn.functional.cross_entropy(self.model(x), (x + 1) % 11)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] *= 0.9

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


class Trained(NamedTuple):
    job: Job
    ckpt: checkmate.Checkpointer
    address: str


@pytest.fixture
def trained(shadow: str) -> Iterator[Trained]:
    """A job of `STEPS` steps that is still attached, as the run "net"."""
    job = Job()
    with checkmate.attach(job.model, job.optimizer, shadow=shadow, run="net") as ckpt:
        ckpt.restore(timeout=20)
        for step in range(STEPS):
            job.train(step)
            ckpt.step()
        ckpt.wait(timeout=20)
        yield Trained(job, ckpt, shadow)


def same(a: Any, b: Any) -> bool:
    """Bit for bit, through containers."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_the_comparison_notices_one_bit() -> None:
    state = Job().state()
    changed = copy.deepcopy(state)
    assert same(state, changed)
    changed["model"]["norm.running_mean"].view(torch.uint8)[0] ^= 1
    assert not same(state, changed)


# ---------------------------------------------------------------- export


def test_exported_torch_file_is_the_state_and_trains_on_alike(run: Command, trained: Trained, tmp_path: Path) -> None:
    result = run("export", trained.address, "--run", "net", "--to", tmp_path / "out", "--format", "torch")
    assert result.code == 0, result.err
    assert f"step {STEPS} of run 'net' is in {tmp_path / 'out'}" in result.out.replace("\n", "")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkmate.json", "checkpoint.pt", "out"]
    loaded = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert loaded["step"] == STEPS

    fresh = Job(seed=1)
    assert not same(fresh.state(), trained.job.state())  # the negative control
    fresh.model.load_state_dict(loaded["model"])
    fresh.optimizer.load_state_dict(loaded["optimizers"][0])
    assert same(fresh.state(), trained.job.state())
    for job in (fresh, trained.job):
        job.train(STEPS)
    assert same(fresh.state(), trained.job.state())


def test_exported_dcp_directory_is_loaded_by_torch_alone(run: Command, trained: Trained, tmp_path: Path) -> None:
    result = run("export", trained.address, "--to", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    assert (facts["run"], facts["step"], facts["format"]) == ("net", STEPS, "dcp")
    assert facts["path"] == str(tmp_path / "out")
    assert b"checkmate" not in (tmp_path / "out" / ".metadata").read_bytes()

    fresh = Job(seed=1)
    state = {"model": fresh.model.state_dict(), "optimizer": get_optimizer_state_dict(fresh.model, fresh.optimizer)}
    del state["optimizer"]["state"]["unused"]  # as in the run: it never had a gradient
    dcp.load(state, checkpoint_id=tmp_path / "out")
    fresh.model.load_state_dict(state["model"])
    partly = StateDictOptions(strict=False)
    set_optimizer_state_dict(fresh.model, fresh.optimizer, state["optimizer"], options=partly)
    assert same(fresh.state(), trained.job.state())
    assert not same(Job(seed=1).state(), trained.job.state())


def test_export_refuses_a_directory_that_exists(run: Command, trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    result = run("export", trained.address, "--to", tmp_path / "out")
    assert result.code == 2
    assert f"{tmp_path / 'out'} exists already; name a new directory" in result.err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_export_that_fails_leaves_nothing(run: Command, trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for to in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        result = run("export", trained.address, "--to", to)
        assert result.code == 1
        assert result.err.startswith("checkmate: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_export_to_a_full_disk_leaves_nothing(run: Command, trained: Trained, tmp_path: Path, kind: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        result = run("export", trained.address, "--to", tmp_path / "out", "--format", kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.code == 1
    assert result.err.startswith("checkmate: ")
    assert not list(tmp_path.iterdir())


def test_export_names_what_the_shadow_does_not_hold(run: Command, trained: Trained, tmp_path: Path) -> None:
    other = run("export", trained.address, "--run", "nte", "--to", tmp_path / "out")
    assert other.code == 1
    assert "holds no run 'nte'; it holds net" in other.err
    older = run("export", trained.address, "--step", 1, "--to", tmp_path / "out")
    assert older.code == 1
    assert f"step 1 is not held; the one step that is whole here is {STEPS}" in older.err
    assert not list(tmp_path.iterdir())


def test_export_wants_a_name_where_there_is_no_single_run(run: Command, shadow: str, tmp_path: Path) -> None:
    result = run("export", shadow, "--to", tmp_path / "out")
    assert result.code == 1
    assert "name the run: this shadow holds none" in result.err


# ---------------------------------------------------------------- ShadowReader


def test_dcp_load_fills_a_plain_model_from_the_shadow_while_it_trains(trained: Trained) -> None:
    fresh = Job(seed=1)
    state = {"model": fresh.model.state_dict(), "step": 0}
    assert not same(state["model"], trained.job.state()["model"])
    reader = checkmate.ShadowReader(trained.address, "net")
    assert reader.read_metadata() is not None  # takes the lease
    expected = trained.job.state()["model"]
    trained.job.train(STEPS)
    trained.ckpt.step()
    trained.ckpt.wait(timeout=20)
    dcp.load(state, storage_reader=reader)
    reader.close()
    assert same(state, {"model": expected, "step": STEPS})
    assert not same(expected, trained.job.state()["model"])  # it had trained on

    dcp.load(state, storage_reader=checkmate.ShadowReader(trained.address))
    fresh.model.load_state_dict(state["model"])
    assert same(fresh.state()["model"], trained.job.state()["model"])


# ---------------------------------------------------------------- status


def test_status_tells_where_a_run_stands(run: Command, trained: Trained) -> None:
    result = run("status", trained.address, "--json", "--max-lag", 1)
    assert result.code == 0, result.err
    answer = json.loads(result.out)
    (net,) = answer["runs"]
    assert (net["run"], net["phase"], net["world_size"], net["live"]) == ("net", "streaming", 1, True)
    assert (net["newest"], net["received"], net["stable"], net["recovery"], net["lag"]) == (*(STEPS,) * 4, 0)
    assert net["last_error"] == ""
    assert answer["server"]["host"] == socket.gethostname()
    shown = run("status", trained.address)
    assert shown.code == 0
    assert re.search(rf"net\b.*streaming.*recovery {STEPS}\b", shown.out, re.DOTALL)


def test_status_of_an_empty_shadow(run: Command, shadow: str) -> None:
    assert run("status", shadow, "--max-lag", 0) == (0, "no runs\n", "")
    assert json.loads(run("status", shadow, "--json").out)["runs"] == []


def test_max_lag_fails_while_a_run_has_no_recent_recovery_point(run: Command, trained: Trained) -> None:
    assert run("rm", trained.address, "net", "--force").code == 0
    deadline = time.monotonic() + 20
    while not json.loads(run("status", trained.address, "--json").out)["runs"]:  # until the job has come back
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # It waits for the job to take a step: there is nothing to restart from, and the job is at step `STEPS`.
    assert run("status", trained.address, "--max-lag", 1000).code == 1
    assert run("status", trained.address).code == 0
    for step in range(2):
        trained.job.train(STEPS + step)
        trained.ckpt.step()
        time.sleep(0.1)
    trained.ckpt.wait(timeout=20)
    assert run("status", trained.address, "--max-lag", 0).code == 0


# ---------------------------------------------------------------- rm


def test_rm_leaves_a_live_run_alone_unless_forced(run: Command, trained: Trained) -> None:
    result = run("rm", trained.address, "net")
    assert result.code == 1
    assert result.err == "checkmate: run 'net' is being trained; stop it first, or give --force\n"
    assert trained.ckpt.stats()["recovery_step"] == STEPS
    trained.ckpt.close()
    deadline = time.monotonic() + 20
    while (result := run("rm", trained.address, "net")).code and time.monotonic() < deadline:
        time.sleep(0.05)  # until the shadow has seen that the connections are closed
    assert result == (0, "run 'net' is removed\n", "")
    assert run("status", trained.address).out == "no runs\n"
    again = run("rm", trained.address, "net")
    assert again.code == 1
    assert "this shadow holds no run 'net'; it holds none" in again.err


# ---------------------------------------------------------------- wrong usage, and peers that are not there


def commands(address: str, tmp_path: Path) -> list[list[str]]:
    return [["status", address], ["export", address, "--to", str(tmp_path / "out")], ["rm", address, "net"]]


@pytest.mark.parametrize(
    "address", ["7070", "localhost", "http://localhost:7070", "localhost:x", "localhost:70700", ":1"]
)
def test_wrong_address_is_wrong_usage(run: Command, tmp_path: Path, address: str) -> None:
    for command in [*commands(address, tmp_path), ["shadow", "--listen", address]]:
        result = run(*command)
        assert result.code == 2
        assert f"'{address}' is not an address; write tcp://HOST:PORT" in result.err


def test_port_on_which_nobody_listens(run: Command, tmp_path: Path) -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        address = str(Address(*listener.getsockname()[:2]))
    for command in commands(address, tmp_path):
        result = run(*command, "--timeout", 0.3)
        assert result.code == 1
        assert f"checkmate: {address} did not answer within 0.3 s: " in result.err
        assert "Connection refused" in result.err


def test_port_on_which_something_else_listens(run: Command) -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        address = str(Address(*listener.getsockname()[:2]))

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(
                    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" + bytes(99)
                )
                peer.recv(1000)

        server = threading.Thread(target=answer)
        server.start()
        result = run("status", address)
        server.join()
    assert result.code == 1
    assert "not a checkmate frame: starts with b'HTTP'" in result.err


def test_shadow_that_accepts_and_says_nothing(run: Command) -> None:
    with listen(Address("127.0.0.1", 0)) as listener:  # the kernel accepts
        address = str(Address(*listener.getsockname()[:2]))
        result = run("status", address, "--timeout", 0.3)
    assert result.code == 1
    assert f"{address} did not answer within 0.3 s" in result.err


def test_token_file_that_is_not_there_or_empty(run: Command, shadow: str, tmp_path: Path) -> None:
    (empty := tmp_path / "empty").write_text("\n")
    for command in [*commands(shadow, tmp_path), ["shadow", "--listen", "127.0.0.1:0"]]:
        missing = run(*command, "--token-file", tmp_path / "missing")
        assert (missing.code, "token file" in missing.err, "No such file" in missing.err) == (2, True, True)
        nothing = run(*command, "--token-file", empty)
        assert (nothing.code, "is empty" in nothing.err) == (2, True)


def test_only_the_right_token_opens_a_shadow(run: Command, tmp_path: Path) -> None:
    (right := tmp_path / "right").write_bytes(TOKEN + b"\n")
    (wrong := tmp_path / "wrong").write_bytes(b"guess")
    for address in serve(TOKEN):
        assert run("status", address, "--token-file", right).code == 0
        without = run("status", address)
        assert without.code == 1
        assert "the shadow wants a token, and none was given" in without.err
        other = run("status", address, "--token-file", wrong)
        assert other.code == 1
        assert "the shadow did not prove that it has this token" in other.err
        assert TOKEN.decode() not in without.err + other.err


def test_token_for_a_shadow_without_one(run: Command, shadow: str, tmp_path: Path) -> None:
    (token := tmp_path / "token").write_bytes(TOKEN)
    result = run("status", shadow, "--token-file", token)
    assert result.code == 1
    assert "it has another one or none" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["status"],
        ["status", "127.0.0.1:1", "--max-lag", "few"],
        ["export", "127.0.0.1:1"],
        ["export", "127.0.0.1:1", "--to", "x", "--format", "zip"],
        ["rm", "127.0.0.1:1"],
        ["shadow", "--threads", "0"],
        ["shadow", "--memory-limit", "1GB"],
    ],
)
def test_wrong_arguments_exit_with_2(run: Command, arguments: list[str]) -> None:
    assert run(*arguments).code == 2


def test_version_is_that_of_the_package(run: Command) -> None:
    assert run("--version") == (0, f"checkmate {version('checkmate-ckpt')}\n", "")


@pytest.mark.parametrize("command", ["shadow", "status", "export", "rm", "demo", "bench", "lab"])
def test_every_command_has_help(run: Command, command: str) -> None:
    result = run(command, "--help")
    assert result.code == 0
    assert f"checkmate {command}" in result.out


# ---------------------------------------------------------------- shadow


def test_shadow_says_which_address_is_taken(run: Command, shadow: str) -> None:
    result = run("shadow", "--listen", shadow)
    assert result.code == 2
    assert f"cannot listen on {shadow}: Address already in use" in result.err


@pytest.mark.processes
def test_shadow_prints_its_address_serves_and_ends_at_sigterm(run: Command, tmp_path: Path) -> None:
    (token := tmp_path / "token").write_bytes(TOKEN)
    command = [sys.executable, "-m", "checkmate", "shadow", "--listen", "127.0.0.1:0", "--token-file", str(token)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 60)[0], "no line within 60 s"
            line = process.stdout.readline()
            found = re.fullmatch(r"checkmate shadow listening on (tcp://127\.0\.0\.1:\d+)\n", line)
            assert found is not None, line
            assert run("status", found[1], "--token-file", token).code == 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
