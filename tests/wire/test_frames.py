"""Frames: exact bytes, limits, and a receiver that parses or refuses whatever it is fed."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest as xxh3

from checkmate.errors import ProtocolError
from checkmate.wire.frames import (
    FIRST_BYTES,
    HEADER_BYTES,
    MAX_BULK_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PART_BYTES,
    Frame,
    FrameReceiver,
    Header,
    Kind,
    decode_header,
    encode,
    encode_header,
    into_new_memory,
)

FULL = Header(
    Kind.GRAD, 5, bytes(range(16)),
    rank=2, epoch=3, step=1 << 40, block=70000, update=1, entry=4, offset=1 << 33, round=9,
)  # fmt: skip
GOLDEN = (
    "434b4d54 01 01 0000 02000000 03000000"  # magic, version, kind, flags, rank, epoch
    "000102030405060708090a0b0c0d0e0f"  # incarnation
    "0000000000010000 70110100 0100 0400"  # step, block, update, entry
    "0000000002000000 0900 0000 05000000"  # offset, round, reserved, length
    "fddc625c55e85595 f0ab00d39d4fbb9b"  # XXH3-64 of the payload, XXH3-64 of the 72 bytes before
)


def headers() -> st.SearchStrategy[Header]:
    def wide(bits: int) -> st.SearchStrategy[int]:
        return st.integers(0, 2**bits - 1)

    return st.builds(
        Header, st.sampled_from(Kind), st.integers(0, MAX_BULK_BYTES), st.binary(min_size=16, max_size=16), wide(32),
        wide(32), wide(64), wide(32), wide(16), wide(16), wide(64), wide(16),
    )  # fmt: skip


def frames() -> st.SearchStrategy[bytes]:
    return st.builds(lambda h, p: encode(h._replace(length=len(p)), p), headers(), st.binary(max_size=200))


def receiver(limit_bytes: int = MAX_PART_BYTES) -> FrameReceiver:
    return FrameReceiver(into_new_memory(limit_bytes))


def feed(fed: FrameReceiver, stream: bytes, chunk: int = 0) -> Iterator[Frame]:
    """Do what a reader of `stream` does that gets at most `chunk` bytes at a time (0: as many as there are)."""
    rest = memoryview(stream)
    while rest:
        room = fed.buffer()
        count = min(len(room), len(rest), chunk or len(rest))
        room[:count] = rest[:count]
        rest = rest[count:]
        if (frame := fed.advance(count)) is not None:
            yield frame


def parse(stream: bytes, chunk: int = 0) -> tuple[list[tuple[Header, bytes]], bool]:
    """What comes of a stream: whole frames, and whether it ended in a protocol error."""
    found = []
    try:
        for frame in feed(receiver(), stream, chunk):
            found.append((frame.header, bytes(frame.payload)))
    except ProtocolError:
        return found, True
    return found, False


# ---------------------------------------------------------------- exact bytes


def test_header_is_these_80_bytes() -> None:
    assert encode_header(FULL, xxh3(b"hello")).hex() == GOLDEN.replace(" ", "")
    assert HEADER_BYTES == 80


def test_header_comes_back_from_its_bytes() -> None:
    assert decode_header(bytes.fromhex(GOLDEN)) == (FULL, xxh3(b"hello"))


@given(headers(), st.integers(0, 2**64 - 1))
def test_every_header_comes_back(header: Header, payload_sum: int) -> None:
    assert decode_header(encode_header(header, payload_sum)) == (header, payload_sum)


def test_checksum_is_xxh3_64_without_a_seed() -> None:
    assert xxh3(b"") == 0x2D06800538D394C2  # as its specification gives it


def test_frame_is_header_then_payload() -> None:
    assert encode(FULL, b"hello") == bytes.fromhex(GOLDEN) + b"hello"


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (FULL, "GRAD of rank 2, step 1099511627776 block 70000 at 8589934592, 5 bytes"),
        (Header(Kind.PART, 17, rank=1, step=3), "PART of rank 1, step 3, 17 bytes"),
    ],
)
def test_header_reads_well_in_a_log(header: Header, text: str) -> None:
    assert str(header) == text


# ---------------------------------------------------------------- what is refused


def rebuilt(**fields: Any) -> bytes:
    """A header whose checksum holds, with fields that `encode_header` would not write."""
    values = list(struct.unpack("<4sBBHII16sQIHHQHHIQ", encode_header(FULL, 0)[:72]))
    for name, value in fields.items():
        values[{"version": 1, "kind": 2, "flags": 3, "zero": 13, "length": 14}[name]] = value
    body = struct.pack("<4sBBHII16sQIHHQHHIQ", *values)
    return body + struct.pack("<Q", xxh3(body))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(80), r"not a checkmate frame: starts with b'GET '"),
        (rebuilt(version=2), "frame version 2, this side speaks 1"),
        (rebuilt(flags=1), "reserved header fields are 0x1, 0x0, not zero"),
        (rebuilt(zero=256), "reserved header fields are 0x0, 0x100, not zero"),
        (rebuilt(kind=0), "unknown frame kind 0"),
        (rebuilt(kind=6), "unknown frame kind 6"),
        (rebuilt(length=MAX_BULK_BYTES + 1), "longer than the 1048576 bytes allowed"),
        (rebuilt(kind=3, length=MAX_PART_BYTES + 1), "longer than the 1073741824 bytes allowed"),
        (rebuilt(kind=4, length=2**32 - 1), "longer than the 1073741824 bytes allowed"),
        (rebuilt()[:-1] + b"\0", "header checksum mismatch"),
    ],
)
def test_header_is_refused(data: bytes, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        decode_header(data)


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    good = encode_header(FULL, xxh3(b"hello"))
    for bit in range(8 * HEADER_BYTES):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            decode_header(bad)


def test_every_flipped_bit_of_a_payload_is_noticed() -> None:
    good = encode(FULL, b"hello")
    for bit in range(8 * HEADER_BYTES, 8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="block 70000 at 8589934592, 5 bytes: payload checksum mismatch"):
            list(feed(receiver(), bytes(bad)))


def test_payload_beyond_the_receivers_own_limit_is_refused_before_it_comes() -> None:
    fed = receiver(100)
    assert len(list(feed(fed, encode(Header(Kind.CONTROL, 100), bytes(100))))) == 1
    with pytest.raises(ProtocolError, match="longer than the 100 bytes allowed here"):
        list(feed(fed, encode_header(Header(Kind.CONTROL, 101), 0)))
    with pytest.raises(ProtocolError, match="longer than the 67108864 bytes allowed here"):
        list(feed(FrameReceiver(into_new_memory()), encode_header(Header(Kind.CONTROL, MAX_MESSAGE_BYTES + 1), 0)))


# ---------------------------------------------------------------- receiving


def test_payload_lands_where_the_sink_says() -> None:
    block = bytearray(b"." * 12)
    fed = FrameReceiver(lambda header: memoryview(block)[header.offset : header.offset + header.length])
    (frame,) = feed(fed, encode(Header(Kind.GRAD, 5, offset=4), b"hello"))
    assert block == b"....hello..."
    assert frame.payload.obj is block


def test_receiver_says_whether_a_frame_has_begun() -> None:
    fed, frame = receiver(), encode(FULL, b"hello")
    assert not fed.mid_frame
    for byte in frame[:-1]:
        assert not list(feed(fed, bytes([byte])))
        assert fed.mid_frame
    assert len(list(feed(fed, frame[-1:]))) == 1
    assert not fed.mid_frame


def test_empty_payload_is_a_frame_at_once() -> None:
    frames = feed(receiver(), encode(Header(Kind.CONTROL, 0), b""))
    assert list(frames) == [Frame(Header(Kind.CONTROL, 0), memoryview(b""))]


@pytest.mark.parametrize("length", [FIRST_BYTES - 1, FIRST_BYTES, FIRST_BYTES + 1, 5 * FIRST_BYTES + 3])
def test_long_message_is_whole_however_its_memory_grew(length: int) -> None:
    payload = random.Random(length).randbytes(length)
    (frame,) = feed(receiver(), encode(Header(Kind.PART, length), payload))
    assert frame.payload == payload


def test_memory_follows_the_bytes_that_came_and_not_the_header() -> None:
    fed, chunk = receiver(), bytes(50_000)
    tracemalloc.start()
    assert not list(feed(fed, encode_header(Header(Kind.PART, MAX_PART_BYTES), 0)))
    assert tracemalloc.get_traced_memory()[1] < 2 * FIRST_BYTES
    for _ in range(20):
        assert not list(feed(fed, chunk))
    assert tracemalloc.get_traced_memory()[1] < 4 * 20 * len(chunk)
    tracemalloc.stop()


# ---------------------------------------------------------------- whatever comes


@given(st.lists(frames(), max_size=5), st.integers(1, 300))
def test_cuts_in_the_stream_change_nothing(encoded: list[bytes], chunk: int) -> None:
    stream = b"".join(encoded)
    whole, failed = parse(stream)
    assert not failed
    assert len(whole) == len(encoded)
    assert parse(stream, chunk) == parse(stream, 1) == (whole, False)


@given(st.lists(frames(), min_size=1, max_size=4), st.data())
def test_truncated_stream_gives_the_frames_before_the_cut(encoded: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(encoded)
    cut = data.draw(st.integers(0, len(stream) - 1))
    whole, failed = parse(stream[:cut])
    assert not failed
    assert whole == parse(stream)[0][: len(whole)]
    assert sum(HEADER_BYTES + len(payload) for _, payload in whole) <= cut


@given(st.lists(frames(), min_size=1, max_size=4), st.data())
def test_flipped_bits_end_the_stream_at_their_frame(encoded: list[bytes], data: st.DataObject) -> None:
    hit = data.draw(st.integers(0, len(encoded) - 1))
    bits = data.draw(st.sets(st.integers(0, 8 * len(encoded[hit]) - 1), min_size=1, max_size=8))
    bad = bytearray(encoded[hit])
    for bit in bits:
        bad[bit // 8] ^= 1 << bit % 8
    stream = b"".join([*encoded[:hit], bytes(bad), *encoded[hit + 1 :]])
    found, failed = parse(stream)
    assert failed
    assert found == parse(b"".join(encoded[:hit]))[0]
    assert parse(stream, 1) == (found, failed)


@given(st.lists(frames(), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_reordered_and_repeated_frames_still_parse_one_by_one(encoded: list[bytes], chance: random.Random) -> None:
    shuffled = [chance.choice(encoded) for _ in encoded]
    assert parse(b"".join(shuffled)) == ([parse(f)[0][0] for f in shuffled], False)


@given(st.binary(max_size=400), st.integers(1, 100))
def test_random_bytes_never_make_a_frame(data: bytes, chunk: int) -> None:
    found, failed = parse(data)
    assert not found
    assert failed is (len(data) >= HEADER_BYTES)
    assert parse(data, chunk) == (found, failed)


@given(frames(), st.binary(min_size=HEADER_BYTES, max_size=300))
def test_garbage_after_a_frame_does_not_take_it_back(frame: bytes, garbage: bytes) -> None:
    found, failed = parse(frame + garbage)
    assert (found, failed) == (parse(frame)[0], True)
