"""``docs/wire.md`` says what the code does: its tables of messages and its hex dumps are made from the code.

``python tests/wire/test_docs.py`` writes them anew.
"""

from __future__ import annotations

import hmac
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkmate.wire import auth, frames, messages
from checkmate.wire.auth import ClientGreeting, ServerGreeting
from checkmate.wire.frames import Header, Kind, encode, encode_header
from checkmate.wire.messages import Attach, Control, Part, Refusal, Update

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"
RECORDS = [
    kind for kind in vars(messages).values()
    if inspect.isclass(kind) and issubclass(kind, messages._Record) and kind is not messages._Record
]  # fmt: skip

# ---------------------------------------------------------------- tables of messages

WORDS = {"Count": "count", "Id": "id", "Code": "code", "Name": "name", "Word": "word", "Text": "text"}


def notation(kind: Any) -> str:
    """A type as the document writes it."""
    for alias, word in WORDS.items():
        if kind == getattr(messages, alias):
            return word
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return notation(arguments[0]) + bounds(arguments[1])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(notation(a) for a in arguments)
    if origin is list:
        return f"[{notation(arguments[0])}]"
    if origin is tuple:
        return f"({', '.join(map(notation, arguments))})"
    if origin is dict:
        return f"{{{notation(arguments[0])}: {notation(arguments[1])}}}"
    return {type(None): "nil", Any: "any"}.get(kind) or str(kind.__name__)


def bounds(meta: msgspec.Meta) -> str:
    if meta.max_length is not None:
        return f" ≤ {power(meta.max_length)}"
    return f" {meta.ge}…{power(meta.le)}"


def power(number: Any) -> str:
    return f"2^{number.bit_length() - 1}" if number > 64 and not number & (number - 1) else str(number)


def comments(kind: type) -> dict[str, str]:
    """What stands behind ``#:`` in the line of each field."""
    return dict(re.findall(r"^    (\w+): .*#: (.*)$", inspect.getsource(kind), re.MULTILINE))


def table(kinds: list[type]) -> str:
    lines = []
    for kind in kinds:
        lines.append(f"{kind.__name__:<14}{said(kind)}".rstrip())
        hints, meanings = typing.get_type_hints(kind, include_extras=True), comments(kind)
        defaults = {field.name: field for field in msgspec.structs.fields(kind)}
        for number, name in enumerate(kind.__struct_fields__, issubclass(kind, messages._Message)):
            field = defaults[name]
            default = "" if field.required else f" = {value(field)}"
            lines.append(
                f"  {number:<3} {name:<15}{notation(hints[name]) + default:<30}  {meanings.get(name, '')}".rstrip()
            )
    return "\n".join(lines)


def said(kind: type) -> str:
    text = (kind.__doc__ or "").split("\n")[0]
    return "" if text.startswith(f"{kind.__name__}(") else text.replace("``", "`")


def value(field: Any) -> str:
    found = repr(field.default_factory() if field.default is msgspec.NODEFAULT else field.default)
    return {"None": "nil", "True": "true", "False": "false"}.get(found, found.replace("'", '"'))


def section(first: type, last: type) -> str:
    control = list(typing.get_args(Control))
    return table(control[control.index(first) : control.index(last) + 1])


# ---------------------------------------------------------------- hex dumps


def dump(data: bytes) -> Iterator[str]:
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"    {start:04x}  {row.hex(' '):<47}  {text}"


def shown(title: str, data: bytes) -> str:
    return "\n".join([f"{title}, {len(data)} bytes", *dump(data)])


def control(message: Control) -> bytes:
    payload = messages.encode(message)
    return encode(Header(Kind.CONTROL, len(payload)), payload)


def example_greeting() -> str:
    """The token is "secret", the nonces are 00…0f and 10…1f."""
    arrows = {"Hello": "->", "Challenge": "<-", "Proof": "->", "Welcome": "<-"}
    said = {type(message).__name__: control(message) for message in greeting()}
    return "\n\n".join(shown(f"{arrows[name]} {name}", data) for name, data in said.items())


def greeting() -> Iterator[Control]:
    client, server = ClientGreeting("data", b"secret"), ServerGreeting(b"secret", "checkmate 0.1.0")
    client.hello.nonce, server._nonce = bytes(range(16)), bytes(range(16, 32))
    reply: Control | None = client.hello
    while reply is not None:
        yield reply
        yield (answer := server.answer(reply))
        reply = client.answer(answer)


INCARNATION = messages.Incarnation(3, bytes.fromhex("c0ffee00000000000000000000000001"))


def example_step() -> str:
    """Rank 1 closes step 7 of epoch 2: one update, of which its slice of block 0 is four float32, from byte 64 on."""
    place = {"incarnation": INCARNATION.id, "rank": 1, "epoch": 2, "step": 7}
    gradient = bytes.fromhex(
        "0000803f 00000040 000080bf 0000c07f"
    )  # 1.0, 2.0, -1.0 and a NaN, which is carried as it is
    part = messages.encode(Part(1, 7, 2, updates=[Update(0, [0], 0x1122334455667788)], sidecar={"rng": b"\x90"}))
    return "\n\n".join([
        shown("-> Attach", control(Attach("gpt-small", INCARNATION, 1, 2))),
        shown("-> GRAD", encode(Header(Kind.GRAD, len(gradient), **place, offset=64), gradient)),
        shown("-> PART", encode(Header(Kind.PART, len(part), **place), part)),
    ])  # fmt: skip


def example_refusal() -> str:
    return shown("<- Refusal", control(Refusal("token", "wrong token")))


GENERATED = {
    "records": lambda: table([kind for kind in RECORDS if kind is not messages.Held]),
    "part": lambda: table([Part]),
    "greeting": lambda: section(messages.Hello, messages.Refusal),
    "control": lambda: section(messages.Prepare, messages.Audited),
    "reading": lambda: "\n".join([table([messages.Held]), section(messages.Lease, messages.Done)]),
    "example-greeting": example_greeting,
    "example-step": example_step,
    "example-refusal": example_refusal,
}
HEAD = "<!-- made by tests/wire/test_docs.py: {} -->\n```text\n"
BLOCK = re.compile(HEAD.format(r"(?P<name>[\w-]+)") + r"(?P<text>.*?)```\n", re.DOTALL)


def written() -> str:
    """The document with all that is made in it made anew."""
    return BLOCK.sub(
        lambda found: HEAD.format(found["name"]) + GENERATED[found["name"]]() + "\n```\n", DOCUMENT.read_text()
    )


def blocks() -> dict[str, str]:
    return {found["name"]: found["text"] for found in BLOCK.finditer(DOCUMENT.read_text())}


def test_every_block_that_is_made_stands_in_the_document() -> None:
    assert list(blocks()) == list(GENERATED)


@pytest.mark.parametrize("name", GENERATED)
def test_block_is_what_the_code_says(name: str) -> None:
    assert blocks()[name] == GENERATED[name]() + "\n"


def test_every_message_and_record_is_documented() -> None:
    text = "\n".join(blocks().values())
    for kind in [*typing.get_args(Control), Part, *RECORDS]:
        assert re.search(rf"^{kind.__name__}\b", text, re.MULTILINE), kind


def test_header_table_has_every_byte_once() -> None:
    rows = re.findall(r"^\| +(\d+) \| +(\d+) \| `(\w+)`", DOCUMENT.read_text(), re.MULTILINE)
    end = 0
    for offset, size, _ in rows:
        assert int(offset) == end
        end += int(size)
    assert end == frames.HEADER_BYTES


def test_limits_in_the_document_are_those_in_the_code() -> None:
    text = DOCUMENT.read_text()
    for limit in (
        frames.MAX_BULK_BYTES, frames.MAX_PART_BYTES, frames.MAX_MESSAGE_BYTES, frames.MAX_GREETING_BYTES,
        frames.FIRST_BYTES, messages.RUN_NAME_LIMIT,
    ):  # fmt: skip
        assert f"{limit:,} bytes" in text, limit
    assert f"The shadow gives {auth.GREETING_S:g} s" in text
    assert f"silent for {messages.LEASE_S:g} s" in text
    assert re.findall(r"^\| `(\w+)` \| ", text.split("### Kinds of refusal")[1], re.MULTILINE) == list(
        messages.REFUSALS
    )


def test_example_is_checked_by_hand_too() -> None:
    """Independently of the code that made it: the proofs, and the header of the gradient."""
    text = b"\0".join([b"checkmate", b"server", b"data", b"1", bytes(range(16)), bytes(range(16, 32))])
    assert messages.Challenge(1, bytes(range(16, 32)), hmac.digest(b"secret", text, "sha256")) in list(greeting())
    header = encode_header(Header(Kind.GRAD, 16, INCARNATION.id, 1, 2, 7, offset=64), 0)
    assert header[:8].hex() == "434b4d5401010000"


if __name__ == "__main__":
    DOCUMENT.write_text(written())
