"""The description of a cluster, ``cluster.toml``: who carries gradients, who listens, on which ports of the switch.

    dscp = 43                       # the mark of what is replicated
    exec = "ssh {address}"          # how to run a command on a host; "" is here
    [switch]
    bridge = "br0"                  # informative
    exec = "ssh root@tor1"          # goes before the switch's commands; "" is here
    [switch.sonic]                  # only for --target sonic, see `Sonic`
    src_ip = "10.1.0.32"
    [multicast]                     # gradients go by multicast, and nothing is mirrored
    groups = "239.77.0.0/24"        # where the group of a run is taken from
    ttl = 1
    [[worker]]
    name = "w0"
    address = "10.77.0.1"           # on the network that carries gradients
    port = "w0"                     # of the switch: a bridge port, or Ethernet8
    interface = "eth0"              # on the host
    [[shadow]]
    name = "s0"
    address = "10.77.1.1"
    port = "s0"
    interface = "eth0"
    listen = "10.78.1.1:7070"       # where its control connections go; optional

`load` checks everything, so that whoever holds a `Cluster` need not: every error names the file and the key.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import string
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UsageError
from ..transport.tcp import parse_address
from ..wire.datagrams import GROUPS, group_range

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DSCP = 43
#: Also part of a SONiC session's name, whose 32 characters "checkmate-" shares.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,21}")
#: What Linux takes as the name of a device, less what would need quoting.
PORT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")


@dataclass(frozen=True)
class Worker:
    name: str
    address: str  # canonical text of an IPv4 or IPv6 address
    port: str
    interface: str = "eth0"


@dataclass(frozen=True)
class Shadow:
    name: str
    address: str
    port: str
    interface: str = "eth0"
    listen: str = ""  # HOST:PORT


@dataclass(frozen=True)
class Sonic:
    """How a SONiC switch carries the copies, one mirror session per shadow. All but `session` is for ERSPAN."""

    session: str = "erspan"  # or "span": out of the shadow's port as they are
    src_ip: str = ""  # of the outer header: an address of the switch, such as its loopback
    dst_ip: str = ""  # "" is the shadow's address
    gre_type: int = 0x88BE
    dscp: int = 8
    ttl: int = 64
    queue: int = 0


@dataclass(frozen=True)
class Switch:
    bridge: str = ""
    exec: str = ""
    sonic: Sonic = Sonic()


@dataclass(frozen=True)
class Multicast:
    """That gradients go by multicast: then the switch mirrors nothing, and groups have to reach who has joined them."""

    groups: str = GROUPS  # a range of IPv4 multicast addresses
    ttl: int = 1


@dataclass(frozen=True)
class Cluster:
    """Names, ports and addresses are unique over workers and shadows together; there is one of each at least."""

    workers: tuple[Worker, ...]
    shadows: tuple[Shadow, ...]
    dscp: int = DSCP
    exec: str = ""  # may hold {name} and {address}
    switch: Switch = Switch()
    multicast: Multicast | None = None


def load(path: Path) -> Cluster:
    """Read a description. Raises UsageError, with the file and the key, for anything that is not as it should be."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text") from None
    return loads(text, str(path))


def loads(text: str, source: str = "cluster.toml") -> Cluster:
    """As `load`, from text; `source` stands in errors."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: {error}") from None
    try:
        return _cluster(content)
    except _Bad as error:
        raise UsageError(f"{source}: {error}") from None


def dumps(cluster: Cluster) -> str:
    """TOML that `loads` reads back as an equal description."""
    lines = [*_pairs(cluster, Cluster((), ())), *_section("[switch]", cluster.switch, Switch())]
    lines += _section("[switch.sonic]", cluster.switch.sonic, Sonic())
    if cluster.multicast is not None:  # it says something also where it is empty
        lines += ["", "[multicast]", *_pairs(cluster.multicast, Multicast())]
    for worker in cluster.workers:
        lines += ["", "[[worker]]", *_pairs(worker)]
    for shadow in cluster.shadows:
        lines += ["", "[[shadow]]", *_pairs(shadow)]
    return "\n".join(lines) + "\n"


def _pairs(row: Any, default: Any = None) -> list[str]:
    found = {field.name: getattr(row, field.name) for field in fields(row)}
    return [
        f"{key} = {json.dumps(value, ensure_ascii=False)}"  # a TOML string, given that it is printable
        for key, value in found.items()
        if isinstance(value, (int, str)) and (key == "dscp" or value != getattr(default, key, ""))
    ]


def _section(title: str, row: Any, default: Any) -> list[str]:
    pairs = _pairs(row, default) if row != default else []
    return ["", title, *pairs] if pairs else []


class _Bad(Exception):
    """One key is wrong; becomes a UsageError with the file's name."""


T = TypeVar("T")
Check = Callable[[str, Any], Any]


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise _Bad(f"{key} must be text of printable characters, not {value!r}")
    return value


def _matching(pattern: re.Pattern[str], what: str) -> Check:
    def check(key: str, value: Any) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _Bad(f"{key} is {value!r}; {what}")
        return value

    return check


_name = _matching(NAME, "a name is 1 to 22 letters, digits, - and _, and begins with a letter or digit")
_port = _matching(PORT, "a device or port name is 1 to 15 letters, digits, '.', - and _")


def _number(low: int, high: int) -> Check:
    def check(key: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _Bad(f"{key} must be a number from {low} to {high}, not {value!r}")
        return value

    return check


def _address(key: str, value: Any) -> str:
    try:
        if not isinstance(value, str) or "%" in value:
            raise ValueError
        address = ipaddress.ip_address(value)
    except ValueError:
        raise _Bad(f"{key} is {value!r}; write one IPv4 or IPv6 address, without prefix length or zone") from None
    if address.is_multicast or address.is_unspecified:
        raise _Bad(f"{key} is {value}, which is no host's address")
    return str(address)


def _listen(key: str, value: Any) -> str:
    text = _text(key, value)
    try:
        if text and parse_address(text).port == 0:
            raise UsageError(f"{text!r} names no port")
    except UsageError as error:
        raise _Bad(f"{key}: {error}") from None
    return text


def _command(*placeholders: str) -> Check:
    def check(key: str, value: Any) -> str:
        text = _text(key, value)
        try:
            shlex.split(text)
            found = [parts for parts in string.Formatter().parse(text) if parts[1] is not None] if placeholders else []
        except ValueError as error:
            raise _Bad(f"{key} is {text!r}: {error}") from None
        for _, name, form, conversion in found:
            if name not in placeholders or form or conversion:
                raise _Bad(f"{key} holds {{{name}}}; what is filled in is {{name}} and {{address}}")
        return text

    return check


def _session(key: str, value: Any) -> str:
    if value not in ("erspan", "span"):
        raise _Bad(f'{key} must be "erspan" or "span", not {value!r}')
    return str(value)


def _groups(key: str, value: Any) -> str:
    try:
        return str(group_range(_text(key, value)))
    except UsageError as error:
        raise _Bad(f"{key}: {error}") from None


def _optional(check: Check) -> Check:
    return lambda key, value: value if value == "" else check(key, value)


WORKER: dict[str, Check] = {"name": _name, "address": _address, "port": _port, "interface": _port}
SHADOW: dict[str, Check] = {**WORKER, "listen": _listen}
SONIC: dict[str, Check] = {
    "session": _session,
    "src_ip": _optional(_address),
    "dst_ip": _optional(_address),
    "gre_type": _number(0, 0xFFFF),
    "dscp": _number(0, 63),
    "ttl": _number(1, 255),
    "queue": _number(0, 255),
}
SWITCH: dict[str, Check] = {"bridge": _optional(_port), "exec": _command(), "sonic": lambda _, value: value}
MULTICAST: dict[str, Check] = {"groups": _groups, "ttl": _number(1, 255)}
CLUSTER: dict[str, Check] = {
    "dscp": _number(1, 63),
    "exec": _command("name", "address"),
    "switch": lambda _, value: value,
    "multicast": lambda _, value: value,
    "worker": lambda _, value: value,
    "shadow": lambda _, value: value,
}


def _table(prefix: str, value: Any, checks: dict[str, Check], required: Iterable[str] = ()) -> dict[str, Any]:
    """The table's values, checked; `prefix` is how its keys begin in errors."""
    if not isinstance(value, dict):
        raise _Bad(f"{prefix.removesuffix('.')} must be a table, not {value!r}")
    for key in value:
        if key not in checks:
            raise _Bad(f"{prefix}{key} is not a key; there are {', '.join(checks)}")
    for key in required:
        if key not in value:
            raise _Bad(f"{prefix}{key} is missing")
    return {key: checks[key](prefix + key, content) for key, content in value.items()}


def _rows(name: str, value: Any, make: Callable[..., T], checks: dict[str, Check]) -> tuple[T, ...]:
    if not isinstance(value, list) or not value:
        raise _Bad(f"there is no {name}; write at least one [[{name}]]")
    needed = ("name", "address", "port")
    return tuple(make(**_table(f"{name}[{i}].", row, checks, needed)) for i, row in enumerate(value))


def _cluster(content: dict[str, Any]) -> Cluster:
    top = _table("", content, CLUSTER)
    switch = _table("switch.", top.pop("switch", {}), SWITCH)
    sonic = Sonic(**_table("switch.sonic.", switch.pop("sonic", {}), SONIC))
    if "multicast" in top:
        top["multicast"] = Multicast(**_table("multicast.", top["multicast"], MULTICAST))
    workers = _rows("worker", top.pop("worker", []), Worker, WORKER)
    shadows = _rows("shadow", top.pop("shadow", []), Shadow, SHADOW)
    seen: dict[tuple[str, str], str] = {}
    rows: list[tuple[str, Worker | Shadow]] = [
        *((f"worker[{i}]", worker) for i, worker in enumerate(workers)),
        *((f"shadow[{i}]", shadow) for i, shadow in enumerate(shadows)),
    ]
    for where, row in rows:
        for key in ("name", "address", "port"):
            value = getattr(row, key)
            if (key, value) in seen:
                raise _Bad(f"{where}.{key} is {value!r}, as {seen[key, value]}.{key} is")
            seen[key, value] = where
        if "multicast" in top and ":" in row.address:
            raise _Bad(f"{where}.address is {row.address}; with [multicast] addresses are IPv4")
    return Cluster(workers, shadows, switch=Switch(sonic=sonic, **switch), **top)
