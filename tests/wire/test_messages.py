"""Control messages and parts: exact bytes of each, limits, and a decoder that parses or refuses whatever it gets."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.errors import ProtocolError, UsageError
from checkmate.wire import messages as m
from checkmate.wire.messages import Control, Part, decode, decode_part, encode

ID = bytes(range(16))
ME = m.Incarnation(3, ID)
FINGERPRINT = m.Fingerprint("2.13.0", "AVX2", 1, False, "cpu")
BLOCK = m.Block("net.weight", "float32", 4, [0, 0], [2, 3], [2, 3], 0, True)
SGD = m.Optimizer("torch.optim", "SGD", b"G", [[0]])
SPEC = m.Spec(1, [[0]], [BLOCK], [SGD], FINGERPRINT, "match", {"tied": "net.weight"})
DIGEST = m.Digest(0, "exp_avg", 64, 128, 2**64 - 1)
ENTRY = m.Entry("", "float32", [2, 3], 24)

WORDS = {
    name: msgspec.msgpack.encode(name).hex() for name in ("net.weight", "float32", "torch.optim", "SGD", "exp_avg")
}
FINGERPRINT_HEX = "95 a6322e31332e30 a441565832 01 c2 a3637075"
BLOCK_HEX = f"98 {WORDS['net.weight']} {WORDS['float32']} 04 920000 920203 920203 00 c3"
SGD_HEX = f"95 {WORDS['torch.optim']} {WORDS['SGD']} c40147 919100 00"
SPEC_HEX = (
    f"98 01 919100 91{BLOCK_HEX} 91{SGD_HEX} {FINGERPRINT_HEX} a56d61746368 "
    f"81a474696564{WORDS['net.weight']} a473746570"
)
ME_HEX = f"92 03 c410{ID.hex()}"
DIGEST_HEX = f"95 00 {WORDS['exp_avg']} 40 cc80 cfffffffffffffffff"
ENTRY_HEX = f"94 a0 {WORDS['float32']} 920203 18"

#: Every control message, with the bytes after its tag: an array of the tag and the fields in order.
GOLDEN: list[tuple[Any, str]] = [
    (m.Hello([1], "data", ID, ["x"]), f"9101 a464617461 c410{ID.hex()} 91a178"),
    (m.Challenge(1, ID, b"pp"), f"01 c410{ID.hex()} c4027070 90"),
    (m.Proof(b"p"), "c40170"),
    (m.Welcome("s"), "a173"),
    (m.Refusal("live", "no"), "a46c697665 a26e6f"),
    (m.Prepare("r", m.Attempt(ID, "h", 7, "j", 2), True), f"a172 95c410{ID.hex()}a16807a16a02 c3"),
    (m.Prepared(ME, [4, 300], 2, None), f"{ME_HEX} 9204cd012c 02 c0"),
    (m.Adopt("r", ME, None, SPEC), f"a172 {ME_HEX} c0 {SPEC_HEX}"),
    (m.Adopted(1, 2**40, FINGERPRINT), f"01 cf0000010000000000 {FINGERPRINT_HEX}"),
    (m.Join("r", ME, 0, 1, 2, 3), f"a172 {ME_HEX} 00 01 02 03 c0 c0 c0"),
    (m.Joined(1, 2, -1), "01 02 ff c3"),
    (m.Attach("r", ME, 1, 2), f"a172 {ME_HEX} 01 02"),
    (m.Ack(1, 9, 8, 7, -1), "01 09 08 07 ff"),
    (m.Stable(1, 9), "01 09"),
    (m.Resume(2, "why"), "02 a3776879"),
    (m.Anchoring(2, 10), "02 0a"),
    (m.Reanchor(2, [0, 5], "audit"), "02 920005 a56175646974"),
    (m.Repair(1, 10, [(7, 0, 1, 64, 128)]), "01 0a 91 95 07 00 01 40 cc80"),
    (m.Report("note", "t", 4, True), "a46e6f7465 a174 04 c3"),
    (m.Ping(200), "ccc8"),
    (m.Pong(), ""),
    (m.Audit(4, [DIGEST]), f"04 91{DIGEST_HEX}"),
    (m.Audited(4, 1, [DIGEST], False), f"04 01 91{DIGEST_HEX} c2"),
    (m.Lease("", None), "a0 c0"),
    (
        m.Leased("r", ME, 4, 1, [m.Held(BLOCK, 0, [ENTRY], b"v")], [SGD], {}, {0: ["rng"]}, FINGERPRINT, [[0]]),
        f"a172 {ME_HEX} 04 01 9194{BLOCK_HEX}0091{ENTRY_HEX}c40176 91{SGD_HEX} 80 810091a3726e67 {FINGERPRINT_HEX} "
        "919100",
    ),
    (m.Read([(0, 1, 64, 70000)]), "919400 01 40 ce00011170"),
    (m.ReadSidecar(2), "02"),
    (m.Sidecar({"rng": b"v"}), "81a3726e67c40176"),
    (m.GetStatus(), ""),
    (m.Status([{"run": "r"}], {"pid": 7}), "9181a372756ea172 81a370696407"),
    (m.Remove("r", False), "a172 c2"),
    (m.Done("t"), "a174"),
]

SHARD = m.Shard(0, 0, 8, 0, 1, 0.5)
PART = Part(
    1, 5, 2, False, False, [m.Update(0, [0], 2**64 - 1, b"G", [[0]], b"S", [SHARD])],
    [m.Anchor(0, 0, [ENTRY], b"v", "w")], [DIGEST], [], [b"G"], [[[0]]], {"rng": b"v"}, ["old"],
)  # fmt: skip
PART_HEX = (
    "9e a450617274 01 05 02 c2 c2"
    " 91 97 00 9100 cfffffffffffffffff c40147 919100 c40153 91 96 00 00 08 00 01 cb3fe0000000000000"  # updates
    f" 91 95 00 00 91{ENTRY_HEX} c40176 a177"  # anchors
    f" 91{DIGEST_HEX} 90 91c40147 91919100 81a3726e67c40176 91a36f6c64"
)


def golden_bytes(message: Any, fields: str) -> bytes:
    tag = msgspec.msgpack.encode(type(message).__name__)
    return bytes([0x90 + 1 + len(type(message).__struct_fields__)]) + tag + bytes.fromhex(fields)


def numbers() -> st.SearchStrategy[int]:
    return st.integers(0, 2**63 - 1)


def records(kind: type, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **given)


WORD = st.sampled_from(["", "exp_avg", "a/b", "é" * 9])
NAME = st.sampled_from(["w", "layers.0.weight", "n" * 512])
BLOBS = st.binary(max_size=40)
DIGESTS = st.builds(m.Digest, numbers(), WORD, numbers(), numbers(), st.integers(0, 2**64 - 1))
ENTRIES = st.builds(m.Entry, WORD, NAME, st.lists(numbers(), max_size=16), numbers())
UPDATES = st.builds(
    m.Update, numbers(), st.lists(numbers(), max_size=3), st.integers(0, 2**64 - 1), BLOBS,
    st.none() | st.lists(st.lists(numbers(), max_size=2), max_size=2), BLOBS,
)  # fmt: skip
ANCHORS = st.builds(m.Anchor, numbers(), st.integers(-1, 9), st.lists(ENTRIES, max_size=2), BLOBS, WORD)
PARTS = st.builds(
    Part, numbers(), numbers(), numbers(), st.booleans(), st.booleans(), st.lists(UPDATES, max_size=2),
    st.lists(ANCHORS, max_size=2), st.lists(DIGESTS, max_size=2), st.lists(DIGESTS, max_size=2),
    st.none() | st.lists(BLOBS, max_size=2), st.none() | st.just([[[1, 2], []]]),
    st.dictionaries(WORD, BLOBS, max_size=2), st.lists(WORD, max_size=2),
)  # fmt: skip

# ---------------------------------------------------------------- exact bytes


@pytest.mark.parametrize(
    ("message", "fields"), GOLDEN, ids=lambda v: type(v).__name__ if not isinstance(v, str) else ""
)
def test_message_is_these_bytes_and_comes_back(message: Any, fields: str) -> None:
    assert encode(message).hex(" ") == golden_bytes(message, fields).hex(" ")
    assert decode(encode(message)) == message


def test_every_control_message_has_its_bytes_here() -> None:
    assert [type(message) for message, _ in GOLDEN] == list(get_args(Control))


def test_part_is_these_bytes_and_comes_back() -> None:
    assert encode(PART).hex(" ") == bytes.fromhex(PART_HEX).hex(" ")
    assert decode_part(encode(PART)) == PART


@given(PARTS)
def test_every_part_comes_back(part: Part) -> None:
    assert decode_part(encode(part)) == part


def test_fields_at_the_end_may_be_left_out() -> None:
    assert decode_part(msgspec.msgpack.encode(["Part", 0, 1, 2])) == Part(0, 1, 2)
    assert decode(msgspec.msgpack.encode(["Done"])) == m.Done()


def test_block_knows_its_bytes() -> None:
    assert BLOCK.nbytes == 24
    assert m.Block("scalar", "float64", 8, [], [], []).nbytes == 8
    assert m.Block("empty", "float32", 4, [0, 0], [0, 5], [0, 5]).nbytes == 0


def test_incarnation_reads_well_in_a_log() -> None:
    assert str(ME) == "3/00010203"


@pytest.mark.parametrize("name", ["r", "gpt small (2)", "Lauf-ä", "a" * 200])
def test_run_name_is_taken(name: str) -> None:
    m.check_run_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "..", ".hidden", "trailing ", "a\\b", "c:", "what?", "line\nend", "a" * 201, "ä" * 101, "\udc80"],
)
def test_run_name_that_could_not_be_a_file_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="use 1 to 200 printable characters"):
        m.check_run_name(name)


# ---------------------------------------------------------------- what is refused


def changed(message: Any, **fields: Any) -> bytes:
    """The message's bytes with fields that its class would not take."""
    values = [fields.get(name, getattr(message, name)) for name in message.__struct_fields__]
    return msgspec.msgpack.encode([type(message).__name__, *values])


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "truncated"),
        (b"\xc1", "invalid"),
        (b"\x93", "truncated"),
        (encode(m.Ping(1)) + b"\0", "trailing"),
        (msgspec.msgpack.encode(["Launch"]), "Invalid value 'Launch'"),
        (msgspec.msgpack.encode({"type": "Ping", "step": 1}), "Expected `array`, got `object`"),
        (msgspec.msgpack.encode(["Ping"]), "length"),
        (msgspec.msgpack.encode(["Ping", 1, 2]), "length"),
        (msgspec.msgpack.encode(["Ping", "1"]), "Expected `int`, got `str`"),
        (msgspec.msgpack.encode(["Ping", -1]), "Expected `int` >= 0"),
        (msgspec.msgpack.encode(["Ping", 2**63]), "Expected `int` <= 9223372036854775807"),
        (changed(PART), "Invalid value 'Part'"),
        (changed(m.Attach("r", ME, 0, 0), run=""), "Expected `str` of length >= 1"),
        (changed(m.Attach("r", ME, 0, 0), run="r" * 513), "Expected `str` of length <= 512"),
        (changed(m.Attach("r", ME, 0, 0), incarnation=[1, bytes(15)]), "Expected `bytes` of length >= 16"),
        (changed(m.Refusal("live", "no"), reason="x" * 65537), "Expected `str` of length <= 65536"),
        (changed(m.Refusal("live", "no"), kind="k" * 1025), "Expected `str` of length <= 1024"),
        (changed(m.Reanchor(1, [], ""), blocks=[0] * (2**20 + 1)), "Expected `array` of length <= 1048576"),
        (changed(m.Read([]), items=[[0, 0, 0]]), "Expected `array` of length 4, got 3"),
        (changed(m.Proof(), proof=bytes(33)), "Expected `bytes` of length <= 32"),
        (
            changed(m.Sidecar({}), entries={str(i): b"" for i in range(2**16 + 1)}),
            "Expected `object` of length <= 65536",
        ),
        (changed(m.Status([], {}), server={1: 1}), "Expected `str`"),
        (b"\x92\xa4Done\xa2\xff\xfe", "Invalid UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_message_is_refused(data: bytes, match: str) -> None:
    with pytest.raises(ProtocolError, match=r"malformed control message: ") as caught:
        decode(data)
    assert match in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": -1},
        {"updates": [[0, [], 0, b"", None, b""]] * (2**16 + 1)},
        {"anchors": [[0, 0, [["", "float32", [1] * 17, 4]], b""]]},
        {"anchors": [[0, 0, [["", "float32", [1], 4]] * 65, b""]]},
        {"audits": [[0, "", 0, 0, 2**64 - 1, 1]]},
        {"groups": [b""] * (2**16 + 1)},
        {"sidecar": {"rng": "text"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_malformed_part_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="malformed part: "):
        decode_part(changed(PART, **fields))


def test_deep_nesting_is_refused() -> None:
    for deep in (b"\x91" * 100_000, b"\x93\xa6Status\x91\x81\xa1k" + b"\x91" * 100_000):
        with pytest.raises(ProtocolError, match="malformed control message"):
            decode(deep)


def test_false_counts_allocate_nothing() -> None:
    """Arrays and maps that claim four thousand million members which never come."""
    status = b"\x93\xa6Status"
    for head in (status + b"\xdd", status + b"\x91\xdf", status + b"\x91\x81\xa1k\xdd", b"\x92\xa4Read\xdd", b"\xdd"):
        tracemalloc.start()
        with pytest.raises(ProtocolError):
            decode(head + b"\xff\xff\xff\xff" + b"\x90" * 20)
        assert tracemalloc.get_traced_memory()[1] < 100_000
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("message", "filler"),
    [
        (b"\x93\xa6Status\xdd\x00\x01\x00\x00", b"\x80" * 65536),
        (b"\x9e\xa4Part\x00\x00\x00\xc2\xc2\xdd\x00\x01\x00\x00", b"\x93\x00\x90\x00" * 65536),
        (b"\x92\xa4Read\xdd\x00\x01\x00\x00", b"\x94\x00\x00\x00\x00" * 65536),
    ],
)  # fmt: skip
def test_memory_of_a_message_is_a_small_multiple_of_its_bytes(message: bytes, filler: bytes) -> None:
    """The worst that one byte can become is an empty container of Python's. ``docs/wire.md`` states the factor."""
    tracemalloc.start()
    for decoder in (decode, decode_part):
        with suppress(ProtocolError):
            decoder(message + filler)
    assert tracemalloc.get_traced_memory()[1] < 80 * len(message + filler)
    tracemalloc.stop()


# ---------------------------------------------------------------- whatever comes


def parses_or_refuses(data: bytes) -> None:
    for decoder in (decode, decode_part):
        try:
            message = decoder(data)
        except ProtocolError:
            continue
        assert encode(decoder(encode(message))) == encode(message)  # bytes, for NaN is not itself


@given(st.binary(max_size=200))
def test_random_bytes_parse_or_are_refused(data: bytes) -> None:
    parses_or_refuses(data)


@given(st.sampled_from([encode(m) for m, _ in GOLDEN] + [encode(PART)]), st.data())
def test_altered_messages_parse_or_are_refused(data: bytes, draw: st.DataObject) -> None:
    bad = bytearray(data)
    for bit in draw.draw(st.lists(st.integers(0, 8 * len(bad) - 1), max_size=5)):
        bad[bit // 8] ^= 1 << bit % 8
    cut = draw.draw(st.integers(0, len(bad)))
    again = draw.draw(st.integers(0, len(bad)))
    parses_or_refuses(bytes(bad[:cut]))
    parses_or_refuses(bytes(bad[:cut] + bad[again:]))


def test_every_single_byte_changed_in_every_message_parses_or_is_refused() -> None:
    for message, _ in GOLDEN:
        good = encode(message)
        for i in range(len(good)):
            for value in (0x00, 0x7F, 0x90, 0xA1, 0xC0, 0xC1, 0xC6, 0xCB, 0xD4, 0xDB, 0xDD, 0xDF, 0xFF):
                parses_or_refuses(good[:i] + bytes([value]) + good[i + 1 :])
