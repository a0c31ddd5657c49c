"""A worker in the lab: training loops whose gradients an emulated accelerator has ready at their times."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import checkmate

from ...lab.job import MASTER_PORT
from ...lab.plan import DATA
from ...recovery import Reader
from ...tensors import bytes_of
from ...trainer.mirror import collective_alone
from ...trainer.multicast import Group
from ...wire.datagrams import GROUPS
from ..common import TIMEOUT_S, BenchmarkFailed
from ..overhead import AdamW

OnLag = Literal["degrade", "block"]
Tap = Literal["mirror", "multicast"]
#: The largest parameter of a model.
BLOCK_BYTES = 4 << 20
#: A shadow may lag by so many steps before any is given up, each with its part.
STAGED_STEPS, STAGED_PARTS_BYTES = 16, 1 << 20
#: Of a model that is smaller.
BLOCKS = 4


class _Ready(torch.autograd.Function):
    """A gradient that is there at a certain time, and no matter what came before: times the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, before: torch.Tensor, _: torch.Tensor, gradient: torch.Tensor, due: float) -> torch.Tensor:
        ctx.gradient, ctx.due = gradient, due
        return before.clone()

    @staticmethod
    def backward(ctx: Any, incoming: torch.Tensor) -> Any:
        time.sleep(max(0.0, ctx.due - time.perf_counter()))
        return incoming, ctx.gradient * incoming, None, None


class Emulated(torch.nn.Module):
    """Parameters of `nbytes` in all. A third of `compute_s` passes in forward, the rest in backward."""

    def __init__(self, nbytes: int, compute_s: float) -> None:
        super().__init__()
        count = max(BLOCKS, -(-nbytes // BLOCK_BYTES))
        sizes = [nbytes // 4 // count] * (count - 1)
        sizes.append(nbytes // 4 - sum(sizes))
        self.blocks = torch.nn.ParameterList(torch.full((size,), 0.5) for size in sizes)
        self._compute_s = compute_s
        made = torch.Generator().manual_seed(dist.get_rank())
        self._gradients = [torch.randn(size, generator=made).mul_(0.01) for size in sizes]

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        began, count = time.perf_counter(), len(self._gradients)
        time.sleep(self._compute_s / 3)
        for number, (param, gradient) in enumerate(zip(self.blocks, self._gradients, strict=True)):
            due = began + self._compute_s * (1 + 2 * (count - number) / count) / 3
            loss = _Ready.apply(loss, param, gradient, due)  # type: ignore[no-untyped-call]
        return loss


@dataclass
class Taken:
    """What one rank measured over consecutive steps."""

    times_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    tagged_bytes: int = 0
    repaired_bytes: int = 0
    sent_bytes: int = 0  #: to the shadow: parts, and repairs
    resent_bytes: int = 0  #: to peers that have missed them, by multicast


class Loop:
    """A training loop with our collective, attached to a shadow or not. Making one is a collective."""

    def __init__(
        self, nbytes: int, tap: Tap, compute_s: float, address: str | None, run: str, on_lag: OnLag, lr: float
    ) -> None:  # fmt: skip
        self.ddp = DistributedDataParallel(Emulated(nbytes, compute_s), gradient_as_bucket_view=True)
        params = list(self.ddp.parameters())
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(params, lr=lr, momentum=0.9) if lr else AdamW(params, lr=0.0)
        )
        self.checkpointer = None
        self._numbers = 0
        if address is None:  # our collective, and nobody who is told of it
            group = Group(GROUPS, run, 1) if tap == "multicast" else None
            self._mirror = collective_alone(self.ddp, self.optimizer, DATA[0], group)
        else:
            self.checkpointer = checkmate.attach(
                self.ddp, self.optimizer, shadow=address, run=run, tap=tap, interface=DATA[0], on_lag=on_lag,
                staging_bytes=STAGED_STEPS * (nbytes // dist.get_world_size() + STAGED_PARTS_BYTES),
            )  # fmt: skip
            assert self.checkpointer._mirror is not None
            self._mirror = self.checkpointer._mirror
            self.checkpointer.restore()

    def step(self) -> None:
        self._numbers += 1
        loss = self.ddp(torch.zeros((), requires_grad=True))
        loss.backward(torch.tensor(1.0 + self._numbers % 7))  # another gradient in each step
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.checkpointer is not None:
            self.checkpointer.step()

    def stats(self) -> dict[str, Any]:
        collective = self._mirror.collective
        gather = collective._multicast
        stats = {"bytes_tagged": collective.bytes_tagged, "bytes_repaired": 0, "bytes_sent": 0}
        stats |= {} if self.checkpointer is None else self.checkpointer.stats()
        return {**stats, "bytes_resent": 0 if gather is None else gather.sender.resent_bytes}

    def close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()
        self._mirror.collective.close()


class Rank:
    """One worker process. Loops have names; all ranks make, run and drop them in the same order."""

    def __init__(self, rank: int, world: int, master: str) -> None:
        join(rank, world, master)
        self._loops: dict[str, Loop] = {}

    def make(
        self, name: str, nbytes: int, tap: Tap, compute_s: float = 0.0, address: str | None = None,
        on_lag: OnLag = "block", lr: float = 1e-3,
    ) -> None:  # fmt: skip
        """Without compute the shadow would fall behind for good, were it not waited for.

        Without a learning rate the optimizer is emulated as well.
        """
        self._loops[name] = Loop(nbytes, tap, compute_s, address, run_of(name, nbytes), on_lag, lr)
        self.steps(name, 2)  # DDP lays out its buckets anew after the first

    def drop(self) -> None:
        for loop in self._loops.values():
            loop.close()
        dist.barrier()
        self._loops.clear()

    def steps(self, name: str, count: int, wait: bool = True) -> Taken:
        """Returns when all of them are safe, if it is to `wait`."""
        loop, taken = self._loops[name], Taken()
        before, cpu = loop.stats(), _cpu_s()
        for _ in range(count):
            began = time.perf_counter()
            loop.step()
            taken.times_s.append(time.perf_counter() - began)
        if loop.checkpointer is not None and wait:
            loop.checkpointer.wait(timeout=TIMEOUT_S)
        taken.cpu_s = _cpu_s() - cpu
        stats = loop.stats()
        taken.tagged_bytes = stats["bytes_tagged"] - before["bytes_tagged"]
        taken.repaired_bytes = stats["bytes_repaired"] - before["bytes_repaired"]
        taken.sent_bytes = stats["bytes_sent"] - before["bytes_sent"]
        taken.resent_bytes = stats["bytes_resent"] - before["bytes_resent"]
        if loop.checkpointer is not None and (stats["gaps"] or stats["differences"] or stats["fallbacks"]):
            raise BenchmarkFailed(f"the shadow does not hold what the workers have: {stats}")
        return taken

    def gloo(self, nbytes: int, count: int) -> None:
        """So many of torch's own all-reduces."""
        memory = torch.zeros(nbytes // 4)
        for _ in range(count):
            dist.all_reduce(memory)

    def check(self, name: str) -> tuple[int, list[str]]:
        """Compare all tensors with those of the shadow, by an audit and byte by byte: how many, and which differ."""
        loop = self._loops[name]
        checkpointer = loop.checkpointer
        assert checkpointer is not None
        audit = checkpointer.audit(timeout=TIMEOUT_S)
        names = dict(loop.ddp.module.named_parameters())
        compared, differing = 0, list(audit["differing"])
        with Reader(checkpointer._address, checkpointer._run, timeout_s=TIMEOUT_S) as reader:
            if reader.leased.step != checkpointer.stats()["step"]:
                raise BenchmarkFailed(f"the shadow holds step {reader.leased.step}: {checkpointer.stats()}")
            for block, held in enumerate(reader.leased.held):
                ours = names[held.block.fqn]
                for entry, told in enumerate(held.entries):
                    tensor = ours.detach() if not told.key else loop.optimizer.state[ours][told.key]
                    theirs = torch.empty_like(tensor)
                    reader.read([(block, entry, 0, bytes_of(theirs))])
                    compared += 1
                    if bytes(bytes_of(theirs)) != bytes(bytes_of(tensor)):
                        differing.append(f"{held.block.fqn} {told.key}")
        return compared, differing


def join(rank: int, world: int, master: str) -> None:
    """Make the process group, on the data network."""
    os.environ["GLOO_SOCKET_IFNAME"] = DATA[0]
    dist.init_process_group("gloo", init_method=f"tcp://{master}:{MASTER_PORT}", rank=rank, world_size=world)


def run_of(name: str, nbytes: int) -> str:
    return f"bench-{name}-{nbytes}"


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
