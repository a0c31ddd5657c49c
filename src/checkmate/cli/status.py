"""``checkmate status``: where each run stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import ProtocolError
from .shadow import read_token

Address = Annotated[str, typer.Argument(help="tcp://HOST:PORT of a shadow.", metavar="ADDRESS")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the shadow's token.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the shadow.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def ask(address: str, token_file: Path | None, timeout: float, request: Any) -> Any:
    """Send one admin message to a shadow and return its answer."""
    from ..recovery import open_channel
    from ..transport.base import call
    from ..transport.tcp import parse_address

    channel = open_channel(parse_address(address), "admin", read_token(token_file), timeout)
    try:
        return call(channel, request, timeout)
    finally:
        channel.close()


def status(
    address: Address,
    as_json: AsJson = False,
    max_lag: Annotated[
        int | None, typer.Option(help="Exit 1 if a run has no recovery point, or one that is more steps old than this.")
    ] = None,
    token_file: TokenFile = None,
    timeout: Timeout = 5.0,
) -> None:
    """Show the runs of a shadow: steps, lag, epoch, memory, last error."""
    from ..wire.messages import GetStatus, Status

    answer = ask(address, token_file, timeout, GetStatus())
    if not isinstance(answer, Status):
        raise ProtocolError(f"{type(answer).__name__} in answer to a status request")
    if as_json:
        print(json.dumps({"server": answer.server, "runs": answer.runs}))
    else:
        _show(answer.runs, answer.server.get("capture"))
    if max_lag is not None and any(r["recovery"] < 0 or r["newest"] - r["recovery"] > max_lag for r in answer.runs):
        raise typer.Exit(1)


def _show(runs: list[dict[str, Any]], capture: dict[str, Any] | None) -> None:
    console = Console(highlight=False)
    if not runs:
        console.print("no runs")
    for run in runs:
        ranks = "1 rank" if run["world_size"] == 1 else f"{run['world_size']} ranks"
        state = run["phase"] if run["live"] else "not trained now"
        table = Table.grid(padding=(0, 3, 0, 0))
        table.add_row("", "attempt", f"{run['incarnation']}, {ranks}, epoch {run['epoch']}, {state}, {run['mode']}")
        steps = [f"{name} {run[name]}" for name in ("recovery", "applied", "stable", "received", "newest", "lag")]
        table.add_row("", "steps", ", ".join(steps))
        mega = [run[key] / 1e6 for key in ("bytes_in_per_s", "bytes_in", "memory_bytes")]
        table.add_row("", "bytes", "{:,.1f} MB/s in, {:,.1f} MB since the start; {:,.1f} MB held".format(*mega))
        if run["bytes_overheard"] or run["bytes_repaired"]:
            heard, repaired = run["bytes_overheard"] / 1e6, run["bytes_repaired"] / 1e6
            table.add_row("", "network", f"{heard:,.1f} MB of gradients copied to here, {repaired:,.1f} MB repaired")
        table.add_row("", "heard", f"{run['silent_s']:.1f} s ago")
        for rank in run["waiting_for"] if run["live"] else []:
            table.add_row("", "waiting", rank)
        if run["last_error"]:
            table.add_row("", "last error", run["last_error"])
        console.print(run["run"], style="bold")
        console.print(table)
    if capture is not None:
        counts = ["packets", "kernel_drops", "holes", "bad_frames", "forged_frames", "foreign_frames"]
        named = ", ".join(f"{capture[name]:,} {name.replace('_', ' ')}" for name in counts)
        named += f", {capture['foreign']:,} foreign packets"
        console.print(f"capture on {capture['interface']}: {named}")
