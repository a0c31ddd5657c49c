"""The greeting: version, capabilities and, with a token, proof by HMAC challenge in both directions.

    client  Hello(versions, role, nonce)     ->
            <-  Challenge(version, nonce, proof of the server)           or Refusal
    client  Proof(proof of the client)       ->
            <-  Welcome                                                  or Refusal

The token itself is never sent. A proof is HMAC-SHA-256 over the side, the role, the version and both nonces, so it
serves for one connection and one direction only.
"""

from __future__ import annotations

import hmac
import secrets

from ..errors import ProtocolError, Refused
from .frames import VERSION
from .messages import Challenge, Control, Hello, Proof, Refusal, Welcome

ROLES = ("control", "data", "reader", "admin")
CAPABILITIES: list[str] = []
#: The shadow gives a client so long for all of it; clients choose their own.
GREETING_S = 10.0


def _proof(token: bytes | None, side: bytes, hello: Hello, version: int, server_nonce: bytes) -> bytes:
    if token is None:
        return b""
    text = b"\0".join((b"checkmate", side, hello.role.encode(), str(version).encode(), hello.nonce, server_nonce))
    return hmac.digest(token, text, "sha256")


class ClientGreeting:
    """The client's side. `hello` goes out first; `answer` takes what comes and returns what goes out."""

    def __init__(self, role: str, token: bytes | None) -> None:
        self.hello = Hello([VERSION], role, secrets.token_bytes(16), CAPABILITIES)
        self.done = False
        self._token = token
        self._proved = False

    def answer(self, message: Control) -> Proof | None:
        if isinstance(message, Refusal):
            raise Refused(message.reason, message.kind)
        if isinstance(message, Challenge) and not self._proved:
            if message.version not in self.hello.versions:
                raise Refused(
                    f"the shadow speaks protocol version {message.version}, this side {self.hello.versions}",
                    "version",
                )
            expected = _proof(self._token, b"server", self.hello, message.version, message.nonce)
            if self._token is None and message.proof:
                raise Refused("the shadow wants a token, and none was given here (token= or --token-file)", "token")
            if not hmac.compare_digest(message.proof, expected):
                raise Refused("the shadow did not prove that it has this token; it has another one or none", "token")
            self._proved = True
            return Proof(_proof(self._token, b"client", self.hello, message.version, message.nonce))
        if isinstance(message, Welcome) and self._proved:
            self.done = True
            return None
        raise ProtocolError(f"{type(message).__name__} in the middle of a greeting")


class ServerGreeting:
    """One connection's greeting, server side. `answer` takes what comes and returns what goes out.

    After a `Refusal` went out the connection is to be closed. `role` is set once `done`.
    """

    def __init__(self, token: bytes | None, server: str) -> None:
        self.done = False
        self.role = ""
        self._token = token
        self._server = server
        self._nonce = secrets.token_bytes(16)
        self._hello: Hello | None = None

    def answer(self, message: Control) -> Challenge | Welcome | Refusal:
        if isinstance(message, Hello) and self._hello is None:
            if VERSION not in message.versions:
                reason = (
                    f"{self._server} speaks protocol {VERSION}, the client {message.versions}; upgrade the older side"
                )
                return Refusal("version", reason)
            if message.role not in ROLES:
                return Refusal("usage", f"unknown role {message.role!r}")
            self._hello = message
            return Challenge(
                VERSION,
                self._nonce,
                _proof(self._token, b"server", message, VERSION, self._nonce),
                CAPABILITIES,
            )
        if isinstance(message, Proof) and self._hello is not None and not self.done:
            expected = _proof(self._token, b"client", self._hello, VERSION, self._nonce)
            if not hmac.compare_digest(message.proof, expected):
                return Refusal("token", "wrong token" if self._token else "this shadow was started without a token")
            self.done, self.role = True, self._hello.role
            return Welcome(self._server)
        raise ProtocolError(f"{type(message).__name__} in the middle of a greeting")
