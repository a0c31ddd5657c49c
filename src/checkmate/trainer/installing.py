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
from ..layout import alike, match_optimizers, numbers
from ..recovery import Reader, ShadowReader, empty
from ..tensors import dtype_of
from ..wire.messages import Entry, Leased
from .model import Shadowed
from .sidecar import SHARED, Sidecars


def predecessors(shadowed: Shadowed, leased: Leased) -> list[int]:
    """The ranks that held what this one holds, in the run that was leased: its replicas there, ascending."""
    names = {shadowed.spec.blocks[block].fqn for block in shadowed.params}
    sets = frozenset(held.block.replicas for held in leased.held if held.block.fqn in names)
    return alike(leased.replica_sets).get(sets, [])


def install(
    shadowed: Shadowed, sidecars: Sidecars, source: ShadowReader, before: list[int], place: int
) -> dict[str, Any]:
    """Put model, optimizers, buffers and stateful objects into the leased step; returns the other sidecar entries.

    `before` are the `predecessors`, and this rank takes over from the one at `place`, if there is one.
    """
    reader = source.reader
    states = _fill(shadowed, source, reader)
    for optimizer in shadowed.optimizers:
        optimizer.state.clear()
    by_name = {shadowed.spec.blocks[i].fqn: param for i, param in shadowed.params.items()}
    own = _own_optimizers(shadowed, reader.leased)
    for held in reader.leased.held:
        state = {**states.get(held.block.fqn, {}), **values.loads(held.values)}
        if held.optimizer in own and held.block.fqn in by_name and state:
            shadowed.optimizers[own[held.optimizer]].state[by_name[held.block.fqn]] = state
    saved = reader.groups()
    for index, optimizer in enumerate(shadowed.optimizers):
        _install_groups(optimizer, _merged([saved[j] for j, mine in own.items() if mine == index]), by_name)
    return sidecars.restore(_entries(reader, before, place))


def _own_optimizers(shadowed: Shadowed, leased: Leased) -> dict[int, int]:
    """Leased optimizer -> optimizer of this rank. The first of several is that of a rank which holds just the same."""
    spec = shadowed.spec
    source = match_optimizers(spec, [held.block for held in leased.held], leased.optimizers)
    sets = {spec.blocks[block].replicas for block in shadowed.params}
    first = alike(spec.replica_sets)[frozenset(sets)][0]
    leads = {spec.replica_sets[number][0] for number in sets}
    mine = sorted((lead != first, lead, index) for lead, index in numbers(spec.optimizers) if lead in leads)
    place = numbers(spec.optimizers)
    return {source[place[lead, index]]: index for _, lead, index in mine}


def _merged(leads: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of one optimizer, of which each lead has saved its own blocks: by value as the first has them."""
    groups: list[dict[str, Any]] = []
    for saved in leads:
        for number, group in enumerate(saved):
            if number < len(groups):
                groups[number]["params"] = groups[number]["params"] + group["params"]
            else:
                groups.append(dict(group))
    return groups


def _entries(reader: Reader, before: list[int], place: int) -> dict[str, bytes]:
    """This rank's sidecar, with what the first of the replicas keeps for all; with everything of it, if it has none."""
    ranks = [rank for rank in before if rank in reader.leased.sidecars]
    first = next(iter(ranks or sorted(reader.leased.sidecars)), None)
    if first is None:
        return {}
    shared = reader.sidecar(first)
    if place >= len(before) or before[place] not in ranks or before[place] == first:
        return shared
    kept = {name: data for name, data in shared.items() if name in SHARED or name.startswith("buffer:")}
    return {**kept, **reader.sidecar(before[place])}


def _fill(shadowed: Shadowed, source: ShadowReader, reader: Reader) -> dict[str, dict[str, torch.Tensor]]:
    """Load parameters in place and optimizer state into new tensors, through ``dcp.load``."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    model = {shadowed.spec.blocks[i].fqn: param.detach() for i, param in shadowed.params.items()}
    for held in reader.leased.held:
        if held.block.fqn not in model:
            continue
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
    for block, param in shadowed.params.items():
        if shadowed.spec.blocks[block].fqn in wanted and param.grad is None:
            param.grad = torch.zeros_like(param)


def _install_groups(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], by_name: dict[str, torch.nn.Parameter]
) -> None:
    """Hyper-parameters by value, in place; groups that training had added are added again."""
    for number, saved in enumerate(groups):
        params = [by_name[fqn] for fqn in saved["params"] if fqn in by_name]  # the lead may hold others too
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
