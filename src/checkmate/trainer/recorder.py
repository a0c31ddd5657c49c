"""Records a step as it happens: its updates with their gradients, then its part. Training thread only.

What it produces are `Batch`es for the link. Where the staging limit is reached it does not wait (unless the user asked
for that): it closes the step with a *gap*, sends nothing more, and begins anew when the shadow asks for a new epoch.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from xxhash import xxh3_64_intdigest as xxh3

from .. import values
from ..errors import Unsupported
from ..layout import Layout
from ..tensors import dtype_name, host_bytes
from ..wire import messages
from ..wire.messages import Anchor, Digest, Entry, Part, Shard, Update
from .changes import Watch
from .link import Link
from .mirror import Mirror
from .model import Shadowed, hyper_parameters
from .sidecar import Sidecars
from .staging import Batch, Buffer, Kept, Pool, aligned, part_of

log = logging.getLogger("checkmate")

#: At most so many bytes of blocks are anchored per step, but always at least one block.
ANCHOR_BYTES_PER_STEP = 64 << 20
#: Batches that may wait to be sent or to become stable, however small they are.
MAX_BACKLOG = 4096
#: Bytes that the rolling audit compares per step and rank.
AUDIT_BYTES = 256 << 10


class Recorder:
    """See the module. `link` is set once the run is adopted; `epoch` is the one that this rank's steps belong to."""

    def __init__(
        self,
        shadowed: Shadowed,
        layout: Layout,
        rank: int,
        pool: Pool,
        sidecars: Sidecars,
    ) -> None:
        self.shadowed, self.layout, self.rank, self.pool, self.sidecars = (
            shadowed,
            layout,
            rank,
            pool,
            sidecars,
        )
        self.mirror: Mirror | None = None  #: with the network tap
        self.lead = rank in layout.leads
        self.epoch = 0
        self.gap = False  #: this epoch is over for us: nothing is kept until the next
        self.gap_reason = ""  #: if it is not that staging memory was full
        self.gaps = 0
        self.at_once = False  #: anchor all blocks in one step
        self.link: Link | None = None
        self.on_full: Callable[[int], bool] = lambda nbytes: False  #: no room for so many bytes; True: try again
        self._here = list(shadowed.params)
        self._optimizer_of = {block: shadowed.optimizer_of(block) for block in self._here}
        self._ids: list[list[list[int]]] = [[] for _ in shadowed.optimizers]
        self._blocks: list[list[list[int]]] = [[] for _ in shadowed.optimizers]
        #: Of these, the blocks that this rank leads. Its parts speak of no others.
        self._led: list[list[list[int]]] = [[] for _ in shadowed.optimizers]
        optimizers = {block: shadowed.optimizers[i] for block, i in self._optimizer_of.items() if i >= 0}
        self.watch = Watch(shadowed.params, optimizers)
        self._step_bytes = sum(aligned(piece.nbytes) for piece in layout.slices[rank].values())
        self._mine = [b for b, owner in enumerate(layout.owners) if owner == rank]
        self._checked_gradients = False
        self._warned = False
        #: Gradients outlive their step: ``zero_grad(set_to_none=False)``. An optimizer steps on zeros, and skips None.
        self.keeps_grads = False
        #: At the end of the last step, with their versions, which each backward that adds to them raises.
        self._last_grads: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._begin()

    def begin_epoch(self, epoch: int) -> None:
        """From the next update on, as this epoch, with nothing known to the shadow.

        If the last epoch ended before the shadow had every block, it cannot replay as fast as training steps. Then all
        blocks are anchored at once, which leaves it nothing to replay until it is whole.
        """
        self.at_once = self.epoch > 0 and bool(self._unanchored)
        self.epoch = epoch
        self.gap, self.gap_reason = False, ""
        self._begin()
        self.watch.mark_all()

    def end_epoch(self, reason: str) -> None:
        """Keep nothing from here on, until the shadow asks for the next epoch."""
        if not self.gap:
            self.gap, self.gap_reason = True, reason

    def _begin(self) -> None:
        self.updates = 0  #: how many the open step has so far, recorded or not
        self._updates: list[Update] = []
        self._gradients: list[Digest] = []
        self._dirty: set[int] = set()  #: changed outside the optimizer in this step
        self._unanchored = list(self._mine)
        self._settled = False  #: a step that counts in this epoch is closed, and later parts say only what changed
        self._gap_told = False
        self._closing = 0  #: the step that `close` was about to close, also when Ctrl-C has ended that
        self._audit_block, self._audit_entry, self._audit_offset = self.rank, 0, 0
        self._forget_sent()

    def _forget_sent(self) -> None:
        """The next part is complete in itself."""
        self._sent_members: list[Any] = [None] * len(self.shadowed.optimizers)
        self._sent_groups: list[bytes] | None = None
        self._sent_part_members: list[Any] | None = None
        self.sidecars.forget()

    def all_anchored(self) -> None:
        """The shadow holds this very state: it was restored from there."""
        for index in range(len(self.shadowed.optimizers)):
            self._members(index)  # with groups that training had added
        self._unanchored = []
        self._settled = True
        self.watch.mark_all()

    def announce(self, step: int) -> None:
        """Tell the shadow that this rank streams the present epoch from the step after `step`."""
        if self.link is not None:
            self.link.begun = (self.epoch, step)
        part = Part(self.rank, step, self.epoch, begins=True)
        self._put(Batch(step, self.epoch, part=messages.encode(part)))

    def distrust(self, index: int) -> None:
        """What this optimizer did in the open step may not be what was recorded: anchor its blocks with it."""
        if self._updates:
            self._dirty.update(b for b, owner in self._optimizer_of.items() if owner == index)

    def distrust_all(self) -> None:
        """Anchor every block as the open step closes."""
        self._dirty.update(self._here)

    @property
    def lacking(self) -> int:
        """How many blocks of this rank's the shadow has no anchor of yet."""
        return len(self._unanchored)

    # ------------------------------------------------------------ updates

    def before(self, index: int, step: int) -> None:
        """An optimizer is about to step with final gradients, as part of `step`."""
        self.updates += 1
        if self.gap:
            return
        optimizer = self.shadowed.optimizers[index]
        members = self._members(index)
        self._dirty |= self.watch.changed()
        with_grad = sorted(b for group in members for b in group if self.shadowed.params[b].grad is not None)
        grads = [self._gradient(b) for b in with_grad]
        groups = hyper_parameters(optimizer)
        scale, inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        scaling = b"" if scale is None and inf is None else values.dumps((scale, inf))
        led = self._led[index]
        told = led if led != self._sent_members[index] else None
        agreement = xxh3(groups + scaling + repr(members).encode())
        if self.lead:
            self._sent_members[index] = led
            update = Update(index, with_grad, agreement, groups, told, scaling)
        else:
            update = Update(index, with_grad, agreement)
        number = len(self._updates)
        self._updates.append(update)
        if number == 0:
            self._note_kept(with_grad)
        if self.layout.world_size > 1:
            self._digest_gradients(number, with_grad, grads, step)
        if self.mirror is not None:
            update.shards, pieces = self.mirror.claim(number, with_grad, grads)
        else:
            slices = self.layout.slices[self.rank]
            pieces = [(b, slices[b].offset, slices[b].nbytes) for b in with_grad if b in slices and slices[b].nbytes]
            if self.layout.tap != "step":
                update.shards = [Shard(*piece, number, 0) for piece in pieces]
        self._stage(number, step, tuple(pieces), dict(zip(with_grad, grads, strict=True)))

    def _note_kept(self, with_grad: list[int]) -> None:
        """Are gradients zeroed in place? Then a new process must find zeros there, not None."""
        if known := [b for b in with_grad if b in self._last_grads]:
            self.keeps_grads = any(self._last_grads[b][0]() is self.shadowed.params[b].grad for b in known)

    def new_grads(self) -> list[torch.Tensor]:
        """Gradients to which something was added since the last step was closed, or that are new."""
        grads = [(block, p.grad) for block, p in self.shadowed.params.items() if p.grad is not None]
        known = self._last_grads
        return [g for b, g in grads if b not in known or known[b][0]() is not g or known[b][1] != g._version]

    def kept_names(self) -> list[str]:
        """FQNs of the parameters whose gradient lives on into the next step, if gradients did so far."""
        kept = [block for block, param in self.shadowed.params.items() if param.grad is not None]
        return [self._fqn(block) for block in kept] if self.keeps_grads else []

    def _members(self, index: int) -> list[list[int]]:
        """Blocks of each of an optimizer's groups. They change so rarely that they are looked up only if they did."""
        optimizer = self.shadowed.optimizers[index]
        ids = [list(map(id, group["params"])) for group in optimizer.param_groups]
        if ids != self._ids[index]:
            self._ids[index], self._blocks[index] = ids, self.shadowed.members(optimizer)
            lead = self.layout.lead
            self._led[index] = [[b for b in group if lead(b) == self.rank] for group in self._blocks[index]]
            for block in (b for group in self._blocks[index] for b in group if self._optimizer_of[b] != index):
                self._optimizer_of[block] = index
                self.watch.adopt(block, optimizer)
        return self._blocks[index]

    def _gradient(self, block: int) -> torch.Tensor:
        param = self.shadowed.params[block]
        grad = param.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise Unsupported(f"the gradient of {self._fqn(block)} is sparse; use dense gradients (sparse=False)")
        if grad.dtype != param.dtype:
            raise Unsupported(
                f"the gradient of {self._fqn(block)} is {grad.dtype}, its parameter {param.dtype}; let them agree"
            )
        return grad.detach() if grad.requires_grad else grad

    def _fqn(self, block: int) -> str:
        return self.layout.blocks[block].fqn

    def _digest_gradients(self, number: int, blocks: list[int], grads: list[torch.Tensor], step: int) -> None:
        """All of the very first update, one block per step after: replicas must hold the same."""
        if number or not blocks:
            return
        if not self._checked_gradients:
            self._checked_gradients = True
            self.first_gradients = {b: xxh3(host_bytes(g)) for b, g in zip(blocks, grads, strict=True)}
            return
        small = [(b, g) for b, g in zip(blocks, grads, strict=True) if g.numel() * g.element_size() <= AUDIT_BYTES]
        if small and grads[0].device.type == "cpu":
            block, grad = small[step % len(small)]
            self._gradients.append(Digest(block, "grad", 0, grad.numel() * grad.element_size(), xxh3(host_bytes(grad))))

    first_gradients: dict[int, int] | None = None  #: digests of the first update, until they are compared

    def _stage(
        self, number: int, step: int, pieces: tuple[tuple[int, int, int], ...], grads: dict[int, torch.Tensor]
    ) -> None:
        """Copy these pieces of gradients (block, offset, bytes), to be sent."""
        if not pieces:
            return
        nbytes = sum(aligned(nbytes) for _, _, nbytes in pieces)
        if (buffer := self._take(nbytes)) is None:
            self.gap = True
            return
        targets, memory = buffer.views(pieces, lambda tensor: self._views(tensor, buffer, pieces))
        ready = copy_to_host(targets, [part_of(grads[block], offset, nbytes) for block, offset, nbytes in pieces])
        self._put(Batch(step, self.epoch, number, pieces=memory, buffers=[buffer], ready=ready))

    def _take(self, nbytes: int) -> Buffer | None:
        buffer = self.pool.take(nbytes)
        while buffer is None and self.on_full(nbytes):
            buffer = self.pool.take(nbytes)
        return buffer

    def _views(
        self, memory: torch.Tensor, buffer: Buffer, wanted: tuple[tuple[int, int, int], ...]
    ) -> tuple[list[torch.Tensor], list[tuple[int, int, memoryview]]]:
        """Where each piece goes in a buffer: as tensors to copy into, as bytes to send from."""
        targets, pieces, at = [], [], 0
        for block, offset, nbytes in wanted:
            param = self.shadowed.params[block]
            view = memory[at : at + nbytes].view(param.dtype)
            targets.append(view.view(param.shape) if nbytes == self.layout.blocks[block].nbytes else view)
            pieces.append((block, offset, buffer.memory[at : at + nbytes]))
            at += aligned(nbytes)
        return targets, pieces

    def _put(self, batch: Batch) -> None:
        if self.link is not None:
            self.link.put(batch)
        else:
            batch.free(self.pool)

    def after(self, index: int) -> None:
        """The optimizer has stepped: what it changed is what replay will change."""
        if not self.gap:
            self.watch.mark(b for group in self._members(index) for b in group)

    # ------------------------------------------------------------ the end of a step

    def close(self, step: int) -> None:
        """Everything so far belongs to `step`: queue its part, and what is anchored with it."""
        self._closing = first = self._closing or step
        if self.link is not None and self.link.backlog > MAX_BACKLOG:
            self.end_epoch(f"the shadow does not keep up, and {MAX_BACKLOG:,} batches wait for it")
        if not self.gap:
            outside = self.watch.changed()
            if outside and not self.updates and not self._warned:
                self._warned = True
                log.warning(
                    "checkmate: step %d has changed parameters (%s) without a step of an attached optimizer; if another"
                    " one trains them, close() and attach() that", step, self._fqn(min(outside)),
                )  # fmt: skip
            changed = self._dirty | outside
            if changed:
                self.watch.mark_all()
            counts = self._counts(step)
            chosen = self._choose_anchors(counts, changed)
            anchored = self._stage_anchors(chosen)
            self.gap = anchored is None or not self._put_part(step, *anchored)
            if not self.gap:
                self._unanchored = [b for b in self._unanchored if b not in set(chosen)]
                self._settled |= counts
                if not self._settled:
                    self._forget_sent()
        if self.mirror is not None:
            self.mirror.end_step(keep=False)
        if self.gap and not self._gap_told:
            self._gap_told = True
            self.gaps += 1
            part = messages.encode(Part(self.rank, first, self.epoch, gap=True))
            self._put(Batch(first, self.epoch, part=part, gap=True))
        self.updates = self._closing = 0
        self._updates, self._gradients, self._dirty = [], [], set()
        grads = ((block, param.grad) for block, param in self.shadowed.params.items())
        self._last_grads = {b: (weakref.ref(grad), grad._version) for b, grad in grads if grad is not None}

    def close_first(self, step: int) -> None:
        """Step 0 of a run that the shadow does not know: every block that this rank owns, straight from its memory.

        The tensors must not change until the step is stable; `restore` waits for that.
        """
        anchors, pieces = [], []
        for block in self._mine:
            anchor, tensors = self._anchor(block)
            anchors.append(anchor)
            pieces += [(block, entry, host_bytes(tensor)) for entry, tensor in enumerate(tensors)]
        self.all_anchored()
        self._put(Batch(step, self.epoch, part=self._part(step, anchors), anchors=pieces))

    def _put_part(
        self,
        step: int,
        anchors: list[Anchor],
        pieces: list[tuple[int, int, memoryview]],
        buffers: list[Buffer],
    ) -> bool:
        """Queue the open step's part with what is anchored. False, with its buffers given back, if there is no room."""
        part, kept = self._part(step, anchors), list[Kept]()
        # As with anchors: whatever its sidecars take, two such steps must fit.
        need = 2 * (self._step_bytes + len(part)) + sum(map(len, buffers))
        self.pool.limit_bytes = max(self.pool.limit_bytes, need)
        room = self.pool.charge(len(part))
        while not room and self.on_full(len(part)):
            room = self.pool.charge(len(part))
        if not room:
            for buffer in buffers:
                self.pool.give(buffer)
            return False
        if self.mirror is not None:
            kept, memory = self.mirror.end_step(keep=True)
            buffers = buffers + memory
        batch = Batch(step, self.epoch, part=part, anchors=pieces, buffers=buffers, charged=len(part), kept=kept)
        self._put(batch)
        return True

    def _part(self, step: int, anchors: list[Anchor]) -> bytes:
        optimizers = self.shadowed.optimizers
        groups = [hyper_parameters(o) for o in optimizers] if self.lead else None
        for index in range(len(optimizers)):
            self._members(index)
        members = list(self._led) if self.lead else None
        part = Part(
            self.rank, step, self.epoch,
            updates=self._updates,
            anchors=anchors,
            audits=self._audit(),
            gradients=self._gradients,
            groups=groups if groups != self._sent_groups else None,
            members=members if members != self._sent_part_members else None,
            sidecar=self.sidecars.take(),
        )  # fmt: skip
        self._sent_groups, self._sent_part_members = groups, members
        return messages.encode(part)

    def _counts(self, step: int) -> bool:
        """Is it known that this step is part of the epoch? Ranks begin at different steps, and the last decides."""
        if self.link is None:
            return False
        epoch, first = self.link.anchoring
        return epoch == self.epoch and step >= first

    def _choose_anchors(self, counts: bool, changed: set[int]) -> list[int]:
        """Own blocks to send whole at the end of this step: those that must, then some that the shadow lacks."""
        must = changed if self.link is None else changed | self.link.take_reanchor()
        budget = ANCHOR_BYTES_PER_STEP
        lacking = set(self._unanchored)
        chosen = [b for b in self._mine if b in must and b not in lacking]
        for block in self._unanchored if counts else []:
            budget -= self.layout.blocks[block].nbytes
            if budget < 0 and chosen and not self.at_once:
                break
            chosen.append(block)
        return chosen

    def _anchor(self, block: int) -> tuple[Anchor, list[torch.Tensor]]:
        """A block's state as it is now: the parameter and what its optimizer keeps, never creating any."""
        param = self.shadowed.params[block]
        index = self._optimizer_of[block]
        tensors, rest = {"": param.detach()}, {}
        if index >= 0 and param in (state := self.shadowed.optimizers[index].state):
            for key, value in state[param].items():
                if isinstance(value, torch.Tensor):
                    tensors[key] = value.detach()
                else:
                    rest[key] = value
        entries = [
            Entry(key, dtype_name(t.dtype), list(t.shape), t.numel() * t.element_size()) for key, t in tensors.items()
        ]
        return Anchor(block, index, entries, values.dumps(rest)), list(tensors.values())

    def _stage_anchors(
        self, blocks: list[int]
    ) -> tuple[list[Anchor], list[tuple[int, int, memoryview]], list[Buffer]] | None:
        """Copies of these blocks' state; None if there is no room for them."""
        anchors, pieces = [], []
        buffers: list[Buffer] = []
        found = [self._anchor(block) for block in blocks]
        # However little the user allows, they must fit beside two steps: else the shadow would never be whole again.
        need = sum(aligned(entry.nbytes) for anchor, _ in found for entry in anchor.entries)
        self.pool.limit_bytes = max(self.pool.limit_bytes, 2 * self._step_bytes + need)
        for block, (anchor, tensors) in zip(blocks, found, strict=True):
            buffer = self._take(sum(aligned(entry.nbytes) for entry in anchor.entries))
            if buffer is None:
                for taken in buffers:
                    self.pool.give(taken)
                return None
            buffers.append(buffer)
            at = 0
            for number, (entry, tensor) in enumerate(zip(anchor.entries, tensors, strict=True)):
                memory = buffer.memory[at : at + entry.nbytes]
                memory[:] = host_bytes(tensor)
                pieces.append((block, number, memory))
                at += aligned(entry.nbytes)
            anchors.append(anchor)
        return anchors, pieces, buffers

    def _audit(self) -> list[Digest]:
        """One window of this rank's parameters or optimizer state, in rotation."""
        if self._unanchored or not self._here or self.shadowed.params[self._here[0]].device.type != "cpu":
            return []
        block = self._here[self._audit_block % len(self._here)]
        anchor, tensors = self._anchor(block)
        if self._audit_entry >= len(tensors):  # the optimizer has dropped some of its state
            self._audit_entry = self._audit_offset = 0
        entry = self._audit_entry
        memory = host_bytes(tensors[entry]) if tensors[entry].is_contiguous() else memoryview(b"")
        window = memory[self._audit_offset : self._audit_offset + AUDIT_BYTES]
        found = Digest(block, anchor.entries[entry].key, self._audit_offset, len(window), xxh3(window))
        self._audit_offset += AUDIT_BYTES
        if self._audit_offset >= len(memory):
            self._audit_offset = 0
            self._audit_entry += 1
        if self._audit_entry >= len(tensors):
            self._audit_entry = 0
            self._audit_block += 1
        return [found] if len(window) else []

    def digests(self) -> list[Digest]:
        """Every parameter and state tensor of this rank, whole, as they are now."""
        found = []
        for block in self._here:
            anchor, tensors = self._anchor(block)
            for entry, tensor in zip(anchor.entries, tensors, strict=True):
                found.append(Digest(block, entry.key, 0, entry.nbytes, xxh3(host_bytes(tensor))))
        return found


def copy_to_host(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], None] | None:
    """Copy, or begin to: what it returns waits until all is there; None: it is."""
    if sources[0].device.type == "cuda":
        return _copy_from_device(targets, sources)
    torch._foreach_copy_(targets, sources)
    return None


def _copy_from_device(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Callable[[], None]:
    """Copy into page-locked memory on a side stream. The device waits with what it does next, the host does not."""
    device = sources[0].device
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
            source.record_stream(stream)
        done = torch.cuda.Event()
        done.record(stream)
    # The optimizer or the user may write into the gradient next (unscaling, zeroing in place).
    torch.cuda.current_stream(device).wait_event(done)
    return done.synchronize


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
