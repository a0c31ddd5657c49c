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
from .model import Shadowed, describe, unwrap
from .multicast import Group, join_group
from .peers import connect_peers, group_timeout_s
from .shards import NO_BLOCK, Cut, Place, Plan
from .staging import Buffer, Kept, Pool, part_of

log = logging.getLogger("checkmate")

#: Packets whose gradients the network replicates: of the DSCP values that are left to local use (RFC 2474, pool 2).
DSCP = 43
#: Rounds and updates of one step that a header can tell apart. Whoever takes more gets by without the network.
_MOST = 65535


#: What the frames of a bucket are labelled with, and whether to keep what is sent. DDP keeps us, but not who knows it.
Where = weakref.WeakMethod[Callable[[], tuple[Label, bool]]]


class _Reduced(NamedTuple):
    """A bucket that was reduced in the open step, and what this rank keeps of it."""

    operation: Operation
    buffer: Buffer | None  #: None: there was no room to keep it
    frames: dict[int, list[Cut]]  #: of this rank's shard, by block

    def piece(self, block: int) -> Kept:
        frames, label, first = self.frames[block], self.operation.label, self.operation.first
        memory = self.operation.shard[frames[0].start - first : frames[-1].stop - first]
        return Kept(block, frames[0].offset, memory, label.update, label.round)


class Mirror:
    """See the module. Making one connects the ranks, a collective; nothing is changed in `ddp` before `install`."""

    def __init__(
        self, ddp: DistributedDataParallel, shadowed: Shadowed, layout: Layout, rank: int, pool: Pool, run: str,
        *, token: bytes | None, interface: str | None, dscp: int, multicast: Group | None = None,
    ) -> None:  # fmt: skip
        self._where: Where | None = None
        self.fallbacks = 0  #: pieces of gradients that went by the step tap
        # DDP refers to us where no garbage collector looks: what we refer to must not lead to it, as optimizers do.
        self._ddp = weakref.ref(ddp)
        self._number, self._layout, self._rank, self._pool = shadowed.number, layout, rank, pool
        self._spare = Pool(1 << 62)  #: memory for what is not kept
        self._round = 0  #: of the open step
        self._open: list[_Reduced] = []  #: buckets of the newest round
        self._newest: dict[int, _Reduced] = {}  #: by block, if it is laid out as its bucket is
        self._claimed: dict[int, _Reduced] = {}  #: by operation: what the open step's updates refer to
        self._used: dict[tuple[int, int, int], Kept] = {}
        self._factor = 1.0
        self._warned = False
        self._plans: dict[tuple[int, ...], tuple[Plan, dict[int, list[Cut]]]] = {}
        self._group = ddp.process_group
        self._group_rank = dist.get_rank(self._group)
        timeout_s = group_timeout_s(self._group)
        peers, tagged = connect_peers(self._group, interface, dscp if multicast is None else None)
        gather = None if multicast is None else join_group(self._group, multicast, interface, timeout_s)
        self.flow = tagged if gather is None else gather.flow
        self.collective = Collective(
            self._group_rank, peers, timeout_s,
            None if token is None else lambda incarnation: Seal(token, run, incarnation), rank, gather,
        )  # fmt: skip
        self._device: _Device | None = None
        weakref.finalize(self, self.collective.hang_up)

    def install(self, where: Where | None) -> None:
        """Become DDP's communication hook, for ever: it takes no second one. Once all ranks are connected."""
        self._where, ddp = where, self._ddp()
        assert ddp is not None
        if ddp._comm_hooks:  # ours, of a Checkpointer that is closed
            installed = ddp._comm_hooks[0][1]
            assert isinstance(installed, _Installed)
            installed.mirror.collective.hang_up()
            installed.mirror = self
        else:
            ddp.register_comm_hook(_Installed(self), _hook)

    @property
    def in_use(self) -> bool:
        return self._where is not None and self._where() is not None

    def let_go(self) -> None:
        """Nobody keeps steps any more; what DDP reduces goes on through our collective."""
        self._where = None
        self.end_step(keep=False)
        self._pool.clear()

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
        plan, frames = self._plan(bucket)
        start, stop = plan.bounds[self._group_rank]
        where = self._where() if self._where is not None else None
        label, keep = where() if where is not None else (UNLABELLED, False)
        if max(self._round, label.update) > _MOST:
            label, keep = UNLABELLED, False
        else:
            label = label._replace(round=self._round)
        kept = self._pool.take(stop - start) if keep else None
        spare = None if kept is not None else self._spare.take(stop - start)
        memory = (spare if kept is None else kept).memory  # type: ignore[union-attr]

        def reduced(operation: Operation) -> None:
            done = _Reduced(operation, kept, frames)
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
        self._open, self._newest = [], {}  # only the last round counts

    def _release(self, buckets: Sequence[_Reduced]) -> None:
        for reduced in buckets:
            if reduced.buffer is not None and id(reduced.operation) not in self._claimed:
                self._pool.give(reduced.buffer)

    def _plan(self, bucket: dist.GradBucket) -> tuple[Plan, dict[int, list[Cut]]]:
        """How this bucket is cut. DDP lays its buckets out anew once, after the first backward."""
        params = bucket.parameters()
        key = (bucket.index(), *map(id, params))
        if (found := self._plans.get(key)) is None:
            found = self._plans[key] = self._make_plan(bucket, params)
        return found

    def _make_plan(self, bucket: dist.GradBucket, params: Sequence[torch.Tensor]) -> tuple[Plan, dict[int, list[Cut]]]:
        buffer = bucket.buffer()
        size, base, at = buffer.element_size(), buffer.data_ptr(), 0
        places: list[Place] = []
        views = sorted(zip(bucket.gradients(), params, strict=True), key=lambda pair: pair[0].data_ptr())
        for view, param in ((view, param) for view, param in views if view.numel()):
            start = view.data_ptr() - base
            if start > at:
                places.append(Place(NO_BLOCK, at, start - at))
            # The views are contiguous whatever the parameter is, and the bucket then is in the parameter's order.
            same = param.is_contiguous() and view.dtype == param.dtype and param in self._number
            places.append(Place(self._number[param] if same else NO_BLOCK, start, view.numel() * size))  # type: ignore[index]
            at = start + view.numel() * size
        if (rest := buffer.numel() * size - at) > 0:
            places.append(Place(NO_BLOCK, at, rest))
        plan = Plan(buffer.numel() * size, dist.get_world_size(self._group), places)
        return plan, plan.frames(self._group_rank)

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
            elif frames := reduced.frames.get(block):
                offset, nbytes = frames[0].offset, frames[-1].stop - frames[0].start
                factor = self._factor_of(reduced, block, part_of(grad, offset, nbytes))
                if factor is None:
                    pieces.append((block, offset, nbytes))
                    if reduced.buffer is not None:  # else it is staging memory that was short
                        unexplained = block
                else:
                    piece = reduced.piece(block)
                    self._claimed[id(reduced.operation)] = reduced
                    self._used[block, piece.update, piece.round] = piece
                    shards.append(Shard(block, offset, nbytes, piece.update, piece.round, factor))
        shards += [Shard(block, offset, nbytes, number, 0) for block, offset, nbytes in pieces]
        self.fallbacks += len(pieces)
        if unexplained >= 0 and not self._warned:
            self._warned = True
            fqn = self._layout.blocks[unexplained].fqn
            log.warning(
                "checkmate: the optimizer uses another gradient of %s than the collective brought, or brought times a "
                "factor, or lays it out otherwise; such are sent to the shadow besides, as with tap='step' "
                "(stats()['fallbacks'] counts)", fqn,
            )  # fmt: skip
        return shards, pieces

    def _factor_of(self, reduced: _Reduced, block: int, used: torch.Tensor) -> float | None:
        """What `used`, this rank's part of the gradient, is a multiple of what was sent by; None: it is none."""
        frames, digests = reduced.frames[block], reduced.operation.digests
        if reduced.buffer is None or any(frame not in digests for frame in frames):  # of a collective that has failed
            return None
        memory, first = host_bytes(used), frames[0].start
        if all(xxh3(memory[frame.start - first : frame.stop - first]) == digests[frame] for frame in frames):
            return 1.0
        sent = torch.frombuffer(reduced.piece(block).memory, dtype=used.dtype)
        factor = find_factor(sent, torch.frombuffer(memory, dtype=used.dtype), self._factor)
        self._factor = self._factor if factor is None else factor
        return factor

    def end_step(self, keep: bool) -> tuple[list[Kept], list[Buffer]]:
        """The open step ends. What its updates refer to, for repairs, and its memory, which are the caller's now."""
        kept = list(self._used.values())
        claimed = [reduced.buffer for reduced in self._claimed.values() if reduced.buffer is not None]
        self._release(self._open)
        if not keep:
            for buffer in claimed:
                self._pool.give(buffer)
        self._round, self._open, self._newest, self._claimed, self._used = 0, [], {}, {}, {}
        return (kept, claimed) if keep else ([], [])


def collective_alone(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, interface: str | None = None,
    multicast: Group | None = None,
) -> Mirror:  # fmt: skip
    """Our collective as DDP's hook, and nobody who keeps what it brings: what the network tap is compared with.

    Gloo adds in another order, so a run with it would end with other bits. A collective.
    """
    shadowed = describe(ddp, unwrap(optimizer), "match", "mirror" if multicast is None else "multicast")
    layout, rank = Layout(shadowed.spec), dist.get_rank()
    mirror = Mirror(
        ddp, shadowed, layout, rank, Pool(0), "", token=None, interface=interface, dscp=DSCP, multicast=multicast
    )
    mirror.install(None)
    return mirror


def mirrorable(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The wrapper whose collective is to be ours; None where there is nobody to exchange gradients with.

    Raises Unsupported for one that has a collective of its own.
    """
    ddp, _ = find_ddp(model)
    if ddp is None or ddp.process_group.size() == 1:
        return None
    if getattr(ddp, "_use_python_reducer", False):
        raise Unsupported("DDP reduces under compiled autograd, which knows no buckets; use tap='step'")
    if any(ddp._build_params_for_reducer()[1]):
        raise Unsupported(
            "DDP expects sparse gradients, of which Checkmate knows none; use dense ones (nn.Embedding(sparse=False))"
        )
    if ddp._comm_hooks:
        hook, state, *_ = ddp._comm_hooks[0]
        if not isinstance(state, _Installed):
            raise Unsupported(
                f"DDP has a communication hook already ({hook.__qualname__}); the network tap is one: register none"
            )
        if state.mirror.in_use:
            raise UsageError("this DDP model is attached already; close() the other Checkpointer first")
    return ddp


def check_unwrapped(rank: int, replica_sets: Sequence[Sequence[int]]) -> None:
    """Raises Unsupported for a rank without DDP, if others hold the same parameters: who averages their gradients?"""
    if any(rank in ranks and len(ranks) > 1 for ranks in replica_sets):
        raise Unsupported(
            "the network tap is a communication hook of DistributedDataParallel: wrap the whole model in it"
        )


def check_replicas(group: Sequence[int], replicas: Sequence[int]) -> None:
    """Raises Unsupported if DDP averages over fewer ranks than hold these parameters."""
    if sorted(group) != sorted(replicas):
        raise Unsupported(
            f"DistributedDataParallel averages over ranks {sorted(group)}, but ranks {sorted(replicas)} hold the same "
            "parameters, and what averages over all of them the network does not show; use tap='step', or parameter "
            "names of their own for each group"
        )


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
            try:
                here.synchronize()
                operation = self._collective.begin(host, plan, shard, label)
            except Exception as error:  # or the backward would wait for ever
                done.set_exception(error)  # type: ignore[arg-type]
                return
            reduced(operation)
            operation.done.add_done_callback(back)

        self._queue.put(begin)
        return done

    def _work(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            self._queue.get()()
