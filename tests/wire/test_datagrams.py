"""Datagrams byte by byte, and the finding of pieces in what the kernel has joined."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.errors import ProtocolError, UsageError
from checkmate.wire.assembly import Assembly, Messages
from checkmate.wire.datagrams import (
    DATAGRAM_HEADER_BYTES,
    GROUP_PORT,
    GROUPS,
    MOST_MISSING,
    Answer,
    Datagram,
    Missing,
    Packer,
    Pieces,
    What,
    decode,
    decode_answer,
    encode_answer,
    group_of,
    group_range,
    piece_bytes,
    split,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"


def test_header_byte_by_byte() -> None:
    head = Datagram(What.DATA, 3, 0x0102030405060708, 0x1112131415161718, 0x2122, 0x3132, 0x4142, 0x5152)
    assert head.encode().hex() == (
        "434b4d44" "01" "01" "0300" "0807060504030201" "1817161514131211" "2221" "3231" "4241" "5251"
    )  # fmt: skip
    assert decode(head.encode()) == head


def test_the_document_has_every_byte_once() -> None:
    section = DOCUMENT.read_text().split("## Datagrams")[1].split("## Messages")[0]
    end = 0
    for offset, size in re.findall(r"^\| +(\d+) \| (\d+) \| \w+ \|", section, re.MULTILINE):
        assert int(offset) == end
        end += int(size)
    assert end == DATAGRAM_HEADER_BYTES
    kinds = re.findall(r"^\| (\d) \| ([A-Z]+) \|", section, re.MULTILINE)
    assert [(int(number), name) for number, name in kinds] == [(what.value, what.name) for what in What]
    assert f"port {GROUP_PORT}" in section
    assert f"up to {MOST_MISSING} ranges" in section


@pytest.mark.parametrize(
    "data", [b"", b"CKMD", bytes(32), b"CKMT" + bytes(28), b"CKMD\x02\x01" + bytes(26), b"CKMD\x01\x09" + bytes(26)]
)
def test_what_is_no_datagram_of_ours_is_none(data: bytes) -> None:
    assert decode(data) is None


def test_an_answer_byte_by_byte() -> None:
    data = encode_answer(1, 2, Answer(7, 9, (Missing(9, 3, 5), Missing(10, 0, 1))))
    assert data[DATAGRAM_HEADER_BYTES:-8].hex() == "0700000000000000" "0900000000000000" "0300" "0500" "0a00000000000000" "0000" "0100"  # fmt: skip # noqa: E501
    head = decode(data)
    assert head is not None
    assert decode_answer(head, data) == Answer(7, 9, (Missing(9, 3, 5), Missing(10, 0, 1)))


@given(at=st.integers(DATAGRAM_HEADER_BYTES, 71), bit=st.integers(0, 7), cut=st.integers(0, 71))
def test_a_damaged_answer_is_refused(at: int, bit: int, cut: int) -> None:
    data = bytearray(encode_answer(1, 2, Answer(7, 9, (Missing(9, 3, 5), Missing(10, 0, 1)))))
    head = decode(data)
    assert head is not None
    with pytest.raises(ProtocolError):
        decode_answer(head, bytes(data[:cut]))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(ProtocolError):
        decode_answer(head, bytes(data))


@given(st.data())
def test_pieces_are_found_in_any_order_with_any_missing_and_among_anything(data: st.DataObject) -> None:
    size, sent = 16 * data.draw(st.integers(1, 8)), data.draw(st.integers(1, 30))
    content = np.arange(size * sent, dtype=np.uint8)
    packed = bytes(Packer(2, 5, size, 64).pack(content, 8, 10, 99, 1))
    each = DATAGRAM_HEADER_BYTES + size
    rows = [packed[at : at + each] for at in range(0, len(packed), each)]
    rows.append(Datagram(What.PROBE, 2, 5).encode().ljust(each, b"\0"))
    rows.append(b"x" * each)
    order = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, max_size=40))
    per = data.draw(st.integers(1, len(order)))
    order = order[: len(order) // per * per]
    joined = np.frombuffer(b"".join(rows[number] for number in order), np.uint8).reshape(-1, per * each)
    found: list[int] = []
    for head, what in split(joined, per * each, each):
        if isinstance(what, Pieces):
            assert (head.number, head.total, head.tables, head.size, head.session) == (8, 99, 1, size, 5)
            got = np.concatenate(what.rows)
            numbers = range(what.first - 10, what.stop - 10)
            assert got.tobytes() == b"".join(rows[number][DATAGRAM_HEADER_BYTES:] for number in numbers)
            found += numbers
        else:
            assert head.what is What.PROBE
            assert len(what) == each
            found.append(sent)
    assert found == [number for number in order if number <= sent]


@given(st.lists(st.binary(max_size=80), max_size=8), st.integers(1, 80))
def test_rubbish_does_nothing(datagrams: list[bytes], each: int) -> None:
    data = np.frombuffer(b"".join(datagrams), np.uint8)[None]
    for _, found in split(data, data.shape[1], each):
        assert isinstance(found, (Pieces, memoryview))


@given(
    st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 64),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 70)), max_size=4),
)  # fmt: skip
def test_forged_pieces_never_leave_their_message(
    first: int, total: int, tables: int, size: int, shapes: list[tuple[int, int]]
) -> None:
    around = np.zeros(32 + 160 + 32, np.uint8)
    assembly = Assembly(6, 1, 32, np.zeros(32, np.uint8), around[32:-32])
    pieces = Pieces(0, first, total, tables, size, [np.ones(shape, np.uint8) for shape in shapes])
    assembly.put(pieces)
    assert assembly.left >= 0
    assert not around[:32].any()
    assert not around[-32:].any()
    messages = Messages(lambda *_: None)
    messages.feed(pieces, 0.0)
    messages.expire(1.0)
    assert messages.frames == 0


def test_memory_of_a_listener_is_bounded() -> None:
    messages = Messages(lambda *_: None)
    row = [np.ones((1, 60000), np.uint8)]
    messages.feed(Pieces(0, 1, 65535, 1, 60000, row), 0.0)
    assert messages.unfit == 1
    for number in range(100):
        messages.feed(Pieces(number, 1, 20, 1, 60000, row), 0.0)
    assert len(messages._open) == 8
    assert len(messages._spare) <= 16


def test_piece_sizes() -> None:
    assert [piece_bytes(mtu) for mtu in (1500, 9000, 65536)] == [1440, 8928, 61440]
    with pytest.raises(UsageError, match="MTU of 300 bytes is too small"):
        piece_bytes(300)


def test_groups_of_runs() -> None:
    assert group_of(GROUPS, "gpt") == group_of(GROUPS, "gpt")
    found = {group_of(GROUPS, f"run {number}") for number in range(200)}
    assert len(found) > 100
    assert all(address.startswith("239.77.0.") for address in found)
    assert int(group_of(GROUPS, "x", 3, 4).split(".")[3]) == int(group_of(GROUPS, "x", 0, 4).split(".")[3]) + 3
    assert group_of("232.1.1.1/32", "x") == "232.1.1.1"
    with pytest.raises(UsageError, match="hold 1 addresses, for 2 partitions"):
        group_of("232.1.1.1/32", "x", 0, 2)


@pytest.mark.parametrize("groups", ["", "10.0.0.0/8", "224.0.0.0/24", "224.0.0.0/8", "ff02::/16", "239.1.2.3/24", "x"])
def test_what_is_no_range_of_groups_is_refused(groups: str) -> None:
    with pytest.raises(UsageError, match="groups"):
        group_range(groups)
