"""Proof, per frame, of a sender whom nobody can ask: trailers of frames that are captured and not received.

    trailer   8 bytes counter, big-endian | 16 bytes GMAC over header | payload
    nonce     4 bytes rank, big-endian    | 8 bytes counter
    key       HKDF-SHA-256(token, salt: incarnation id, info: "checkmate seal", run name)

GMAC is AES-GCM over associated data alone, many times faster than HMAC. A nonce must never come twice under one key:
the key belongs to one incarnation, and each of its ranks counts all frames that it seals, on whatever connection. What
peers send each other by multicast has one trailer more, for a whole message: its key is that of the session, as if it
were an incarnation, and its counter the message's number.
A frame that is replayed proves itself again, and says nothing that its receiver does not know.
"""

from __future__ import annotations

import hmac
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

_COUNTER = struct.Struct("!Q")
_NONCE = struct.Struct("!IQ")
_TAG_BYTES = 16
TRAILER_BYTES = _COUNTER.size + _TAG_BYTES  # 24
_LABEL = b"checkmate seal\0"

Bytes = bytes | bytearray | memoryview


def counter_of(trailer: Bytes) -> int:
    return int(_COUNTER.unpack_from(trailer)[0])


class Seal:
    """The key of one incarnation of a run. Safe to use from several threads, each frame with a counter of its own."""

    def __init__(self, token: bytes, run: str, incarnation_id: bytes) -> None:
        assert len(incarnation_id) == 16
        extracted = hmac.digest(incarnation_id, token, "sha256")
        self._key = AES(hmac.digest(extracted, _LABEL + run.encode() + b"\x01", "sha256"))

    def trailer(self, rank: int, counter: int, header: Bytes, payload: Bytes) -> bytes:
        """The 24 bytes that follow the payload. `counter` is one that this rank has not used in this incarnation."""
        gmac = Cipher(self._key, GCM(_NONCE.pack(rank, counter))).encryptor()
        gmac.authenticate_additional_data(header)
        gmac.authenticate_additional_data(payload)
        gmac.finalize()
        return _COUNTER.pack(counter) + gmac.tag

    def holds(self, rank: int, header: Bytes, payload: Bytes, trailer: Bytes) -> bool:
        """Whether `trailer` was made for this frame by one who has the token."""
        if len(trailer) != TRAILER_BYTES:
            return False
        (counter,) = _COUNTER.unpack_from(trailer)
        tag = bytes(trailer[_COUNTER.size :])
        gmac = Cipher(self._key, GCM(_NONCE.pack(rank, counter), tag)).decryptor()
        gmac.authenticate_additional_data(header)
        gmac.authenticate_additional_data(payload)
        try:
            gmac.finalize()
        except InvalidTag:
            return False
        return True
