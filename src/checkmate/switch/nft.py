"""A Linux bridge as the switch: rules of nftables, hooked in where a packet enters the port of a worker.

    table netdev checkmate {
        chain made_by_checkmate_switch { }
        chain from_w0 {
            type filter hook ingress device "w0" priority -300; policy accept;
            ip dscp 43 ip protocol tcp counter dup to "s0" dup to "s1"
            ip6 dscp 43 ip6 nexthdr tcp counter dup to "s0" dup to "s1"
        }
    }

The table is ours, with all that is in it, if the empty chain is there that says so (``nft -j`` lists no comments of
tables); a table of that name without it is left alone and refused. Nothing else on the machine is named in what we
send. `script` is one transaction: whole or not at all, and not if what it changes has come or gone since it was read.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckmateError
from .cluster import Cluster
from .rules import Operation, Rule, State, plan, rules

TABLE = "netdev checkmate"
MARKER = "made_by_checkmate_switch"
CHAIN = "from_"
ENTRY = f"table {TABLE}"
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Found:
    """What a switch has of ours. `counted` holds packets and bytes (from the IP header on) that matched, by port."""

    state: State
    counted: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def desired(cluster: Cluster) -> State:
    if not rules(cluster):
        return {}
    return {ENTRY: MARKER, **{entry(CHAIN + rule.port): rule for rule in rules(cluster)}}


def entry(chain: str) -> str:
    return f"chain {chain}"


def read(cluster: Cluster) -> Found:
    """What is there. Raises CheckmateError if nft fails, or if a table of our name is not ours."""
    return parse(ask(cluster, ["nft", "-n", "-j", "list", "ruleset", "netdev"]))


def parse(listing: Mapping[str, Any]) -> Found:
    """Ours among what ``nft -n -j list ruleset`` prints."""
    ours = [(kind, thing) for row in listing["nftables"] for kind, thing in row.items() if _in_table(kind, thing)]
    if not ours:
        return Found({})
    chains: dict[str, Any] = {thing["name"]: thing for kind, thing in ours if kind == "chain"}
    if MARKER not in chains:
        raise CheckmateError(
            f"the switch has a table {TABLE!r} that checkmate switch did not make (chain {MARKER} is not in it); "
            f"if it can go, delete it: nft delete table {TABLE}"
        )
    state: dict[str, Any] = {ENTRY: MARKER}
    counted = {}
    for name, chain in chains.items():
        if name == MARKER:
            continue
        port = name.removeprefix(CHAIN)
        bodies = [thing["expr"] for kind, thing in ours if kind == "rule" and thing["chain"] == name]
        both = [_rule(port, expr, family) for expr, family in zip(bodies, FAMILIES, strict=False)]
        there = [chain.get(key, default) for key, default in (("hook", ""), ("prio", 0), ("dev", port), ("policy", ""))]
        hooked = there == ["ingress", -300, port, "accept"]
        whole = hooked and len(bodies) == len(FAMILIES) and both[0] is not None and both[0] == both[1]
        state[entry(name)] = both[0] if whole else json.dumps([chain, bodies])
        counters = [part["counter"] for expr in bodies for part in expr if isinstance(part.get("counter"), dict)]
        counted[port] = (sum(c["packets"] for c in counters), sum(c["bytes"] for c in counters))
    return Found(state, counted)


def _in_table(kind: str, thing: Any) -> bool:
    if kind == "metainfo" or thing["family"] != "netdev":
        return False
    return bool(thing["name" if kind == "table" else "table"] == "checkmate")


#: Per family: its name, its field for what is inside, as nft writes them.
FAMILIES = (("ip", "protocol"), ("ip6", "nexthdr"))


def _rule(port: str, expr: list[dict[str, Any]], family: tuple[str, str]) -> Rule | None:
    """A rule of nft as ours, or None if it is not of that form."""
    ip, protocol = family
    try:
        dscp, inside, counter, *copies = expr
        fields = [(part["match"]["op"], part["match"]["left"]) for part in (dscp, inside)]
        wanted = [("==", {"payload": {"protocol": ip, "field": name}}) for name in ("dscp", protocol)]
        if fields != wanted or inside["match"]["right"] != 6 or "counter" not in counter:
            return None
        return Rule(port, dscp["match"]["right"], tuple(sorted(part["dup"]["addr"] for part in copies)))
    except (KeyError, TypeError, ValueError):
        return None


def script(operations: Iterable[Operation]) -> str:
    """What ``nft -f`` takes: one transaction that carries out a plan."""
    lines: list[str] = []
    for operation in operations:
        if operation.name == ENTRY:
            if operation.after is None:
                lines += [f"delete chain {TABLE} {MARKER}", f"delete table {TABLE}"]
            else:
                lines += [f"create table {TABLE}", f"create chain {TABLE} {MARKER}"]
            continue
        chain = f"{TABLE} {operation.name.removeprefix('chain ')}"
        if operation.before is not None:
            lines += [f"flush chain {chain}", f"delete chain {chain}"]
        if operation.after is not None:
            rule: Rule = operation.after
            hook = f'type filter hook ingress device "{rule.port}" priority -300; policy accept;'
            copies = " ".join(f'dup to "{port}"' for port in rule.copies)
            lines.append(f"create chain {chain} {{ {hook} }}")
            lines += [
                f"add rule {chain} {ip} dscp {rule.dscp} {ip} {protocol} tcp counter {copies}"
                for ip, protocol in FAMILIES
            ]
    return "".join(line + "\n" for line in lines)


def apply(cluster: Cluster, operations: Iterable[Operation]) -> None:
    """Carry out a plan, whole or not at all. Raises CheckmateError with what nft says, or for a port without device."""
    operations = tuple(operations)
    check(cluster, operations)
    if operations:
        execute(cluster, ["nft", "-f", "-"], script(operations))


def check(cluster: Cluster, operations: Iterable[Operation]) -> None:
    """Raises CheckmateError if a plan needs a port that has no device."""
    needed = {port for o in operations if isinstance(o.after, Rule) for port in (o.after.port, *o.after.copies)}
    if needed and (lacking := missing(cluster, needed)):
        raise CheckmateError("; ".join(lacking))


def missing(cluster: Cluster, ports: Iterable[str]) -> list[str]:
    """A sentence for each of the ports that has no device. Kernels from 6.16 on would take a rule for it in silence."""
    devices = {link.get("ifname") for link in ask(cluster, ["ip", "-j", "link", "show"])}
    named = {worker.port: f"worker {worker.name}" for worker in cluster.workers}
    named |= {shadow.port: f"shadow {shadow.name}" for shadow in cluster.shadows}
    return [
        f"port {port} of {named.get(port, 'the switch')} is no device of the switch; "
        "create it and add it to the bridge first, or mend `port` in the cluster's description"
        for port in sorted(set(ports) - devices)
    ]


def establish(cluster: Cluster) -> tuple[Operation, ...]:
    """Bring a switch to what the cluster asks for, and return what that took."""
    operations = plan(read(cluster).state, desired(cluster))
    apply(cluster, operations)
    return operations


def remove(cluster: Cluster) -> tuple[Operation, ...]:
    """Take away everything of ours, whatever the cluster asks for, and return what that took."""
    operations = plan(read(cluster).state, {})
    apply(cluster, operations)
    return operations


def ask(cluster: Cluster, command: list[str]) -> Any:
    """What a command prints on the switch, as JSON. Raises CheckmateError as `execute`, and for what is not JSON."""
    said = execute(cluster, command)
    try:
        return json.loads(said)
    except ValueError:
        argv = shlex.join([*shlex.split(cluster.switch.exec), *command])
        raise CheckmateError(f"{argv}: what it prints is not JSON but {said[:80]!r}; is switch.exec right?") from None


def execute(cluster: Cluster, command: list[str], given: str = "") -> str:
    """Run a command on the switch. Raises CheckmateError with what it says if it fails."""
    argv = [*shlex.split(cluster.switch.exec), *command]
    try:
        ran = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise CheckmateError(
            f"{shlex.join(argv)}: there is no {argv[0]} here; install it (nftables, iproute2)"
        ) from None
    except OSError as error:
        raise CheckmateError(f"{shlex.join(argv)}: {error.strerror}; is switch.exec right?") from None
    except subprocess.TimeoutExpired:
        raise CheckmateError(f"{shlex.join(argv)}: no end after {TIMEOUT_S:.0f} s") from None
    if ran.returncode:
        said = ran.stderr.strip() or ran.stdout.strip() or f"exit code {ran.returncode}"
        raise CheckmateError(f"{shlex.join(argv)}: {said}" + (f"\ngiven:\n{given}" if given else ""))
    return ran.stdout
