"""``checkmate switch``: the rules by which a switch replicates gradients."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import CheckmateError, UsageError
from ..switch import cluster as description
from ..switch import nft, snooping, sonic
from ..switch.cluster import Cluster, Multicast
from ..switch.rules import Operation, plan, rules
from .status import AsJson

app = typer.Typer(
    help="What makes a switch replicate gradients: show it, apply it, remove it. That is rules that mirror them to the "
    "shadows or, where the cluster's description has \\[multicast], IGMP snooping.",
    no_args_is_help=True,
)


class Target(str, Enum):
    nft = "nft"
    sonic = "sonic"


ClusterFile = Annotated[
    Path, typer.Option("--cluster", metavar="FILE", help="Description of the cluster: workers, shadows, ports, DSCP.")
]
TargetKind = Annotated[
    Target, typer.Option(help="nft: a Linux bridge, changed at once; sonic: JSON for the tools of a SONiC switch.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
ConfigDb = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="sonic: what the switch has, from sonic-cfggen -d --print-data; only with it can there be a comparison.",
    ),
]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="sonic: write here, not to standard output.")]


@app.command()
def show(
    cluster: ClusterFile, target: TargetKind = Target.nft, config_db: ConfigDb = None, as_json: AsJson = False
) -> None:
    """Show the rules that the cluster asks for, what the switch has, and the differences.

    The exit code is 1 if there are any, and where nothing was compared.
    """
    _options(target, config_db)
    asked = description.load(cluster)
    groups: dict[str, Any] = {}
    if target is Target.nft:
        found, heard = nft.read(asked), snooping.read(asked)
        operations = (*plan(found.state, nft.desired(asked)), *plan(heard.state, snooping.desired(asked)))
        lacking = nft.missing(asked, [port for rule in rules(asked) for port in (rule.port, *rule.copies)])
        rows = _nft_rows(asked, found)
        if asked.multicast is not None:
            groups = {"groups": heard.groups, "routers": heard.routers, "settings": heard.state}
    else:
        desired, config = sonic.desired(asked), _config(config_db)
        operations = () if config is None else plan(sonic.read(config), desired)
        in_the_way = None if config is None else sonic.obstacle(config, desired)
        lacking = [in_the_way] if in_the_way else []
        rows = [{"entry": name, "fields": row} for name, row in desired.items()]
    compared = target is Target.nft or config_db is not None
    if as_json:
        facts = {"compared": compared, "as_desired": compared and not (operations or lacking), "rules": rows}
        _print_json(target, operations, **facts, **groups, problems=lacking)
    else:
        if asked.multicast is None:
            _show_rows(rows)
        else:
            _show_groups(asked.multicast, heard)
        _print_operations(operations, "differs: apply would")
        for sentence in lacking:
            print(sentence)
        if not compared:
            print("not compared with the switch: --config-db says what it has")
        elif not operations and not lacking:
            print("the switch is as desired")
    if operations or lacking or not compared:
        raise typer.Exit(1)


@app.command()
def apply(
    cluster: ClusterFile,
    target: TargetKind = Target.nft,
    dry_run: DryRun = False,
    config_db: ConfigDb = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Make the switch replicate what the cluster asks for; what is as it should be stays untouched, with its counters.

    nft: all changes in one transaction, whole or not at all. With \\[multicast] the bridge is made to snoop on IGMP and
    to be a querier; rules of ours, which then nobody wants, are removed.

    sonic: prints JSON for `config load`, which only adds; given --config-db, the differences for `config apply-patch`.
    """
    _options(target, config_db, output)
    asked = description.load(cluster)
    if target is Target.nft:
        settings = plan(snooping.read(asked).state, snooping.desired(asked))
        _change_nft(asked, plan(nft.read(asked).state, nft.desired(asked)), settings, dry_run, as_json)
        return
    desired, config = sonic.desired(asked), _config(config_db)
    operations = plan(sonic.read(config or {}), desired)
    to = None if dry_run else output
    if config is None:
        _hand_over(operations, sonic.load_json(desired), "config load -y", to, as_json)
        return
    if reason := sonic.obstacle(config, desired):
        raise CheckmateError(reason)
    _hand_over(operations, sonic.patch(operations, config), "config apply-patch", to, as_json)


@app.command()
def remove(
    cluster: ClusterFile,
    target: TargetKind = Target.nft,
    dry_run: DryRun = False,
    config_db: ConfigDb = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Take away everything that `apply` made, and nothing else.

    nft: the whole table `netdev checkmate`, whatever the description says now. A bridge that snoops on IGMP goes on:
    others may rely on it. If not: ip link set dev BRIDGE type bridge mcast_querier 0

    sonic: prints a JSON patch for `config apply-patch`. Give --config-db: SONiC refuses what leaves an empty table.
    """
    _options(target, config_db, output)
    asked = description.load(cluster)
    if target is Target.nft:
        _change_nft(asked, plan(nft.read(asked).state, {}), (), dry_run, as_json)
        return
    config = _config(config_db)
    operations = plan(sonic.desired(asked) if config is None else sonic.read(config), {})
    _hand_over(operations, sonic.patch(operations, config), "config apply-patch", None if dry_run else output, as_json)


def _options(target: Target, *only_sonic: Path | None) -> None:
    if target is Target.nft and any(only_sonic):
        raise UsageError("--config-db and --output belong to --target sonic")


def _config(path: Path | None) -> sonic.Config | None:
    if path is None:
        return None
    try:
        return sonic.check(json.loads(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None


def _change_nft(
    asked: Cluster, operations: Sequence[Operation], settings: Sequence[Operation], dry_run: bool, as_json: bool
) -> None:
    """Carry out a plan for the rules and one for the bridge."""
    if not dry_run:
        snooping.apply(asked, settings)
        nft.apply(asked, operations)
    both, commands = (*settings, *operations), [shlex.join(command) for command in snooping.commands(settings)]
    script = nft.script(operations)
    if as_json:
        _print_json(Target.nft, both, applied=not dry_run, script=script, commands=commands)
    else:
        _print_operations(both, "would" if dry_run else "done:")
        if dry_run and both:
            print("", *commands, script, sep="\n", end="")
        print("" if both else "nothing to do\n", end="")
    if dry_run:
        nft.check(asked, operations)


def _hand_over(operations: Sequence[Operation], content: Any, command: str, output: Path | None, as_json: bool) -> None:
    """Give the user what the switch's own tool takes, and say which one: on stderr, as stdout may go to a file."""
    if as_json:
        _print_json(Target.sonic, operations, content=content, run=f"sudo {command} FILE" if operations else "")
    if not operations:
        print("nothing to do", file=sys.stderr)
        return
    text = json.dumps(content, indent=4)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    elif not as_json:
        print(text)
    name = "FILE" if output is None else output.name
    print(f"nothing was changed; on the switch run: sudo {command} {name} && sudo config save -y", file=sys.stderr)


def _print_json(target: Target, operations: Sequence[Operation], **facts: Any) -> None:
    changes = [
        {"do": o.verb, "entry": o.name, "before": _as_json(o.before), "after": _as_json(o.after)} for o in operations
    ]
    print(json.dumps({"target": target.value, "changes": changes, **facts}))


def _as_json(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _print_operations(operations: Sequence[Operation], verb: str) -> None:
    for operation in operations:
        print(f"{verb} {operation}")
        for sign, value in (("-", operation.before), ("+", operation.after)):
            if value is not None and not operation.name.startswith("table "):
                print(f"    {sign} {value if isinstance(value, str) or is_dataclass(value) else json.dumps(value)}")


def _nft_rows(asked: Cluster, found: nft.Found) -> list[dict[str, Any]]:
    rows = []
    for rule in rules(asked):
        packets, octets = found.counted.get(rule.port, (0, 0))
        there = found.state.get(nft.entry(nft.CHAIN + rule.port)) == rule
        rows.append({**asdict(rule), "there": there, "packets": packets, "bytes": octets})
    return rows


def _show_rows(rows: list[dict[str, Any]]) -> None:
    table = Table.grid(padding=(0, 3, 0, 0))
    if rows and "entry" in rows[0]:
        for row in rows:
            table.add_row(row["entry"], json.dumps(row["fields"]))
    else:
        table.add_row("port", "marked", "copied to", "there", "packets", "bytes")
        for row in rows:
            copies, there = ", ".join(row["copies"]), "yes" if row["there"] else "no"
            counted = (f"{row['packets']:,}", f"{row['bytes']:,}")
            table.add_row(row["port"], f"DSCP {row['dscp']}", copies, there, *counted)
    Console(highlight=False, soft_wrap=True, markup=False).print(table)


def _show_groups(multicast: Multicast, found: snooping.Found) -> None:
    for name, value in found.state.items():
        print(f"{name} is {'on' if value == 1 else 'off'}")
    for group, ports in found.groups.items():
        print(f"group {group} goes to {', '.join(ports)}")
    if not found.groups:
        print(f"no host has joined a group in {multicast.groups}")
    if found.routers:
        print(f"every group goes to {', '.join(found.routers)}, where a multicast router was heard")
