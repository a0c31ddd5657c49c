"""The collective, with real sockets: all of its ranks are in this process, for what they do is done by threads."""

from __future__ import annotations

import itertools
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from xxhash import xxh3_64_intdigest

from checkmate.errors import UsageError
from checkmate.tensors import bytes_of
from checkmate.trainer.collective import UNLABELLED, Collective, Label, Operation, Peer
from checkmate.trainer.gather import Gather, Member
from checkmate.trainer.multicast import check_ranks
from checkmate.trainer.peers import _connect, tagged_distance
from checkmate.trainer.shards import NO_BLOCK, Place, Plan
from checkmate.transport.group import enlarge, join, sender
from checkmate.wire.datagrams import GROUP_PORT, What, group_of
from checkmate.wire.frames import HEADER_BYTES, Header, decode_header
from checkmate.wire.seal import TRAILER_BYTES, Seal

SEED = random.SystemRandom().randrange(2**32)
SECRET = bytes(range(16))
NUMBERS = itertools.count()
TAKES_S = 60.0

Make = Callable[..., list[Collective]]


def gathers(world: int, timeout_s: float, hosts: list[str]) -> list[Gather]:
    """All ranks in one group, which is of this test alone; as `join_group` makes them."""
    group = group_of("239.77.8.0/24", f"{SEED} {next(NUMBERS)}")
    sockets = [(join(group, GROUP_PORT, "127.0.0.1"), sender("127.0.0.1", 1)) for _ in hosts]
    rooms = [min(map(enlarge, pair)) for pair in sockets]
    members = [Member(pair[1].getsockname(), 16436, room) for pair, room in zip(sockets, rooms, strict=True)]
    session = random.Random(SEED).getrandbits(64)
    made = [Gather(rank, members, session, (group, GROUP_PORT), *sockets[rank], timeout_s) for rank in range(world)]
    assert [gather.probe() for gather in made] == [[]] * world
    return made


@pytest.fixture(params=["mirror", "multicast"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """All ranks of a collective, connected over loopback."""
    multicast = request.param == "multicast"
    print(f"seed {SEED}")
    made: list[Collective] = []

    def collectives(
        world: int, timeout_s: float = 30.0, seal: Callable[[bytes], Seal] | None = None, per_host: int = 16
    ) -> list[Collective]:
        hosts = [f"127.0.0.{1 + rank // per_host}" for rank in range(world)]
        listeners = [socket.create_server((host, 0), backlog=64) for host in hosts]
        addresses = [listener.getsockname()[:2] for listener in listeners]
        peers: list[list[Peer | None]] = [[] for _ in range(world)]

        def connect(rank: int) -> None:
            dscp = None if multicast else 43
            peers[rank], _ = _connect(rank, addresses, SECRET, listeners[rank], dscp, time.monotonic() + 30)
            listeners[rank].close()

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gather = gathers(world, timeout_s, hosts) if multicast else [None] * world
        made.extend(ranks := [Collective(r, peers[r], timeout_s, seal, None, gather[r]) for r in range(world)])
        return ranks

    yield collectives
    for collective in made:
        collective.close()


def begin(
    collective: Collective, bucket: torch.Tensor, places: list[Place] | None = None, label: Label = UNLABELLED
) -> Operation:
    nbytes = bucket.numel() * bucket.element_size()
    plan = Plan(nbytes, collective.world, [Place(0, 0, nbytes)] if places is None else places)
    first, stop = plan.bounds[collective.rank]
    return collective.begin(bucket, plan, memoryview(bytearray(stop - first)), label)


def done(operation: Operation) -> torch.Tensor:
    """Its result, however it ends; a future that never ends fails the test."""
    limit = time.monotonic() + TAKES_S
    while not operation.done.done():
        assert time.monotonic() < limit, "the operation does not end"
        time.sleep(0.001)
    return operation.done.value()


def average(values: list[torch.Tensor]) -> torch.Tensor:
    """As DDP divides, in the order of ranks."""
    total = values[0] / len(values)
    for value in values[1:]:
        total = total + value / len(values)
    return total


def values_of(world: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]


#: What is about tagged connections.
tagged = pytest.mark.parametrize("make", ["mirror"], indirect=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize(
    ("make", "world"),
    [*(("mirror", world) for world in range(2, 17)), *(("multicast", world) for world in (2, 3, 4, 7, 16))],
    indirect=["make"],
)
def test_every_rank_gets_the_same_sum_bit_for_bit(make: Make, world: int) -> None:
    ranks = make(world)
    sizes = random.Random(SEED).sample(range(1, 3000), 3)
    for number, count in enumerate([1, world - 1, world, *sizes, 200_003]):
        dtype = DTYPES[number % len(DTYPES)]
        values = values_of(world, count, dtype, SEED + number)
        buckets = [value.clone() for value in values]
        for operation in [begin(c, b) for c, b in zip(ranks, buckets, strict=True)]:
            done(operation)
        assert all(torch.equal(bucket, average(values)) for bucket in buckets), f"{count} elements of {dtype}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_several_buckets_at_once_with_ranks_that_are_late(make: Make, world: int, dtype: torch.dtype) -> None:
    ranks, rng = make(world), random.Random(SEED)
    counts = [rng.randrange(1, 900_000) for _ in range(5)]
    values = [values_of(world, count, dtype, SEED + i) for i, count in enumerate(counts)]
    results: list[list[torch.Tensor]] = [[] for _ in range(world)]

    def train(rank: int, delays: list[float]) -> None:
        operations = []
        for number, delay in enumerate(delays):
            time.sleep(delay)
            operations.append(begin(ranks[rank], values[number][rank].clone()))
        results[rank] = [done(operation) for operation in operations]

    threads = [threading.Thread(target=train, args=(r, [rng.random() / 20 for _ in counts])) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(len(counts)):
        expected = average(values[number])
        assert all(torch.equal(results[rank][number], expected) for rank in range(world))


def test_another_order_of_ranks_would_be_noticed(make: Make) -> None:
    """The negative control: sums that are equal but for their order are not equal in bits."""
    values = values_of(3, 10_000, torch.float32, SEED)
    bucket = [value.clone() for value in values]
    for operation in [begin(c, b) for c, b in zip(make(3), bucket, strict=True)]:
        done(operation)
    assert torch.equal(bucket[0], average(values))
    assert not torch.equal(bucket[0], average(values[::-1]))


def test_half_precision_does_not_overflow_in_the_sum(make: Make) -> None:
    buckets = [torch.full((100,), 40_000.0, dtype=torch.float16) for _ in range(2)]
    for operation in [begin(c, b) for c, b in zip(make(2), buckets, strict=True)]:
        assert torch.equal(done(operation), torch.full((100,), 40_000.0, dtype=torch.float16))


@tagged
@pytest.mark.parametrize(("world", "per_host"), [(2, 1), (4, 2), (8, 2), (8, 4), (16, 8), (6, 4), (5, 2)])
def test_tagged_connections_go_to_another_host_from_as_many_ranks_as_can_be(
    make: Make, world: int, per_host: int
) -> None:
    ranks = make(world, per_host=per_host)
    values = values_of(world, 300_003, torch.float32, SEED)
    buckets = [value.clone() for value in values]
    for operation in [begin(c, b) for c, b in zip(ranks, buckets, strict=True)]:
        done(operation)
    assert all(torch.equal(bucket, average(values)) for bucket in buckets)
    targets = [collective._tagged_to for collective in ranks]
    assert sorted(targets) == list(range(world))
    across = sum(rank // per_host != target // per_host for rank, target in enumerate(targets))
    assert across == {(6, 4): 4}.get((world, per_host), world)  # four on one host have two to go to


def test_on_one_host_the_tagged_connection_goes_to_the_next_rank() -> None:
    assert [tagged_distance(["a"] * world) for world in range(2, 17)] == [1] * 15


@tagged
@pytest.mark.parametrize("sealed", [False, True])
def test_tagged_connections_carry_each_byte_of_each_block_once(make: Make, sealed: bool) -> None:
    """Read from the peers' sockets, as a switch would see them: rank 0's tagged connection ends in this test."""
    world, label = 3, Label(bytes(range(16)), epoch=2, step=7, update=1, round=3)
    seal = (lambda incarnation: Seal(b"secret", "run", incarnation)) if sealed else None
    ranks = make(world, seal=seal)
    count = 400_000
    places = [Place(5, 0, 400_000), Place(NO_BLOCK, 400_000, 4), Place(2, 400_004, 1_199_996)]
    values = values_of(world, count, torch.float32, SEED)
    heard = [_Tee(collective, sealed) for collective in ranks]
    for operation in [begin(c, v.clone(), places, label) for c, v in zip(ranks, values, strict=True)]:
        done(operation)
    found = {5: bytearray(400_000), 2: bytearray(1_199_996)}
    times = {block: bytearray(len(memory)) for block, memory in found.items()}
    for rank, tee in enumerate(heard):
        for header, payload, trailer in tee.frames():
            assert (header.incarnation, header.rank, header.epoch) == (label.incarnation, rank, 2)
            assert (header.step, header.update, header.round) == (7, 1, 3)
            if sealed:
                assert Seal(b"secret", "run", label.incarnation).holds(rank, tee.head, payload, trailer)
            if header.block != NO_BLOCK:
                place = slice(header.offset, header.offset + header.length)
                found[header.block][place] = payload
                times[header.block][place] = bytes(n + 1 for n in times[header.block][place])
    expected = bytes(bytes_of(average(values)))
    assert found[5] == expected[:400_000]
    assert found[2] == expected[400_004:]
    assert all(set(counts) == {1} for counts in times.values())


def test_a_peer_that_is_gone_ends_the_collective_everywhere(make: Make) -> None:
    ranks = make(3)
    operations = [begin(ranks[rank], torch.ones(300_000)) for rank in (0, 1)]
    ranks[2].hang_up()
    for operation in operations:
        with pytest.raises((ConnectionError, OSError)):
            done(operation)
    with pytest.raises((ConnectionError, OSError)):
        done(begin(ranks[0], torch.ones(5)))


def test_a_peer_that_stops_ends_the_collective_within_the_timeout(make: Make) -> None:
    ranks = make(3, timeout_s=1.0)
    began = time.monotonic()
    operations = [begin(ranks[rank], torch.ones(300_000)) for rank in (0, 1)]  # rank 2 never comes
    for operation in operations:
        with pytest.raises((TimeoutError, ConnectionError, OSError)):
            done(operation)
    assert 0.9 < time.monotonic() - began < 3.0


def test_a_rank_may_end_as_soon_as_it_has_done_all(make: Make) -> None:
    for _ in range(5):
        ranks = make(3)
        values = values_of(3, 300_003, torch.float32, SEED)
        buckets = [value.clone() for value in values]
        operations = [begin(c, b) for c, b in zip(ranks, buckets, strict=True)]
        failed: list[Exception] = []

        def end(collective: Collective, operation: Operation, failed: list[Exception] = failed) -> None:
            try:
                done(operation)
            except Exception as error:
                failed.append(error)
            collective.hang_up()

        threads = [threading.Thread(target=end, args=pair) for pair in zip(ranks, operations, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TAKES_S)
        assert not failed
        assert all(torch.equal(bucket, average(values)) for bucket in buckets)


def test_who_waits_for_its_last_answer_is_content_with_a_farewell(make: Make) -> None:
    ranks = make(2)
    if ranks[0]._multicast is None:
        return
    outlet, say = ranks[0]._multicast._outlet, ranks[0]._multicast._outlet.say
    outlet.say = lambda data, target: None if data[5] == What.ASK else say(data, target)  # type: ignore[method-assign]
    values = values_of(2, 300_003, torch.float32, SEED)
    operations = [begin(c, v) for c, v in zip(ranks, values, strict=True)]
    done(operations[1])
    time.sleep(0.1)
    assert not operations[0].done.done()  # it asks, and nobody hears it
    ranks[1].close()
    done(operations[0])
    assert torch.equal(values[0], values[1])


def test_who_goes_on_without_a_rank_that_has_ended_is_told_at_once(make: Make) -> None:
    ranks = make(3, timeout_s=30.0)
    values = values_of(3, 3003, torch.float32, SEED)
    for operation in [begin(c, v) for c, v in zip(ranks, values, strict=True)]:
        done(operation)
    ranks[1].close()
    began = time.monotonic()
    for operation in [begin(ranks[0], values[0]), begin(ranks[2], values[2])]:
        with pytest.raises(Exception, match=r"rank 1 has ended its collective|closed its connection|Broken pipe"):
            done(operation)
    assert time.monotonic() - began < 5


def test_ranks_that_reduce_different_buckets_are_told(make: Make) -> None:
    ranks = make(2)
    first, second = begin(ranks[0], torch.ones(1000)), begin(ranks[1], torch.ones(1001))
    errors = []
    for operation in (first, second):
        with pytest.raises(ConnectionError) as caught:
            done(operation)
        errors.append(str(caught.value))
    assert any("different bucket" in text or "another bucket" in text for text in errors), errors


def test_ranks_that_label_their_frames_differently_reduce_all_the_same(make: Make) -> None:
    """One has closed its Checkpointer, or has not heard of an epoch yet: no reason to stop training."""
    ranks = make(3, seal=lambda incarnation: Seal(b"secret", "run", incarnation))
    values = values_of(3, 300_003, torch.float32, SEED)
    labels = [UNLABELLED, Label(bytes(15) + b"\1", 2, 7), Label(bytes(15) + b"\1", 3, 7)]
    buckets = [value.clone() for value in values]
    for operation in [begin(c, b, None, label) for c, b, label in zip(ranks, buckets, labels, strict=True)]:
        done(operation)
    assert all(torch.equal(bucket, average(values)) for bucket in buckets)


def test_more_ranks_than_multicast_is_for_are_refused() -> None:
    check_ranks(16)
    with pytest.raises(UsageError, match=r"17 ranks reduce together.* at most 16: .*use tap='mirror'"):
        check_ranks(17)


def test_an_empty_bucket_is_done_at_once(make: Make) -> None:
    for collective in make(2):
        assert begin(collective, torch.empty(0)).done.done()


class _Tee:
    """What leaves on a rank's tagged connection."""

    def __init__(self, collective: Collective, sealed: bool) -> None:
        self._trailer_bytes = TRAILER_BYTES if sealed else 0
        self._data = bytearray()
        self._queue, collective._tagged = collective._tagged, self  # type: ignore[assignment]

    def put(self, message: object) -> None:
        if message is not None:
            self._data += b"".join(message.buffers)  # type: ignore[attr-defined]
        self._queue.put(message)  # type: ignore[arg-type]

    def frames(self) -> Iterator[tuple[Header, memoryview, memoryview]]:
        data, at = memoryview(bytes(self._data)), 0
        while at < len(data):
            header, digest = decode_header(data[at : at + HEADER_BYTES])
            payload = data[at + HEADER_BYTES : at + HEADER_BYTES + header.length]
            assert xxh3_64_intdigest(payload) == digest
            self.head = bytes(data[at : at + HEADER_BYTES])
            at += HEADER_BYTES + header.length + self._trailer_bytes
            yield header, payload, data[at - self._trailer_bytes : at]


@pytest.mark.processes
def test_a_process_may_exit_while_it_reduces() -> None:
    """Threads that torch finds without an interpreter abort the process."""
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=TAKES_S, check=False)
        assert ran.returncode == 0, ran.stderr


EXIT = """
import socket, time, torch
from checkmate.trainer.collective import Collective, Peer
from checkmate.trainer.shards import Place, Plan

pairs = [socket.socketpair() for _ in range(3)]
peers = [[None, Peer(*(pair[0] for pair in pairs))], [Peer(pairs[0][1], pairs[2][1], pairs[1][1]), None]]
size = 4 << 20
plan = Plan(size, 2, [Place(0, 0, size)])
for rank in range(2):
    collective = Collective(rank, peers[rank], 30.0)
    for _ in range(200):
        first, stop = plan.bounds[rank]
        collective.begin(torch.zeros(size // 4), plan, memoryview(bytearray(stop - first)))
time.sleep(0.1)
"""
