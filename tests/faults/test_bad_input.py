"""Wrong input of every kind: one clear message that names the thing and what to do, and nothing is lost."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import checkmate
from checkmate import Mismatch, Refused, StepNotFound, Unreachable, UsageError
from checkmate.errors import CheckmateError, ProtocolError
from checkmate.transport.base import Channel
from checkmate.transport.tcp import connect, parse_address
from checkmate.wire import messages
from tests.faults.helpers import Lab, Shadow, Zygote, black_hole

pytestmark = pytest.mark.processes

TOKEN = "correct horse battery staple"


@pytest.fixture(scope="module")
def shadow(zygote: Zygote) -> Iterator[Shadow]:
    made = Shadow(zygote, 0, (), {})
    yield made
    made.close()


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture(scope="module")
def guarded(zygote: Zygote, token_file: Path) -> Iterator[Shadow]:
    made = Shadow(zygote, 0, ("--token-file", str(token_file)), {})
    yield made
    made.close()


class Job:
    """A model with an optimizer, attached; closed at the end of its ``with``."""

    def __init__(self, address: str, run: str, model: torch.nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = model or torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
        self.optimizer = options.pop("optimizer", None) or torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ckpt = checkmate.attach(self.model, self.optimizer, shadow=address, run=run, **options)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()

    def train(self, steps: int, factor: float = 1.0) -> Job:
        for _ in range(steps):
            self.optimizer.zero_grad()
            (self.model(torch.ones(3, 6)).square().sum() * factor).backward()
            self.optimizer.step()
            self.ckpt.step()
        self.ckpt.wait(timeout=30)
        return self

    def state(self) -> list[torch.Tensor]:
        params = list(self.model.parameters())
        found = [p.detach().clone() for p in params]
        for param in params:
            values = sorted(self.optimizer.state[param].items())
            found += [value.clone() for _, value in values if isinstance(value, torch.Tensor)]
        return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Bit by bit: NaN is not equal to itself."""
    return len(a) == len(b) and all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in zip(a, b, strict=True))


def held(address: str, run: str) -> Job:
    """A run with 3 steps, whose trainer has gone."""
    job = Job(address, run)
    assert job.ckpt.restore() == 0
    job.train(3).ckpt.close()
    return job


def check_untouched(address: str, run: str, job: Job, **options: Any) -> None:
    """The run stands where `held` left it."""
    with Job(address, run, **options) as again:
        assert again.ckpt.restore(timeout=30) == 3
        assert same(again.state(), job.state())


# ------------------------------------------------------------ addresses, names, arguments


@pytest.mark.parametrize("address", ["7070", "http://host:1", "tcp://host", "tcp://host:port", "tcp://host:99999", ""])
def test_what_is_not_an_address_is_said_at_attach(address: str) -> None:
    with pytest.raises(UsageError, match="is not an address; write tcp://HOST:PORT"):
        Job(address, "r")


@pytest.mark.parametrize("run", ["a/b", "..", ".hidden", "a\\b", "", "a\nb", "x" * 201, "c:d", "trailing "])
def test_run_name_with_path_characters_is_refused_at_attach(run: str) -> None:
    with pytest.raises(UsageError, match=r"run name .* printable characters"):
        Job("tcp://127.0.0.1:1", run)


def test_run_name_with_path_characters_is_refused_by_the_shadow(lab: Lab, shadow: Shadow, tmp_path: Path) -> None:
    export = lab.command("export", shadow.address, "--run", "../x", "--to", str(tmp_path / "out"))
    assert export.join() == 1
    assert export.count(r"run name '\.\./x': use 1 to 200 printable characters") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [{"on_lag": "x"}, {"replay": "x"}, {"tap": "network"}, {"stateful": {"a": 1}}])
def test_wrong_arguments_are_said_at_attach(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))
    with pytest.raises(UsageError, match=name):
        Job("tcp://127.0.0.1:1", "r", **wrong)


def test_unknown_host_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with (
        Job("tcp://no-such-host.invalid:7070", "r") as job,
        pytest.raises(Unreachable, match=r"no-such-host\.invalid:7070"),
    ):
        job.ckpt.restore(timeout=0.5)


def test_black_hole_is_named() -> None:
    with (
        black_hole() as address,
        Job(address, "r") as job,
        pytest.raises(Unreachable, match=f"{address} did not answer within 0.5 s"),
    ):
        job.ckpt.restore(timeout=0.5)


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n" * 10, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10, b""])
def test_other_service_at_that_address_is_named(greeting: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.recv(4096)
                sock.sendall(greeting)

    threading.Thread(target=serve, daemon=True).start()
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with Job(address, "r") as job, pytest.raises((ProtocolError, Unreachable), match=address):
        job.ckpt.restore(timeout=1.0)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_exit_codes_of_the_command_line(lab: Lab, shadow: Shadow) -> None:
    nobody = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
    nobody.close()
    wrong = lab.command("status", "nonsense")
    assert wrong.join() == 2
    assert wrong.count("'nonsense' is not an address") == 1
    unreachable = lab.command("status", address, "--timeout", "0.5")
    assert unreachable.join() == 1
    assert unreachable.count(f"checkmate: {address} did not answer") == 1
    taken = lab.command("shadow", "--listen", f"127.0.0.1:{shadow.port}")
    assert taken.join() == 2
    assert taken.count(f"cannot listen on {shadow.address}") == 1
    missing = lab.command("rm", shadow.address, "nobody")
    assert missing.join() == 1
    assert missing.count("holds no run 'nobody'") == 1


# ------------------------------------------------------------ tokens and versions


@pytest.mark.parametrize("token", ["wrong", None])
def test_wrong_token_is_refused_and_harms_no_run(guarded: Shadow, token: str | None) -> None:
    run = f"token {token}"
    job = Job(guarded.address, run, token=TOKEN)
    job.ckpt.restore()
    job.train(3).ckpt.close()
    with Job(guarded.address, run, token=token) as other, pytest.raises(Refused, match="token") as refused:
        other.ckpt.restore(timeout=30)
    assert refused.value.kind == "token"
    check_untouched(guarded.address, run, job, token=TOKEN)


def test_token_for_a_shadow_without_one_is_refused(shadow: Shadow) -> None:
    with Job(shadow.address, "needless", token=TOKEN) as job, pytest.raises(Refused, match="token"):
        job.ckpt.restore(timeout=30)


@pytest.mark.parametrize("versions", [[0], [2, 3]], ids=["too old", "too new"])
def test_client_of_another_version_is_told_both(shadow: Shadow, versions: list[int]) -> None:
    channel = connect(parse_address(shadow.address), 10)
    channel.send(messages.Hello(versions, "control", bytes(16)))
    answer = channel.message()
    channel.close()
    assert isinstance(answer, messages.Refusal)
    assert answer.kind == "version"
    assert f"speaks protocol 1, the client {versions}; upgrade the older side" in answer.reason


@pytest.mark.parametrize("version", [0, 2], ids=["too old", "too new"])
def test_shadow_of_another_version_is_refused(version: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        channel = Channel(sock)
        channel.message()
        channel.send(messages.Challenge(version, bytes(16)))
        channel.message()
        channel.close()

    threading.Thread(target=serve, daemon=True).start()
    with (
        Job(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "r") as job,
        pytest.raises(Refused, match=rf"speaks protocol version {version}, this side \[1\]"),
    ):
        job.ckpt.restore(timeout=10)
    listener.close()


# ------------------------------------------------------------ restore


def test_step_that_is_not_there_is_named_with_those_that_are(shadow: Shadow) -> None:
    job = held(shadow.address, "steps")
    with (
        Job(shadow.address, "steps") as other,
        pytest.raises(StepNotFound, match=r"step 7 is not held; tcp://.* holds \[3\]"),
    ):
        other.ckpt.restore(step=7)
    with Job(shadow.address, "never seen") as other:
        with pytest.raises(StepNotFound, match=r"step 7 was asked for, and tcp://.* holds none of this run"):
            other.ckpt.restore(step=7)
        assert other.ckpt.restore() == 0  # the same Checkpointer, asked for what there is
    check_untouched(shadow.address, "steps", job)


def other_shape() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2))


def other_names() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def other_dtype() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2)).double()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (other_shape, [r"0\.weight is float32 \[5, 6\] in the model, float32 \[4, 6\] in the checkpoint"]),
        (other_names, [r"2\.weight is in the model but not in the checkpoint", r"1\.bias is in the checkpoint"]),
        (other_dtype, [r"0\.bias is float64 \[4\] in the model, float32 \[4\] in the checkpoint"]),
    ],
)
def test_model_that_does_not_fit_changes_nothing_on_either_side(shadow: Shadow, make: Any, words: list[str]) -> None:
    run = make.__name__
    job = held(shadow.address, run)
    with Job(shadow.address, run, make()) as other:
        before, rng = other.state(), torch.get_rng_state()
        with pytest.raises(Mismatch, match="Nothing was changed on either side") as mismatch:
            other.ckpt.restore()
        for word in words:
            mismatch.match(word)
        assert same(other.state(), before)
        assert torch.equal(torch.get_rng_state(), rng)
    check_untouched(shadow.address, run, job)


def test_optimizer_that_does_not_fit_changes_nothing_on_either_side(shadow: Shadow) -> None:
    job = held(shadow.address, "optimizer")
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    with (
        Job(shadow.address, "optimizer", model, optimizer=torch.optim.SGD(model.parameters(), 0.1)) as other,
        pytest.raises(Mismatch, match=r"torch\.optim\.SGD.*here.*torch\.optim\.AdamW.*in the checkpoint"),
    ):
        other.ckpt.restore()
    groups = [{"params": [p]} for p in model.parameters()]
    with (
        Job(shadow.address, "optimizer", model, optimizer=torch.optim.AdamW(groups, 0.1)) as other,
        pytest.raises(Mismatch, match="4 groups here, 1 in the checkpoint"),
    ):
        other.ckpt.restore()
    check_untouched(shadow.address, "optimizer", job)


def test_calls_in_the_wrong_order_are_refused(shadow: Shadow) -> None:
    job = Job(shadow.address, "order")
    with pytest.raises(UsageError, match=r"call restore\(\) before the first step\(\)"):
        job.ckpt.step()
    with pytest.raises(UsageError, match=r"call restore\(\) before batches\(\)"):
        job.ckpt.batches([1])
    with pytest.raises(UsageError, match=r"wait\(\) before restore\(\)"):
        job.ckpt.wait()
    job.ckpt.restore()
    with pytest.raises(UsageError, match=r"restore\(\) is called once, before training"):
        job.ckpt.restore()
    job.train(3)
    with pytest.raises(UsageError, match=r"wait\(9\): the newest step is 3"):
        job.ckpt.wait(9)
    job.ckpt.close()
    job.ckpt.close()
    with pytest.raises(UsageError, match="closed"):
        job.ckpt.step()
    check_untouched(shadow.address, "order", job)


def test_restore_after_training_has_begun_is_refused(shadow: Shadow) -> None:
    first = held(shadow.address, "late")
    with Job(shadow.address, "late") as job:
        job.model(torch.ones(1, 6)).sum().backward()
        job.optimizer.step()
        with pytest.raises(UsageError, match=r"restore\(\) after training has begun; call it right after attach\(\)"):
            job.ckpt.restore()
    check_untouched(shadow.address, "late", first)


def test_attaching_twice_to_one_optimizer_is_refused_and_the_first_goes_on(shadow: Shadow) -> None:
    job = Job(shadow.address, "twice")
    job.ckpt.restore()
    with pytest.raises(UsageError, match="this AdamW is attached already"):
        Job(shadow.address, "twice more", job.model, optimizer=job.optimizer)
    job.train(3).ckpt.close()
    check_untouched(shadow.address, "twice", job)
    with Job(shadow.address, "twice", job.model, optimizer=job.optimizer) as again:  # after close() it is free
        assert again.ckpt.restore() == 3


# ------------------------------------------------------------ gradients and memory


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_not_finite_are_carried_faithfully(
    shadow: Shadow, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    run = f"factor {factor}"
    with Job(shadow.address, run) as job:
        job.ckpt.restore()
        job.train(1).train(2, factor)
        assert not all(bool(t.isfinite().all()) for t in job.state())
        assert job.ckpt.audit()["differing"] == []
        assert job.ckpt.stats()["differences"] == 0
    check_untouched(shadow.address, run, job)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_shadow_without_memory_refuses_the_run_and_keeps_the_others(lab: Lab) -> None:
    small = lab.shadow("--memory-limit", "1500")
    job = held(small.address, "fits")
    large = torch.nn.Linear(100, 100)
    with Job(small.address, "too large", large) as other:
        before = other.state()
        with pytest.raises(Refused, match=r"run 'too large' may need [\d,]+ bytes here .*may use 1,500") as refused:
            other.ckpt.restore(timeout=30)
        assert refused.value.kind == "memory"
        assert same(other.state(), before)
    for _number in range(2):  # what fits alone need not fit beside another
        with (
            Job(small.address, "one more") as other,
            pytest.raises(Refused, match=r"'one more' may need 1,368 bytes here .*, other runs 1,368, .*may use 1,5"),
        ):
            other.ckpt.restore(timeout=30)
    check_untouched(small.address, "fits", job)


def test_error_of_every_kind_is_a_checkmate_error() -> None:
    for name in checkmate.__all__:
        thing = getattr(checkmate, name)
        if isinstance(thing, type) and issubclass(thing, Exception):
            assert issubclass(thing, CheckmateError)
