"""The greeting, message by message: who is let in, and what each side says when it is not."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate.errors import ProtocolError, Refused
from checkmate.wire import auth, messages
from checkmate.wire.auth import ROLES, ClientGreeting, ServerGreeting
from checkmate.wire.frames import MAX_GREETING_BYTES, VERSION
from checkmate.wire.messages import Challenge, Control, Done, Hello, Ping, Proof, Refusal, Welcome


def meet(client: ClientGreeting, server: ServerGreeting) -> list[Control]:
    """Everything that is said, until both are done or one refuses. Raises what the client raises."""
    said: list[Control] = [client.hello]
    while True:
        answer = server.answer(said[-1])
        said.append(answer)
        reply = client.answer(answer)
        if client.done:
            return said
        assert reply is not None
        said.append(reply)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("token", [None, b"s", b"a long secret" * 100])
def test_same_token_on_both_sides_is_let_in(role: str, token: bytes | None) -> None:
    client, server = ClientGreeting(role, token), ServerGreeting(token, "checkmate 1.2")
    said = meet(client, server)
    assert [type(message) for message in said] == [Hello, Challenge, Proof, Welcome]
    assert said[-1] == Welcome("checkmate 1.2")
    assert (server.done, server.role) == (True, role)


def test_token_is_never_sent() -> None:
    said = meet(ClientGreeting("data", b"the secret"), ServerGreeting(b"the secret", "s"))
    assert all(b"the secret" not in messages.encode(message) for message in said)
    assert len({m.proof for m in said if isinstance(m, (Challenge, Proof))}) == 2


def test_without_a_token_proofs_are_empty() -> None:
    said = meet(ClientGreeting("data", None), ServerGreeting(None, "s"))
    assert [m.proof for m in said if isinstance(m, (Challenge, Proof))] == [b"", b""]


@pytest.mark.parametrize(
    ("ours", "theirs", "match"),
    [
        (b"ours", b"theirs", "the shadow did not prove that it has this token; it has another one or none"),
        (b"ours", None, "the shadow did not prove that it has this token; it has another one or none"),
        (None, b"theirs", "the shadow wants a token, and none was given here"),
    ],
)
def test_client_refuses_a_server_with_another_token(ours: bytes | None, theirs: bytes | None, match: str) -> None:
    client = ClientGreeting("control", ours)
    with pytest.raises(Refused, match=match) as caught:
        meet(client, ServerGreeting(theirs, "s"))
    assert caught.value.kind == "token"
    assert not client.done


def test_server_refuses_a_client_with_another_token() -> None:
    for token, proof, reason in [
        (b"theirs", b"", "wrong token"),
        (b"theirs", bytes(32), "wrong token"),
        (None, bytes(32), "this shadow was started without a token"),
    ]:
        server = ServerGreeting(token, "s")
        server.answer(Hello([VERSION], "control", bytes(16)))
        assert server.answer(Proof(proof)) == Refusal("token", reason)
        assert (server.done, server.role) == (False, "")


def test_replayed_proof_is_refused() -> None:
    said = meet(ClientGreeting("control", b"t"), ServerGreeting(b"t", "s"))
    hello, _, proof, _ = said
    server = ServerGreeting(b"t", "s")
    server.answer(hello)
    assert server.answer(proof) == Refusal("token", "wrong token")


def test_replayed_challenge_is_refused() -> None:
    said = meet(ClientGreeting("control", b"t"), ServerGreeting(b"t", "s"))
    with pytest.raises(Refused, match="did not prove"):
        ClientGreeting("control", b"t").answer(said[1])


def test_a_servers_own_proof_reflected_at_it_is_refused() -> None:
    server = ServerGreeting(b"t", "s")
    challenge = server.answer(Hello([VERSION], "control", secrets.token_bytes(16)))
    assert isinstance(challenge, Challenge)
    assert server.answer(Proof(challenge.proof)) == Refusal("token", "wrong token")


def test_a_challenge_taken_from_another_connection_to_the_server_does_not_help() -> None:
    """Someone without the token answers a challenge with what the server says to him elsewhere."""
    one, other = ServerGreeting(b"t", "s"), ServerGreeting(b"t", "s")
    challenge = one.answer(Hello([VERSION], "control", bytes(16)))
    assert isinstance(challenge, Challenge)
    elsewhere = other.answer(Hello([VERSION], "control", challenge.nonce))
    assert isinstance(elsewhere, Challenge)
    assert one.answer(Proof(elsewhere.proof)) == Refusal("token", "wrong token")


def test_proof_is_for_one_role() -> None:
    client, server = ClientGreeting("reader", b"t"), ServerGreeting(b"t", "s")
    altered = Hello(client.hello.versions, "admin", client.hello.nonce)
    challenge = server.answer(altered)  # someone in between asks for more than the client did
    with pytest.raises(Refused, match="did not prove"):
        client.answer(challenge)


# ---------------------------------------------------------------- versions and roles


@pytest.mark.parametrize("versions", [[0], [VERSION + 1], [], [0, VERSION + 7]])
def test_server_refuses_versions_that_it_does_not_speak(versions: list[int]) -> None:
    server = ServerGreeting(None, "checkmate 1.2")
    assert server.answer(Hello(versions, "control", bytes(16))) == Refusal(
        "version", f"checkmate 1.2 speaks protocol 1, the client {versions}; upgrade the older side"
    )


def test_server_takes_its_version_from_among_several() -> None:
    challenge = ServerGreeting(None, "s").answer(Hello([7, VERSION, 0], "control", bytes(16)))
    assert isinstance(challenge, Challenge)
    assert challenge.version == VERSION


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_client_refuses_a_version_that_it_did_not_offer(version: int) -> None:
    with pytest.raises(Refused, match=rf"the shadow speaks protocol version {version}, this side \[1\]") as caught:
        ClientGreeting("control", None).answer(Challenge(version, bytes(16)))
    assert caught.value.kind == "version"


def test_client_raises_the_servers_refusal() -> None:
    with pytest.raises(Refused, match="upgrade") as caught:
        ClientGreeting("control", None).answer(Refusal("version", "upgrade the older side"))
    assert caught.value.kind == "version"


@pytest.mark.parametrize("role", ["", "root", "control ", "CONTROL", "control\0"])
def test_unknown_role_is_refused(role: str) -> None:
    assert ServerGreeting(None, "s").answer(Hello([1], role, bytes(16))) == Refusal("usage", f"unknown role {role!r}")


def test_unknown_capabilities_are_no_reason_to_refuse() -> None:
    server = ServerGreeting(None, "s")
    assert isinstance(server.answer(Hello([1], "data", bytes(16), ["udp", "of 2031"])), Challenge)
    assert isinstance(ClientGreeting("data", None).answer(Challenge(1, bytes(16), b"", ["udp"])), Proof)


def test_longest_greeting_fits_its_limit() -> None:
    hello = ClientGreeting("control", b"t").hello
    assert len(messages.encode(hello)) < MAX_GREETING_BYTES // 10
    refusal = ServerGreeting(None, "s" * 100).answer(Hello([2**63] * 64, "control", bytes(16)))
    assert len(messages.encode(refusal)) < MAX_GREETING_BYTES


@pytest.mark.parametrize(
    "hello", [[[1] * 65, "data", bytes(16)], [[1], "data", bytes(15)], [[1], "d" * 1025, bytes(16)]]
)
def test_hello_beyond_its_limits_is_malformed(hello: list[object]) -> None:
    with pytest.raises(ProtocolError, match="malformed control message"):
        messages.decode(msgspec.msgpack.encode(["Hello", *hello]))


# ---------------------------------------------------------------- out of order

NONCES = st.binary(min_size=16, max_size=16)
ANY = st.one_of(
    st.builds(Hello, st.lists(st.integers(0, 3), max_size=3), st.sampled_from([*ROLES, "x"]), NONCES),
    st.builds(Challenge, st.integers(0, 3), NONCES, st.binary(max_size=32)),
    st.builds(Proof, st.binary(max_size=32)),
    st.builds(Welcome, st.just("s")),
    st.builds(Refusal, st.just("usage"), st.just("no")),
    st.just(Ping(1)),
    st.just(Done()),
)


@given(st.lists(ANY, max_size=5), st.booleans())
def test_nobody_gets_in_by_guessing(said: list[Control], echo: bool) -> None:
    """Whatever comes in whatever order: a refusal, a protocol error, or one more challenge; never a welcome."""
    server = ServerGreeting(b"a token", "s")
    for message in said:
        try:
            answer = server.answer(message)
        except ProtocolError:
            break
        assert isinstance(answer, (Challenge, Refusal))
        if echo and isinstance(answer, Challenge):
            assert isinstance(server.answer(Proof(answer.proof)), Refusal)
    assert not server.done
    assert server.role == ""


@given(st.lists(ANY, max_size=5))
def test_client_trusts_nobody_by_chance(said: list[Control]) -> None:
    client = ClientGreeting("control", b"a token")
    for message in said:
        try:
            client.answer(message)
        except (ProtocolError, Refused):
            break
    assert not client.done


@pytest.mark.parametrize(
    "out_of_order",
    [
        lambda: ServerGreeting(None, "s").answer(Proof()),
        lambda: ServerGreeting(None, "s").answer(Ping(0)),
        lambda: ClientGreeting("data", None).answer(Welcome("s")),
        lambda: ClientGreeting("data", None).answer(Ping(0)),
    ],
)
def test_message_out_of_order_is_a_protocol_error(out_of_order: Callable[[], object]) -> None:
    with pytest.raises(ProtocolError, match="in the middle of a greeting"):
        out_of_order()


def test_second_hello_and_second_proof_are_protocol_errors() -> None:
    server, client = ServerGreeting(None, "s"), ClientGreeting("data", None)
    server.answer(client.hello)
    with pytest.raises(ProtocolError, match="Hello in the middle"):
        server.answer(client.hello)
    server.answer(Proof())
    with pytest.raises(ProtocolError, match="Proof in the middle"):
        server.answer(Proof())
    client.answer(challenge := Challenge(1, bytes(16)))
    with pytest.raises(ProtocolError, match="Challenge in the middle"):
        client.answer(challenge)


def test_nonces_are_fresh_for_every_connection() -> None:
    assert ClientGreeting("data", None).hello.nonce != ClientGreeting("data", None).hello.nonce
    nonces = set()
    for _ in range(2):
        challenge = ServerGreeting(None, "s").answer(Hello([auth.VERSION], "data", bytes(16)))
        assert isinstance(challenge, Challenge)
        nonces.add(challenge.nonce)
    assert len(nonces) == 2


def test_proofs_are_these_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth.secrets, "token_bytes", lambda count: bytes(range(count)))
    _, challenge, proof, _ = meet(ClientGreeting("control", b"secret"), ServerGreeting(b"secret", "s"))
    assert isinstance(challenge, Challenge)
    assert isinstance(proof, Proof)
    assert challenge.proof.hex() == "8e6afb4daed2f3602b1daad4f782082da7e4aa0768794e045b8abd778d8df730"
    assert proof.proof.hex() == "993adedf9fd074938a0a63e7df92be4ceee010054f3560a03fdeb862f529b754"
