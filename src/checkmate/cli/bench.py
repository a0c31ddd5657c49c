"""``checkmate bench``: measure what Checkmate costs, beside what this machine could do at best."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .status import AsJson

if TYPE_CHECKING:
    from ..bench.common import Figure, Outcome

app = typer.Typer(
    help="Measure overhead, ingest, restore and the network tap beside the limits of this machine.",
    no_args_is_help=True,
)

Parameters = Annotated[int, typer.Option(min=1, help="Parameters of the model, in fp32; about so many.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often limit and benchmark alternate.")]


@app.command()
def overhead(
    parameters: Annotated[
        int | None, typer.Option(min=1, help="Parameters of the model, in fp32; by default 50 M, with --real 3 M.")
    ] = None,
    compute: Annotated[float, typer.Option(min=0.001, help="Seconds of emulated compute per step.")] = 1.0,
    real: Annotated[bool, typer.Option("--real", help="Train a small GPT on the CPU instead of emulating.")] = False,
    block: Annotated[int, typer.Option(min=1, help="Steps of one measurement, with or without.")] = 8,
    pairs: Annotated[int, typer.Option(min=1, help="How often the two alternate.")] = 5,
    baselines: Annotated[bool, typer.Option("--baselines", help="Also with torch.save and DCP in every step.")] = False,
    as_json: AsJson = False,
) -> None:
    """What a checkpoint of every step costs the workers."""
    from ..bench.overhead import Settings, measure

    parameters = parameters or (3_000_000 if real else 50_000_000)
    show(measure(Settings(parameters, 0.0 if real else compute, block, pairs, baselines)), as_json)


@app.command()
def ingest(
    parameters: Parameters = 100_000_000,
    steps: Annotated[int, typer.Option(min=1, help="Steps per measurement.")] = 20,
    rounds: Rounds = 3,
    as_json: AsJson = False,
) -> None:
    """How fast one core of a shadow receives gradients and applies them."""
    from ..bench.ingest import measure

    show(measure(parameters, steps, rounds), as_json)


@app.command()
def restore(parameters: Parameters = 100_000_000, rounds: Rounds = 3, as_json: AsJson = False) -> None:
    """How fast the state comes back, into one rank and into two."""
    from ..bench.restore import measure

    show(measure(parameters, rounds), as_json)


@app.command()
def network(
    quick: Annotated[bool, typer.Option("--quick", help="Small and few: to see that it runs.")] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PART",
            help="egress, delivery, collective, overhead, loss, capture, multicast-egress, multicast-collective, "
            "multicast-goodput or multicast-overhead; by default all.",
        ),
    ] = None,
    rate: Annotated[str, typer.Option(metavar="RATE", help="Of links, where delivery limits them.")] = "400mbit",
    as_json: AsJson = False,
) -> None:
    """What replication by the network costs and brings, in a lab on this machine (as root)."""
    from ..bench.network import measure

    def progress(figure: Figure) -> None:
        print(f"{figure.name}: {figure.value:,.3f} {figure.unit}".rstrip(), file=sys.stderr, flush=True)

    show(measure(quick, only, rate, progress), as_json)


def show(outcome: Outcome, as_json: bool) -> None:
    """Print the method and every figure."""
    if as_json:
        print(msgspec.json.encode(outcome).decode())
        return
    console = Console()
    console.print(outcome.method.strip(), markup=False, highlight=False)
    table = Table("measured", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "target", "holds"):
        table.add_column(column, justify="right")
    for figure in outcome.figures:
        verdict = "" if figure.holds is None else "[green]yes" if figure.holds else "[red]no"
        table.add_row(figure.name, f"{figure.value:,.3f} {figure.unit}".strip(), figure.target, verdict)
    console.print(table)
