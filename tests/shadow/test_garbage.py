"""Whatever a peer sends, the shadow goes on: nothing raised, nothing left behind, and healthy runs untouched."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from socket import SHUT_WR
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkmate import values
from checkmate.errors import Refused
from checkmate.transport.base import Channel, call, greet
from checkmate.transport.memory import Faults, MemoryStream
from checkmate.wire import messages as m
from checkmate.wire.auth import ROLES
from checkmate.wire.frames import FIRST_BYTES, HEADER_BYTES, MAX_BULK_BYTES, Header, Kind, encode, encode_header

from .wired import PATIENCE_S, Rank, Served, served

NOBODY = m.Incarnation(1, b"no such attempt.")
FINGERPRINT = m.Fingerprint("2.13.0", "AVX2", 1, False, "cpu")


@pytest.fixture
def shadow() -> Iterator[Served]:
    with served() as found:
        yield found


@pytest.fixture
def rank(shadow: Served) -> Iterator[Rank]:
    healthy = Rank(shadow, "healthy")
    yield healthy
    healthy.close()


def message(said: m.Control) -> bytes:
    payload = m.encode(said)
    return encode(Header(Kind.CONTROL, len(payload)), payload)


def pour(stream: MemoryStream, data: bytes, chunk: int = 0) -> None:
    """Write all of it, unless the shadow has had enough."""
    with suppress(OSError):
        for start in range(0, len(data), chunk or max(1, len(data))):
            rest = data[start : start + (chunk or len(data))]
            while rest:
                rest = rest[stream.sendmsg([rest]) :]


def last_word(channel: Channel) -> m.Refusal | None:
    """What the shadow says before it closes, if it is a refusal."""
    said = None
    with suppress(OSError):
        while (heard := channel.message()) is not None:
            said = heard
    return said if isinstance(said, m.Refusal) else None


# ---------------------------------------------------------------- strangers

SPECS = st.builds(
    m.Spec, st.just(1), st.sampled_from([[[0]], [], [[0, 5]]]),
    st.lists(
        st.builds(m.Block, st.just("w"), st.sampled_from(["float32", "load", "int8"]), st.sampled_from([1, 4]),
                  st.just([0]), st.sampled_from([[3], [2**62]]), st.just([3])),
        max_size=2,
    ),
    st.lists(
        st.builds(m.Optimizer, st.sampled_from(["torch.optim", "os"]), st.sampled_from(["SGD", "system", "Optimizer"]),
                  st.sampled_from([b"", b"\x90", Rank.GROUPS, Rank.GROUPS[:-3]]), st.sampled_from([[[0]], [], [[9]]])),
        max_size=2,
    ),
    st.just(FINGERPRINT),
)  # fmt: skip
RUNS = st.sampled_from(["healthy", "other", "../x", ""])
SAID = st.one_of(
    st.builds(m.Hello, st.just([1]), st.sampled_from(ROLES), st.just(bytes(16))),
    st.just(m.Proof()),
    st.builds(m.Prepare, RUNS, st.builds(m.Attempt, st.binary(min_size=16, max_size=16), st.just("h"), st.just(1))),
    st.builds(m.Adopt, RUNS, st.just(NOBODY), st.sampled_from([None, 0, 3]), SPECS),
    st.builds(m.Join, RUNS, st.just(NOBODY), st.integers(0, 2), st.just(1), st.just(1), st.just(1), st.none() | SPECS),
    st.builds(m.Attach, RUNS, st.just(NOBODY), st.integers(0, 2), st.integers(0, 2)),
    st.builds(m.Lease, RUNS, st.none() | st.integers(0, 9)),
    st.builds(m.Read, st.lists(st.tuples(*[st.sampled_from([0, 1, 160, 2**62])] * 4), max_size=3)),
    st.builds(m.ReadSidecar, st.integers(0, 9)),
    st.builds(m.Remove, st.just("other")),
    st.sampled_from([m.Ping(1), m.Pong(), m.GetStatus(), m.Stable(1, 1), m.Audit(0, []), m.Ack(1, 1, 1, 1, 1)]),
)  # fmt: skip
FRAMES = st.builds(
    lambda kind, payload, block: encode(Header(kind, len(payload), NOBODY.id, step=1, block=block), payload),
    st.sampled_from(Kind), st.binary(max_size=80), st.integers(0, 3),
)  # fmt: skip


@st.composite
def sendings(draw: st.DrawFn) -> bytes:
    """Messages and frames in any order, then spoilt in places or not, or bytes that never were any."""
    data = b"".join(draw(st.lists(st.one_of(SAID.map(message), FRAMES, st.binary(max_size=200)), max_size=5)))
    spoilt = bytearray(data)
    for at in draw(st.lists(st.integers(0, max(0, 8 * len(data) - 1)), max_size=2)) if data else []:
        spoilt[at // 8] ^= 1 << at % 8
    return bytes(spoilt[: draw(st.integers(0, len(spoilt)))]) if draw(st.booleans()) else bytes(spoilt)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(role=st.none() | st.sampled_from(ROLES), data=sendings(), chunk=st.sampled_from([0, 1, 7]))
def test_strangers_leave_nothing_behind(shadow: Served, rank: Rank, role: str | None, data: bytes, chunk: int) -> None:
    shadow.settle(keep=2)
    threads = threading.active_count()
    stream = shadow.open()
    if role is not None:
        greet(Channel(stream), role, None)
    pour(stream, data, chunk)
    with suppress(OSError):
        stream.shutdown(SHUT_WR)
        while stream.recv_into(memoryview(bytearray(65536))):
            pass
    stream.close()
    shadow.settle(keep=2)
    for name in [name for name in shadow.daemon.runs if name != "healthy"]:  # adopted in good order: that is no garbage
        assert shadow.daemon.runs[name].partition is not None
        shadow.daemon._remove(name, force=True)
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == threads
    assert not shadow.errors.found, shadow.errors.found[0]
    rank.ping()
    rank.send(rank.train())
    rank.await_applied()
    if rank.step % 10 == 0:
        rank.check()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=SPECS, prepared=st.booleans(), step=st.sampled_from([None, None, 0]))
def test_spec_is_taken_or_refused_and_changes_nothing_then(
    shadow: Served, spec: m.Spec, prepared: bool, step: int | None
) -> None:
    channel = shadow.greeted("control")
    if prepared:
        answer = call(channel, m.Prepare("other", m.Attempt(bytes(16), "h", 1)), PATIENCE_S)
        assert isinstance(answer, m.Prepared)
        channel.send(m.Adopt("other", answer.incarnation, step, spec))
    else:
        channel.send(m.Join("other", NOBODY, 0, 1, 1, 1, spec))
    said = channel.message()
    run = shadow.daemon.runs.get("other")
    if isinstance(said, m.Refusal):
        assert run is None or (run.partition, run.replayer.state, run.replayer.frozen) == (None, None, None)
    else:
        assert isinstance(said, (m.Adopted, m.Joined)), said
    channel.close()
    shadow.settle()
    assert ("other" in shadow.daemon.runs) is not isinstance(said, m.Refusal)
    if "other" in shadow.daemon.runs:
        shadow.daemon._remove("other", force=True)
    assert not shadow.errors.found, shadow.errors.found[0]


@pytest.mark.parametrize("count", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1])
@pytest.mark.parametrize("role", ROLES)
def test_connection_that_ends_at_any_byte_is_over(shadow: Served, role: str, count: int) -> None:
    channel = shadow.greeted(role)
    pour(channel.stream, message(m.GetStatus())[:count])  # type: ignore[arg-type]
    channel.close()
    shadow.settle()


def test_run_that_was_only_asked_for_is_forgotten(shadow: Served) -> None:
    for ask in (
        m.Prepare("typo", m.Attempt(bytes(16), "h", 1)),
        m.Join("typo", NOBODY, 0, 1, 1, 1),
    ):
        channel = shadow.greeted("control")
        assert not isinstance(call(channel, ask, PATIENCE_S), m.Refusal)
        assert list(shadow.daemon.runs) == ["typo"]
        channel.close()
        shadow.settle()
        assert not shadow.daemon.runs


def test_length_that_is_claimed_and_never_sent_takes_no_memory(shadow: Served, rank: Rank) -> None:
    channels = [shadow.greeted(role) for role in ROLES for _ in range(4)]
    for channel in channels[4:8]:  # the data connections
        channel.send(m.Attach("other", NOBODY, 0, 0))
    tracemalloc.start()
    for channel in channels:
        pour(channel.stream, encode_header(Header(Kind.CONTROL, 64 << 20), 0) + bytes(1000))  # type: ignore[arg-type]
    rank.data.stream.sendmsg([encode_header(Header(Kind.PART, 1 << 30, rank.me.id, 0, rank.epoch, 1), 0)])
    time.sleep(0.2)
    assert tracemalloc.get_traced_memory()[1] < 2 * len(channels) * FIRST_BYTES + 4 * MAX_BULK_BYTES
    tracemalloc.stop()
    for channel in channels:
        channel.close()


# ---------------------------------------------------------------- a rank's own connection


@st.composite
def damage(draw: st.DrawFn) -> Callable[[list[bytes]], bytes]:
    """Something that happens to a rank's frames on their way."""
    order = draw(st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=9))
    flips = draw(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), max_size=2))
    cut = draw(st.none() | st.integers(0, 10**6))
    extra = draw(st.just(b"") | st.binary(max_size=100) | FRAMES)

    def apply(frames: list[bytes]) -> bytes:
        data = bytearray(b"".join(frames if order is None else [frames[i % len(frames)] for i in order]) + extra)
        for at, bit in flips:
            data[at % len(data)] ^= 1 << bit
        return bytes(data if cut is None else data[: cut % len(data)])

    return apply


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged=damage(), chunk=st.sampled_from([0, 1, 50]))
def test_damaged_frames_are_as_if_never_sent(
    shadow: Served, rank: Rank, damaged: Callable[[list[bytes]], bytes], chunk: int
) -> None:
    """Cut, flipped, left out, doubled, in another order: once the rank has sent all again, the state is exact."""
    frames = rank.train() + rank.train()
    pour(rank.data.stream, damaged(frames), chunk)  # type: ignore[arg-type]
    rank.data.close()
    shadow.settle(keep=1)
    assert not shadow.errors.found, shadow.errors.found[0]
    rank.attach()
    rank.send(frames)
    rank.await_applied()
    rank.check()
    shadow.settle(keep=2)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"updates": [m.Update(1, [0], 7, Rank.GROUPS)]},
        {"updates": [m.Update(0, [1], 7, Rank.GROUPS)]},
        {"updates": [m.Update(0, [0, 0], 7, Rank.GROUPS)]},
        {"updates": [m.Update(0, [0], 7, Rank.GROUPS[:-1])]},
        {"updates": [m.Update(0, [0], 7, values.dumps([7]))]},
        {"updates": [m.Update(0, [0], 7, Rank.GROUPS, [[3]])]},
        {"members": []},
        {"members": [[[0]], [[0]]]},
        {"members": [[[0, 1]]]},
        {"groups": [Rank.GROUPS, Rank.GROUPS]},
        {"groups": [b"none"]},
        {"anchors": [m.Anchor(1, 0, [m.Entry("", "float32", [40], 160)], b"")]},
        {"anchors": [m.Anchor(0, 0, [m.Entry("", "float32", [39], 156)], values.dumps({}))]},
        {"anchors": [m.Anchor(0, 2, [m.Entry("", "float32", [40], 160)], values.dumps({}))]},
        {"anchors": [m.Anchor(0, 0, [m.Entry("", "float32", [40], 160)], values.dumps([]))]},
        {"anchors": [m.Anchor(0, 0, [m.Entry("", "float32", [40], 160)] * 2, values.dumps({}))]},
        {"rank": 1},
        {"step": 9},
        {"epoch": 99},
    ],
)  # fmt: skip
def test_part_that_cannot_be_applied_costs_its_connection_and_not_the_state(
    shadow: Served, rank: Rank, spoilt: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    frames = rank.train()
    fields = {"rank": 0, "step": 1, "epoch": rank.epoch, "updates": [m.Update(0, [0], 7, Rank.GROUPS)], **spoilt}
    rank.send([*frames[:2], rank.frame(Kind.PART, m.encode(m.Part(**fields)))])
    refusal = last_word(rank.data)
    assert refusal is not None
    assert refusal.kind == "usage"
    rank.data.close()
    shadow.settle(keep=1)
    assert [record.message for record in caplog.records] == [f"closing the connection from peer: {refusal.reason}"]
    rank.attach()
    rank.send(frames)
    rank.await_applied()
    rank.check()


@pytest.mark.parametrize("seed", range(3))
def test_reset_at_any_byte_of_a_step_is_repaired_by_sending_again(shadow: Served, rank: Rank, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        frames = rank.train()
        rank.data.close()
        greeting = message(m.Attach("healthy", rank.me, 0, rank.epoch))
        hello = 2 * HEADER_BYTES + len(greeting) + 60
        faults = Faults(seed, short=True, reset_at=hello + chance.randrange(sum(map(len, frames))))
        channel = Channel(shadow.open(there=faults), "shadow")
        greet(channel, "data", None)
        pour(channel.stream, greeting + b"".join(frames))  # type: ignore[arg-type]
        channel.close()
        shadow.settle(keep=1)  # else it may yet take the place of the next
        rank.attach()
        rank.send(frames)
        rank.await_applied()
    rank.check()


def test_second_data_connection_of_a_rank_takes_the_place_of_the_first(rank: Rank) -> None:
    first, frames = rank.data, rank.train()
    first.stream.sendmsg([frames[0][:-1]])  # in mid-frame
    rank.attach()
    rank.send(frames)
    rank.await_applied()
    rank.check()
    with pytest.raises(OSError):  # noqa: PT011
        first.stream.sendmsg([frames[0][-1:]])


# ---------------------------------------------------------------- the greeting, as the shadow gives it


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkmate.shadow.daemon.GREETING_S", 0.2)


@pytest.mark.usefixtures("impatient")
def test_silence_is_not_waited_for(shadow: Served) -> None:
    stream = shadow.open()
    shadow.settle()
    assert stream.recv_into(memoryview(bytearray(1))) == 0


@pytest.mark.usefixtures("impatient")
def test_greeting_that_trickles_in_is_not_waited_for(shadow: Served) -> None:
    stream = shadow.open()
    began = time.monotonic()
    with suppress(OSError):
        for byte in message(m.Hello([1], "control", bytes(16), ["x" * 900])):
            stream.sendmsg([bytes([byte])])
            time.sleep(0.01)
    assert time.monotonic() - began < 5.0
    shadow.settle()
    stream.close()


def test_greeting_beyond_its_limit_is_refused_at_its_header(shadow: Served, caplog: pytest.LogCaptureFixture) -> None:
    channel = Channel(shadow.open())
    pour(channel.stream, encode_header(Header(Kind.CONTROL, 4097), 0))  # type: ignore[arg-type]
    refusal = last_word(channel)
    assert refusal is not None
    assert "longer than the 4096 bytes allowed here" in refusal.reason
    channel.close()
    assert [record.message for record in caplog.records] == [f"closing the connection from peer: {refusal.reason}"]


@pytest.mark.parametrize(
    ("hello", "kind"),
    [
        (m.Hello([0], "control", bytes(16)), "version"),
        (m.Hello([2, 3], "control", bytes(16)), "version"),
        (m.Hello([1], "root", bytes(16)), "usage"),
    ],
)
def test_refusal_is_said_and_logged_once(
    shadow: Served, caplog: pytest.LogCaptureFixture, hello: m.Hello, kind: str
) -> None:
    channel = Channel(shadow.open())
    channel.send(hello)
    refusal = last_word(channel)
    assert refusal is not None
    assert refusal.kind == kind
    channel.close()
    shadow.settle()
    assert [record.message for record in caplog.records] == [f"refused peer: {refusal.reason}"]


@pytest.mark.parametrize("token", [b"another", None])
def test_without_the_token_nobody_gets_past_the_greeting(token: bytes | None) -> None:
    with served(b"the token") as shadow:
        with pytest.raises(Refused) as caught:
            shadow.greeted("admin", token)
        assert caught.value.kind == "token"
        for proof in (b"", bytes(32)):
            channel = Channel(shadow.open())
            channel.send(m.Hello([1], "admin", bytes(16)))
            assert isinstance(channel.message(), m.Challenge)
            channel.send(m.Proof(proof))
            channel.send(m.GetStatus())  # already on its way
            assert last_word(channel) == m.Refusal("token", "wrong token")
            channel.close()
        with pytest.raises((Refused, OSError)):
            call(Channel(shadow.open()), m.GetStatus(), PATIENCE_S)
        assert isinstance(call(shadow.greeted("admin", b"the token"), m.GetStatus(), PATIENCE_S), m.Status)
