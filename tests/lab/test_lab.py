"""A lab comes and goes, and leaves nothing; beside it nothing changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from checkmate.lab import Lab, LabError, network
from tests.lab.conftest import Ran, started, wait_until
from tests.network import requires_network

pytestmark = requires_network


def ask(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def outside() -> list[str]:
    """Everything that a lab must leave alone, but for namespaces of our names."""
    listed = [line for line in ask("ip", "netns", "list").splitlines() if not line.startswith(("cm-w", "cm-s"))]
    links = [ask("ip", "-o", "link"), ask("ip", "-o", "addr"), ask("ip", "route")]
    return [*sorted(line.split()[0] for line in listed), *links, ask("nft", "list", "ruleset")]


@pytest.fixture
def foreign() -> Iterator[str]:
    """A namespace of somebody else, whose name is much like ours, with a process in it."""
    name = f"cm-x{os.getpid()}"
    ask("ip", "netns", "add", name)
    with subprocess.Popen(["ip", "netns", "exec", name, "sleep", "1000"]) as sleeping:
        yield name
        assert sleeping.poll() is None
        sleeping.kill()
    ask("ip", "netns", "del", name)


def test_up_down_and_status_say_the_same_when_said_again() -> None:
    assert json.loads(Ran("status", "--json").out) == {"up": False, "leftovers": []}
    options = ("--workers", 3, "--mtu", 9000, "--rate", "1gbit", "--no-offloads")
    first, second = (json.loads(Ran("up", *options, "--json").out) for _ in range(2))
    assert (first.pop("built"), second.pop("built")) == (True, False)
    status = Ran("status", "--json")
    assert first == second == json.loads(status.out)
    assert status.code == 0
    assert [host["name"] for host in first["hosts"]] == ["w0", "w1", "w2", "s0"]
    assert [(rule["port"], rule["copies"]) for rule in first["rules"]] == [(f"w{i}", ["s0"]) for i in range(3)]
    assert set(first["links"]["s0"].values()) == {0}
    assert all(word in Ran("status").out for word in ("10.78.1.1", "w2/mgmt0", "packets dropped", "copied to s0"))
    other = Ran("up", "--workers", 4)
    assert other.code == 1
    assert "another shape is up (3 workers, 1 shadow, MTU 9000, 1gbit per link, no offloads)" in other.err
    removed = [json.loads(Ran("down", "--json").out)["removed"] for _ in range(2)]
    assert removed == [["cm-s0", "cm-switch", "cm-w0", "cm-w1", "cm-w2"], []]
    assert Ran("status").code == 1


def test_nothing_outside_changes(foreign: str) -> None:
    before = outside()
    assert any(foreign in line for line in before)
    assert Ran("up", "--shadows", 2).code == 0
    assert outside() == before
    assert Ran("down").code == 0
    assert outside() == before


def test_leftovers_of_a_job_that_was_killed_are_removed_by_the_next_up() -> None:
    with started(
        "run", "--shadows", 0, "--", "sh", "-c", "setsid sleep 1000 & echo pid $$; exec sleep 1000"
    ) as command:
        pids = [int(command.read_until("pid").split()[-1]) for _ in range(2)]
        for refused in (Ran("down"), Ran("status"), Ran("up")):
            assert refused.code == 1
            assert f"process {command.pid} is using the lab" in refused.err
        command.kill()
        command.wait()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))  # they die with it
    assert len(network.processes(network.namespaces())) == 2  # what they have started may not
    assert "of one that was killed there are cm-switch, cm-w0, cm-w1" in Ran("status").out
    assert Ran("up", "--workers", 1).code == 0
    assert network.namespaces() == ["cm-s0", "cm-switch", "cm-w0"]
    assert network.processes(network.namespaces()) == {}


def test_a_lab_that_fails_to_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LabError("no")

    monkeypatch.setattr("checkmate.switch.nft.establish", fail)
    with pytest.raises(LabError, match="no"), Lab():
        pass
    assert network.namespaces() == []


SEND = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    sock.sendto(bytes(100), (sys.argv[1], 9))
"""


def test_share_of_packets_that_get_lost_is_as_asked_for() -> None:
    with Lab(workers=1) as lab:
        received = []
        for percent in (0, 10, 0):
            lab.drop("s0", percent)
            before = lab.counters()
            with lab.run_in("w0", ["python3", "-c", SEND, lab.shadows[0].address, "4000"]) as sending:
                assert sending.wait() == 0
            after = lab.counters()
            assert after["w0"]["tx_packets"] - before["w0"]["tx_packets"] == 4000
            assert after["w0"]["tx_bytes"] - before["w0"]["tx_bytes"] == 4000 * (14 + 20 + 8 + 100)
            received.append(after["s0"]["rx_packets"] - before["s0"]["rx_packets"])
        assert received[0] == received[2] == 4000
        assert 3500 <= received[1] <= 3700  # five standard deviations


def test_signal_while_it_is_built_leaves_nothing() -> None:
    with started("up", "--workers", 16) as command:
        wait_until(network.namespaces)
        command.send_signal(signal.SIGTERM)
        assert command.wait(30) == 128 + signal.SIGTERM
    assert network.namespaces() == []
