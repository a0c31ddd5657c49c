"""``checkmate lab``: a cluster of network namespaces on this machine, and jobs in it."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..lab import Lab, Shape, cluster, job, network
from ..switch import nft, snooping
from ..switch.rules import Rule
from .status import AsJson

app = typer.Typer(
    help="A cluster on this machine (as root): network namespaces as hosts, a bridge as the switch, real packets.",
    no_args_is_help=True,
)

#: As shells count them.
INTERRUPTED = 128 + signal.SIGINT

Workers = Annotated[int | None, typer.Option(help="Worker hosts, w0, w1, …; 2 if not given.", show_default=False)]
Shadows = Annotated[int | None, typer.Option(help="Shadow hosts, s0, s1, …; 1 if not given.", show_default=False)]
Mtu = Annotated[int | None, typer.Option(help="MTU of the data network; 1500 if not given.", show_default=False)]
Offloads = Annotated[
    bool | None,
    typer.Option(
        "--offloads/--no-offloads",
        help="Without: no packet is larger than the MTU, and checksums are filled in; slower, and as on a wire.",
        show_default=False,
    ),
]
Rate = Annotated[str | None, typer.Option(metavar="RATE", help="Limit of each link of the data network, as in 1gbit.")]
Rules = Annotated[
    bool | None, typer.Option("--rules/--no-rules", help="Whether the switch mirrors.", show_default=False)
]
Multicast = Annotated[
    bool | None,
    typer.Option(
        "--multicast/--no-multicast",
        help="The switch mirrors nothing; it sends multicast groups to the hosts that have joined them.",
        show_default=False,
    ),
]


@app.command()
def up(
    workers: Workers = None, shadows: Shadows = None, mtu: Mtu = None, offloads: Offloads = None, rate: Rate = None,
    rules: Rules = None, multicast: Multicast = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Build a lab that stays. Leftovers of one that was killed are removed first; one that is as asked for, stays."""
    given = {"workers": workers, "shadows": shadows, "mtu": mtu, "offloads": offloads, "rate": rate}
    lab = Lab(**_given(**given, rules=rules, multicast=multicast))
    built = cluster.up(lab)
    if as_json:
        print(json.dumps({"built": built, **_facts(lab)}))
        return
    print(f"the lab is up{'' if built else ' already'}: {lab.shape}")
    print("run a job in it:          checkmate lab run -- python train.py")
    print(f"run a command on a host:  ip netns exec {lab.workers[0].namespace} …")
    if lab.shadows:
        print(f"for switch and doctor:    --cluster {lab.cluster_file}")


@app.command()
def down(as_json: AsJson = False) -> None:
    """Remove the lab, or what is left of one, with all that runs in it. Nothing else is touched."""
    removed = cluster.down()
    if as_json:
        print(json.dumps({"removed": removed}))
    else:
        print(f"removed {', '.join(removed)}" if removed else "there is no lab")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show hosts, addresses, what went over each link, and the switch's rules. Exit code 1 if no lab is up."""
    lab = cluster.existing()
    if lab is None:
        if leftovers := network.namespaces():
            network.require(Shape(rules=False))
            with cluster.lock():  # raises: it belongs to a job
                message = f"no lab is up; of one that was killed there are {', '.join(leftovers)} (checkmate lab down)"
        else:
            message = "no lab is up"
        print(json.dumps({"up": False, "leftovers": leftovers}) if as_json else message)
        raise typer.Exit(1)
    network.require(lab.shape)
    facts = _facts(lab)
    if as_json:
        print(json.dumps(facts))
        return
    print(f"the lab is up: {lab.shape}")
    table = Table("host", "namespace", "data", "management", box=SIMPLE_HEAD, pad_edge=False)
    for host in facts["hosts"]:
        table.add_row(host["name"], host["namespace"], host["address"], host["management"])
    console = Console(highlight=False)
    console.print(table)
    console.print(links_table(facts["links"]))
    for rule in facts["rules"]:
        print(f"{rule['text']}: {rule['packets']:,} packets, {rule['bytes']:,} bytes so far")
    for group, ports in facts["groups"].items():
        print(f"multicast group {group} goes to {', '.join(ports)}")
    if not facts["rules"]:
        print("the switch mirrors nothing")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="What every worker runs; after --.", metavar="-- COMMAND …")],
    workers: Workers = None, shadows: Shadows = None, mtu: Mtu = None, offloads: Offloads = None, rate: Rate = None,
    rules: Rules = None, multicast: Multicast = None,
    loss: Annotated[
        float, typer.Option(min=0, max=100, metavar="PERCENT", help="Packets that get lost on the way to the shadows.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Run a command on every worker, beside a shadow on every shadow host; then show what went over each link.

    It finds RANK, WORLD_SIZE, MASTER_ADDR and the like, as under torchrun, and CHECKMATE_SHADOW and CHECKMATE_TAP, for
    attach(shadow=…, tap=…). Uses the lab that is up, or one of its own. The first worker that fails ends the
    others, and its exit code is ours.
    """
    output = sys.stderr if as_json else sys.stdout

    def emit(host: str, line: str) -> None:
        output.write(f"[{host}] {line}\n")
        output.flush()

    given = {"workers": workers, "shadows": shadows, "mtu": mtu, "offloads": offloads, "rate": rate}
    try:
        with (
            cluster.borrowed(**given, rules=rules, multicast=multicast) as lab,
            job.lossy(lab, loss),
            job.shadows(lab, emit) as addresses,
        ):
            before, began = lab.counters(), time.monotonic()
            ended = job.run(lab, command, emit, addresses)
            seconds, links = time.monotonic() - began, job.difference(before, lab.counters())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if ended.code:
        print(f"checkmate: {ended.host} failed first, with exit code {ended.code}", file=sys.stderr)
    if as_json:
        print(json.dumps({"exit_code": ended.code, "failed": ended.host, "seconds": seconds, "links": links}))
    else:
        Console(highlight=False).print(links_table(links))
    raise typer.Exit(ended.code)


def links_table(links: dict[str, dict[str, int]]) -> Table:
    """What went over each link, as its host sees it."""
    table = Table("link", box=SIMPLE_HEAD, pad_edge=False)
    columns = {"tx_bytes": "bytes sent", "rx_bytes": "bytes received", "rx_dropped": "packets dropped"}
    columns = {key: title for key, title in columns.items() if any(key in link for link in links.values())}
    for title in columns.values():
        table.add_column(title, justify="right")
    for name, link in links.items():
        table.add_row(name, *(f"{link[key]:,}" if key in link else "" for key in columns))
    return table


def _facts(lab: Lab) -> dict[str, Any]:
    found = nft.read(lab.cluster) if lab.shape.rules else nft.Found({})
    rules = [rule for rule in found.state.values() if isinstance(rule, Rule)]
    return {
        "up": True,
        "shape": asdict(lab.shape),
        "cluster": str(lab.cluster_file),
        "hosts": [{**asdict(host), "namespace": host.namespace} for host in lab.hosts.values()],
        "links": lab.counters(),
        "rules": [
            {
                "text": str(rule),
                **asdict(rule),
                **dict(zip(("packets", "bytes"), found.counted[rule.port], strict=True)),
            }
            for rule in rules
        ],
        "groups": snooping.read(lab.cluster).groups,
    }


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
