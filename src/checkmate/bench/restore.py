"""``checkmate bench restore``: how fast a whole state comes back from a shadow, into one rank and into two.

A trainer of a GPT takes one step with AdamW, so the shadow holds parameters and both moments: three times the
parameters. Then new processes build their model and optimizer and call ``restore()``: they agree with the shadow and
each other on a step, fetch all of it, install it, and connect for the steps to come. Every rank fetches all. Before
that, in the same processes, raw TCP delivers as many bytes to as many ranks at once, from one process with a thread per
connection. Their memory is as a restart has it: mapped for the parameters, which the model has, new for the moments;
for to map new memory takes about as long as to fill it. Raw TCP without that is shown too. No process is pinned, for
nothing else runs in a restart. After each restore every tensor is compared with the trainer's, by checksum.
"""

from __future__ import annotations

import os
import tempfile
import time

import torch
import torch.distributed as dist
from xxhash import xxh3_64_intdigest as xxh3

import checkmate

from ..tensors import bytes_of
from .common import TIMEOUT_S, BenchmarkFailed, Crew, Figure, Outcome, at_most, everywhere, median, shadow_on
from .limits import RawSender, gpt, raw_receive, warmed

#: What is asked of the ratio between a restore and raw TCP.
TARGET = 1.5
RUN = "restore"
#: Tensors of the state, each as large as the parameters: they themselves, and AdamW's two moments.
TENSORS = 3


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """A checksum for each tensor of the state."""
    params = list(model.parameters())
    moments = [optimizer.state[p][key] for p in params for key in ("step", "exp_avg", "exp_avg_sq")]
    return [xxh3(bytes_of(tensor)) for tensor in [*params, *moments]]


class Trainer:
    """Gives the shadow a state to restore; sends raw bytes too."""

    def __init__(self, parameters: int, address: str) -> None:
        model = gpt(parameters)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with checkmate.attach(model, optimizer, shadow=address, run=RUN) as checkpointer:
            checkpointer.restore()
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step()
            checkpointer.step()
            checkpointer.wait(timeout=TIMEOUT_S)
        self._digests = digests(model, optimizer)
        self._state_bytes = TENSORS * 4 * sum(p.numel() for p in model.parameters())
        self._raw = RawSender()

    def facts(self) -> tuple[str, int, list[int]]:
        """Where raw bytes come from, how many the state has, and its checksums."""
        return self._raw.address, self._state_bytes, self._digests

    def prepare_raw(self) -> None:
        self._memory = warmed(self._state_bytes)

    def send_raw(self, num_receivers: int) -> None:
        self._raw.send(self._memory, num_receivers, 1)


class Rank:
    """A worker that has just started."""

    def __init__(self, rank: int, world_size: int, store: str, parameters: int, address: str) -> None:
        if world_size > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        self._parameters, self._address = parameters, address

    def receive_raw(self, address: str, nbytes: int, mapped_bytes: int) -> float:
        """Seconds in which raw TCP fills so much memory, of which so much is mapped."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        memory[:mapped_bytes].zero_()
        self._together()
        began = time.perf_counter()
        raw_receive(address, bytes_of(memory), 1)
        return time.perf_counter() - began

    def restore(self, expected: list[int]) -> float:
        """Seconds that ``restore()`` takes. Raises BenchmarkFailed if it brings back anything else."""
        model = gpt(self._parameters)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with checkmate.attach(model, optimizer, shadow=self._address, run=RUN) as checkpointer:
            self._together()
            began = time.perf_counter()
            checkpointer.restore(timeout=TIMEOUT_S)
            taken = time.perf_counter() - began
        if digests(model, optimizer) != expected:
            raise BenchmarkFailed("what was restored is not what was trained")
        return taken

    @staticmethod
    def _together() -> None:
        if dist.is_initialized():
            dist.barrier()


def measure(parameters: int, rounds: int) -> Outcome:
    """Run the benchmark: `rounds` times raw TCP and then a restore, into one rank and into two."""
    figures: list[Figure] = []
    with (
        shadow_on(everywhere()) as shadow,
        Crew(Trainer, [(parameters, shadow.address)], [everywhere()]) as trainer,
        tempfile.TemporaryDirectory(prefix="checkmate-bench-") as folder,
    ):
        ((raw_address, state_bytes, expected),) = trainer.call("facts")
        trainer.call("prepare_raw")
        figures.append(Figure("state", state_bytes / 1e6, "MB"))
        for num_ranks in (1, 2):
            raws: list[float] = []
            mapped: list[float] = []
            restores: list[float] = []
            for number in range(rounds):
                store = os.path.join(folder, f"{num_ranks}-{number}")
                arguments = [(rank, num_ranks, store, parameters, shadow.address) for rank in range(num_ranks)]
                with Crew(Rank, arguments, [everywhere()] * num_ranks) as ranks:
                    for mapped_bytes, times in ((state_bytes // TENSORS, raws), (state_bytes, mapped)):
                        trainer.tell("send_raw", num_ranks)
                        times.append(max(ranks.call("receive_raw", raw_address, state_bytes, mapped_bytes)))
                        trainer.hear()
                    restores.append(max(ranks.call("restore", expected)))
            figures += _figures(num_ranks, raws, mapped, restores)
    return Outcome("restore", __doc__ or "", figures)


def _figures(num_ranks: int, raws: list[float], mapped: list[float], restores: list[float]) -> list[Figure]:
    name = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    ratio = median([taken / limit for taken, limit in zip(restores, raws, strict=True)])
    return [
        Figure(f"{name}: raw TCP", median(raws), "s"),
        Figure(f"{name}: raw TCP, all memory mapped before", median(mapped), "s"),
        Figure(f"{name}: restore(), median", median(restores), "s"),
        Figure(f"{name}: restore(), longest", max(restores), "s"),
        at_most(f"{name}: restore by raw TCP", ratio, TARGET),
    ]
