"""``checkmate shadow``: run a shadow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError


def read_token(path: Path | None) -> bytes | None:
    """The token in a file, without its line end. Raises UsageError if there is none."""
    if path is None:
        return None
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"token file {path}: {error.strerror}") from None
    if not token:
        raise UsageError(f"token file {path} is empty")
    return token


def shadow(
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 picks a free one.")] = "127.0.0.1:7070",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the secret that every client must prove to have.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="Module from which optimizer classes may be imported.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads for replay='fast'; 'match' uses the trainer's number.")
    ] = None,
    memory_limit: Annotated[
        int | None, typer.Option(min=1, metavar="BYTES", help="Refuse a run that may need more, with the others.")
    ] = None,
    expire: Annotated[float | None, typer.Option(help="Forget a run that nobody has used for so many seconds.")] = None,
    capture: Annotated[
        str | None,
        typer.Option(metavar="INTERFACE", help="Where the network copies gradients to this shadow (tap='mirror')."),
    ] = None,
    multicast: Annotated[
        str | None,
        typer.Option(metavar="INTERFACE", help="Where the workers multicast gradients (tap='multicast')."),
    ] = None,
) -> None:
    """Receive every step of the runs that connect, apply it, and so be their checkpoint."""
    token = read_token(token_file)
    from ..shadow.daemon import Daemon
    from ..shadow.run import Limits
    from ..transport.tcp import Address, parse_address
    from ..transport.tcp import listen as open_listener

    address = parse_address(listen)
    try:
        listener = open_listener(address)
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {error.strerror or error}") from None
    daemon = Daemon(Limits(memory_limit, threads, tuple(allow or ()), expire), token, capture, multicast)

    bound = Address(*listener.getsockname()[:2])
    print(f"checkmate shadow listening on {bound}", flush=True)
    try:
        daemon.serve(listener)
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        daemon.stop()
    os._exit(0)  # or torch would abort the process, finding the interpreter gone under a thread that replays
