"""Jobs in the lab: what a command finds, what becomes of what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from checkmate.lab import Lab, job, network
from tests.lab.conftest import Ran, started
from tests.network import requires_network

pytestmark = requires_network

TELL = "import json, os; print(json.dumps(dict(os.environ)))"


def environments(out: str) -> list[dict[str, str]]:
    lines = sorted(line for line in out.splitlines() if line.startswith("[w"))
    return [json.loads(line.partition(" ")[2]) for line in lines]


def test_command_finds_what_torchrun_would_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    ran = Ran("run", "--workers", 2, "--", sys.executable, "-c", TELL)
    assert ran.code == 0, ran.err
    assert "[s0] checkmate shadow listening on tcp://10.78.1.1:7070" in ran.out
    for rank, found in enumerate(environments(ran.out)):
        expected = {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0",
            "CHECKMATE_SHADOW": "tcp://10.78.1.1:7070", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RESTART_COUNT": "3",
        }  # fmt: skip
        assert {key: found.get(key) for key in expected} == expected
        assert "TORCHELASTIC_RUN_ID" not in found or "TORCHELASTIC_RUN_ID" in os.environ
    assert "w1/mgmt0" in ran.out


def test_lab_that_is_up_is_used_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    tell = ("--", sys.executable, "-c", TELL)
    assert Ran("up", "--workers", 3, "--shadows", 0, "--mtu", 9000).code == 0
    found = environments(Ran("run", *tell).out)
    assert [env["WORLD_SIZE"] for env in found] == ["3", "3", "3"]
    assert found[0]["OMP_NUM_THREADS"] == "2"
    assert "CHECKMATE_SHADOW" not in found[0]
    assert len(environments(Ran("run", "--workers", 2, *tell).out)) == 2
    for options in (("--workers", 4), ("--mtu", 1500), ("--no-rules",)):
        ran = Ran("run", *options, *tell)
        assert (ran.code, "[w" in ran.out) == (1, False)
        assert "does not fit (3 workers, 0 shadows, MTU 9000)" in ran.err
    assert Ran("status").code == 0


def test_first_failure_ends_the_others_and_is_the_exit_code() -> None:
    script = (
        "echo as rank $RANK; [ $RANK = 1 ] && sleep 0.5 && exit 7; trap 'echo told; exit 9' TERM; sleep 1000 & wait"
    )
    ran = Ran("run", "--workers", 3, "--shadows", 0, "--json", "--", "sh", "-c", script)
    assert ran.code == 7
    assert "w1 failed first, with exit code 7" in ran.err
    said = json.loads(ran.out)
    assert (said["exit_code"], said["failed"]) == (7, "w1")
    assert "[w2] as rank 2" in ran.err
    assert network.namespaces() == []


def test_a_worker_that_is_killed_counts_as_in_a_shell() -> None:
    ran = Ran("run", "--workers", 1, "--shadows", 0, "--", "sh", "-c", "kill -9 $$")
    assert ran.code == 128 + signal.SIGKILL


def test_a_command_that_is_not_there_fails() -> None:
    ran = Ran("run", "--workers", 1, "--shadows", 0, "--", "no-such-command")
    assert ran.code not in (0, 2)
    assert "no-such-command" in ran.out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_the_job_and_remove_the_lab(number: signal.Signals, code: int) -> None:
    with started("run", "--shadows", 0, "--", "sh", "-c", "echo ready; setsid sleep 1000 & wait") as command:
        for _ in range(2):
            command.read_until("ready")
        command.send_signal(number)
        assert command.wait(30) == code
    assert network.namespaces() == []


def test_who_does_not_end_at_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "GRACE_S", 0.3)
    printed: list[tuple[str, str]] = []
    with Lab(workers=2, shadows=0) as lab:
        script = (
            f"trap '' TERM; cd {tmp_path}; echo ready; touch $RANK; while [ $RANK = 0 ]; do sleep 0.05; done; "
            "until [ -e 0 ]; do sleep 0.05; done; exit 3"
        )
        began = time.monotonic()
        ended = job.run(lab, ["sh", "-c", script], lambda *line: printed.append(line))
        assert ended == (3, "w1")
        assert time.monotonic() - began < 5
        assert sorted(printed) == [("w0", "ready"), ("w1", "ready")]
        assert network.processes(network.namespaces()) == {}


def test_bytes_are_counted_where_they_went(tmp_path: Path) -> None:
    (tmp_path / "send.py").write_text(SEND)
    size = 5_000_000
    for rules, seen in (("--rules", True), ("--no-rules", False)):
        ran = Ran("run", "--workers", 3, rules, "--json", "--", sys.executable, tmp_path / "send.py", size)
        assert ran.code == 0, ran.err
        links = json.loads(ran.out)["links"]
        assert size < links["w0"]["tx_bytes"] < 1.2 * size  # headers, and what TCP sends again
        assert links["w1"]["rx_bytes"] == links["w0"]["tx_bytes"]
        assert links["w2"]["tx_bytes"] == links["w2"]["rx_bytes"] == links["s0"]["tx_bytes"] == 0
        copied = links["s0"]["rx_bytes"]
        assert (size < copied <= links["w0"]["tx_bytes"] + links["w1"]["tx_bytes"]) if seen else copied == 0


SEND = """
import os, socket, sys, time
size = int(sys.argv[1])
if os.environ["RANK"] == "0":
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 43 << 2)
    while sock.connect_ex(("10.77.0.2", 5000)):
        sock.close()
        time.sleep(0.1)
        sock = socket.socket()
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 43 << 2)
    sock.sendall(bytes(size))
    sock.shutdown(socket.SHUT_WR)
    sock.recv(1)
elif os.environ["RANK"] == "1":
    sock, _ = socket.create_server(("10.77.0.2", 5000)).accept()
    while sock.recv(1 << 20):
        pass
"""

TRAIN = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import checkmate

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(500, 500))
optimizer = torch.optim.AdamW(model.parameters())
with checkmate.attach(model, optimizer, shadow=os.environ["CHECKMATE_SHADOW"], run="r", tap="mirror") as ckpt:
    for step in range(ckpt.restore(), 10):
        optimizer.zero_grad()
        model(torch.randn(8, 500)).square().mean().backward()
        optimizer.step()
        ckpt.step()
    ckpt.wait(timeout=30)
    print("differing", ckpt.audit()["differing"])
dist.destroy_process_group()
"""


def test_a_training_job_is_shadowed_by_what_the_switch_copies(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ran = Ran("run", "--workers", 2, "--json", "--", sys.executable, tmp_path / "train.py")
    assert ran.code == 0, ran.err
    assert "[w0] differing []" in ran.err
    check_copied(ran)


def test_so_is_one_whose_hosts_have_several_ranks_each(tmp_path: Path) -> None:
    """What two ranks of one host send each other passes no switch."""
    (tmp_path / "train.py").write_text(TRAIN)
    command = (
        f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --node-rank $RANK "
        f"--master-addr $MASTER_ADDR --master-port 29511 {tmp_path / 'train.py'}"
    )
    ran = Ran("run", "--workers", 2, "--json", "--", "sh", "-c", command)
    assert ran.code == 0, ran.err
    assert ran.err.count("differing []") == 4
    check_copied(ran)


def check_copied(ran: Ran) -> None:
    """One gradient per step has come to the shadow from the switch; repairs would go by the management network."""
    gradients = 10 * 4 * (500 * 500 + 500)
    links = json.loads(ran.out)["links"]
    assert gradients < links["s0"]["rx_bytes"] < 1.2 * gradients
    assert links["s0"]["tx_bytes"] == 0
