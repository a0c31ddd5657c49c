"""Every way in which a marked TCP packet may arrive, and much that is none."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.wire.packets import Flow, parse
from tests.wire.packet_makers import (
    ERSPAN,
    FLOW4,
    FLOW6,
    OUTER4,
    OUTER6,
    PSH_ACK,
    erspan,
    ethernet,
    ipv4,
    ipv6,
    packet,
    tcp,
)

PAYLOAD = b"gradient"


def seen(data: bytes, room: int = 0) -> tuple[bytes, int, int, int, bytes] | None:
    """`parse` of a packet in a buffer with old bytes behind it."""
    segment = parse(memoryview(data + b"\xaa" * room), len(data))
    return None if segment is None else (*segment[:4], bytes(segment[4]))


def wanted(flow: Flow, payload: bytes = PAYLOAD) -> tuple[bytes, int, int, int, bytes]:
    return flow.key, flow.dscp, 2**32 - 3, PSH_ACK, payload


@pytest.mark.parametrize("room", [0, 100])
@pytest.mark.parametrize("tags", [(), (0x8100,), (0x88A8, 0x8100)])
@pytest.mark.parametrize("flow", [FLOW4, FLOW6])
def test_plain_and_tagged_packets(flow: Flow, tags: tuple[int, ...], room: int) -> None:
    assert seen(packet(flow, 2**32 - 3, PAYLOAD, tags=tags), room) == wanted(flow)


@pytest.mark.parametrize("outer", [OUTER4, OUTER6])
@pytest.mark.parametrize("kind", ERSPAN)
@pytest.mark.parametrize("flow", [FLOW4, FLOW6])
def test_mirror_sessions(flow: Flow, kind: str, outer: Flow) -> None:
    for tags in ((), (0x8100,)):
        assert seen(erspan(kind, packet(flow, 2**32 - 3, PAYLOAD, tags=tags), outer)) == wanted(flow)


def test_options_of_ip_and_tcp_are_passed_over() -> None:
    inner = tcp(FLOW4, 2**32 - 3, PAYLOAD, options=bytes(40))
    assert seen(ethernet(ipv4(FLOW4, inner, options=bytes(40)))) == wanted(FLOW4)


def test_padding_of_a_short_frame_is_no_payload() -> None:
    for flow in (FLOW4, FLOW6):
        for payload in (b"", b"x"):
            inner = tcp(flow, 2**32 - 3, payload)
            data = ethernet(ipv6(flow, inner) if flow is FLOW6 else ipv4(flow, inner)) + b"checksum"
            assert seen(data) == wanted(flow, payload)


def test_packets_over_64_kib() -> None:
    payload = random.Random(1).randbytes(200_000)
    inner = tcp(FLOW4, 2**32 - 3, payload)
    assert seen(ethernet(ipv4(FLOW4, inner, total=0))) == wanted(FLOW4, payload)
    inner = tcp(FLOW6, 2**32 - 3, payload)
    assert seen(ethernet(ipv6(FLOW6, inner, length=0))) == wanted(FLOW6, payload)
    jumbo = struct.pack("!BBBBI", 6, 0, 0xC2, 4, 8 + len(inner))
    assert seen(ethernet(ipv6(FLOW6, jumbo + inner, protocol=0, length=0))) == wanted(FLOW6, payload)


def test_payload_is_a_view_of_the_packet() -> None:
    data = bytearray(packet(FLOW4, 1, PAYLOAD))
    segment = parse(memoryview(data), len(data))
    assert segment is not None
    data[-1:] = b"T"
    assert segment[4] == b"gradienT"


def test_packet_captured_in_part_gives_that_part() -> None:
    for data in (packet(FLOW4, 2**32 - 3, PAYLOAD), packet(FLOW6, 2**32 - 3, PAYLOAD)):
        assert seen(data[:-3], 50) == wanted(FLOW6 if len(data) > 80 else FLOW4, PAYLOAD[:-3])


@pytest.mark.parametrize("fragment", [0x2000, 0x0001, 0x6000])
def test_fragments_are_refused(fragment: int) -> None:
    assert seen(ethernet(ipv4(FLOW4, tcp(FLOW4, 1, PAYLOAD), fragment=fragment))) is None
    assert seen(ethernet(ipv4(FLOW4, tcp(FLOW4, 1, PAYLOAD), options=bytes(4), fragment=fragment))) is None
    assert seen(ethernet(ipv6(FLOW6, bytes(8) + tcp(FLOW6, 1, PAYLOAD), protocol=44))) is None


def test_what_is_no_tcp_segment_is_none() -> None:
    inner = tcp(FLOW4, 1, PAYLOAD)
    twice = erspan("type II", erspan("type II", packet(FLOW4, 1, PAYLOAD)))
    source_routed = bytearray(erspan("type I", packet(FLOW4, 1, PAYLOAD)))
    source_routed[34] |= 0x40
    other_gre = bytearray(erspan("type I", packet(FLOW4, 1, PAYLOAD)))
    other_gre[36:38] = b"\x65\x58"
    small_offset = bytearray(packet(FLOW4, 1, PAYLOAD))
    small_offset[46] = 0x40
    wrong = bytearray(packet(FLOW6, 1, PAYLOAD))
    wrong[14] = 0x40
    for data in (b"", ethernet(ipv4(FLOW4, inner, protocol=17)), ethernet(ipv4(FLOW4, inner, total=30)), twice,
                 bytes(source_routed), bytes(other_gre), bytes(small_offset), bytes(wrong),
                 packet(FLOW4, 1, PAYLOAD, tags=(0x8100,) * 3)):  # fmt: skip
        assert seen(data) is None


WELL_FORMED = [
    *(packet(flow, 5, PAYLOAD, tags=tags) for flow in (FLOW4, FLOW6) for tags in ((), (0x8100,), (0x88A8, 0x8100))),
    *(erspan(kind, packet(flow, 5, PAYLOAD)) for kind in ERSPAN for flow in (FLOW4, FLOW6)),
    ethernet(ipv4(FLOW4, tcp(FLOW4, 5, PAYLOAD, options=bytes(8)), options=bytes(8))),
    ethernet(ipv6(FLOW6, bytes([6, 0, 1, 4, 0, 0, 0, 0]) + tcp(FLOW6, 5, PAYLOAD), protocol=0)),
]


def test_every_truncation_is_read_or_refused() -> None:
    for data in WELL_FORMED:
        for length in range(len(data)):
            for given_data in (data, data[:length]):  # what lies behind makes no difference
                segment = parse(memoryview(given_data), length)
                assert segment is None or PAYLOAD.startswith(bytes(segment[4]))


@given(
    st.sampled_from(WELL_FORMED), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=6), st.data()
)
def test_nothing_raises(data: bytes, changes: list[tuple[int, int]], draw: st.DataObject) -> None:
    changed = bytearray(data)
    for at, value in changes:
        changed[at % len(changed)] = value
    length = draw.draw(st.integers(0, len(changed)))
    segment = parse(memoryview(changed), length)
    assert segment is None or (len(segment[0]) in (12, 36) and len(segment[4]) <= length)


@given(st.binary(max_size=200))
def test_noise_never_raises(data: bytes) -> None:
    parse(memoryview(data), len(data))


def test_flow_has_the_key_of_its_packets() -> None:
    assert Flow("::ffff:10.77.0.1", 40001, "10.77.0.2", 40002, 43).key == FLOW4.key
    assert str(FLOW4) == "10.77.0.1:40001 -> 10.77.0.2:40002, DSCP 43"
    for source in ("fd00::1", "host"):
        with pytest.raises(ValueError, match=source):
            _ = FLOW4._replace(source=source).key
