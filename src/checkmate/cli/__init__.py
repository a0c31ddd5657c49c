"""The command line: one file per sub-command. Exit codes: 0 fine, 1 failed, 2 wrong usage."""

from __future__ import annotations

import logging
import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from ..errors import CheckmateError, UsageError
from . import bench, doctor, export, lab, rm, shadow, status, switch
from .demo import demo

app = typer.Typer(
    name="checkmate",
    help="Every training step is a checkpoint, and training does not stop for it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(shadow.shadow)
app.command()(status.status)
app.command()(export.export)
app.command()(rm.rm)
app.command()(demo)
app.command()(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(switch.app, name="switch")
app.add_typer(lab.app, name="lab")


def print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        print(f"checkmate {version('checkmate-ckpt')}")
    except PackageNotFoundError:
        print("checkmate (not installed)")
    raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of ``checkmate`` itself."""


def main() -> None:
    """Entry point of ``checkmate`` and ``python -m checkmate``."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # for ip and nft; su leaves them out
    _end_at_signals()
    try:
        app()
    except UsageError as error:
        print(f"checkmate: {error}", file=sys.stderr)
        sys.exit(2)
    except (CheckmateError, OSError) as error:
        print(f"checkmate: {error}", file=sys.stderr)
        sys.exit(1)


def _end_at_signals() -> None:
    """SIGTERM, and a terminal that is closed, end us in good order; once is enough. What `nohup` ignores stays so."""
    ours = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]

    def end(number: int, _: Any) -> None:
        for signal_ in ours:
            signal.signal(signal_, signal.SIG_IGN)
        sys.exit(128 + number)

    for signal_ in ours:
        signal.signal(signal_, end)
