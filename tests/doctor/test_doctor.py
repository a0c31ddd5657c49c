"""``checkmate doctor`` in a lab: a healthy one passes, each planted fault is found, with what mends it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checkmate.doctor import probe
from checkmate.doctor.hosts import observe
from checkmate.doctor.judge import FAILED, judge
from checkmate.lab import Lab
from checkmate.switch.cluster import Cluster, Shadow, Worker, dumps
from tests.network import one_lab, requires_network

HOOK = "add table netdev foreign; add chain netdev foreign c {{ type filter hook {} priority {}; }};"

Result = tuple[int, str, str]


class TestInALab:
    pytestmark = requires_network

    @pytest.fixture
    def lab(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
        # Limits of socket buffers are the machine's, not the lab's: one test is about them, and not the others.
        monkeypatch.setattr("checkmate.cli.doctor.judge", partial(judge, least_buffer_bytes=1))
        with one_lab(), Lab(workers=2, shadows=1) as lab:
            yield lab

    def failures(self, lab: Lab, cluster: Cluster | None = None) -> list[tuple[str, str, str, str]]:
        """Subject, check, text and remedy of each."""
        cluster = cluster or lab.cluster
        lines = judge(cluster, observe(cluster), "cluster.toml", least_buffer_bytes=1)
        return [(line.subject, line.check, line.text, line.remedy) for line in lines if line.verdict == FAILED]

    def foreign(self, hook: str, rule: str, priority: int = 0) -> None:
        self.at("switch", "nft", HOOK.format(hook, priority) + f"add rule netdev foreign c {rule}")

    def at(self, host: str, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", f"cm-{host}", *command], check=True, timeout=10)

    def test_healthy_lab_passes(self, lab: Lab, run: Callable[..., Result]) -> None:
        code, out, err = run(lab.cluster_file)
        assert (code, err) == (0, "")
        assert "all is well" in out
        assert "w0 -> s0  ok           each marked packet is copied once; copies have DSCP 43; traffic" in out
        assert "w1 -> w0  ok           packets of full size arrive; DSCP 43 survives" in out
        assert "failed" not in out
        assert "not checked" not in out

    def test_missing_rules(self, lab: Lab, run: Callable[..., Result]) -> None:
        self.at("switch", "nft", "delete table netdev checkmate")
        code, out, _ = run(lab.cluster_file, "--json")
        told: dict[str, Any] = json.loads(out)
        failed = [line for line in told["lines"] if line["verdict"] == "failed"]
        assert (code, told["ok"]) == (1, False)
        assert [line["subject"] for line in failed] == ["switch", "w0 -> s0", "w1 -> s0"]
        assert {line["remedy"] for line in failed} == {f"checkmate switch apply --cluster {lab.cluster_file}"}

    def test_one_worker_alone_is_not_called_well(self, lab: Lab, run: Callable[..., Result], tmp_path: Path) -> None:
        (tmp_path / "alone.toml").write_text(dumps(replace(lab.cluster, workers=lab.cluster.workers[:1])))
        self.at("switch", "nft", "delete chain netdev checkmate from_w1")
        code, out, _ = run(tmp_path / "alone.toml")
        assert "w0      not checked  there is no other worker to send packets to" in out
        assert code == 0
        assert out.endswith(" 1 not checked\n")

    def test_rule_twice(self, lab: Lab) -> None:
        self.foreign("ingress device w0", "ip dscp 43 dup to s0")
        ((subject, _, text, remedy),) = self.failures(lab)
        assert (subject, text) == ("w0 -> s0", "each marked packet is copied twice")
        assert "ip netns exec cm-switch nft -a list ruleset" in remedy

    def test_mark_rewritten_before_it_is_looked_at(self, lab: Lab) -> None:
        self.foreign("ingress device w0", "ip dscp 43 ip dscp set 10", priority=-400)
        path, link = self.failures(lab)
        assert path[:3] == ("w0 -> w1", "dscp", "DSCP 43 was rewritten to 10 on the way")
        assert "ip netns exec cm-switch nft -a list ruleset" in path[3]
        assert (link[0], link[3]) == ("w0 -> s0", "first keep the mark, see w0 -> w1")

    def test_mark_rewritten_in_copies(self, lab: Lab) -> None:
        self.foreign("egress device s0", "ip dscp 43 ip dscp set 10")
        first, second = self.failures(lab)
        assert (first[0], second[0]) == ("w0 -> s0", "w1 -> s0")
        assert first[2].startswith("copies arrive with DSCP 10 in place of 43")

    def test_smaller_mtu_of_a_worker(self, lab: Lab) -> None:
        self.at("w1", "ip", "link", "set", "eth0", "mtu", "1400")
        ((subject, check, _, remedy),) = self.failures(lab)
        assert (subject, check) == ("w1", "mtu")
        assert remedy == "ip netns exec cm-w1 ip link set dev eth0 mtu 1500"

    def test_smaller_mtu_of_a_port_on_the_way(self, lab: Lab) -> None:
        self.at("switch", "ip", "link", "set", "w1", "mtu", "1400")
        found = self.failures(lab)
        assert [line[:2] for line in found] == [("w0 -> w1", "mtu"), ("w1 -> w0", "mtu")]
        assert "ip netns exec cm-switch ip link set dev w1 mtu 1500" in found[0][3]

    def test_smaller_mtu_of_the_shadow(self, lab: Lab) -> None:
        self.at("s0", "ip", "link", "set", "eth0", "mtu", "1400")
        assert [line[:2] for line in self.failures(lab)] == [("s0", "mtu"), ("w0 -> s0", "mtu"), ("w1 -> s0", "mtu")]

    def test_unmarked_traffic_is_copied(self, lab: Lab) -> None:
        self.foreign("ingress device w0", "ip dscp != 43 dup to s0")
        ((subject, check, _, remedy),) = self.failures(lab)
        assert (subject, check) == ("w0 -> s0", "unmarked")
        assert "nft -a list ruleset" in remedy

    def test_socket_buffers(self, lab: Lab) -> None:
        found = observe(lab.cluster)
        at_least = 1 << 40
        lines = judge(lab.cluster, found, "cluster.toml", at_least)
        assert [line.subject for line in lines if line.check == "buffers"] == ["w0", "w0", "w1", "w1", "s0", "s0"]
        assert all(f"sysctl -w net.core.{name}={at_least}" in "".join(line.remedy for line in lines)
                   for name in ("rmem_max", "wmem_max"))  # fmt: skip

    def test_wrong_interface_of_the_shadow(self, lab: Lab) -> None:
        cluster = replace(lab.cluster, shadows=(replace(lab.cluster.shadows[0], interface="ens3"),))
        ((subject, check, text, remedy),) = self.failures(lab, cluster)
        assert (subject, check) == ("s0", "interface")
        assert text == "no interface 'ens3'; there are lo, eth0, mgmt0"
        assert "mend `interface` of s0 in cluster.toml" in remedy

    def test_no_right_to_capture(self, lab: Lab) -> None:
        cluster = replace(lab.cluster, exec=lab.cluster.exec + " setpriv --bounding-set=-net_raw")
        ((subject, check, text, remedy),) = self.failures(lab, cluster)
        assert (subject, check) == ("s0", "capture")
        assert "CAP_NET_RAW" in text
        assert "+net_raw" in remedy

    def test_nothing_stays_behind_on_the_hosts(self, lab: Lab) -> None:
        observe(lab.cluster)
        for host in lab.hosts:
            assert subprocess.check_output(["ip", "netns", "pids", f"cm-{host}"], text=True) == ""


# ---------------------------------------------------------------- without a network


HERE = Cluster(
    (Worker("w0", "127.0.0.1", "w0", "lo"), Worker("w1", "127.0.0.2", "w1", "lo")),
    (Shadow("s0", "127.0.0.3", "s0", "lo"),),
)


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: str) -> Path:
        (tmp_path / "cluster.toml").write_text(dumps(replace(HERE, **changes)))  # type: ignore[arg-type]
        return tmp_path / "cluster.toml"

    return write


def test_command_that_is_not_there(file: Callable[..., Path], run: Callable[..., Result]) -> None:
    code, out, _ = run(file(exec="no-such-shell {address}"))
    assert code == 1
    assert "w0      failed       cannot be reached: no-such-shell: No such file or directory" in out
    assert f"no-such-shell 127.0.0.1 {sys.executable} -c 'import checkmate'; mend `exec` in " in out
    assert out.count("failed    ") == 3


def test_python_without_checkmate(file: Callable[..., Path], run: Callable[..., Result]) -> None:
    code, out, _ = run(file(), "--python", "false")
    assert code == 1
    assert "cannot be reached: it ended without a word, exit code 1" in out
    assert "--python" in out


def test_host_that_says_why_it_cannot_be_reached(file: Callable[..., Path], run: Callable[..., Result]) -> None:
    _, out, _ = run(file(exec="sh -c 'echo Permission denied >&2; exit 255'"))
    assert out.count("cannot be reached: Permission denied") == 3


def test_host_that_does_not_answer_is_given_up_in_time(file: Callable[..., Path], run: Callable[..., Result]) -> None:
    began = time.monotonic()
    code, out, _ = run(file(exec="sh -c 'echo ready; exec sleep 60'"), "--timeout", "1")
    assert code == 1
    assert out.count("cannot be reached: no answer in time; it says: ready") == 3
    assert time.monotonic() - began < 10


def test_description_that_is_wrong_is_wrong_usage(tmp_path: Path, run: Callable[..., Result]) -> None:
    (tmp_path / "cluster.toml").write_text("dscp = 99\n")
    code, _, err = run(tmp_path / "cluster.toml")
    assert code == 2
    assert "dscp must be a number from 1 to 63" in err
    assert run(tmp_path / "absent.toml")[0] == 2


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_marks_are_found_at_the_next_worker_without_privileges(address: str) -> None:
    try:
        worker = probe.Worker(address)
    except OSError:
        pytest.skip(f"this machine has no {address}")
    cookie = "0123456789abcdef" * 2
    assert worker.send(address, worker.port, 43, cookie)["lost"] == []
    deadline = time.monotonic() + 10
    while len(arrived := worker.end()["arrived"]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert {one["cookie"] for one in arrived} == {cookie}
    assert {(one["kind"], one["dscp"]) for one in arrived} == {("small", 43), ("full", 43), ("control", 0)}


def test_worker_without_its_address_says_so() -> None:
    host, answer = probe.begin("worker", "lo", "192.0.2.1")
    assert host is None
    assert answer["trouble"] == "address"


def test_probe_needs_no_torch_on_the_hosts_of_the_network() -> None:
    program = "import sys, checkmate.doctor.probe; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
