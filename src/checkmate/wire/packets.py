"""Packets as a switch's mirror delivers them: Ethernet in, TCP segment out, without a copy.

    Ethernet [802.1Q tags] IPv4 | IPv6 [hop-by-hop]  TCP  payload
    Ethernet [802.1Q tags] IPv4 | IPv6  GRE  [ERSPAN]  Ethernet …        as a mirror session over a routed network

Lengths come from the IP header, so that neither the padding of short frames nor a checksum at the end counts as
payload; where it says 0 (packets over 64 KiB, which exist inside hosts only) the captured length counts. Checksums are
not looked at: a copy may be taken before the sender's card has filled them in. The frames inside bring their own.
What is no whole TCP segment (fragments, other protocols, headers that are cut short) is None; nothing raises.
"""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple, TypeAlias

#: Flow key, DSCP, sequence number of the first payload byte (of the SYN itself, if it is one), TCP flags, payload.
#: The key is source and target address, then source and target port, as they stand in the packet: 12 or 36 bytes.
#: Of a packet that was captured only in part, the payload is the part that is there.
Segment: TypeAlias = "tuple[bytes, int, int, int, memoryview]"

FIN, SYN, RST = 0x01, 0x02, 0x04
IPV4, IPV6 = 0x0800, 0x86DD
#: EtherTypes of a VLAN tag. Capturing takes the outermost one off; others stay in the packet.
VLAN_TAGS = (0x8100, 0x88A8, 0x9100)
MAX_TAGS = 2
HOP_BY_HOP, TCP, GRE = 0, 6, 47

_ERSPAN_1_OR_2, _ERSPAN_3, _ERSPAN_MELLANOX = 0x88BE, 0x22EB, 0x8949

#: Untagged Ethernet, IPv4 without options, TCP: nearly every packet, read at one go.
PLAIN = struct.Struct("!12x3sBH2xHxB2x12sI4xBB6x")
PLAIN_IPV4 = b"\x08\x00\x45"
#: In the field between them: more fragments follow, or this one is not the first.
FRAGMENTED = 0x3FFF
_ETHERTYPE = struct.Struct("!H")
_IPV4 = struct.Struct("!BBH2xHxB2x8s")
_IPV6 = struct.Struct("!IHBx32s")
_TCP = struct.Struct("!4sI4xBB6x")
_GRE = struct.Struct("!HH")


class Flow(NamedTuple):
    """One direction of a TCP connection whose packets carry a mark, or what one sends to a group. Addresses as text."""

    source: str
    source_port: int
    target: str
    target_port: int
    dscp: int

    @property
    def key(self) -> bytes:
        """As `parse` gives it. Raises ValueError if an address is none, or the two are of different kinds."""
        source, target = packed(self.source), packed(self.target)
        if len(source) != len(target):
            raise ValueError(f"{self}: one address is IPv4 and the other IPv6")
        return source + target + struct.pack("!HH", self.source_port, self.target_port)

    @property
    def multicast(self) -> bool:
        """Whether the target is a group: then these are datagrams."""
        return ip_address(self.target).is_multicast

    def __str__(self) -> str:
        return f"{self.source}:{self.source_port} -> {self.target}:{self.target_port}, DSCP {self.dscp}"


def packed(address: str) -> bytes:
    """An address as it stands in packets: an IPv4 address in IPv6 notation travels as IPv4."""
    parsed: IPv4Address | IPv6Address = ip_address(address)
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return parsed.packed


def parse(data: memoryview, length: int) -> Segment | None:
    """The TCP segment in the packet ``data[:length]``; what lies behind `length` is not looked at."""
    if length >= PLAIN.size:
        kind, tos, total, fragment, protocol, key, seq, offset, flags = PLAIN.unpack_from(data)
        if kind == PLAIN_IPV4 and protocol == TCP and not fragment & FRAGMENTED:
            start = 34 + (offset >> 4 << 2)
            stop = total + 14 if total and total + 14 < length else length
            if 54 <= start <= stop:
                return key, tos >> 2, seq, flags, data[start:stop]
            return None
    return _ethernet(data[:length], 0, encapsulated=False)


def _ethernet(data: memoryview, at: int, encapsulated: bool) -> Segment | None:
    """The frame that begins at `at`."""
    try:
        at += 12
        for _ in range(MAX_TAGS + 1):
            (ethertype,) = _ETHERTYPE.unpack_from(data, at)
            if ethertype not in VLAN_TAGS:
                break
            at += 4
        if ethertype == IPV4:
            return _ipv4(data, at + 2, encapsulated)
        if ethertype == IPV6:
            return _ipv6(data, at + 2, encapsulated)
    except (struct.error, IndexError):  # a header that is cut short
        pass
    return None


def _ipv4(data: memoryview, at: int, encapsulated: bool) -> Segment | None:
    version, tos, total, fragment, protocol, addresses = _IPV4.unpack_from(data, at)
    header = (version & 15) << 2
    stop = min(at + total, len(data)) if total else len(data)
    if version >> 4 != 4 or header < 20 or at + header > stop or fragment & FRAGMENTED:
        return None
    return _within_ip(data[:stop], at + header, protocol, tos, addresses, encapsulated)


def _ipv6(data: memoryview, at: int, encapsulated: bool) -> Segment | None:
    word, length, protocol, addresses = _IPV6.unpack_from(data, at)
    at += 40
    stop = min(at + length, len(data)) if length else len(data)
    if word >> 28 != 6 or at > stop:
        return None
    if protocol == HOP_BY_HOP:  # the length of a packet over 64 KiB, which the captured length says as well
        protocol, more = data[at], data[at + 1]
        at += (more + 1) << 3
    return _within_ip(data[:stop], at, protocol, word >> 20 & 0xFF, addresses, encapsulated)


def _within_ip(
    data: memoryview, at: int, protocol: int, tos: int, addresses: bytes, encapsulated: bool
) -> Segment | None:
    if protocol == TCP:
        ports, seq, offset, flags = _TCP.unpack_from(data, at)
        start = at + (offset >> 4 << 2)
        if at + 20 <= start <= len(data):
            return addresses + ports, tos >> 2, seq, flags, data[start:]
    elif protocol == GRE and not encapsulated:
        return _gre(data, at)
    return None


def _gre(data: memoryview, at: int) -> Segment | None:
    flags, protocol = _GRE.unpack_from(data, at)
    if flags & 0x4007:  # source routing, or another version
        return None
    at += 4 + 4 * (flags >> 15) + 4 * (flags >> 13 & 1) + 4 * (flags >> 12 & 1)  # checksum, key, sequence number
    if protocol == _ERSPAN_1_OR_2:
        at += 8 if flags & 0x1000 else 0
    elif protocol == _ERSPAN_3:
        at += 20 if data[at + 11] & 1 else 12  # the last bit announces a platform's own 8 bytes
    elif protocol == _ERSPAN_MELLANOX:
        at += 22
    else:
        return None
    return _ethernet(data, at, encapsulated=True)
