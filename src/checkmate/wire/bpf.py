"""The filter of a capturing socket, as a program for the kernel (classic BPF): which packets, and how much of each.

    TCP of an announced flow, with its mark             whole
    TCP with some flow's mark, but of none of them      its first `FOREIGN_BYTES`, enough to be counted
    GRE                                                 whole: user space looks inside
    everything else                                     nothing

Classic BPF has an accumulator A, an index X, sixteen words of memory, and jumps forward only. A packet too short for
what is read from it is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from .packets import GRE, HOP_BY_HOP, IPV4, IPV6, MAX_TAGS, TCP, VLAN_TAGS, Flow

FOREIGN_BYTES = 128
WHOLE = 0x7FFFFFFF
#: With more flows the kernel looks at the mark only: a program may have 4,096 instructions, a flow needs up to 21.
MAX_FLOWS = 128


class Op(NamedTuple):
    """One ``struct sock_filter``; jumps are relative to the next instruction."""

    code: int
    jump_true: int
    jump_false: int
    k: int


# A := word, half, byte at k, or at X + k
LD_WORD, LD_HALF, LD_BYTE, LD_WORD_X, LD_HALF_X, LD_BYTE_X = 0x20, 0x28, 0x30, 0x40, 0x48, 0x50
LD_MEMORY, LDX_MEMORY, STORE, STORE_X, LDX, TAX = 0x60, 0x61, 0x02, 0x03, 0x01, 0x07
ADD, ADD_X, AND, SHIFT_LEFT, SHIFT_RIGHT = 0x04, 0x0C, 0x54, 0x64, 0x74
JUMP, EQUAL, ANY_BIT, RETURN = 0x05, 0x15, 0x45, 0x06

_IP, _MARK, _PORTS = range(3)  # what the words of memory hold


def program(flows: Collection[Flow], by_flow: bool = True) -> list[Op]:
    """The filter for these flows, or for all with their marks. Without any, only GRE passes."""
    marks = sorted({flow.dscp for flow in flows})
    known = sorted({(flow.key, flow.dscp) for flow in flows}) if by_flow and len(flows) <= MAX_FLOWS else []
    rest = FOREIGN_BYTES if known else WHOLE
    version4 = [
        *[Op(LD_BYTE_X, 0, 0, 9), Op(EQUAL, 0, 1, GRE), Op(RETURN, 0, 0, WHOLE), *_drop_unless(EQUAL, TCP)],
        *[Op(LD_HALF_X, 0, 0, 6), Op(ANY_BIT, 0, 1, 0x3FFF), Op(RETURN, 0, 0, 0)],  # fragments
        *[Op(LD_BYTE_X, 0, 0, 1), Op(SHIFT_RIGHT, 0, 0, 2), Op(STORE, 0, 0, _MARK)],
        *[Op(LD_BYTE_X, 0, 0, 0), Op(AND, 0, 0, 15), Op(SHIFT_LEFT, 0, 0, 2), Op(ADD_X, 0, 0, 0), Op(TAX, 0, 0, 0)],
        *[Op(LD_WORD_X, 0, 0, 0), Op(STORE, 0, 0, _PORTS)],
        *_choose([(key, dscp) for key, dscp in known if len(key) == 12], 12, marks, rest),
    ]
    version6 = [
        *[Op(LD_HALF_X, 0, 0, 0), Op(SHIFT_RIGHT, 0, 0, 6), Op(AND, 0, 0, 0x3F), Op(STORE, 0, 0, _MARK)],
        *[Op(LD_BYTE_X, 0, 0, 6), Op(EQUAL, 0, 1, GRE), Op(RETURN, 0, 0, WHOLE)],
        *[Op(EQUAL, 10, 0, TCP), *_drop_unless(EQUAL, HOP_BY_HOP), Op(LD_BYTE_X, 0, 0, 40), *_drop_unless(EQUAL, TCP)],
        *[Op(LD_BYTE_X, 0, 0, 41), Op(ADD, 0, 0, 1), Op(SHIFT_LEFT, 0, 0, 3), Op(ADD_X, 0, 0, 0), Op(TAX, 0, 0, 0)],
        *[Op(LD_WORD_X, 0, 0, 40), Op(STORE, 0, 0, _PORTS)],
        *_choose([(key, dscp) for key, dscp in known if len(key) == 36], 8, marks, rest),
    ]
    return [
        *_find_ip(),
        Op(STORE_X, 0, 0, _IP),
        *[Op(EQUAL, 0, 1, IPV6), Op(JUMP, 0, 0, 2 + len(version4)), *_drop_unless(EQUAL, IPV4)],
        *version4,
        *version6,
    ]


def _find_ip() -> list[Op]:
    """A := the EtherType behind the VLAN tags, X := where the IP header begins."""
    ops: list[Op] = []
    for tags in reversed(range(MAX_TAGS + 1)):
        load = [Op(LDX, 0, 0, 14 + 4 * tags), Op(LD_HALF, 0, 0, 12 + 4 * tags)]
        if ops:
            last = len(VLAN_TAGS)
            load += [Op(EQUAL, last - i, 0, tag) for i, tag in enumerate(VLAN_TAGS)]
            load += [Op(JUMP, 0, 0, len(ops))]
        ops = load + ops
    return ops


def _drop_unless(test: int, k: int) -> list[Op]:
    return [Op(test, 1, 0, k), Op(RETURN, 0, 0, 0)]


def _choose(flows: Sequence[tuple[bytes, int]], at: int, marks: Sequence[int], rest: int) -> list[Op]:
    """Return by flow, else by mark. Addresses begin at `at` of the IP header."""
    ops = [Op(LDX_MEMORY, 0, 0, _IP)]
    for key, dscp in flows:
        words = [int.from_bytes(key[i : i + 4], "big") for i in range(0, len(key), 4)]
        tests = [(Op(LD_MEMORY, 0, 0, _PORTS), words.pop()), (Op(LD_MEMORY, 0, 0, _MARK), dscp)]
        tests += [(Op(LD_WORD_X, 0, 0, at + 4 * i), word) for i, word in enumerate(words)]
        for number, (load, wanted) in enumerate(tests):
            ops += [load, Op(EQUAL, 0, 2 * (len(tests) - number) - 1, wanted)]
        ops += [Op(RETURN, 0, 0, WHOLE)]
    ops += [Op(LD_MEMORY, 0, 0, _MARK)]
    for mark in marks:
        ops += [Op(EQUAL, 0, 1, mark), Op(RETURN, 0, 0, rest)]
    return [*ops, Op(RETURN, 0, 0, 0)]
