"""Streams of frames under every schedule of segments: each frame comes byte-exact or not at all, and never another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.wire.frames import HEADER_BYTES, MAX_BULK_BYTES, Header, Kind, decode_header, encode_header, xxh3
from checkmate.wire.packets import SYN
from checkmate.wire.reassembly import NEAR_BYTES, Stream

TRAILER = 24
WRAP = 2**32


def make_frame(number: int, length: int, trailer_bytes: int = 0) -> bytes:
    payload = random.Random(number).randbytes(length)
    header = Header(Kind.GRAD, length, rank=number, step=1, offset=number, round=1)
    return encode_header(header, xxh3(payload)) + payload + bytes([number % 256]) * trailer_bytes


class Taken:
    """A stream and what it delivered, copied while the views are valid."""

    def __init__(self, trailer_bytes: int = 0, deadline_s: float = 1.0, limit_bytes: int = 1 << 20) -> None:
        self.frames: list[bytes] = []
        self.fed = 0
        self.most_waiting = 0
        self.stream = Stream(self._take, trailer_bytes, deadline_s, limit_bytes)
        self._trailer_bytes = trailer_bytes

    def _take(self, header: Header, head: memoryview, payload: memoryview, trailer: memoryview) -> None:
        assert decode_header(head)[0] == header
        assert (len(head), len(payload), len(trailer)) == (HEADER_BYTES, header.length, self._trailer_bytes)
        self.frames.append(bytes(head) + bytes(payload) + bytes(trailer))

    def feed(self, seq: int, payload: bytes, now: float = 0.0, flags: int = 0) -> None:
        memory = bytearray(payload)
        self.stream.feed(seq % WRAP, flags, memoryview(memory), now)
        memory[:] = bytes(len(memory))  # as the next packet will
        self.fed += len(payload)
        self.most_waiting = max(self.most_waiting, self.stream.waiting_bytes)

    def feed_all(self, data: bytes, seq: int, each: int = 1000) -> int:
        for at in range(0, len(data), each):
            self.feed(seq + at, data[at : at + each])
        return seq + len(data)


# ---------------------------------------------------------------- any schedule


class Piece(NamedTuple):
    """Bytes ``[start, stop)`` of the stream, sent again or not, now or later."""

    start: int
    stop: int
    later: int
    copies: int


class Case(NamedTuple):
    trailer_bytes: int
    lengths: list[int]
    pieces: list[Piece]
    isn: int
    syn: bool
    limit_bytes: int
    deadline_s: float


@st.composite
def cases(draw: st.DrawFn, lossless: bool = False) -> Case:
    trailer_bytes = draw(st.sampled_from([0, TRAILER]))
    lengths = draw(st.lists(st.sampled_from([0, 1, 79, 80, 200, 1000, 5000]), min_size=1, max_size=12))
    total = sum(HEADER_BYTES + length + trailer_bytes for length in lengths)
    step = st.sampled_from([1, 7, 80, 104, 536, 1448, 4000])
    pieces, at = [], 0
    while at < total:
        stop = min(at + draw(step) if draw(st.booleans()) else at + 1448, total)
        start = max(at - draw(st.sampled_from([0, 0, 0, 5, 300])), 0)
        copies = draw(st.sampled_from([1, 1, 1, 2] if lossless else [0, 1, 1, 1, 1, 2]))
        pieces.append(Piece(start, stop, draw(st.sampled_from([0, 0, 0, 1, 3, 9])), copies))
        at = stop
    isn = draw(st.sampled_from([0, 1, 2**31 - 5, WRAP - 1, WRAP - 100, WRAP - 3000]))
    limit_bytes = draw(st.sampled_from([0, 4000, 1 << 20]))
    return Case(
        trailer_bytes, lengths, pieces, isn, draw(st.booleans()), limit_bytes, draw(st.sampled_from([0.0, 1.0]))
    )


def play(case: Case) -> tuple[Taken, list[bytes]]:
    """Feed the pieces in their order (each by `later` places later), then let all deadlines pass."""
    sent = [make_frame(i, length, case.trailer_bytes) for i, length in enumerate(case.lengths)]
    data = b"".join(sent)
    taken = Taken(case.trailer_bytes, case.deadline_s, case.limit_bytes)
    if case.syn:
        taken.feed(case.isn, b"", flags=SYN)
    order = sorted((i + piece.later * copy, i) for i, piece in enumerate(case.pieces) for copy in range(piece.copies))
    for number, (_, i) in enumerate(order):
        piece = case.pieces[i]
        taken.feed(case.isn + 1 + piece.start, data[piece.start : piece.stop], now=number * 0.3)
        if number % 3 == 0:
            taken.stream.expire(number * 0.3)
    taken.stream.expire(1e9)
    return taken, sent


@given(cases())
def test_any_schedule_gives_each_frame_exactly_or_not_at_all(case: Case) -> None:
    taken, sent = play(case)
    assert is_subsequence(taken.frames, sent)
    stream, scanner = taken.stream, taken.stream.scanner
    assert scanner.frames == len(taken.frames)
    assert scanner.bad_frames == 0
    assert stream.jumps == stream.waiting_bytes == 0
    assert taken.fed == stream.payload_bytes + stream.duplicate_bytes
    assert taken.most_waiting <= case.limit_bytes
    if case.syn:  # then everything that did not come stands in some count
        missing = sum(map(len, sent)) - sum(map(len, taken.frames))
        assert not missing or stream.hole_bytes or lost_at_the_end(case)
        if not stream.hole_bytes:
            assert taken.frames == sent[: len(taken.frames)]


@given(cases(lossless=True).map(lambda case: case._replace(limit_bytes=1 << 20, deadline_s=1e6, syn=True)))
def test_without_loss_every_frame_comes(case: Case) -> None:
    taken, sent = play(case)
    assert taken.frames == sent
    assert taken.stream.holes == taken.stream.scanner.skipped_bytes == taken.stream.scanner.torn_frames == 0


@given(cases(), st.integers(0, 10**6), st.integers(1, 255))
def test_changed_byte_loses_a_frame_and_makes_no_other(case: Case, at: int, change: int) -> None:
    sent = [make_frame(i, length) for i, length in enumerate(case.lengths)]
    data = bytearray(b"".join(sent))
    data[at % len(data)] ^= change
    taken = Taken()
    taken.feed(case.isn, b"", flags=SYN)
    taken.feed_all(bytes(data), case.isn + 1)
    assert is_subsequence(taken.frames, sent)
    assert len(taken.frames) < len(sent)
    assert taken.stream.scanner.bad_frames + taken.stream.scanner.skipped_bytes > 0


def test_a_receiver_that_joins_segments_as_they_come_would_fail() -> None:
    """The negative control: these schedules do change the stream of one who does not sort them."""
    sent = [make_frame(i, 1000) for i in range(5)]
    data = b"".join(sent)
    pieces = [(at, data[at : at + 700]) for at in range(0, len(data), 700)]
    pieces[2], pieces[3] = pieces[3], pieces[2]
    naive, taken = Taken(), Taken()
    naive.feed(0, b"", flags=SYN)
    taken.feed(0, b"", flags=SYN)
    naive.feed_all(b"".join(piece for _, piece in pieces), 1)
    for at, piece in pieces:
        taken.feed(1 + at, piece)
    assert taken.frames == sent
    assert naive.frames != sent
    assert is_subsequence(naive.frames, sent)


def is_subsequence(some: Sequence[bytes], of: Sequence[bytes]) -> bool:
    rest = iter(of)
    return all(any(one == other for other in rest) for one in some)


def lost_at_the_end(case: Case) -> bool:
    """Nothing behind the last hole came, so nobody can have seen it."""
    return max((piece.stop for piece in case.pieces if piece.copies), default=0) < case.pieces[-1].stop


# ---------------------------------------------------------------- what each rule is for


@pytest.mark.parametrize("trailer_bytes", [0, TRAILER])
def test_hole_in_a_payload_loses_that_frame_only_and_searches_nothing(trailer_bytes: int) -> None:
    sent = [make_frame(i, 10_000, trailer_bytes) for i in range(3)]
    data = b"".join(sent)
    taken = Taken(trailer_bytes, deadline_s=0.05)
    taken.feed(9, b"", flags=SYN)
    hole = len(sent[0]) + 500
    taken.feed_all(data[:hole], 10)
    taken.feed_all(data[hole + 300 :], 10 + hole + 300)
    assert taken.frames == sent[:1]
    taken.stream.expire(0.04)
    assert taken.stream.holes == 0
    taken.stream.expire(0.05)
    assert taken.frames == [sent[0], sent[2]]
    scanner = taken.stream.scanner
    assert (taken.stream.holes, taken.stream.hole_bytes) == (1, 300)
    assert (scanner.torn_frames, scanner.skipped_bytes, scanner.bad_frames) == (1, 0, 0)


@pytest.mark.parametrize("ends", [0, 1, TRAILER])
def test_hole_that_ends_where_a_frame_ends(ends: int) -> None:
    sent = [make_frame(i, 1000, TRAILER) for i in range(3)]
    data = b"".join(sent)
    taken = Taken(TRAILER, deadline_s=0.0)
    taken.feed(9, b"", flags=SYN)
    stop = len(sent[0]) - TRAILER + ends
    taken.feed(10, data[:900])
    taken.feed(10 + stop, data[stop:])
    taken.stream.expire(0.0)
    assert taken.frames == sent[1:]
    assert taken.stream.scanner.skipped_bytes == 0


def test_hole_over_a_header_is_searched_over() -> None:
    sent = [make_frame(i, 1000) for i in range(4)]
    data = b"".join(sent)
    taken = Taken(deadline_s=0.0)
    taken.feed(9, b"", flags=SYN)
    taken.feed(10, data[:1000])
    taken.feed(10 + 1100, data[1100:])
    taken.stream.expire(0.0)
    assert taken.frames == sent[2:]
    assert taken.stream.scanner.torn_frames == 1
    assert taken.stream.scanner.skipped_bytes == 2 * 1080 - 1100


@pytest.mark.parametrize("each", [1, 79, 80, 81, 1448, 60_000])
def test_flow_that_began_before_is_joined_at_the_next_header(each: int) -> None:
    sent = [make_frame(i, 3000, TRAILER) for i in range(4)]
    data = b"".join(sent)
    for began in (1, 79, 80, 200, len(sent[0]) - 1, len(sent[0])):
        taken = Taken(TRAILER)
        taken.feed_all(data[began:], WRAP - 100 + began, each)
        assert taken.frames == sent[1:]
        assert taken.stream.scanner.skipped_bytes == len(sent[0]) - began


def test_magic_within_payload_is_no_header() -> None:
    payload = b"CKMT" * 50 + make_frame(7, 0)[:72] + bytes(8)
    frame = encode_header(Header(Kind.GRAD, len(payload)), xxh3(payload)) + payload
    taken = Taken()
    taken.feed_all((frame * 3)[90:], 5, 33)
    assert taken.frames == [frame] * 2


def test_frame_longer_than_any_of_ours_is_not_waited_for() -> None:
    long = encode_header(Header(Kind.PART, MAX_BULK_BYTES + 1), 0)
    good = make_frame(1, MAX_BULK_BYTES)
    taken = Taken()
    taken.feed(9, b"", flags=SYN)
    taken.feed_all(long + good, 10)
    assert taken.frames == [good]
    assert taken.stream.scanner.bad_frames == 1


def test_segments_that_wait_are_bounded_in_bytes_and_number() -> None:
    taken = Taken(limit_bytes=10_000)
    taken.feed(9, b"", flags=SYN)
    for i in range(2000):
        taken.feed(10 + 2 * i + 1, b"x")
    assert 0 < taken.most_waiting <= 10_000
    assert taken.stream.holes > 1900


def test_new_connection_of_the_same_ports_begins_anew() -> None:
    first, second = make_frame(1, 500), make_frame(2, 500)
    for isn in (100_000, 5, WRAP - 1, 9):
        taken = Taken()
        taken.feed(9, b"", flags=SYN)
        taken.feed(10, first + first[:300])
        taken.feed(isn + 1_000_000, b"", flags=SYN)
        taken.feed(isn + 1_000_001, second)
        assert taken.frames == [first, second]
        assert taken.stream.scanner.torn_frames == 1


def test_repeated_syn_changes_nothing() -> None:
    frame = make_frame(1, 500)
    taken = Taken()
    for part in (b"", frame[:100], frame[100:]):
        taken.feed(WRAP - 1, b"", flags=SYN)
        taken.feed(100 if part == frame[100:] else 0, part)
    assert taken.frames == [frame]


def test_syn_with_data() -> None:
    taken = Taken()
    taken.feed(WRAP - 1, make_frame(1, 50), flags=SYN)
    assert taken.frames == [make_frame(1, 50)]


@pytest.mark.parametrize("away", [NEAR_BYTES + 50_000, 2**31 - 1, 2**31 + 5, -NEAR_BYTES - 1_000_000])
def test_flow_is_found_again_after_a_long_absence(away: int) -> None:
    sent = [make_frame(i, 2000) for i in range(6)]
    taken = Taken()
    taken.feed(9, b"", flags=SYN)
    seq = taken.feed_all(sent[0] + sent[1][:700], 10, 700)
    taken.feed_all(b"".join(sent[2:])[300:], seq + away, 700)
    assert taken.frames == [sent[0], *sent[3:]]
    assert taken.stream.jumps == 1
    assert taken.stream.scanner.torn_frames == 1


def test_single_segment_from_far_away_is_ignored() -> None:
    frame = make_frame(1, 2000)
    taken = Taken()
    taken.feed(9, b"", flags=SYN)
    taken.feed(10, frame[:1000])
    taken.feed(10 + 2**31, b"forged")
    taken.feed(1010, frame[1000:])
    assert taken.frames == [frame]


def test_longer_copy_of_a_waiting_segment_takes_its_place() -> None:
    frame = make_frame(1, 2000)
    taken = Taken(limit_bytes=5000)
    taken.feed(9, b"", flags=SYN)
    for stop in (600, 500, 1200, 2080):
        taken.feed(510, frame[500:stop])
    taken.feed(10, frame[:500])
    assert taken.frames == [frame]
    assert taken.fed == taken.stream.payload_bytes + taken.stream.duplicate_bytes
    assert taken.stream.waiting_bytes == 0
