"""Trailers: exact bytes, against AES-GCM itself, and every way of not fitting."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from checkmate.wire.seal import TRAILER_BYTES, Seal

TOKEN, RUN, ID = b"secret", "gpt-small", bytes(range(16))
HEADER, PAYLOAD = bytes(80), b"gradient" * 100


def test_trailer_is_gmac_with_a_key_by_hkdf() -> None:
    trailer = Seal(TOKEN, RUN, ID).trailer(3, 258, HEADER, memoryview(PAYLOAD))
    key = HKDF(SHA256(), 32, salt=ID, info=b"checkmate seal\0gpt-small").derive(TOKEN)
    tag = AESGCM(key).encrypt(bytes.fromhex("00000003 0000000000000102"), b"", HEADER + PAYLOAD)
    assert trailer == bytes.fromhex("0000000000000102") + tag
    assert len(trailer) == TRAILER_BYTES == 24


def test_trailer_holds_for_its_frame() -> None:
    trailer = Seal(TOKEN, RUN, ID).trailer(3, 2**64 - 1, HEADER, PAYLOAD)
    assert Seal(TOKEN, RUN, ID).holds(3, memoryview(HEADER), memoryview(PAYLOAD), memoryview(trailer))
    assert Seal(TOKEN, RUN, ID).holds(3, HEADER, b"", Seal(TOKEN, RUN, ID).trailer(3, 1, HEADER, b""))


@pytest.mark.parametrize(
    ("token", "run", "incarnation"), [(b"other", RUN, ID), (TOKEN, "other", ID), (TOKEN, RUN, bytes(16))]
)
def test_trailer_of_another_token_run_or_incarnation_does_not_hold(token: bytes, run: str, incarnation: bytes) -> None:
    trailer = Seal(token, run, incarnation).trailer(3, 1, HEADER, PAYLOAD)
    assert Seal(token, run, incarnation).holds(3, HEADER, PAYLOAD, trailer)
    assert not Seal(TOKEN, RUN, ID).holds(3, HEADER, PAYLOAD, trailer)


def test_no_bit_can_be_changed() -> None:
    seal = Seal(TOKEN, RUN, ID)
    whole = HEADER + b"payload" + seal.trailer(3, 1, HEADER, b"payload")
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        assert not seal.holds(3, changed[:80], changed[80:87], changed[87:])
    assert not seal.holds(2, whole[:80], whole[80:87], whole[87:])
    assert seal.holds(3, whole[:80], whole[80:87], whole[87:])


def test_trailer_of_another_length_does_not_hold() -> None:
    seal = Seal(TOKEN, RUN, ID)
    trailer = seal.trailer(3, 1, HEADER, PAYLOAD)
    for wrong in (b"", trailer[:-1], trailer + b"\0", trailer[:12]):
        assert not seal.holds(3, HEADER, PAYLOAD, wrong)
