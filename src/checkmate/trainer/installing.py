"""Restoring: bytes come through DCP's planner into the parameters; optimizer state and groups are written directly.

``Optimizer.load_state_dict`` would cast some scalars to the parameter's dtype, and DCP's helpers would run a fake step
to create state; neither is exact, so neither is used.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from .. import values
from ..errors import CheckmateError, Unreachable
from ..recovery import Reader, ShadowReader, empty
from ..tensors import dtype_of
from ..wire.messages import Entry
from .model import Shadowed
from .sidecar import SHARED, Sidecars


def install(shadowed: Shadowed, sidecars: Sidecars, source: ShadowReader, rank: int) -> dict[str, Any]:
    """Put model, optimizers, buffers and stateful objects into the leased step; returns the other sidecar entries."""
    reader = source.reader
    states = _fill(shadowed, source, reader)
    for optimizer in shadowed.optimizers:
        optimizer.state.clear()
    by_name = {block.fqn: shadowed.params[i] for i, block in enumerate(shadowed.spec.blocks)}
    for held in reader.leased.held:
        state = {**states.get(held.block.fqn, {}), **values.loads(held.values)}
        if held.optimizer >= 0 and state:
            shadowed.optimizers[held.optimizer].state[by_name[held.block.fqn]] = state
    for optimizer, groups in zip(shadowed.optimizers, reader.groups(), strict=True):
        _install_groups(optimizer, groups, by_name)
    ranks = sorted(reader.leased.sidecars)
    own = reader.sidecar(rank) if rank in ranks else {}
    if ranks:
        shared = own if rank == ranks[0] else reader.sidecar(ranks[0])
        own = {
            **{k: v for k, v in shared.items() if k in SHARED or k.startswith("buffer:") or rank not in ranks},
            **own,
        }
    return sidecars.restore(own)


def _fill(shadowed: Shadowed, source: ShadowReader, reader: Reader) -> dict[str, dict[str, torch.Tensor]]:
    """Load parameters in place and optimizer state into new tensors, through ``dcp.load``."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    model = {block.fqn: shadowed.params[i].detach() for i, block in enumerate(shadowed.spec.blocks)}
    for held in reader.leased.held:
        entries = {entry.key: _empty(entry, model[held.block.fqn]) for entry in held.entries[1:]}
        if entries:
            states[held.block.fqn] = entries
    tree: dict[str, Any] = {"model": model}
    if states:
        tree["optimizer"] = {"state": states}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is disabled": each rank reads for itself, on purpose
            if "no_dist" in inspect.signature(dcp.load).parameters:
                dcp.load(tree, storage_reader=source, no_dist=True)
            else:  # an older torch
                dcp.load_state_dict(tree, source, no_dist=True)
    except CheckmateError:
        raise
    except BaseException as error:  # DCP's CheckpointException is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        cause = next((e for e in _causes(error) if isinstance(e, CheckmateError)), None)
        raise cause or Unreachable(f"reading step {reader.leased.step} failed: {error!r}") from error
    for fqn, entries in states.items():
        param = model[fqn]
        if param.device.type != "cpu":
            states[fqn] = {k: t.to(param.device) if t.shape == param.shape else t for k, t in entries.items()}
    return states


def _empty(entry: Entry, param: torch.Tensor) -> torch.Tensor:
    """Host memory for optimizer state. Where it is as large as its parameter, it lies in memory as that does.

    Fused kernels rely on it: they go through both without looking at strides.
    """
    if list(param.shape) == entry.sizes:
        return torch.empty_like(param, dtype=dtype_of(entry.dtype), device="cpu")
    return empty(entry)


def _causes(error: BaseException) -> list[BaseException]:
    """Exceptions inside a CheckpointException, and along ``__cause__``."""
    found = [inner[0] if isinstance(inner, tuple) else inner for inner in getattr(error, "failures", {}).values()]
    while error.__cause__ is not None:
        error = error.__cause__
        found.append(error)
    return found


def keep_gradients(shadowed: Shadowed, names: list[str]) -> None:
    """Give these parameters a zero gradient: the run zeroes gradients in place, so a step without one uses zeros."""
    wanted = set(names)
    for block, param in zip(shadowed.spec.blocks, shadowed.params, strict=True):
        if block.fqn in wanted and param.grad is None:
            param.grad = torch.zeros_like(param)


def _install_groups(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], by_name: dict[str, torch.nn.Parameter]
) -> None:
    """Hyper-parameters by value, in place; groups that training had added are added again."""
    for number, saved in enumerate(groups):
        params = [by_name[fqn] for fqn in saved["params"]]
        if number == len(optimizer.param_groups):
            optimizer.add_param_group({**saved, "params": params})
        group = optimizer.param_groups[number]
        group["params"] = params
        for key, value in saved.items():
            if key == "params":
                continue
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
        for key in set(group) - set(saved):
            del group[key]
