"""Restart: *prepare* (fence what is older, learn what can be reached), *choose* a step, *adopt* it.

Rank 0 talks to the shadow and tells the others. Whatever goes wrong on one rank is raised on all of them.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import CheckmateError, Mismatch, ProtocolError, Refused, StepNotFound, Unreachable
from ..layout import match_optimizers
from ..recovery import Reader, open_channel
from ..transport.base import Channel, call
from ..transport.tcp import Address
from ..wire.messages import LEASE_S, Adopt, Adopted, Attempt, Fingerprint, Incarnation, Leased, Prepare, Prepared, Spec

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def together(work: Callable[[], T]) -> T:
    """Do `work` on every rank; if it fails on any, raise on all. A collective."""
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # the user's too: the others must not wait for this rank
        error = caught
    _, world = rank_and_world()
    if world > 1:
        told: list[str | None] = [None] * world
        dist.all_gather_object(told, None if error is None else f"{type(error).__name__}: {error}")
        failed = [(r, text) for r, text in enumerate(told) if text is not None]
        if error is None and failed:
            raise CheckmateError(f"rank {failed[0][0]} failed: {failed[0][1]}")
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def on_all_ranks(value: T) -> list[T]:
    """This value of every rank. A collective."""
    _, world = rank_and_world()
    found = [value] * world
    if world > 1:
        dist.all_gather_object(found, value)
    return found


def from_rank_zero(work: Callable[[], T]) -> T:
    """Do `work` on rank 0 and give its result, or its error, to every rank. A collective."""
    rank, world = rank_and_world()
    outcome: list[Any] = [None, None]
    own: Exception | None = None
    if rank == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            own = error
            outcome[1] = error if isinstance(error, CheckmateError) else CheckmateError(f"rank 0 failed: {error!r}")
    if world > 1:
        dist.broadcast_object_list(outcome, src=0)
    if own is not None or outcome[1] is not None:
        raise own or outcome[1]
    return outcome[0]  # type: ignore[no-any-return]


def attempt() -> Attempt:
    """This training attempt, with what the launcher says of it."""
    env = os.environ
    job = env.get("TORCHELASTIC_RUN_ID", "")
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if job in ("", "none"):  # torchrun's default id is the same for every job
        job, restarts = env.get("SLURM_JOB_ID", ""), env.get("SLURM_RESTART_COUNT", "0")
    return Attempt(secrets.token_bytes(16), socket.gethostname(), os.getpid(), job, int(restarts or 0))


@dataclass
class Agreed:
    """What all ranks go on from. `step` None: the shadow holds nothing, the present state is step 0.

    `epoch` 0: the shadow was not reached.
    """

    attempt: Attempt
    incarnation: Incarnation
    step: int | None = None
    epoch: int = 0
    life: int = 0
    world_size: int = 0  #: of the attempt that wrote the step
    shadow: Fingerprint | None = None


class Rendezvous:
    """Rank 0's conversation with one shadow. Its control connection is the claim on the run until `close`."""

    def __init__(self, address: Address, run: str, spec: Spec, token: bytes | None, deadline: float) -> None:
        self._address, self._run, self._spec, self._token, self._deadline = (
            address,
            run,
            spec,
            token,
            deadline,
        )
        self._channel: Channel | None = None

    def agree(self, attempt: Attempt, step: int | None, fresh: bool) -> Agreed:
        """Raises Unreachable, Refused, StepNotFound or Mismatch; then nothing has changed but the fence.

        If the connection breaks, all begins again: the shadow knows this attempt, and each message is idempotent.
        """
        while True:
            try:
                return self._agree(attempt, step, fresh)
            except Unreachable:
                self.close()
                if time.monotonic() + 0.5 > self._deadline:
                    raise
                time.sleep(0.2)

    def _agree(self, attempt: Attempt, step: int | None, fresh: bool) -> Agreed:
        prepared = self._prepare(attempt, fresh)
        chosen = None if fresh else self._choose(prepared, step)
        if chosen is not None:
            with Reader(self._address, self._run, chosen, token=self._token, timeout_s=self._left()) as reader:
                check_fit(self._spec, reader.leased)
        adopted = self._call(Adopt(self._run, prepared.incarnation, chosen, self._spec))
        if not isinstance(adopted, Adopted):
            raise ProtocolError(f"{type(adopted).__name__} in answer to Adopt")
        return Agreed(
            attempt, prepared.incarnation, chosen, adopted.epoch, adopted.life, prepared.world_size, adopted.fingerprint
        )

    def _prepare(self, attempt: Attempt, fresh: bool) -> Prepared:
        """A run that seems to be trained by someone else gets the time of a lease to prove that it is."""
        until = {"live": min(time.monotonic() + LEASE_S + 2, self._deadline), "busy": self._deadline}
        while True:
            self._channel = open_channel(self._address, "control", self._token, self._left())
            try:
                answer = self._call(Prepare(self._run, attempt, fresh))
                if not isinstance(answer, Prepared):
                    raise ProtocolError(f"{type(answer).__name__} in answer to Prepare")
                return answer
            except Refused as error:
                self.close()
                if time.monotonic() > until.get(error.kind, 0.0):
                    raise
                time.sleep(0.5)

    def _choose(self, prepared: Prepared, step: int | None) -> int | None:
        if not prepared.steps:
            if step not in (None, 0):
                raise StepNotFound(
                    f"run {self._run!r}: step {step} was asked for, and {self._address} holds none of this run"
                )
            return None
        newest = max(prepared.steps)
        if step is not None and step not in prepared.steps:
            raise StepNotFound(f"run {self._run!r}: step {step} is not held; {self._address} holds {prepared.steps}")
        return newest if step is None else step

    def _left(self) -> float:
        return max(0.5, self._deadline - time.monotonic())

    def _call(self, request: Any) -> Any:
        assert self._channel is not None
        try:
            return call(self._channel, request, self._left())
        except OSError as error:
            raise Unreachable(f"{self._address}: {error}") from error

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def check_fit(spec: Spec, leased: Leased) -> None:
    """Raises Mismatch, with the first differences, unless the leased state fits this model and its optimizers."""
    ours = {block.fqn: block for block in spec.blocks}
    theirs = {held.block.fqn: held.block for held in leased.held}
    differences = [f"{fqn} is in the model but not in the checkpoint" for fqn in ours if fqn not in theirs]
    differences += [f"{fqn} is in the checkpoint but not in the model" for fqn in theirs if fqn not in ours]
    for fqn in ours.keys() & theirs.keys():
        a, b = ours[fqn], theirs[fqn]
        if (a.sizes, a.dtype) != (b.sizes, b.dtype):
            differences.append(
                f"{fqn} is {a.dtype} {list(a.sizes)} in the model, {b.dtype} {list(b.sizes)} in the checkpoint"
            )
    try:
        match_optimizers(spec, [held.block for held in leased.held], leased.optimizers)
    except Mismatch as error:
        differences.append(str(error))
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        listed = "; ".join(sorted(differences)[:5])
        raise Mismatch(f"the checkpoint does not fit: {listed}{more}. Nothing was changed on either side.")
