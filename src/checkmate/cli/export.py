"""``checkmate export``: the newest whole step as an ordinary checkpoint on disk."""

from __future__ import annotations

import json
import os
import shutil
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CheckmateError, UsageError
from .shadow import read_token
from .status import Address, AsJson, TokenFile


class Format(str, Enum):
    dcp = "dcp"
    torch = "torch"


def export(
    address: Address,
    to: Annotated[Path, typer.Option(help="New directory to write.")],
    run: Annotated[str, typer.Option(help="Run to export; may be left out where there is only one.")] = "",
    step: Annotated[int | None, typer.Option(help="This step and no other.")] = None,
    format: Annotated[
        Format,
        typer.Option(
            help="dcp: for torch.distributed.checkpoint, resharding included; torch: one file for torch.load."
        ),
    ] = Format.dcp,
    as_json: AsJson = False,
    token_file: TokenFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the shadow, and for each of its answers.")] = 60.0,
) -> None:
    """Write model and optimizer of the newest whole step, while the run goes on. Torch loads it alone."""
    if to.exists():
        raise UsageError(f"{to} exists already; name a new directory")
    from ..recovery import Reader
    from ..shadow.daemon import release

    partial = to.with_name(f".{to.name}.partial-{os.getpid()}")
    try:
        with Reader(address, run, step, token=read_token(token_file), timeout_s=timeout) as reader:
            partial.mkdir(parents=True)
            write = _write_dcp if format is Format.dcp else _write_torch
            write(reader, partial)
            facts = {
                "run": reader.leased.run,
                "step": reader.leased.step,
                "format": format.value,
                "world_size": reader.leased.world_size,
                "tensors": sum(len(held.entries) for held in reader.leased.held),
                "bytes": sum(entry.nbytes for held in reader.leased.held for entry in held.entries),
                "written_by": release(),
            }
        (partial / "checkmate.json").write_text(json.dumps(facts, indent=1))
        _sync(partial)
        partial.rename(to)
        _sync(to.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, RuntimeError):  # what torch.save makes of a full disk
            raise CheckmateError(f"cannot write {to}: {error}") from error
        raise
    if as_json:
        print(json.dumps({**facts, "path": str(to)}))
    else:
        print(f"step {facts['step']} of run {facts['run']!r} is in {to} ({facts['bytes']:,} bytes, {format.value})")


def _sync(folder: Path) -> None:
    """Make the names in a folder, and the files that they name, durable."""
    for path in [*(p for p in folder.iterdir() if p.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _tensors(reader: Any) -> list[dict[str, Any]]:
    """Per block: its tensors by key ("" is the parameter)."""
    from ..recovery import empty
    from ..tensors import bytes_of

    blocks = [{entry.key: empty(entry) for entry in held.entries} for held in reader.leased.held]
    reader.read(
        (block, entry, 0, bytes_of(tensor))
        for block, entries in enumerate(blocks)
        for entry, tensor in enumerate(entries.values())
    )
    return blocks


def _state(reader: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The model's and the optimizers' state by FQN."""
    from .. import values

    blocks = _tensors(reader)
    held = reader.leased.held
    model = {h.block.fqn: block[""] for h, block in zip(held, blocks, strict=True)}
    state = {
        h.block.fqn: {**{k: t for k, t in block.items() if k}, **values.loads(h.values)}
        for h, block in zip(held, blocks, strict=True)
    }
    model.update({alias: model[fqn] for alias, fqn in reader.leased.aliases.items()})
    model.update(reader.buffers())
    return model, {fqn: entries for fqn, entries in state.items() if entries}


def _write_dcp(reader: Any, folder: Path) -> None:
    import warnings

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    model, state = _state(reader)
    groups = [group for optimizer in reader.groups() for group in optimizer]
    tree = {"model": model, "optimizer": {"state": state, "param_groups": groups}, "step": reader.leased.step}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "torch.distributed is disabled": this process is alone
        try:
            dcp.save(tree, checkpoint_id=folder)
        except CheckpointException as error:  # a BaseException, which holds what went wrong on each rank
            raise next(iter(error.failures.values()))[0] from None


def _write_torch(reader: Any, folder: Path) -> None:
    import torch

    model, state = _state(reader)
    optimizers = []
    for groups in reader.groups():
        names = [fqn for group in groups for fqn in group["params"]]
        number = {fqn: i for i, fqn in enumerate(names)}
        numbered = [{**group, "params": [number[fqn] for fqn in group["params"]]} for group in groups]
        optimizers.append({"state": {number[f]: state[f] for f in names if f in state}, "param_groups": numbered})
    content = {"model": model, "optimizers": optimizers, "step": reader.leased.step}
    torch.save(content, folder / "checkpoint.pt")
