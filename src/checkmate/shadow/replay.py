"""Replay: a run's blocks and optimizer state at one step, moved on by ``torch.optim`` itself.

A `State` is changed by one thread only, its replayer. Readers take a `Cut`: references to every tensor of one whole
step. Before the replayer changes a block that a cut refers to, it gives itself a copy and leaves the old memory to the
cut; so a reader needs no lock while it sends, and never sees half a step.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
import torch
from xxhash import xxh3_64_intdigest as xxh3

from .. import values
from ..errors import Mismatch, ProtocolError, Unsupported
from ..layout import Layout, match_optimizers, numbers
from ..tensors import bytes_of, dtype_name, dtype_of
from ..wire.messages import Anchor, Block, Digest, Entry, Held, Incarnation, Optimizer, Part, Spec, Update
from .pieces import Pieces, may_cut

Tensor = torch.Tensor


def optimizer_class(spec: Optimizer, allowed: Iterable[str] = ()) -> type[torch.optim.Optimizer]:
    """Find the class by name: from ``torch.optim``, or from a module that the shadow was told to allow."""
    if spec.module != "torch.optim" and spec.module not in allowed:
        raise Unsupported(
            f"optimizer class {spec.module}.{spec.name}: this shadow imports optimizers from torch.optim only; "
            f"start it with --allow {spec.module}, where that module is installed"
        )
    try:
        found = getattr(importlib.import_module(spec.module), spec.name, None)
    except ImportError as error:
        raise Unsupported(f"{spec.module} cannot be imported on this shadow: {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise Unsupported(f"{spec.module}.{spec.name} is not an optimizer class on this shadow")
    return found


def make_optimizer(spec: Optimizer, groups: list[dict[str, Any]], allowed: Iterable[str] = ()) -> torch.optim.Optimizer:
    """An optimizer of that class with these groups, still without parameters."""
    cls = optimizer_class(spec, allowed)
    accepted = inspect.signature(cls).parameters
    try:
        arguments = {name: value for name, value in groups[0].items() if name in accepted and name != "params"}
        return cls([{**group, "params": []} for group in groups], **arguments)
    except Exception as error:  # whatever such a class does with what came over the wire
        raise Unsupported(f"{spec.module}.{spec.name} does not take these param groups: {error!r}") from error


def state_multiple(spec: Optimizer, allowed: Iterable[str] = ()) -> int:
    """How many tensors as large as the parameter this optimizer keeps, found by one step on a tiny one."""
    group = dict(values.loads(spec.groups)[0])
    for name in ("foreach", "fused", "capturable"):
        if name in group:
            group[name] = False if name != "foreach" else None
    optimizer = make_optimizer(spec, [group], allowed)
    tiny = torch.nn.Parameter(torch.ones(3, 5))
    tiny.grad = torch.ones(3, 5)
    optimizer.param_groups[0]["params"].append(tiny)
    optimizer.step()
    return sum(1 for value in optimizer.state[tiny].values() if torch.is_tensor(value) and value.shape == tiny.shape)


def check_part(part: Part, layout: Layout) -> None:
    """Raises ProtocolError for a part that no state of this layout could apply: replay would break off half way."""
    name = f"part of rank {part.rank}, step {part.step}"
    for block in (anchor.block for anchor in part.anchors if anchor.block >= len(layout.blocks)):
        raise ProtocolError(f"{name}: anchor of block {block} of {len(layout.blocks)}")
    used = [(part.rank, u.optimizer) for u in part.updates if part.rank in layout.leads]
    used += [(layout.lead(a.block), a.optimizer) for a in part.anchors if a.optimizer != -1]
    for lead, optimizer in used:
        if (lead, optimizer) not in layout.optimizers:
            raise ProtocolError(f"{name}: optimizer {optimizer} of lead {lead}, which does not have so many")
    mine = sum(1 for lead, _ in layout.optimizers if lead == part.rank)
    for table in (part.groups, part.members):
        if table is not None and len(table) != mine:
            raise ProtocolError(f"{name}: groups of {len(table)} optimizers, of {mine}")
    membership = [u.members for u in part.updates if u.members is not None] + (part.members or [])
    for block in (block for groups in membership for group in groups for block in group):
        if block >= len(layout.blocks):
            raise ProtocolError(f"{name}: block {block} of {len(layout.blocks)} in a group")
        if layout.lead(block) != part.rank:
            raise ProtocolError(f"{name}: block {block} in a group, which rank {layout.lead(block)} leads")
    for encoded in [u.groups for u in part.updates if u.groups] + (part.groups or []):
        groups = values.loads(encoded)
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise ProtocolError(f"{name}: hyper-parameters that are no list of dict")
    for anchor in part.anchors:
        keys = [entry.key for entry in anchor.entries]
        if keys[:1] != [""] or len(set(keys)) < len(keys) or not isinstance(values.loads(anchor.values), dict):
            raise ProtocolError(f"{name}, anchor of block {anchor.block}: entries {keys}, or values that are no dict")


class Cut:
    """References to everything of one whole step. `release` it, or the replayer goes on copying."""

    def __init__(self, state: State) -> None:
        self.state = state  #: which goes on
        self.step, self.spec, self.holder = state.step, state.spec, state.holder
        self.held: list[Held] = []
        self.tensors: list[list[Tensor]] = []
        self.optimizers = state.optimizer_specs()
        self.sidecars = {rank: dict(entries) for rank, entries in state.sidecars.items()}
        self.replica_sets, replicas = state.written_by
        for number, block in enumerate(state.spec.blocks):
            block = msgspec.structs.replace(block, replicas=replicas[number])
            index, entries, rest = state.entries(number)
            described = [
                Entry(key, dtype_name(t.dtype), list(t.shape), t.numel() * t.element_size())
                for key, t in entries.items()
            ]
            self.held.append(Held(block, index, described, values.dumps(rest)))
            self.tensors.append(list(entries.values()))


class State:
    """Parameters, optimizer state, groups and sidecars of one run at `step`; some blocks may still be without."""

    def __init__(self, spec: Spec, allowed: Iterable[str], holder: Incarnation) -> None:
        for block in spec.blocks:
            if dtype_of(block.dtype).itemsize != block.itemsize:
                raise Mismatch(f"{block.fqn}: an element of {block.dtype} does not have {block.itemsize} bytes")
        self.spec = spec
        self.holder = holder  #: the attempt that wrote it last
        self.step = -1
        self.allowed = tuple(allowed)
        self.params: list[torch.nn.Parameter | None] = [None] * len(spec.blocks)
        self.optimizers = [make_optimizer(o, values.loads(o.groups), self.allowed) for o in spec.optimizers]
        self._pieces = [Pieces(optimizer) for optimizer in self.optimizers]
        self.members = [[list(group) for group in o.members] for o in spec.optimizers]  #: as each lead sent last
        self.groups = [o.groups for o in spec.optimizers]
        self._number = numbers(spec.optimizers)
        self.sidecars: dict[int, dict[str, bytes]] = {}
        #: Who has closed `step`, by whose numbers the sidecars go: replica sets, and that of each block.
        self.written_by = spec.replica_sets, [block.replicas for block in spec.blocks]
        self._cuts: list[Cut] = []
        self._shared: set[int] = set()

    # ------------------------------------------------------------ what it holds

    @property
    def whole(self) -> bool:
        return all(param is not None for param in self.params)

    def entries(self, block: int) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
        """The optimizer that has this block (-1: none), its tensors by key ("" is the parameter), other state."""
        param = self.params[block]
        assert param is not None
        tensors: dict[str, Tensor] = {"": param.detach()}
        for index, optimizer in enumerate(self.optimizers):
            if param in optimizer.state:
                state = optimizer.state[param]
                tensors.update({key: value for key, value in state.items() if torch.is_tensor(value)})
                return (
                    index,
                    tensors,
                    {key: value for key, value in state.items() if not torch.is_tensor(value)},
                )
        return -1, tensors, {}

    def optimizer_specs(self) -> list[Optimizer]:
        """The optimizers with their groups as they stood when `step` was closed."""
        return [
            Optimizer(o.module, o.name, groups, members, o.rank)
            for o, groups, members in zip(self.spec.optimizers, self.groups, self.members, strict=True)
        ]

    def nbytes(self) -> int:
        blocks = (i for i, param in enumerate(self.params) if param is not None)
        return sum(t.numel() * t.element_size() for i in blocks for t in self.entries(i)[1].values())

    # ------------------------------------------------------------ reading

    def cut(self) -> Cut:
        """Hold this step. Called with the replayer between two steps."""
        cut = Cut(self)
        self._cuts.append(cut)
        self._shared = set(range(len(self.params)))
        return cut

    def cut_of(self, step: int) -> Cut | None:
        """Hold an earlier step that another reader holds: its memory is left alone for as long as anyone does."""
        found = next((cut for cut in self._cuts if cut.step == step), None)
        if found is not None:
            self._cuts.append(found := copy.copy(found))
        return found

    @property
    def leased(self) -> bool:
        """Whether a reader holds a cut."""
        return bool(self._cuts)

    def release(self, cut: Cut) -> None:
        if cut in self._cuts:
            self._cuts.remove(cut)
        if not self._cuts:
            self._shared = set()

    def _own(self, blocks: Iterable[int]) -> None:
        """Leave the memory of these blocks to the cuts that refer to it; go on with a copy."""
        for block in self._shared.intersection(blocks):
            self._shared.discard(block)
            param = self.params[block]
            assert param is not None
            param.data = param.detach().clone()
            for optimizer in self.optimizers:
                if param in optimizer.state:
                    state = optimizer.state[param]
                    state.update({key: value.clone() for key, value in state.items() if torch.is_tensor(value)})

    # ------------------------------------------------------------ moving on

    def apply(
        self,
        step: int,
        parts: Mapping[int, Part],
        leads: Iterable[int],
        gradient: Callable[[int, int], Tensor],
        anchored: Callable[[int, int], Tensor],
        suspects: Collection[int] = (),
    ) -> dict[int, float]:
        """Apply one step: its updates in order, then its anchors, then its groups and sidecars.

        `gradient(update, block)` and `anchored(block, entry)` give the received tensors. Returns how far each block
        among `suspects` was from its anchor, where it got one: the largest absolute difference.
        """
        leading = [parts[rank] for rank in sorted(leads)]  # each of blocks that no other leads
        for part in leading:
            for number, update in enumerate(part.updates):
                self._update(self._number[part.rank, update.optimizer], number, update, gradient)
        distances: dict[int, float] = {}
        for part in parts.values():
            for anchor in part.anchors:
                tensors = [anchored(anchor.block, entry) for entry in range(len(anchor.entries))]
                if anchor.block in suspects:
                    distances[anchor.block] = self._distance(anchor, tensors)
                self.install(anchor, tensors)
        for part in leading:
            for i, groups in enumerate(part.groups or ()):
                self.groups[self._number[part.rank, i]] = groups
            for i, members in enumerate(part.members or ()):
                self.members[self._number[part.rank, i]] = [list(group) for group in members]
        if self.written_by[0] is not self.spec.replica_sets:  # the first parts of an attempt are complete
            self.written_by = self.spec.replica_sets, [block.replicas for block in self.spec.blocks]
            self.sidecars.clear()
        for rank, part in parts.items():
            entries = self.sidecars.setdefault(rank, {})
            entries.update(part.sidecar)
            for name in part.dropped:
                entries.pop(name, None)
        self.step = step
        return distances

    def _distance(self, anchor: Anchor, tensors: list[Tensor]) -> float:
        """Largest absolute difference between a block's state here and in an anchor."""
        if self.params[anchor.block] is None:
            return 0.0
        _, held, _ = self.entries(anchor.block)
        largest = 0.0
        for entry, theirs in zip(anchor.entries, tensors, strict=True):
            ours = held.get(entry.key)
            if ours is None or ours.shape != theirs.shape:
                return float("inf")
            if ours.numel():
                largest = max(largest, float((ours.double() - theirs.double()).abs().max()))
        return largest

    def _update(self, index: int, number: int, update: Update, gradient: Callable[[int, int], Tensor]) -> None:
        """The optimizer of this index steps, as the lead that has it did in its update of this number."""
        optimizer = self.optimizers[index]
        if update.members is not None:
            self.members[index] = [list(group) for group in update.members]
        blocks = set(update.blocks)
        self._own(blocks)
        hyper = values.loads(update.groups)
        del optimizer.param_groups[len(hyper) :]
        while len(optimizer.param_groups) < len(hyper):
            optimizer.param_groups.append({**hyper[len(optimizer.param_groups)], "params": []})
        pieces = self._pieces[index]
        stepped: list[torch.nn.Parameter] = []
        cut: list[torch.nn.Parameter] = []
        for group, named, members in zip(optimizer.param_groups, hyper, self.members[index], strict=True):
            group.update(named)
            if self.spec.replay == "fast" and "fused" in group:
                group.update(fused=True, foreach=False)
            present = [(b, p) for b in members if b in blocks and (p := self.params[b]) is not None]
            for block, param in present:
                param.grad = gradient(number, block)
                stepped.append(param)
            group["params"] = [param for _, param in present]
            if may_cut(optimizer, group):
                split = {param: pieces.of(param) for param in group["params"]}
                cut += [param for param, parts in split.items() if parts[0] is not param]
                group["params"] = [piece for parts in split.values() for piece in parts]
        if update.scaling:
            optimizer.grad_scale, optimizer.found_inf = values.loads(update.scaling)  # type: ignore[attr-defined]
        try:
            optimizer.step()
            for param in cut:
                pieces.collect(param)
        finally:
            for param in stepped:
                param.grad = None
            if update.scaling:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def install(self, anchor: Anchor, tensors: list[Tensor]) -> None:
        """Put a block's state in place of what was there."""
        param = self.params[anchor.block]
        if param is None:
            param = torch.nn.Parameter(tensors[0], requires_grad=tensors[0].is_floating_point())
            self.params[anchor.block] = param
        else:
            param.data = tensors[0]
        self._shared.discard(anchor.block)
        for optimizer in self.optimizers:
            optimizer.state.pop(param, None)
        if anchor.optimizer >= 0:
            named = {entry.key: tensor for entry, tensor in zip(anchor.entries[1:], tensors[1:], strict=True)}
            rest = values.loads(anchor.values)
            lead = self.spec.replica_sets[self.spec.blocks[anchor.block].replicas][0]
            if named or rest:
                self.optimizers[self._number[lead, anchor.optimizer]].state[param] = {**named, **rest}

    def respec(self, spec: Spec) -> None:
        """Take over the block order and replica sets of another attempt that has the same blocks and optimizers."""
        ours, theirs = ({(b.fqn, b.dtype, tuple(b.sizes)) for b in s.blocks} for s in (self.spec, spec))
        if ours != theirs:
            raise Mismatch("the parameters of this spec are not those of the state that it shall take over")
        source = match_optimizers(spec, self.spec.blocks, self.optimizer_specs())
        number = {block.fqn: i for i, block in enumerate(self.spec.blocks)}
        order = [number[block.fqn] for block in spec.blocks]
        place = {old: new for new, old in enumerate(order)}
        self.params = [self.params[i] for i in order]
        self._shared = {place[i] for i in self._shared}
        self.written_by = self.written_by[0], [self.written_by[1][i] for i in order]
        self.members = [[[place[i] for i in group] for group in self.members[j]] for j in source]
        self.groups = [self.groups[j] for j in source]
        self.optimizers = [self.optimizers[j] for j in source]
        self._pieces = [self._pieces[j] for j in source]
        self.spec, self._number = spec, numbers(spec.optimizers)

    def differing(self, digests: Iterable[Digest]) -> list[Digest]:
        """Those digests that this state does not match."""
        return [d for d in digests if not self._matches(d)]

    def _matches(self, digest: Digest) -> bool:
        if digest.block >= len(self.params) or self.params[digest.block] is None:
            return True
        tensor = self.entries(digest.block)[1].get(digest.key)
        if tensor is None:
            return False
        window = bytes_of(tensor)[digest.offset : digest.offset + digest.nbytes]
        return xxh3(window) == digest.digest


def empty_like(block: Block) -> Tensor:
    """Uninitialised memory for one gradient or parameter of this block, on the CPU."""
    return torch.empty(block.sizes, dtype=dtype_of(block.dtype))
