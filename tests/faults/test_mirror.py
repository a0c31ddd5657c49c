"""Faults of a run over the network tap: of the shadow, of workers, of the network, and forged packets.

Two ranks see the same data, so that training equals that of one rank. As root, the shadow captures on loopback what is
mirrored; what is multicast there, it joins.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest

from checkmate.wire.frames import HEADER_BYTES, MAGIC, Header, decode_header, encode
from checkmate.wire.packets import Flow, parse
from checkmate.wire.seal import TRAILER_BYTES, Seal
from tests.faults.faults import SMALL, STOP_S
from tests.faults.helpers import Lab, Shadow, Trainer, median
from tests.network import requires_network
from tests.wire.packet_makers import packet

pytestmark = pytest.mark.processes

RUN = {"step_s": 0.01}
DSCP = 43
F = TypeVar("F", bound=Callable[..., None])


def needs_capture(test: F) -> F:
    for mark in requires_network:
        test = mark(test)
    return test


by_tap = pytest.mark.parametrize("tap", ["mirror", "multicast"])
#: Where the shadow must hear something.
by_tap_heard = pytest.mark.parametrize("tap", [pytest.param("mirror", marks=requires_network), "multicast"])


def shadow_of(lab: Lab, tap: str, *args: str, **options: Any) -> Shadow:
    hears = ("--multicast", "lo") if tap == "multicast" else ("--capture", "lo") if os.geteuid() == 0 else ()
    return lab.shadow(*hears, *args, **options)


def start(
    lab: Lab, store: Path, address: str, tap: str, ranks: int = 2, run: str = "r", **options: Any
) -> list[Trainer]:
    """All ranks, training."""
    options = {**RUN, "tap": tap, **options}
    trainers = [lab.trainer(address, run, world=(r, ranks, str(store)), **options) for r in range(ranks)]
    for trainer in trainers:
        trainer.event("restored")
        trainer.tell("train 100000")
    return trainers


def settle(ranks: list[Trainer]) -> int:
    """Let them stop at one step, and return it."""
    stop = max(rank.last_step for rank in ranks) + 50
    for rank in ranks:
        rank.tell(f"train {stop}")
    for rank in ranks:
        rank.await_step(stop)
    return stop


def audit(ranks: list[Trainer], room: bool = True) -> None:
    """The shadow holds the bits that training has. Without room in staging, the last step may be one of a gap."""
    for _ in range(1 if room else 5):
        step = settle(ranks)
        if room or ranks[0].call("wait", 5.0)["error"] is None:
            break
    for rank in ranks:
        called = rank.call("audit", 30.0)
        assert called["error"] is None, called["error"]
        assert (called["answer"]["step"], called["answer"]["differing"]) == (step, [])
        assert called["answer"]["compared"] > 0


def tagged(rank: Trainer, after: int) -> set[int]:
    """Bytes that left on the tagged connection, or by multicast, of each step from `after` on."""
    counts = [(e["step"], e["stats"]["bytes_tagged"]) for e in rank.steps if e["step"] >= after]
    return {now - then for (_, then), (_, now) in pairwise(counts)}


def status(lab: Lab, shadow: Shadow, *options: str) -> dict[str, Any]:
    asked = lab.command("status", shadow.address, "--json", *options)
    assert asked.join() == 0, asked.transcript()
    return asked.event("json")


# ------------------------------------------------------------------------------ the shadow


@by_tap_heard
@pytest.mark.parametrize("staging", [None, SMALL], ids=["room for all", "room for some"])
def test_stopped_shadow_costs_the_workers_nothing_and_is_whole_again(
    lab: Lab, tmp_path: Path, staging: int | None, tap: str
) -> None:
    shadow = shadow_of(lab, tap)
    ranks = start(lab, tmp_path / "0", shadow.address, tap, staging_bytes=staging)
    ranks[0].await_whole(60)
    before_at = ranks[0].last_step
    shadow.stop()
    time.sleep(STOP_S)
    during_at = ranks[0].last_step
    shadow.cont()
    assert during_at > before_at + 40
    ranks[0].await_whole(during_at + 1)
    audit(ranks, room=staging is None)
    for rank in ranks:
        assert len(tagged(rank, 3)) == 1
        lab.check_steps(rank)
        before = median(e["took"] for e in rank.steps if 5 <= e["step"] <= before_at)
        during = median(e["took"] for e in rank.steps if before_at < e["step"] <= during_at)
        assert during <= 1.3 * before + 0.003, f"{1e3 * before:.2f} ms, then {1e3 * during:.2f} ms"
        if staging is None:
            assert rank.steps[-1]["stats"]["gaps"] == 0
        assert rank.steps[-1]["stats"]["fallbacks"] <= (0 if staging is None else 10)
    assert (ranks[0].steps[-1]["stats"]["gaps"] > 0) == (staging is not None)
    assert ranks[0].count("brought nothing") == 0


@by_tap
def test_shadow_that_comes_back_empty_is_whole_again(lab: Lab, tmp_path: Path, tap: str) -> None:
    shadow = shadow_of(lab, tap)
    ranks = start(lab, tmp_path / "0", shadow.address, tap)
    ranks[0].await_whole(20)
    shadow.kill()
    time.sleep(lab.random.uniform(0, 0.3))
    told = ranks[0].count("whole again")  # of the shadow that is gone, if it was behind
    shadow = shadow_of(lab, tap, port=shadow.port)
    ranks[0].line("whole again", after=told)
    ranks[0].await_whole(ranks[0].last_step)
    audit(ranks)
    for rank in ranks:
        assert len(tagged(rank, 3)) == 1
        lab.check_steps(rank)


@by_tap
def test_shadow_that_hears_nothing_gets_everything_as_repairs_and_says_so(lab: Lab, tmp_path: Path, tap: str) -> None:
    shadow = lab.shadow()
    ranks = start(lab, tmp_path / "0", shadow.address, tap)
    ranks[0].await_whole(30)
    ranks[0].line("without --capture.*or without --multicast")
    audit(ranks)
    found = status(lab, shadow)["runs"][0]
    gradient = 4 * (48 * 96 + 96 + 96 * 48 + 48)
    assert found["bytes_overheard"] == 0
    assert found["bytes_repaired"] == ranks[0].last_step * gradient
    for rank in ranks:
        assert rank.count("without --capture") == (rank is ranks[0])
        lab.check_steps(rank)


@pytest.fixture
def silent() -> Iterator[str]:
    """An interface on which nothing comes."""
    name = f"cmt{os.getpid()}"
    subprocess.run(["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"], check=True)
    subprocess.run(["ip", "link", "set", name, "up"], check=True)
    subprocess.run(["ip", "address", "add", "192.0.2.77/32", "dev", name], check=True)
    yield name
    subprocess.run(["ip", "link", "delete", name], check=True)


@needs_capture
def test_shadow_to_which_the_network_brings_nothing_says_so(lab: Lab, tmp_path: Path, silent: str) -> None:
    shadow = lab.shadow("--capture", silent)  # by multicast it is the same, and takes as long
    ranks = start(lab, tmp_path / "0", shadow.address, "mirror")
    ranks[0].line(r"brought nothing.*checkmate doctor")
    audit(ranks)


@by_tap_heard
def test_what_the_network_loses_is_repaired(lab: Lab, tmp_path: Path, tap: str) -> None:
    shadow = shadow_of(lab, tap, loss=(0.05, lab.random.randrange(1 << 32)))
    ranks = start(lab, tmp_path / "0", shadow.address, tap)
    ranks[0].await_whole(100)
    audit(ranks)
    found = status(lab, shadow)["runs"][0]
    gradient = 4 * (48 * 96 + 96 + 96 * 48 + 48)
    assert found["epoch"] == 1
    assert found["bytes_repaired"] > 0
    assert found["bytes_overheard"] > 0
    assert found["bytes_repaired"] + found["bytes_overheard"] == ranks[0].last_step * gradient
    for rank in ranks:
        lab.check_steps(rank)
        assert rank.steps[-1]["stats"]["gaps"] == rank.steps[-1]["stats"]["fallbacks"] == 0
        assert rank.count("brought nothing") == 0


# ------------------------------------------------------------------------------ the workers


@by_tap
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_worker_that_is_gone_raises_in_every_other_within_the_timeout(
    lab: Lab, tmp_path: Path, number: signal.Signals, tap: str
) -> None:
    timeout_s = 3.0
    shadow = shadow_of(lab, tap)
    ranks = start(lab, tmp_path / "0", shadow.address, tap, 3, group_timeout_s=timeout_s, step_s=0.0, close_s=0.2)
    ranks[0].await_whole(20, lag=20)
    time.sleep(lab.random.uniform(0, 0.05))
    victim = ranks.pop(lab.random.randrange(3))
    victim.signal(number)
    took = max(rank.event("raised")["took"] for rank in ranks)  # since their step began
    for rank in ranks:
        assert rank.join() == 1, rank.transcript()
        # Some hear of it from another that has given up before them.
        assert rank.count("no answer within the process group's timeout|closed its connection|reset by peer|is over")
    assert took < (timeout_s if number is signal.SIGSTOP else 0.0) + 1.0, f"{took:.1f} s"
    assert number is signal.SIGKILL or took > timeout_s - 0.5


@by_tap
def test_worker_that_stands_still_for_a_while_costs_that_while(lab: Lab, tmp_path: Path, tap: str) -> None:
    shadow = shadow_of(lab, tap)
    ranks = start(lab, tmp_path / "0", shadow.address, tap, group_timeout_s=6.0, step_s=0.0)
    ranks[0].await_whole(20, lag=20)
    for _ in range(3):
        at = ranks[0].last_step
        victim = lab.random.choice(ranks)
        victim.signal(signal.SIGSTOP)
        time.sleep(lab.random.uniform(0.5, 2.0))
        assert ranks[0].last_step < at + 500
        victim.signal(signal.SIGCONT)
        ranks[0].await_step(ranks[0].last_step + 20)
    audit(ranks)
    for rank in ranks:
        lab.check_steps(rank, slowest_s=3.0)
        assert max(step["took"] for step in rank.steps) > 0.4


@by_tap
def test_three_ranks_that_were_all_killed_go_on_with_the_same_bits(lab: Lab, tmp_path: Path, tap: str) -> None:
    shadow = shadow_of(lab, tap)
    stop = 120
    undisturbed = start(lab, tmp_path / "whole", shadow.address, tap, 3, "whole")
    settled = settle(undisturbed)
    assert settled < stop
    for rank in undisturbed:
        rank.tell(f"train {stop}")
    undisturbed[0].await_step(stop)
    expected = {e["step"]: e["digest"] for e in undisturbed[0].steps}
    for rank in undisturbed:
        rank.kill()
    assert len(set(expected.values())) == len(expected)  # the negative control: steps differ
    claim, at = 0, 0
    for attempt in range(3):
        ranks = start(lab, tmp_path / str(attempt), shadow.address, tap, 3)
        restored = [rank.event("restored") for rank in ranks]
        first = restored[0]["step"]
        assert {e["step"] for e in restored} == {first}
        assert claim <= first <= at + 1
        for told in restored:
            assert first == 0 or told["digest"] == expected[first]
        at = first + lab.random.randrange(5, 35)
        ranks[0].await_step(at)
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        for rank in ranks:
            rank.kill()
            at = max(at, rank.last_step)
            for step in rank.steps:
                assert step["digest"] == expected[step["step"]], f"step {step['step']} differs"
        claim = max(c for rank in ranks for c in rank.claims if c is not None)
        assert claim > first


# ------------------------------------------------------------------------------ forged packets


def overheard(sealed: bool) -> tuple[Flow, Header, bytes]:
    """A frame of the tagged connections on loopback: its flow, its header, and all of it."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as sock:
        sock.bind(("lo", 0x0800))
        sock.settimeout(20)
        while True:
            data = memoryview(sock.recv(1 << 17))
            segment = parse(data, len(data))
            if segment is None or segment[1] != DSCP or bytes(segment[4][:4]) != MAGIC:
                continue
            key, dscp, _, _, payload = segment
            source, target, source_port, target_port = struct.unpack("!4s4sHH", key)
            header, _ = decode_header(payload)
            flow = Flow(socket.inet_ntoa(source), source_port, socket.inet_ntoa(target), target_port, dscp)
            whole = HEADER_BYTES + header.length + (TRAILER_BYTES if sealed else 0)
            if whole <= min(len(payload), 60_000):
                return flow, header, bytes(payload[:whole])


def forge(flow: Flow, seq: int, payload: bytes) -> None:
    """Into what is captured, and not into what the workers receive: the IP checksum is wrong."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sock:
        sock.bind(("lo", 0))
        # Two in a row, for one alone is no reason to believe that the connection has gone on elsewhere.
        sock.send(packet(flow, seq, bytes(8)))
        sock.send(packet(flow, (seq + 8) % (1 << 32), payload))


def spoilt(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@needs_capture
@pytest.mark.parametrize("token", [None, "secret"])
def test_forged_and_foreign_packets_are_counted_and_change_nothing(lab: Lab, tmp_path: Path, token: str | None) -> None:
    options: tuple[str, ...] = ()
    if token is not None:
        (tmp_path / "token").write_text(token)
        (tmp_path / "token").chmod(0o600)
        options = ("--token-file", str(tmp_path / "token"))
    shadow = shadow_of(lab, "mirror", *options)
    ranks = start(lab, tmp_path / "0", shadow.address, "mirror", token=token)
    ranks[0].await_whole(30)
    before = status(lab, shadow, *options)
    chance = random.Random(lab.random.randrange(1 << 32))
    rounds = 10
    for _ in range(rounds):
        flow, header, genuine = overheard(token is not None)
        ahead = header._replace(step=header.step + 1, length=64, offset=0)
        payload = chance.randbytes(64)
        trailer = chance.randbytes(TRAILER_BYTES) if token is not None else b""
        others = Seal(b"guessed", "r", header.incarnation).trailer(
            header.rank, 1 << 40, encode(ahead, payload)[:80], payload
        )
        for bad in (
            encode(ahead._replace(incarnation=chance.randbytes(16)), payload) + trailer,
            encode(ahead._replace(incarnation=bytes(16)), payload) + trailer,
            spoilt(encode(ahead, payload), HEADER_BYTES + 5) + trailer,  # its payload fails the checksum
            spoilt(encode(ahead, payload), 30) + trailer,  # its header does
        ):
            forge(flow, chance.randrange(1 << 32), bad)
        if token is not None:
            forge(flow, chance.randrange(1 << 32), encode(ahead, payload) + trailer)
            forge(flow, chance.randrange(1 << 32), encode(ahead, payload) + others)
            forge(flow, chance.randrange(1 << 32), spoilt(genuine, len(genuine) - 1))
            forge(flow, chance.randrange(1 << 32), genuine)  # once more
        time.sleep(0.05)
    ranks[0].await_whole(ranks[0].last_step + 20)
    audit(ranks)
    after = status(lab, shadow, *options)
    then, now = before["server"]["capture"], after["server"]["capture"]
    counts = {name: now[name] - then[name] for name in ("foreign_frames", "forged_frames", "bad_frames")}
    print(counts)
    few = rounds // 2  # where a genuine packet came between the two of a forgery, nobody believed it
    assert counts["foreign_frames"] >= few
    assert counts["bad_frames"] >= few
    assert (counts["forged_frames"] >= few) if token is not None else counts["forged_frames"] == 0
    assert after["runs"][0]["epoch"] == before["runs"][0]["epoch"]
    for rank in ranks:
        lab.check_steps(rank)
        assert len(tagged(rank, 3)) == 1
        assert rank.steps[-1]["stats"]["gaps"] == 0
