"""Reading a run: a lease on one whole step, and a DCP ``StorageReader`` over it.

``dcp.load(state_dict, storage_reader=checkmate.ShadowReader("tcp://host:7070"))`` works for anyone, also while the run
trains. Keys are those that DCP gives a nested ``{"model": …, "optimizer": {"state": …, "param_groups": …}}``.
"""

from __future__ import annotations

import io
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)  # fmt: skip
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from . import values
from .errors import Mismatch, ProtocolError, Refused, StepNotFound, Unreachable
from .tensors import bytes_of, dtype_of
from .transport.base import Channel, call, greet, refused
from .transport.tcp import Address, connect, parse_address
from .wire import messages
from .wire.frames import MAX_PART_BYTES, Header, Kind, into_new_memory
from .wire.messages import Entry, Incarnation, Lease, Leased, Read, ReadSidecar, Sidecar

log = logging.getLogger("checkmate")

#: Whoever waits for an answer for longer is told so.
TELL_S = 3.0
#: Items asked for at a time: far below what one `Read` may hold, for a shard by columns is an item per row.
READ_ITEMS = 1 << 16


def open_channel(address: Address, role: str, token: bytes | None, timeout_s: float) -> Channel:
    """Connect and greet, trying again until `timeout_s` has passed. Raises Unreachable, or Refused at once."""
    began = time.monotonic()
    deadline, told = began + timeout_s, False
    while True:
        left = deadline - time.monotonic()
        try:
            patience = max(0.1, min(left, 5.0))
            channel = connect(address, patience)
            greet(channel, role, token, patience)
            return channel
        except ProtocolError as error:
            raise ProtocolError(f"{address} does not answer as a shadow does: {error}") from error
        except OSError as error:
            if time.monotonic() + 0.2 > deadline:
                raise Unreachable(f"{address} did not answer within {timeout_s:.3g} s: {error}") from error
            if not told and time.monotonic() - began > TELL_S:
                told = True
                log.warning("checkmate: no answer from %s (%s); trying for %.0f s more", address, error, left)
            time.sleep(0.2)


T = TypeVar("T")
Item = tuple[int, int, int, memoryview]  #: block, entry, offset in bytes, where the bytes go


class Reader:
    """One connection with one lease: the step does not change under it, whatever the run does."""

    def __init__(
        self,
        address: str | Address,
        run: str = "",
        step: int | None = None,
        *,
        token: bytes | None = None,
        timeout_s: float = 60.0,
    ):
        address = parse_address(address) if isinstance(address, str) and not isinstance(address, Address) else address
        assert isinstance(address, Address)
        self._timeout_s = timeout_s
        self._channel = open_channel(address, "reader", token, timeout_s)
        self._channel.limit_messages(MAX_PART_BYTES)
        try:
            self.leased = self._ask(Lease(run, step), Leased)
        except BaseException:
            self.close()
            raise
        self.place = {held.block.fqn: i for i, held in enumerate(self.leased.held)}

    def read(self, items: Iterable[Item]) -> None:
        """Fill each item's memory. Raises Unreachable if the shadow goes away or falls silent."""
        items = [item for item in items if len(item[3])]
        for first in range(0, len(items), READ_ITEMS):
            self._read(items[first : first + READ_ITEMS])

    def _read(self, items: list[Item]) -> None:
        progress = _Progress(items)
        self._channel.use_sink(progress.sink)
        try:
            self._channel.send(Read([(block, entry, offset, len(memory)) for block, entry, offset, memory in items]))
            while progress.left:
                frame = self._channel.receive()
                if frame is None:
                    raise ConnectionResetError("closed in the middle of a read")
                if frame.header.kind is Kind.CONTROL:
                    answer = messages.decode(frame.payload)
                    if isinstance(answer, messages.Refusal):
                        raise refused(answer)
                    raise ProtocolError(f"{type(answer).__name__} in answer to Read")
        except OSError as error:
            raise Unreachable(f"reading step {self.leased.step} from {self._channel.peer}: {error}") from error
        finally:
            self._channel.limit_messages(MAX_PART_BYTES)

    def _ask(self, request: messages.Control, expected: type[T]) -> T:
        try:
            answer = call(self._channel, request, self._timeout_s)
        except OSError as error:
            raise Unreachable(f"{self._channel.peer}: {error}") from error
        if not isinstance(answer, expected):
            raise ProtocolError(f"{type(answer).__name__} in answer to {type(request).__name__}")
        return answer

    def sidecar(self, rank: int) -> dict[str, bytes]:
        """Sidecar entries of a rank at the leased step, encoded."""
        return self._ask(ReadSidecar(rank), Sidecar).entries

    def groups(self) -> list[list[dict[str, Any]]]:
        """Per optimizer: its param groups at the leased step, each with the FQNs of its parameters as "params"."""
        found = []
        for optimizer in self.leased.optimizers:
            names = [[self.leased.held[b].block.fqn for b in group] for group in optimizer.members]
            groups = values.loads(optimizer.groups)
            found.append([{**group, "params": members} for group, members in zip(groups, names, strict=True)])
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """The models' buffers by FQN, each as the first rank that has it had it (which DDP gives to its replicas)."""
        found: dict[str, bytes] = {}
        for rank, names in sorted(self.leased.sidecars.items()):
            if any(name.startswith("buffer:") and name not in found for name in names):
                found = {**self.sidecar(rank), **found}
        return {n.removeprefix("buffer:"): values.loads(data) for n, data in found.items() if n.startswith("buffer:")}

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Progress:
    """Leads the STATE frames of one read to their places, and takes no other."""

    def __init__(self, items: list[Item]) -> None:
        self._items = deque(items)
        self._at = 0
        self.left = sum(len(item[3]) for item in items)

    def sink(self, header: Header) -> memoryview | None:
        if header.kind is Kind.CONTROL:
            return into_new_memory()(header)
        block, entry, offset, memory = self._items[0] if self._items else (-1, -1, -1, memoryview(b""))
        at = header.offset - offset
        ours = (header.kind, header.block, header.entry) == (Kind.STATE, block, entry)
        if not ours or at != self._at or at + header.length > len(memory):
            raise ProtocolError(f"{header} is not what was asked for")
        self._at += header.length
        self.left -= header.length
        if self._at == len(memory):
            self._items.popleft()
            self._at = 0
        return memory[at : at + header.length]


def empty(entry: Entry) -> torch.Tensor:
    """Uninitialised memory for one entry, on the CPU."""
    return torch.empty(entry.sizes, dtype=dtype_of(entry.dtype))


class ShadowReader(StorageReader):
    """Reads a run from its shadow into ``dcp.load``.

    Args:
        address: ``tcp://HOST:PORT`` of the shadow.
        run: name of the run; may be left out where the shadow holds only one.
        step: the step wanted; by default the newest whole one.
        token: as given to the shadow.
        timeout: seconds to wait for the shadow to be there, and for each of its answers.

    Raises Unreachable, Refused, StepNotFound, Mismatch.

    Ranks that load together read one step. Where training went on between their leases, they lease again the step that
    the coordinator then finds; StepNotFound says that training was faster than that too.
    """

    def __init__(
        self,
        address: str,
        run: str = "",
        step: int | None = None,
        *,
        token: str | bytes | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._arguments = (address, run, step)
        self._token = token.encode() if isinstance(token, str) else token
        self._timeout_s = timeout
        self._reader: Reader | None = None
        self._values: dict[str, Any] = {}
        self._where: dict[str, tuple[int, int]] = {}
        self._described: dict[str, Any] = {}  #: what the metadata last said of each key

    @property
    def reader(self) -> Reader:
        """The lease, taken at first use."""
        if self._reader is None:
            self._reader = self._lease(self._arguments[2])
        return self._reader

    def _lease(self, step: int | None) -> Reader:
        address, run, _ = self._arguments
        return Reader(address, run, step, token=self._token, timeout_s=self._timeout_s)

    def _lease_again(self, step: int | None) -> None:
        """Another lease in place of this one, under a plan that is made already. Raises Mismatch if that cannot be."""
        planned = self._described
        self.close()
        self._reader = self._lease(step)
        self.read_metadata()
        changed = [key for key, described in planned.items() if self._described.get(key) != described]
        if changed:
            raise Mismatch(
                f"the ranks leased different steps, and in step {self._reader.leased.step} {changed[0]} is not what it "
                f"was when the load was planned ({len(changed)} such keys); load again"
            )

    @property
    def _held(self) -> tuple[Incarnation, int]:
        """Which state this is: a restart of training may come to the same step with another one."""
        return self.reader.leased.incarnation, self.reader.leased.step

    def close(self) -> None:
        """Give the lease back: while it lasts, the shadow keeps a copy of what training changes. Idempotent."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __del__(self) -> None:
        self.close()

    # ------------------------------------------------------------ StorageReader

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return checkpoint_id is None or str(checkpoint_id).startswith("tcp://")

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None:
            self._arguments = (str(checkpoint_id), *self._arguments[1:])

    def read_metadata(self) -> Metadata:
        reader = self.reader
        self._values, self._where = {}, {}
        tensors: dict[str, Any] = {}
        flat, planner_data = flatten_state_dict(self._tree(reader))
        for key, leaf in flat.items():
            if isinstance(leaf, _Leaf):
                self._where[key] = (leaf.block, leaf.entry)
                entry = reader.leased.held[leaf.block].entries[leaf.entry]
                tensors[key] = _metadata(dtype_of(entry.dtype), entry.sizes)
            elif isinstance(leaf, torch.Tensor):
                self._values[key] = leaf
                tensors[key] = _metadata(leaf.dtype, leaf.shape)
            else:
                self._values[key] = leaf
                tensors[key] = BytesStorageMetadata()
        self._described = tensors
        return Metadata(tensors, planner_data=planner_data)

    @staticmethod
    def _tree(reader: Reader) -> dict[str, Any]:
        """The run as a nested state dict, with leaves in place of tensors."""
        model: dict[str, Any] = {}
        state: dict[str, Any] = {}
        for number, held in enumerate(reader.leased.held):
            model[held.block.fqn] = _Leaf(number, 0)
            entries: dict[str, Any] = {e.key: _Leaf(number, i) for i, e in enumerate(held.entries) if i}
            entries.update(values.loads(held.values))
            if entries:
                state[held.block.fqn] = entries
        model.update({alias: model[fqn] for alias, fqn in reader.leased.aliases.items()})
        model.update(reader.buffers())
        groups = [group for optimizer in reader.groups() for group in optimizer]
        return {
            "model": model,
            "optimizer": {"state": state, "param_groups": groups},
            "step": reader.leased.step,
        }

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._held)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """One step for all: what they hold, or what the coordinator, who is called, leases now that all are ready."""
        if any(plan.storage_data != self._held for plan in plans):
            self._lease_again(self._arguments[2])
        return [replace(plan, storage_data=self._held) for plan in plans]

    def _follow(self, wanted: tuple[Incarnation, int]) -> None:
        """Hold what the coordinator holds."""
        had, step = self._held[1], wanted[1]
        why = ""
        try:
            self._lease_again(step)
            if self._held != wanted:
                why = f"step {step} is by now that of attempt {self._held[0]}, and was that of {wanted[0]}"
        except Refused as error:
            if error.kind != "missing":
                raise
            why = str(error)
        if why:
            self.close()  # of use to nobody, and the shadow copies for it
            raise StepNotFound(
                f"this rank leased step {had} and the coordinator step {step}, which training has left before this "
                f"rank could lease it too ({why}); load again, or while training stands, or from what "
                "`checkmate export` writes"
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if plan.storage_data is not None and plan.storage_data != self._held:
            self._follow(plan.storage_data)
        items: list[Item] = []
        indirect: list[tuple[torch.Tensor, torch.Tensor]] = []
        for request in plan.items:
            if request.type is LoadItemType.BYTE_IO:
                buffer = io.BytesIO()
                torch.save(
                    self._values[request.storage_index.fqn], buffer
                )  # made here, of decoded values: DCP unpickles it
                buffer.seek(0)
                planner.load_bytes(request, buffer)
                continue
            target = planner.resolve_tensor(request).detach()
            if (known := self._values.get(request.storage_index.fqn)) is not None:
                box = [slice(o, o + n) for o, n in zip(request.storage_offsets, request.lengths, strict=True)]
                target.copy_(known[tuple(box)])
            else:
                items += self._items(request, target, indirect)
            planner.commit_tensor(request, target)
        self.reader.read(items)
        for target, plain in indirect:
            target.copy_(plain)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _items(
        self, request: Any, target: torch.Tensor, indirect: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[Item]:
        """What to read for one request: rows that are contiguous in the shadow, into the target or a plain copy."""
        block, entry = self._where[request.storage_index.fqn]
        described = self.reader.leased.held[block].entries[entry]
        plain = target
        if target.device.type != "cpu" or not target.is_contiguous() or target.dtype != dtype_of(described.dtype):
            plain = torch.empty(target.shape, dtype=dtype_of(described.dtype))
            indirect.append((target, plain))
        memory = bytes_of(plain)
        size = plain.element_size()
        return [
            (block, entry, source * size, memory[at * size : (at + count) * size])
            for source, at, count in runs(described.sizes, list(request.storage_offsets), list(request.lengths))
        ]


def runs(sizes: list[int], offsets: list[int], lengths: list[int]) -> Iterable[tuple[int, int, int]]:
    """Contiguous element runs of a box in a row-major tensor: (start in the tensor, start in the box, count)."""
    if any(length == 0 for length in lengths):
        return
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 2, -1, -1):
        strides[i] = strides[i + 1] * sizes[i + 1]
    inner = len(sizes)
    while inner > 0 and lengths[inner - 1] == sizes[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # dimensions before this one are walked; from it on, the box is one run
    count = 1
    for length in lengths[outer:]:
        count *= length
    index = [0] * outer
    at = 0
    while True:
        start = sum((o + i) * s for o, i, s in zip(offsets, index, strides, strict=False))
        start += sum(o * s for o, s in zip(offsets[outer:], strides[outer:], strict=True))
        yield start, at, count
        at += count
        for d in range(outer - 1, -1, -1):
            index[d] += 1
            if index[d] < lengths[d]:
                break
            index[d] = 0
        else:
            return


class _Leaf:
    """Stands for a tensor in the tree."""

    def __init__(self, block: int, entry: int) -> None:
        self.block, self.entry = block, entry


def _metadata(dtype: torch.dtype, sizes: Sequence[int]) -> TensorStorageMetadata:
    size = torch.Size(sizes)
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype), size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
    )
