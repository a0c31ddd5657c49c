"""Addresses, and what a connection that cannot be made says."""

from __future__ import annotations

import os
import socket

import pytest

from checkmate.errors import UsageError
from checkmate.transport.tcp import Address, connect, listen, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://10.0.0.5:7070", Address("10.0.0.5", 7070)),
        ("shadow.example:0", Address("shadow.example", 0)),
        ("tcp://[::1]:65535", Address("::1", 65535)),
    ],
)
def test_address_is_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":7070", "host:port", "host:65536", "host:-1", "http://host:1", "host:٣"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not an address; write tcp://HOST:PORT"):
        parse_address(text)


def test_refused_connection_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = Address(*closed.getsockname())
    with pytest.raises(OSError, match=f"cannot connect to {address}: Connection refused"):
        connect(address, 5.0)


def test_connection_is_made_to_who_listens() -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        channel = connect(Address(*listener.getsockname()), 5.0)
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"x")
            assert channel.stream.recv_into(memoryview(bytearray(4))) == 1
        channel.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_connection_ends_with_its_process_although_a_forked_child_lives_on() -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        channel = connect(Address(*listener.getsockname()), 5.0)
        accepted, _ = listener.accept()
    wait, release = os.pipe()
    if (child := os.fork()) == 0:
        os.close(release)
        os.read(wait, 1)
        os._exit(0)
    with accepted:
        accepted.sendall(b"x")
        assert channel.stream.recv_into(memoryview(bytearray(4))) == 1  # the child has not ended it
        channel.stream.close()  # as the kernel does for a process that is killed, without a shutdown
        accepted.settimeout(5.0)
        assert accepted.recv(1) == b""
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.close(release)
    os.close(wait)
    os.waitpid(child, 0)
