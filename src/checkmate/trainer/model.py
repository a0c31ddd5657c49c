"""What there is to shadow: parameters and optimizers as blocks with names, and the numerics they run with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from .. import values
from ..errors import Unsupported, UsageError
from ..tensors import dtype_name, fingerprint
from ..wire.frames import MAX_PART_BYTES
from ..wire.messages import Block, Optimizer, Spec
from .rendezvous import together

#: What wrappers put into a parameter's name, and DCP's helpers take out again.
_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))
_REFUSED = {
    "LBFGS": "it evaluates its closure several times per step; use an optimizer that steps once",
    "SparseAdam": "sparse gradients have no fixed size; use Adam with dense gradients (sparse=False)",
}


class Slot(NamedTuple):
    """Where a model keeps a buffer: some replace the tensor, rather than write into it."""

    owner: torch.nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.owner._buffers.get(self.name)


@dataclass
class Shadowed:
    """A model and its optimizers, by block number. Blocks are those of all ranks; this one may have only some."""

    spec: Spec
    params: dict[int, torch.nn.Parameter]  #: those that are here, ascending
    number: dict[torch.nn.Parameter, int]
    optimizers: list[torch.optim.Optimizer]
    buffers: dict[str, Slot] = field(default_factory=dict)

    def members(self, optimizer: torch.optim.Optimizer) -> list[list[int]]:
        """Block numbers per param group. Raises Unsupported for a parameter that `attach` did not see."""
        return [[self._number(param) for param in group["params"]] for group in optimizer.param_groups]

    def _number(self, param: torch.nn.Parameter) -> int:
        if param not in self.number:
            raise Unsupported(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that was not in the model at attach(); "
                "attach after all parameters exist (they may join the optimizer later)"
            )
        return self.number[param]

    def optimizer_of(self, block: int) -> int:
        """Index of the optimizer that has this block, -1 for none."""
        param = self.params[block]
        for index, optimizer in enumerate(self.optimizers):
            if any(param is p for group in optimizer.param_groups for p in group["params"]):
                return index
        return -1


def unwrap(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside what frameworks pass around. Raises UsageError for anything else."""
    if isinstance(optimizer, (list, tuple)):
        return [inner for item in optimizer for inner in unwrap(item)]
    inner = getattr(optimizer, "optimizers", None)
    if isinstance(inner, (list, tuple)):
        return unwrap(list(inner))
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):  # accelerate's AcceleratedOptimizer
        return [inner]
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    raise UsageError(f"attach() takes a torch optimizer or a list of them, not {type(optimizer).__name__}")


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """What ``torch.compile`` was given."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def _slots(module: torch.nn.Module) -> Iterator[tuple[str, Slot]]:
    """Every buffer, once, with its name."""
    seen: set[torch.Tensor] = set()
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer not in seen:
                seen.add(buffer)
                yield clean(f"{path}.{name}" if path else name), Slot(owner, name)


def clean(name: str) -> str:
    """A parameter's name as ``torch.distributed.checkpoint.state_dict`` gives it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class _Here(NamedTuple):
    """What one rank has, without its tensors."""

    blocks: list[Block]
    optimizers: list[Optimizer]  #: whose members number these blocks
    aliases: dict[str, str]


def describe(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], replay: str, tap: str = "step"
) -> Shadowed:
    """Name every parameter and check that the run can be shadowed. A collective where torch.distributed is initialised.

    Raises Unsupported, naming the parameter or class and what to do instead, on every rank.
    """
    here, named, buffers = together(lambda: _look(model, optimizers))
    ranks = [here]
    if (world := dist.get_world_size() if dist.is_initialized() else 1) > 1:
        ranks *= world
        dist.all_gather_object(ranks, here)
    blocks, sets = _replica_sets(ranks)
    described = _optimizers(ranks, blocks, sets)
    numerics = fingerprint(list(named.values()))
    spec = Spec(world, sets, blocks, described, numerics, replay, _aliases(ranks, blocks), tap)
    own = set(map(_box, here.blocks))
    params = {i: named[block.fqn] for i, block in enumerate(blocks) if _box(block) in own}
    return Shadowed(spec, params, {param: i for i, param in params.items()}, list(optimizers), buffers)


def _look(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[_Here, dict[str, torch.nn.Parameter], dict[str, Slot]]:
    """This rank's part of `describe`, with its parameters and buffers by FQN."""
    model = uncompiled(model)
    module = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    params: list[torch.nn.Parameter] = []
    number: dict[torch.nn.Parameter, int] = {}
    names: list[str] = []
    aliases: dict[str, str] = {}
    for raw, param in module.named_parameters(remove_duplicate=False):
        name = clean(raw)
        _check_parameter(name, param)
        if param in number:
            aliases[name] = names[number[param]]
        else:
            number[param] = len(params)
            params.append(param)
            names.append(name)
    known = set(get_model_state_dict(model))
    buffers = {name: slot for name, slot in _slots(module) if name in known}
    if missing := [name for name in [*names, *aliases] if name not in known]:
        raise Unsupported(
            f"torch.distributed.checkpoint does not know these parameters of the model: {missing[:5]}; pass what "
            "DistributedDataParallel was given or what it returned, without another module around it"
        )
    if (total := sum(b.tensor.nbytes for b in buffers.values() if b.tensor is not None)) > MAX_PART_BYTES // 2:
        raise Unsupported(
            f"the model's buffers have {total:,} bytes, and all of them may have to travel with one step: at most "
            f"{MAX_PART_BYTES // 2:,}; register what is derived with persistent=False"
        )
    if not params:
        raise UsageError("attach() got a model without parameters")
    _check_optimizers(optimizers, number, names)
    trainable = {
        param for o in optimizers for group in o.param_groups for param in group["params"] if param.requires_grad
    }
    blocks = [
        Block(
            name,
            dtype_name(p.dtype),
            p.element_size(),
            [0] * p.dim(),
            list(p.shape),
            list(p.shape),
            0,
            p in trainable,
        )
        for name, p in zip(names, params, strict=True)
    ]
    described = [
        _describe_optimizer(o, [[number[p] for p in group["params"]] for group in o.param_groups]) for o in optimizers
    ]
    return _Here(blocks, described, aliases), dict(zip(names, params, strict=True)), buffers


def _check_parameter(name: str, param: torch.nn.Parameter) -> None:
    if isinstance(param, UninitializedParameter):
        raise Unsupported(f"parameter {name} is not initialised yet; run one forward pass before attach()")
    if isinstance(param, DTensor):
        raise Unsupported(
            f"parameter {name} is a DTensor (FSDP2 or tensor parallel), which this version does not shadow yet"
        )
    if param.is_complex():
        raise Unsupported(f"parameter {name} is complex; hold it as two real parameters (torch.view_as_real)")
    if param.layout is not torch.strided:
        raise Unsupported(f"parameter {name} is not a dense tensor ({param.layout}); use a dense one")
    if param.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"parameter {name} is on {param.device}; only cpu and cuda are supported")


def _check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], number: dict[torch.nn.Parameter, int], names: list[str]
) -> None:
    if not optimizers:
        raise UsageError("attach() got no optimizer")
    owner: dict[torch.nn.Parameter, int] = {}
    for index, optimizer in enumerate(optimizers):
        if (why := _REFUSED.get(type(optimizer).__name__)) is not None:
            raise Unsupported(f"{type(optimizer).__name__} cannot be shadowed: {why}")
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param not in number:
                raise Unsupported(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(param.shape)} that is not in the "
                    "model; pass the module that holds it (several modules: put them into one nn.ModuleDict)"
                )
            if owner.setdefault(param, index) != index:
                raise Unsupported(f"parameter {names[number[param]]} is in two optimizers; give each parameter to one")


def _describe_optimizer(optimizer: torch.optim.Optimizer, members: list[list[int]]) -> Optimizer:
    cls = type(optimizer)
    module = "torch.optim" if getattr(torch.optim, cls.__name__, None) is cls else cls.__module__
    return Optimizer(module, cls.__qualname__, hyper_parameters(optimizer), members)


def inexact(shadowed: Shadowed) -> list[str]:
    """Why replay may not give the bits of these optimizers, though it steps as they do."""
    half = (torch.float16, torch.bfloat16)
    reasons = []
    if torch.get_default_dtype() != torch.float32:
        reasons.append(f"optimizers keep their scalars in the default dtype, {torch.get_default_dtype()} here")
    for group in (group for optimizer in shadowed.optimizers for group in optimizer.param_groups):
        fused = bool(group.get("fused"))
        if fused and group.get("momentum") and any(param.dtype in half for param in group["params"]):
            reasons.append("torch's fused SGD reads beside its momentum buffers in half precision; use fused=False")
        odd = (param for param in group["params"] if not param.is_contiguous() and (fused or param.dtype in half))
        if (param := next(odd, None)) is not None:
            fqn = shadowed.spec.blocks[shadowed.number[param]].fqn
            reasons.append(f"torch rounds by position in memory here, and parameter {fqn} is not contiguous")
    return reasons


def hyper_parameters(optimizer: torch.optim.Optimizer) -> bytes:
    """The param groups without their parameters, by value."""
    return values.dumps([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])


def _box(block: Block) -> tuple[Any, ...]:
    """What a block is, on whichever ranks: equal ones are replicas."""
    return block.fqn, tuple(block.offsets), tuple(block.sizes)


def _aliases(ranks: list[_Here], blocks: list[Block]) -> dict[str, str]:
    """The second names of tied parameters, on any rank."""
    tied = {alias: name for rank in reversed(ranks) for alias, name in rank.aliases.items()}
    if odd := [block.fqn for block in blocks if block.fqn in tied]:
        raise Unsupported(
            f"parameter {odd[0]} is tied to {tied[odd[0]]} on some ranks, and a parameter of its own on others; give "
            "it another name there"
        )
    return tied


def _replica_sets(ranks: list[_Here]) -> tuple[list[Block], list[list[int]]]:
    """All ranks' blocks, each with the ranks that have it: replicas are found by content."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    first: dict[tuple[Any, ...], Block] = {}
    whole: dict[str, tuple[int, Block]] = {}
    for rank, here in enumerate(ranks):
        for block in here.blocks:
            other, seen = whole.setdefault(block.fqn, (rank, block))
            if (seen.dtype, seen.global_sizes) != (block.dtype, block.global_sizes):
                raise Unsupported(
                    f"parameter {block.fqn} is {seen.dtype} {list(seen.global_sizes)} on rank {other} and "
                    f"{block.dtype} {list(block.global_sizes)} on rank {rank}: one name is one parameter, wherever it "
                    'is; give pipeline stages names of their own, e.g. nn.ModuleDict({"stage0": …})'
                )
            holders.setdefault(_box(block), []).append(rank)
            first.setdefault(_box(block), block)
    sets = sorted(set(map(tuple, holders.values())))
    number = {ranks: i for i, ranks in enumerate(sets)}
    blocks = [msgspec.structs.replace(block, replicas=number[tuple(holders[key])]) for key, block in first.items()]
    return blocks, [list(ranks) for ranks in sets]


def _optimizers(ranks: list[_Here], blocks: list[Block], sets: list[list[int]]) -> list[Optimizer]:
    """Those of each lead, with the blocks that it leads. Raises Unsupported where replicas have theirs otherwise."""
    number = {_box(block): i for i, block in enumerate(blocks)}
    place: dict[int, tuple[int, str]] = {}
    described = []
    for rank, here in enumerate(ranks):
        own = [number[_box(block)] for block in here.blocks]
        mine = dict.fromkeys(own, "no optimizer")
        for index, optimizer in enumerate(here.optimizers):
            led = [[own[b] for b in group if sets[blocks[own[b]].replicas][0] == rank] for group in optimizer.members]
            described.append(msgspec.structs.replace(optimizer, members=led, rank=rank))
            for g, group in enumerate(optimizer.members):
                mine |= dict.fromkeys((own[b] for b in group), f"group {g} of optimizer {index} ({optimizer.name})")
        for block, where in mine.items():
            other, theirs = place.setdefault(block, (rank, where))
            if where != theirs:
                raise Unsupported(
                    f"parameter {blocks[block].fqn} is in {theirs} on rank {other}, but in {where} on rank {rank}; "
                    "ranks that hold the same parameter must optimize it alike"
                )
    leads = {ranks[0] for ranks in sets}
    return [optimizer for optimizer in described if optimizer.rank in leads]
