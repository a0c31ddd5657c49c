"""The filter, run by a small interpreter: which packets pass, and how much of each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.wire import bpf
from checkmate.wire.bpf import FOREIGN_BYTES, MAX_FLOWS, WHOLE, Op, program
from checkmate.wire.packets import Flow, parse
from tests.wire.packet_makers import ERSPAN, FLOW4, FLOW6, OUTER4, OUTER6, erspan, ethernet, ipv4, ipv6, packet, tcp

FLOWS = [FLOW4, FLOW6, FLOW4._replace(target="10.77.0.3", dscp=10), FLOW6._replace(source_port=7)]
TAGS = [(), (0x8100,), (0x88A8, 0x8100)]


def run(ops: list[Op], data: bytes) -> int:
    """What the kernel would return: how many bytes of the packet to keep."""
    a = x = at = 0
    memory = [0] * 16
    loads = {bpf.LD_WORD: (4, 0), bpf.LD_HALF: (2, 0), bpf.LD_BYTE: (1, 0),
             bpf.LD_WORD_X: (4, 1), bpf.LD_HALF_X: (2, 1), bpf.LD_BYTE_X: (1, 1)}  # fmt: skip
    while True:
        code, jump_true, jump_false, k = ops[at]
        at += 1
        if code in loads:
            size, indexed = loads[code]
            start = k + x * indexed
            if start + size > len(data):
                return 0
            a = int.from_bytes(data[start : start + size], "big")
        elif code == bpf.LDX:
            x = k
        elif code == bpf.LD_MEMORY:
            a = memory[k]
        elif code == bpf.LDX_MEMORY:
            x = memory[k]
        elif code == bpf.STORE:
            memory[k] = a
        elif code == bpf.STORE_X:
            memory[k] = x
        elif code == bpf.TAX:
            x = a
        elif code == bpf.ADD:
            a = a + k & 0xFFFFFFFF
        elif code == bpf.ADD_X:
            a = a + x & 0xFFFFFFFF
        elif code == bpf.AND:
            a &= k
        elif code == bpf.SHIFT_LEFT:
            a = a << k & 0xFFFFFFFF
        elif code == bpf.SHIFT_RIGHT:
            a >>= k
        elif code == bpf.JUMP:
            at += k
        elif code == bpf.EQUAL:
            at += jump_true if a == k else jump_false
        elif code == bpf.ANY_BIT:
            at += jump_true if a & k else jump_false
        elif code == bpf.RETURN:
            return k
        else:
            raise AssertionError(f"unknown code {code:#x}")


@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("flow", FLOWS)
def test_packets_of_announced_flows_pass_whole(flow: Flow, tags: tuple[int, ...]) -> None:
    assert run(program(FLOWS), packet(flow, 1, b"x" * 500, tags=tags)) == WHOLE
    assert run(program([flow]), packet(flow, 1, b"", tags=tags)) == WHOLE


@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("flow", FLOWS)
def test_marked_packets_of_others_pass_in_part(flow: Flow, tags: tuple[int, ...]) -> None:
    others = [
        flow._replace(source_port=9),
        flow._replace(target_port=9),
        flow._replace(dscp=10 if flow.dscp == 43 else 43),
    ]
    others += [flow._replace(source=flow.source + "0"), flow._replace(target=flow.target + "0")]
    for other in others:
        data = packet(other, 1, b"x" * 500, tags=tags)
        assert run(program(FLOWS), data) == FOREIGN_BYTES
        segment = parse(memoryview(data[:FOREIGN_BYTES]), FOREIGN_BYTES)
        assert segment is not None
        assert segment[0] == other.key


@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("flow", FLOWS)
def test_everything_else_is_dropped(flow: Flow, tags: tuple[int, ...]) -> None:
    ops = program(FLOWS)
    assert run(ops, packet(flow._replace(dscp=0), 1, b"x" * 500, tags=tags)) == 0
    assert run(program([]), packet(flow, 1, b"x" * 500, tags=tags)) == 0
    six = ":" in flow.source
    inner = tcp(flow, 1, b"x")
    assert run(ops, ethernet(ipv6(flow, inner, protocol=17) if six else ipv4(flow, inner, protocol=17), tags)) == 0
    if not six:
        assert run(ops, ethernet(ipv4(flow, inner, fragment=1), tags)) == 0
    assert run(ops, ethernet(b"\x00" * 40, tags)) == 0
    whole = packet(flow, 1, b"", tags=tags)
    for length in range(14 + 4 * len(tags) + 20 + 20 * six):
        assert run(ops, whole[:length]) == 0


@pytest.mark.parametrize("outer", [OUTER4, OUTER6])
@pytest.mark.parametrize("kind", ERSPAN)
def test_encapsulated_packets_pass_whole(kind: str, outer: Flow) -> None:
    assert run(program([]), erspan(kind, packet(FLOW4, 1, b"x" * 500), outer)) == WHOLE


def test_options_and_extensions_before_tcp() -> None:
    inner = tcp(FLOW4, 1, b"x")
    assert run(program(FLOWS), ethernet(ipv4(FLOW4, inner, options=bytes(40)))) == WHOLE
    inner = bytes([6, 1, *bytes(14)]) + tcp(FLOW6, 1, b"x")
    assert run(program(FLOWS), ethernet(ipv6(FLOW6, inner, protocol=0))) == WHOLE
    inner = bytes([17, 1, *bytes(14)]) + tcp(FLOW6, 1, b"x")
    assert run(program(FLOWS), ethernet(ipv6(FLOW6, inner, protocol=0))) == 0


@pytest.mark.parametrize("number", [1, MAX_FLOWS, MAX_FLOWS + 1, 5000])
def test_program_is_one_that_the_kernel_takes(number: int) -> None:
    for flow in (FLOW4, FLOW6):
        flows = [flow._replace(source_port=port) for port in range(1, number + 1)]
        ops = program(flows)
        assert len(ops) <= 4096
        assert all(0 <= value <= 255 for op in ops for value in (op.jump_true, op.jump_false))
        assert ops[-1].code == bpf.RETURN
        assert run(ops, packet(flows[-1], 1, b"x")) == WHOLE
        foreign = FOREIGN_BYTES if number <= MAX_FLOWS else WHOLE
        assert run(ops, packet(flow._replace(source_port=9999), 1, b"x")) == foreign


@given(st.binary(max_size=120))
def test_no_packet_leads_out_of_the_program(data: bytes) -> None:
    assert run(program(FLOWS), data) in (0, FOREIGN_BYTES, WHOLE)
