"""``checkmate rm``: make a shadow forget a run."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import ProtocolError, Refused
from .status import Address, Timeout, TokenFile, ask


def rm(
    address: Address,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    force: Annotated[bool, typer.Option(help="Also if the run is being trained.")] = False,
    token_file: TokenFile = None,
    timeout: Timeout = 5.0,
) -> None:
    """Remove a run, with its last whole step, from the memory of a shadow."""
    from ..wire.messages import Done, Remove

    try:
        answer = ask(address, token_file, timeout, Remove(run, force))
    except Refused as error:
        if error.kind == "live":
            raise Refused(f"run {run!r} is being trained; stop it first, or give --force", error.kind) from None
        raise
    if not isinstance(answer, Done):
        raise ProtocolError(f"{type(answer).__name__} in answer to a removal")
    print(answer.text)
