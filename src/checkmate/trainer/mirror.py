"""The network tap in the worker: DDP's gradients go through our collective, which the network shows to the shadow.

As DDP's communication hook it averages each bucket. What this rank has sent of it, tagged, is kept until the step is
safe. When the optimizer steps, each gradient is compared with what was sent: if it is that, or that times a factor, the
part says so, and nothing more is sent; if it is not, the bytes go by the step tap.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from xxhash import xxh3_64_intdigest as xxh3

from ..errors import Unsupported, UsageError
from ..layout import Layout
from ..tensors import host_bytes
from ..wire.messages import Shard
from ..wire.seal import Seal
from .buckets import find_ddp
from .collective import UNLABELLED, Collective, Label, Operation
from .factor import find_factor
from .model import Shadowed
from .peers import connect_peers, group_timeout_s
from .shards import NO_BLOCK, Cut, Place, Plan
from .staging import Buffer, Kept, Pool, part_of

log = logging.getLogger("checkmate")

#: Packets whose gradients the network replicates: of the DSCP values that are left to local use (RFC 2474, pool 2).
DSCP = 43
_MAX_ROUND = 65535


class _Reduced(NamedTuple):
    """A bucket that was reduced in the open step, and what this rank keeps of it."""

    operation: Operation
    buffer: Buffer | None  #: None: there was no room to keep it
    cuts: dict[int, tuple[Cut, int, tuple[int, ...]]]  #: by block: this rank's range, its first frame, frames' lengths

    def piece(self, block: int) -> Kept:
        cut, label = self.cuts[block][0], self.operation.label
        first = self.operation.first
        memory = self.operation.shard[cut.start - first : cut.stop - first]
        return Kept(block, cut.offset, memory, label.update, label.round)


class Mirror:
    """See the module. `where` says what the frames of a bucket are labelled with, and whether to keep what is sent."""

    def __init__(
        self, ddp: DistributedDataParallel, shadowed: Shadowed, layout: Layout, rank: int, pool: Pool, run: str,
        *, token: bytes | None, interface: str | None, dscp: int,
    ) -> None:  # fmt: skip
        self.where: Callable[[], tuple[Label, bool]] = lambda: (UNLABELLED, False)
        self.in_use: Callable[[], bool] = lambda: False  #: by a Checkpointer that is not closed
        self.fallbacks = 0  #: pieces of gradients that went by the step tap
        # DDP refers to us where no garbage collector looks: what we refer to must not lead to it, as optimizers do.
        self._ddp = weakref.ref(ddp)
        self._number, self._layout, self._rank, self._pool = shadowed.number, layout, rank, pool
        self._spare = Pool(1 << 62)  #: memory for what is not kept
        self._round = 0  #: of the open step
        self._open: list[_Reduced] = []  #: buckets of the newest round
        self._newest: dict[int, _Reduced | None] = {}  #: by block, None if it is laid out unlike its bucket
        self._claimed: dict[int, _Reduced] = {}  #: by operation: what the open step's updates refer to
        self._used: dict[tuple[int, int, int], Kept] = {}
        self._factor = 1.0
        self._warned = False
        self._plans: dict[tuple[int, ...], tuple[Plan, dict[int, tuple[Cut, int, tuple[int, ...]]]]] = {}
        self._group = ddp.process_group
        self._group_rank = dist.get_rank(self._group)
        peers, self.flow = connect_peers(self._group, interface, dscp)
        self.collective = Collective(
            self._group_rank, peers, group_timeout_s(self._group),
            None if token is None else lambda incarnation: Seal(token, run, incarnation), rank,
        )  # fmt: skip
        self._device: _Device | None = None
        weakref.finalize(self, self.collective.hang_up)
        if ddp._comm_hooks:  # ours, of a Checkpointer that is closed; DDP takes no second one
            installed = ddp._comm_hooks[0][1]
            assert isinstance(installed, _Installed)
            installed.mirror.collective.hang_up()
            installed.mirror = self
        else:
            ddp.register_comm_hook(_Installed(self), _hook)

    # ------------------------------------------------------------ in the backward

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the ranks of DDP's process group, in place."""
        if (ddp := self._ddp()) is not None and ddp._join_config.enable:
            raise Unsupported(
                "DDP's join(): a rank that has run out of data takes no steps, so there is no common step to keep; "
                "give every rank the same number of batches"
            )
        if bucket.index() == 0:
            self._begin_round()
        buffer = bucket.buffer()
        plan, cuts = self._plan(bucket)
        start, stop = plan.bounds[self._group_rank]
        label, keep = self.where()
        label = label._replace(round=min(self._round, _MAX_ROUND))
        kept = self._pool.take(stop - start) if keep and self._round <= _MAX_ROUND else None
        spare = None if kept is not None else self._spare.take(stop - start)
        memory = (spare if kept is None else kept).memory  # type: ignore[union-attr]

        def reduced(operation: Operation) -> None:
            done = _Reduced(operation, kept, cuts)
            self._open.append(done)
            for place in plan.places:
                if place.block != NO_BLOCK:
                    self._newest[place.block] = done
            if spare is not None:
                operation.done.add_done_callback(lambda _: self._spare.give(spare))

        if buffer.device.type == "cpu":
            operation = self.collective.begin(buffer, plan, memory, label)
            reduced(operation)
            return operation.done
        self._device = self._device or _Device(self.collective, buffer.device)
        return self._device.reduce(buffer, plan, memory, label, reduced)

    def _begin_round(self) -> None:
        self._round += 1
        # However little the user allows: two steps, and once more what no factor explains.
        mine = sum(len(reduced.operation.shard) for reduced in self._open)
        self._pool.limit_bytes = max(self._pool.limit_bytes, 3 * mine)
        self._release(self._open)
        self._open = []

    def _release(self, buckets: Sequence[_Reduced]) -> None:
        for reduced in buckets:
            if reduced.buffer is not None and id(reduced.operation) not in self._claimed:
                self._pool.give(reduced.buffer)

    def _plan(self, bucket: dist.GradBucket) -> tuple[Plan, dict[int, tuple[Cut, int, tuple[int, ...]]]]:
        """How this bucket is cut. DDP lays its buckets out anew once, after the first backward."""
        params = bucket.parameters()
        key = (bucket.index(), *map(id, params))
        if (found := self._plans.get(key)) is None:
            found = self._plans[key] = self._make_plan(bucket, params)
        return found

    def _make_plan(
        self, bucket: dist.GradBucket, params: Sequence[torch.Tensor]
    ) -> tuple[Plan, dict[int, tuple[Cut, int, tuple[int, ...]]]]:
        buffer = bucket.buffer()
        size, base, at = buffer.element_size(), buffer.data_ptr(), 0
        places: list[Place] = []
        views = sorted(zip(bucket.gradients(), params, strict=True), key=lambda pair: pair[0].data_ptr())
        for view, param in views:
            start = view.data_ptr() - base
            if start > at:
                places.append(Place(NO_BLOCK, at, start - at))
            same = view.is_contiguous() and view.dtype == param.dtype and param in self._number
            places.append(Place(self._number[param] if same else NO_BLOCK, start, view.numel() * size))  # type: ignore[index]
            at = start + view.numel() * size
        if (rest := buffer.numel() * size - at) > 0:
            places.append(Place(NO_BLOCK, at, rest))
        plan = Plan(buffer.numel() * size, dist.get_world_size(self._group), [p for p in places if p.nbytes])
        frames = [cut for chunk in plan.chunks[self._group_rank] for cut in chunk.frames]
        cuts = {}
        for cut in plan.slices(self._group_rank):
            mine = [i for i, frame in enumerate(frames) if frame.block == cut.block]
            cuts[cut.block] = (cut, mine[0], tuple(frames[i].stop - frames[i].start for i in mine))
        return plan, cuts

    # ------------------------------------------------------------ as the optimizer steps, and as the step ends

    def claim(
        self, number: int, blocks: Sequence[int], grads: Sequence[torch.Tensor]
    ) -> tuple[list[Shard], list[tuple[int, int, int]]]:
        """Where the shadow finds this rank's part of these gradients; and which pieces must be sent for this update.

        Those are block, offset and bytes. Every rank decides about its own shards.
        """
        shards: list[Shard] = []
        pieces: list[tuple[int, int, int]] = []
        unexplained = -1
        for block, grad in zip(blocks, grads, strict=True):
            reduced = self._newest.get(block)
            if reduced is None:
                if (mine := self._layout.slices[self._rank].get(block)) is not None and mine.nbytes:
                    pieces.append((block, mine.offset, mine.nbytes))
                    unexplained = block
            elif block in reduced.cuts:
                cut = reduced.cuts[block][0]
                nbytes = cut.stop - cut.start
                factor = self._factor_of(reduced, block, part_of(grad, cut.offset, nbytes))
                if factor is None:
                    pieces.append((block, cut.offset, nbytes))
                    if reduced.buffer is not None:  # else it is staging memory that was short
                        unexplained = block
                else:
                    piece = reduced.piece(block)
                    self._claimed[id(reduced.operation)] = reduced
                    self._used[block, piece.update, piece.round] = piece
                    shards.append(Shard(block, cut.offset, nbytes, piece.update, piece.round, factor))
        shards += [Shard(block, offset, nbytes, number, 0) for block, offset, nbytes in pieces]
        self.fallbacks += len(pieces)
        if unexplained >= 0 and not self._warned:
            self._warned = True
            fqn = self._layout.blocks[unexplained].fqn
            log.warning(
                "checkmate: the optimizer uses another gradient of %s than the collective brought, or brought times a "
                "factor; such are sent to the shadow besides, as with tap='step' (stats()['fallbacks'] counts)", fqn,
            )  # fmt: skip
        return shards, pieces

    def _factor_of(self, reduced: _Reduced, block: int, used: torch.Tensor) -> float | None:
        """What `used`, this rank's part of the gradient, is a multiple of what was sent by; None: it is none."""
        if reduced.buffer is None:
            return None
        _, first, lengths = reduced.cuts[block]
        memory, at = host_bytes(used), 0
        for digest, nbytes in zip(reduced.operation.digests[first:], lengths, strict=False):
            if xxh3(memory[at : at + nbytes]) != digest:
                break
            at += nbytes
        else:
            return 1.0
        sent = torch.frombuffer(reduced.piece(block).memory, dtype=used.dtype)
        factor = find_factor(sent, torch.frombuffer(memory, dtype=used.dtype), self._factor)
        self._factor = self._factor if factor is None else factor
        return factor

    def close(self, keep: bool) -> tuple[list[Kept], list[Buffer]]:
        """The open step ends. What its updates refer to, for repairs, and its memory, which are the caller's now."""
        kept = list(self._used.values())
        claimed = [reduced.buffer for reduced in self._claimed.values() if reduced.buffer is not None]
        self._release(self._open)
        if not keep:
            for buffer in claimed:
                self._pool.give(buffer)
        self._round, self._open, self._newest, self._claimed, self._used = 0, [], {}, {}, {}
        return (kept, claimed) if keep else ([], [])


def mirrorable(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The wrapper whose collective is to be ours; None where there is nobody to exchange gradients with.

    Raises Unsupported for one that has a collective of its own.
    """
    ddp, _ = find_ddp(model)
    if ddp is None or ddp.process_group.size() == 1:
        return None
    if ddp._comm_hooks:
        hook, state, *_ = ddp._comm_hooks[0]
        if not isinstance(state, _Installed):
            raise Unsupported(
                f"DDP has a communication hook already ({hook.__qualname__}); tap='mirror' is one itself: register none"
            )
        if state.mirror.in_use():
            raise UsageError("this DDP model is attached already; close() the other Checkpointer first")
    return ddp


def check_unwrapped(rank: int, replica_sets: Sequence[Sequence[int]]) -> None:
    """Raises Unsupported for a rank without DDP, if others hold the same parameters: who averages their gradients?"""
    if any(rank in ranks and len(ranks) > 1 for ranks in replica_sets):
        raise Unsupported("tap='mirror' is a communication hook of DistributedDataParallel: wrap the whole model in it")


class _Installed:
    """DDP's communication hook is for ever; whose it is may change."""

    sums_by_rank = True  #: so the order of DDP's buckets changes no bit

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror


def _hook(installed, bucket):  # type: ignore[no-untyped-def]  # DDP looks at the annotations, and knows no strings
    return installed.mirror.reduce(bucket)


class _Device:
    """Buckets on a GPU go through page-locked host memory, in order, without making the training thread wait."""

    def __init__(self, collective: Collective, device: torch.device) -> None:
        self._collective, self._device = collective, device
        self._stream = torch.cuda.Stream(device)
        self._host: dict[int, torch.Tensor] = {}
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="checkmate device", daemon=True).start()

    def reduce(
        self, bucket: torch.Tensor, plan: Plan, shard: memoryview, label: Label, reduced: Callable[[Operation], None]
    ) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self._device])
        host = self._host.get(bucket.data_ptr())
        if host is None or host.numel() != bucket.numel():
            host = self._host[bucket.data_ptr()] = torch.empty_like(bucket, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(bucket, non_blocking=True)
            here = torch.cuda.Event()
            here.record(self._stream)

        def back(finished: torch.futures.Future[torch.Tensor]) -> None:
            try:
                finished.value()
            except Exception as error:
                done.set_exception(error)  # type: ignore[arg-type]  # so says torch
                return
            with torch.cuda.stream(self._stream):
                bucket.copy_(host, non_blocking=True)
                done.set_result(bucket)  # those who wait for it wait for this stream

        def begin() -> None:
            here.synchronize()
            operation = self._collective.begin(host, plan, shard, label)
            reduced(operation)
            operation.done.add_done_callback(back)

        self._queue.put(begin)
        return done

    def _work(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            self._queue.get()()
