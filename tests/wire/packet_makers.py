"""Packets for tests, built field by field."""

from __future__ import annotations

import struct

from checkmate.wire.packets import Flow, packed

MACS = bytes.fromhex("02 00 00 00 00 02  02 00 00 00 00 01")
FLOW4 = Flow("10.77.0.1", 40001, "10.77.0.2", 40002, 43)
FLOW6 = Flow("fd00::1", 40001, "fd00::2", 40002, 43)
PSH_ACK = 0x18


def tcp(flow: Flow, seq: int, payload: bytes, flags: int = PSH_ACK, options: bytes = b"") -> bytes:
    assert len(options) % 4 == 0
    offset = (20 + len(options)) << 2
    head = struct.pack("!HHIIBBHHH", flow.source_port, flow.target_port, seq, 7, offset, flags, 512, 0xDEAD, 0)
    return head + options + payload


def ipv4(flow: Flow, inner: bytes, protocol: int = 6, options: bytes = b"", total: int | None = None,
         fragment: int = 0x4000) -> bytes:  # fmt: skip
    length = 20 + len(options) + len(inner)
    head = struct.pack(
        "!BBHHHBBH", 0x45 + len(options) // 4, flow.dscp << 2 | 1, length if total is None else total, 5, fragment, 64,
        protocol, 0xBEEF,
    )  # fmt: skip
    return head + packed(flow.source) + packed(flow.target) + options + inner


def ipv6(flow: Flow, inner: bytes, protocol: int = 6, length: int | None = None) -> bytes:
    word = 6 << 28 | flow.dscp << 22 | 0x12345
    head = struct.pack("!IHBB", word, len(inner) if length is None else length, protocol, 64)
    return head + packed(flow.source) + packed(flow.target) + inner


def ethernet(ip: bytes, tags: tuple[int, ...] = (), macs: bytes = MACS) -> bytes:
    """A frame, padded as short ones are on the wire."""
    inner = b"".join(struct.pack("!HH", tag, 100 + i) for i, tag in enumerate(tags))
    kind = 0x86DD if ip[0] >> 4 == 6 else 0x0800
    return (macs + inner + struct.pack("!H", kind) + ip).ljust(60, b"\xee")


def packet(flow: Flow, seq: int, payload: bytes, flags: int = PSH_ACK, tags: tuple[int, ...] = ()) -> bytes:
    inner = tcp(flow, seq, payload, flags, bytes(12))
    return ethernet(ipv6(flow, inner) if ":" in flow.source else ipv4(flow, inner), tags)


#: What stands between the GRE header and the mirrored frame, by GRE flags and protocol.
ERSPAN = {
    "type I": (0x0000, 0x88BE, b""),
    "type II": (0x1000, 0x88BE, bytes(4) + bytes(8)),
    "type III": (0x1000, 0x22EB, bytes(4) + bytes(12)),
    "type III, platform": (0x1000, 0x22EB, bytes(4) + bytes(11) + b"\x01" + bytes(8)),
    "type II, key and checksum": (0xB000, 0x88BE, bytes(12) + bytes(8)),
    "Mellanox": (0x0000, 0x8949, bytes(22)),
}
OUTER4 = Flow("10.1.0.1", 0, "10.1.0.2", 0, 8)
OUTER6 = Flow("fd01::1", 0, "fd01::2", 0, 8)


def erspan(kind: str, mirrored: bytes, outer: Flow = OUTER4) -> bytes:
    flags, protocol, between = ERSPAN[kind]
    gre = struct.pack("!HH", flags, protocol) + between + mirrored
    return ethernet(ipv6(outer, gre, 47) if ":" in outer.source else ipv4(outer, gre, 47))
