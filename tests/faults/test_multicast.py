"""Multicast among many: ranks that are too many, runs that share a group, and datagrams that somebody else sends.

All is on loopback, where whoever joins a group hears it, and whoever has heard a session's number can talk into it.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkmate.transport.group import join, sender
from checkmate.wire.datagrams import DATAGRAM_HEADER_BYTES, GROUP_PORT, Datagram, What, decode
from checkmate.wire.frames import HEADER_BYTES
from tests.faults.helpers import Lab, Shadow, Trainer
from tests.faults.test_mirror import audit, needs_capture, start, status

pytestmark = pytest.mark.processes

#: One address, so that all who use it share a group.
GROUP = "239.77.7.7"
ONE = {"groups": f"{GROUP}/32"}


def failures(ranks: list[Trainer]) -> list[dict[str, Any]]:
    """How `attach` failed, on every rank."""
    found = [rank.event("failed") for rank in ranks]
    for rank in ranks:
        assert rank.join() == 1, rank.transcript()
    return found


def attach(lab: Lab, store: Path, ranks: int, options: Callable[[int], dict[str, Any]]) -> list[Trainer]:
    return [
        lab.trainer("tcp://127.0.0.1:1", world=(r, ranks, str(store)), tap="multicast", **options(r))
        for r in range(ranks)
    ]


def test_ranks_that_take_their_group_from_other_ranges_are_told(lab: Lab, tmp_path: Path) -> None:
    for told in failures(attach(lab, tmp_path / "0", 2, lambda rank: {"groups": f"239.77.7.{8 + rank}/32"})):
        assert "the ranks have chosen different groups (239.77.7.8, 239.77.7.9): groups= differs" in told["text"]


def test_runs_that_share_a_group_do_not_disturb_each_other(lab: Lab, tmp_path: Path) -> None:
    shadow = lab.shadow("--multicast", "lo")
    runs = [start(lab, tmp_path / run, shadow.address, "multicast", 2, run, **ONE) for run in ("r", "other")]
    for ranks in runs:
        ranks[0].await_whole(60)
    early = status(lab, shadow)["server"]["multicast"]["foreign"]  # what those said who had not attached yet
    for ranks in runs:
        audit(ranks)
        for rank in ranks:
            lab.check_steps(rank)
    found = status(lab, shadow)
    assert found["server"]["multicast"]["groups"] == [f"{GROUP}:{GROUP_PORT}"]
    assert found["server"]["multicast"]["foreign"] == early
    for run in found["runs"]:
        assert run["bytes_overheard"] > 2 * run["bytes_repaired"]  # six processes on these cores


# ------------------------------------------------------------------------------ what somebody else sends

Parts = tuple[bytes, bytes]  #: the table of a message, and its payload; here each is one datagram


def noise(chance: random.Random, genuine: Parts) -> Parts:
    return chance.randbytes(len(genuine[0])), chance.randbytes(len(genuine[1]))


def spoilt_header(chance: random.Random, genuine: Parts) -> Parts:
    table = bytearray(genuine[0])
    table[chance.randrange(HEADER_BYTES)] ^= 1 << chance.randrange(8)
    return bytes(table), genuine[1]


def spoilt_payload(chance: random.Random, genuine: Parts) -> Parts:
    payload = bytearray(genuine[1])
    payload[chance.randrange(len(payload))] ^= 1 << chance.randrange(8)
    return genuine[0], bytes(payload)


def replayed(chance: random.Random, genuine: Parts) -> Parts:
    return genuine


FORGERIES = [noise, spoilt_header, spoilt_payload, replayed]


class Forger:
    """Joins the group, and says of every rank's next messages what `forge` makes of the present one."""

    def __init__(self, forge: Callable[[random.Random, Parts], Parts], seed: int) -> None:
        self.said = 0
        self._forge, self._chance = forge, random.Random(seed)
        self._ears, self._mouth = join(GROUP, GROUP_PORT, "127.0.0.1"), sender("127.0.0.1", 1)
        self._tables: dict[tuple[int, int], bytes] = {}
        self._over = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        thread = threading.Thread(target=self._work)
        thread.start()
        try:
            yield
        finally:
            self._over = True
            thread.join()
            self._ears.close()
            self._mouth.close()
            self.close()

    def _work(self) -> None:
        self._ears.settimeout(0.1)
        while not self._over:
            try:
                data, address = self._ears.recvfrom(1 << 16)
            except TimeoutError:
                continue
            if address == self._mouth.getsockname() or (head := decode(data)) is None or head.what is not What.DATA:
                continue
            part = data[DATAGRAM_HEADER_BYTES:]
            if head.first < head.tables:
                self._tables[head.sender, head.number] = part
            elif (table := self._tables.pop((head.sender, head.number), None)) is not None:
                self._say(head, self._forge(self._chance, (table, part)), address)

    def _say(self, head: Datagram, parts: Parts, address: tuple[str, int]) -> None:
        for first, part in enumerate(filter(None, parts)):
            for ahead in (1, 2):
                forged = head._replace(number=head.number + ahead, first=first).encode() + part
                self.send(forged, address)
        self.said += 1

    def close(self) -> None: ...

    def send(self, data: bytes, address: tuple[str, int]) -> None:
        """`address` is whose datagram was heard."""
        self._mouth.sendto(data, (GROUP, GROUP_PORT))


class Impostor(Forger):
    """As root, even from the address of the rank."""

    def __init__(self, forge: Callable[[random.Random, Parts], Parts], seed: int) -> None:
        super().__init__(forge, seed)
        self._raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        self._raw.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))

    def close(self) -> None:
        self._raw.close()

    def send(self, data: bytes, address: tuple[str, int]) -> None:
        head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 0, 0, 0, 1, 17, 0, *map(socket.inet_aton, (address[0], GROUP)))
        self._raw.sendto(head + struct.pack("!HHHH", address[1], GROUP_PORT, 8 + len(data), 0) + data, (GROUP, 0))


def token_of(lab: Lab, folder: Path, token: str | None) -> tuple[Shadow, tuple[str, ...]]:
    options: tuple[str, ...] = ()
    if token is not None:
        (folder / "token").write_text(token)
        (folder / "token").chmod(0o600)
        options = ("--token-file", str(folder / "token"))
    return lab.shadow("--multicast", "lo", *options), options


def unharmed(lab: Lab, ranks: list[Trainer]) -> None:
    """Every bit is right. What is spoilt is fetched again and again, so no step need be quick."""
    audit(ranks)
    for rank in ranks:
        lab.check_steps(rank, slowest_s=10.0)


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_with_a_token_peers_refuse_what_one_of_them_did_not_say(
    lab: Lab, tmp_path: Path, forge: Callable[[random.Random, Parts], Parts]
) -> None:
    shadow, options = token_of(lab, tmp_path, "secret")
    ranks = start(lab, tmp_path / "0", shadow.address, "multicast", token="secret", **ONE)
    ranks[0].await_whole(30)
    forger = Forger(forge, lab.random.randrange(1 << 32))
    with forger.at_work():
        ranks[0].await_step(ranks[0].last_step + 60)
    assert forger.said > 50
    unharmed(lab, ranks)
    assert status(lab, shadow, *options)["server"]["multicast"]["foreign"] > 0


def test_without_a_token_a_damaged_table_is_refused(lab: Lab, tmp_path: Path) -> None:
    """Whoever forges with care is believed; that takes a token."""
    shadow, _ = token_of(lab, tmp_path, None)
    ranks = start(lab, tmp_path / "0", shadow.address, "multicast", **ONE)
    ranks[0].await_whole(30)
    forger = Forger(lambda *made: (spoilt_header(*made)[0], b""), lab.random.randrange(1 << 32))
    with forger.at_work():
        ranks[0].await_step(ranks[0].last_step + 60)
    assert forger.said > 50
    unharmed(lab, ranks)


@needs_capture
@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_with_a_token_what_comes_from_a_ranks_address_proves_nothing(
    lab: Lab, tmp_path: Path, forge: Callable[[random.Random, Parts], Parts]
) -> None:
    shadow, options = token_of(lab, tmp_path, "secret")
    ranks = start(lab, tmp_path / "0", shadow.address, "multicast", token="secret", **ONE)
    ranks[0].await_whole(30)
    with Impostor(forge, lab.random.randrange(1 << 32)).at_work():
        ranks[0].await_step(ranks[0].last_step + 40)
    ranks[0].await_whole(ranks[0].last_step + 1)
    unharmed(lab, ranks)
    found = status(lab, shadow, *options)["server"]["multicast"]
    print(found)
    assert found["foreign"] == 0
    assert found["bad_frames"] + found["unwanted_frames"] + found["duplicates"] > 0


def test_trainers_with_another_token_are_not_heard(lab: Lab, tmp_path: Path) -> None:
    """Not even attached to; what they multicast before is nobody's."""
    shadow, _ = token_of(lab, tmp_path, "secret")
    ranks = [
        lab.trainer(
            shadow.address, world=(r, 2, str(tmp_path / "0")), tap="multicast", token="guessed",
            restore={"timeout": 2.0}, **ONE,
        )
        for r in range(2)
    ]  # fmt: skip
    assert {told["type"] for told in failures(ranks)} == {"Refused"}
