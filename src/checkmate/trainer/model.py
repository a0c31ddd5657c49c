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
    """A model and its optimizers, by block number."""

    spec: Spec
    params: list[torch.nn.Parameter]
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


def describe(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], replay: str) -> Shadowed:
    """Name every parameter and check that the run can be shadowed. A collective where torch.distributed is initialised.

    Raises Unsupported, naming the parameter or class and what to do instead.
    """
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
    local = [
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
    blocks, sets = _replica_sets(local)
    by_name = dict(zip(names, params, strict=True))
    params = [by_name[block.fqn] for block in blocks]
    number = {param: i for i, param in enumerate(params)}
    described = [
        _describe_optimizer(o, [[number[p] for p in group["params"]] for group in o.param_groups]) for o in optimizers
    ]
    world = dist.get_world_size() if dist.is_initialized() else 1
    spec = Spec(world, sets, blocks, described, fingerprint(params), replay, aliases)
    return Shadowed(spec, params, number, list(optimizers), buffers)


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


def _replica_sets(local: list[Block]) -> tuple[list[Block], list[list[int]]]:
    """All ranks' blocks, each with the ranks that have it: replicas are found by content."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return local, [[0]]
    gathered: list[list[Block]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, local)
    holders: dict[tuple[Any, ...], list[int]] = {}
    first: dict[tuple[Any, ...], Block] = {}
    for rank, theirs in enumerate(gathered):
        for block in theirs:
            key = (block.fqn, tuple(block.offsets), tuple(block.sizes), block.dtype)
            holders.setdefault(key, []).append(rank)
            first.setdefault(key, block)
    everyone = list(range(len(gathered)))
    for (fqn, _, sizes, dtype), ranks in holders.items():
        if ranks != everyone:
            raise Unsupported(
                f"parameter {fqn} ({dtype}, {list(sizes)}) is on ranks {ranks} of {len(everyone)} only; this version "
                "shadows models that every rank holds whole"
            )
    sets = sorted(set(map(tuple, holders.values())))
    blocks = [msgspec.structs.replace(block, replicas=sets.index(tuple(holders[key]))) for key, block in first.items()]
    return blocks, [list(ranks) for ranks in sets]
