"""`attach` and the `Checkpointer`: the library as its users see it."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import CheckmateError, ReplicasDiffer, Unreachable, UsageError
from ..layout import Layout, connected
from ..recovery import ShadowReader
from ..tensors import differs
from ..transport.tcp import Address, parse_address
from ..wire.datagrams import GROUPS, group_range
from ..wire.messages import Audit, Fingerprint, Incarnation, check_run_name
from . import rng
from .buckets import Buckets, find_ddp, ranks_of
from .collective import UNLABELLED, Label
from .data import Batches
from .ending import call_at_exit
from .installing import install, keep_gradients, predecessors
from .lag import Lag
from .link import Link
from .mirror import DSCP, Mirror, check_replicas, check_unwrapped, mirrorable
from .model import Shadowed, describe, inexact, unwrap
from .multicast import Group
from .recorder import Recorder
from .rendezvous import Agreed, Rendezvous, attempt, from_rank_zero, on_all_ranks, rank_and_world, together
from .sidecar import Sidecars, Stateful, check_stateful
from .staging import Pool, aligned
from .tap import Tap, check_untapped

log = logging.getLogger("checkmate")

#: Staging memory by default: this much, or four times what a step sends, whichever is more.
STAGING_BYTES = 256 << 20

#: Why `wait` may be in vain.
LACKING = (
    "the shadow takes in the state anew, which travels with the next steps: call step() on all ranks, also without an "
    "update, and wait() after it"
)


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    shadow: str,
    run: str,
    stateful: Mapping[str, Stateful] | None = None,
    tap: Literal["step", "mirror", "multicast"] = "step",
    replay: Literal["match", "fast"] = "match",
    on_lag: Literal["degrade", "block"] = "degrade",
    staging_bytes: int | None = None,
    block_timeout: float = 300.0,
    fresh: bool = False,
    token: str | bytes | None = None,
    interface: str | None = None,
    dscp: int = DSCP,
    groups: str = GROUPS,
    ttl: int = 1,
) -> Checkpointer:
    """Shadow a training loop. Call it on every rank, after DDP wrapping and before training; then `restore`.

    Args:
        model: a plain module or ``DistributedDataParallel``; parameters on CPU or CUDA, dense and real. Ranks may hold
            different ones, as pipeline stages do: a name means the same parameter on every rank that has it.
        optimizer: one optimizer or several, over parameters of `model`.
        shadow: ``tcp://HOST:PORT`` of a process started with ``checkmate shadow``.
        run: name of the run at that shadow; a restart under the same name goes on from where it stopped.
        stateful: objects with ``state_dict`` and ``load_state_dict`` that belong to a step: scheduler, GradScaler, …
        tap: where gradients are read: "step" at ``optimizer.step()``, "mirror" inside the gradient all-reduce, which is
            then ours, and whose packets the network copies to the shadow; "multicast" there as well, but each rank
            sends its sums once, to its peers and the shadow together (``docs/network.md``). Both need DDP.
        replay: "match" replays with the trainer's own optimizer flags, bit for bit; "fast" with fused kernels.
        on_lag: "degrade" never waits for the shadow; "block" waits until at most one step is not safe.
        staging_bytes: host memory of this rank that may hold steps on their way to the shadow; never less than for two
            steps and, while the shadow takes in the state anew, for that beside them.
        block_timeout: seconds that "block" waits before it degrades; below the process group's timeout.
        fresh: begin a new lineage at step 0; what the shadow holds of this run stays until that step is whole.
        token: the shared secret that the shadow was started with.
        interface: with the network tap, the network interface (or address) over which the ranks exchange gradients; by
            default GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, or that of the route to MASTER_ADDR.
        dscp: with "mirror", the mark on packets that the network is to copy, as ``checkmate switch`` was told.
        groups: with "multicast", the range of addresses from which the run takes its group, the same for all.
        ttl: with "multicast", how many networks far datagrams go; more than 1 if there are routers between the ranks.

    Raises UsageError for a wrong argument, Unsupported for a model or optimizer that cannot be shadowed, Unreachable if
    the ranks do not reach each other.
    """
    if tap not in ("step", "mirror", "multicast"):
        raise UsageError(f"tap={tap!r} is not available; there are 'step', 'mirror' and 'multicast'")
    if replay not in ("match", "fast") or on_lag not in ("degrade", "block"):
        raise UsageError(f"replay is 'match' or 'fast', not {replay!r}; on_lag is 'degrade' or 'block', not {on_lag!r}")
    for name, value, kinds in (
        ("shadow", shadow, str), ("run", run, str), ("staging_bytes", staging_bytes, (int, type(None))),
        ("block_timeout", block_timeout, (int, float)), ("token", token, (str, bytes, type(None))),
        ("interface", interface, (str, type(None))), ("dscp", dscp, int),
        ("groups", groups, str), ("ttl", ttl, int),
    ):  # fmt: skip
        if not isinstance(value, kinds):
            raise UsageError(f"attach() takes no {type(value).__name__} for {name}")
    if not 1 <= dscp <= 63:
        raise UsageError(f"dscp={dscp}: a mark is 1 to 63")
    if not 1 <= ttl <= 255:
        raise UsageError(f"ttl={ttl}: it is 1 to 255")
    group_range(groups)
    if "," in shadow:
        raise UsageError("several shadows are not available yet; give one address")
    check_run_name(run)
    address = parse_address(shadow)
    optimizers = unwrap(optimizer)
    objects = check_stateful(stateful)
    check_untapped(optimizers)
    ddp = together(lambda: mirrorable(model)) if tap != "step" else None
    mirrored = any(on_all_ranks(ddp is not None))
    shadowed = together(lambda: describe(model, optimizers, replay, tap if mirrored else "step"))
    if tap != "step":
        rank, _ = rank_and_world()
        together(lambda: None if ddp is not None else check_unwrapped(rank, shadowed.spec.replica_sets))
    secret = token.encode() if isinstance(token, str) else token
    return Checkpointer(
        model, shadowed, address, run, objects, on_lag=on_lag, staging_bytes=staging_bytes, block_timeout=block_timeout,
        fresh=fresh, token=secret, mirrored=ddp, interface=interface, dscp=dscp,
        multicast=Group(groups, run, ttl) if tap == "multicast" else None,
    )  # fmt: skip


class Checkpointer:
    """What `attach` returns: one per training process. Also a context manager, which closes it."""

    def __init__(
        self, model: torch.nn.Module, shadowed: Shadowed, address: Address, run: str, stateful: Mapping[str, Stateful],
        *, on_lag: str, staging_bytes: int | None, block_timeout: float, fresh: bool, token: bytes | None,
        mirrored: DistributedDataParallel | None, interface: str | None, dscp: int,
        multicast: Group | None,
    ) -> None:  # fmt: skip
        self.rank, self.world_size = rank_and_world()
        self._address, self._run, self._fresh, self._token = address, run, fresh, token
        self._shadowed = shadowed
        self._layout = Layout(shadowed.spec)
        own = sum(aligned(s.nbytes) for s in self._layout.slices[self.rank].values())
        limit = staging_bytes if staging_bytes is not None else max(STAGING_BYTES, 4 * own)
        self._pool = Pool(max(limit, 2 * own), pinned=shadowed.spec.fingerprint.device == "cuda")
        ddp, elsewhere = find_ddp(model)
        self._replicas = self._layout.alike[self.rank]  #: ranks that hold what this one holds
        reduced = self._replicas if ddp is None else ranks_of(ddp)
        shared_buffers = ddp is not None and ddp.broadcast_buffers and self.rank != reduced[0]
        self._sidecars = Sidecars(stateful, {} if shared_buffers else shadowed.buffers)
        self._recorder = Recorder(shadowed, self._layout, self.rank, self._pool, self._sidecars)
        self._lag = Lag(
            self._recorder, self._pool, str(address), self.rank, block_timeout if on_lag == "block" else 0.0
        )
        self._recorder.on_full = self._lag.on_full
        self._mirror: Mirror | None = None
        if self._layout.tap != "step":
            together(lambda: None if mirrored is None else check_replicas(ranks_of(mirrored), self._replicas))
            self._mirror = self._recorder.mirror = together(
                lambda: None if mirrored is None else Mirror(  # a stage without replicas has none
                    mirrored, shadowed, self._layout, self.rank, self._pool, run, token=token, interface=interface,
                    dscp=dscp, multicast=multicast,
                )
            )  # fmt: skip
        if self._mirror is not None:
            self._mirror.install(weakref.WeakMethod(self._where))
        self._buckets = None
        if ddp is not None and reduced == self._replicas:
            self._buckets = Buckets(ddp, {p: shadowed.spec.blocks[i].fqn for p, i in shadowed.number.items()})
        self._taps = [
            Tap(o, lambda i=i: self._before(i), lambda i=i: self._after(i))  # type: ignore[misc]
            for i, o in enumerate(shadowed.optimizers)
        ]
        self._link: Link | None = None
        self._step = self._first_step = 0
        self._restored = False
        self._trained = False
        groups = connected(self._layout.replica_sets)
        made = [dist.new_group(ranks) for ranks in groups] if len(groups) > 1 else [None]  # all ranks make all
        self._sharing, self._sharing_group = next(z for z in zip(groups, made, strict=True) if self.rank in z[0])
        self._compared = len(self._sharing) == 1
        self._closed = False
        self._held: dict[str, Any] = {}  #: restored sidecars that wait for `batches`
        self._batches: list[Batches[Any]] = []
        self._drift = inexact(shadowed)
        if ddp is not None and self._buckets is None and len(reduced) > 2:
            self._drift.append(
                f"DistributedDataParallel averages over ranks {reduced}, but ranks {self._replicas} hold these "
                "parameters; the order of its buckets is not kept"
            )
        if elsewhere and self.world_size > 2:
            self._drift.append("DistributedDataParallel wraps parts of the model; the order of its buckets is not kept")
        for why in self._drift if self.rank == 0 else ():
            log.warning("checkmate: replay may differ from training in its last bits: %s", why)
        self._shadow_numerics: Fingerprint | None = None
        self._merged = 0
        self._finalizer: weakref.finalize[..., Checkpointer] | None = None
        _alive.add(self)
        call_at_exit(self.close)

    # ------------------------------------------------------------ restore

    def restore(self, step: int | None = None, *, timeout: float = 300.0, missing_ok: bool = False) -> int:
        """Put this process into the newest step that the shadow holds; 0 if it holds none. A collective; call it once.

        Parameters, optimizer state, param groups, buffers, RNG and `stateful` objects become those of that step, bit
        for bit. Where the shadow holds nothing of the run, the present state becomes step 0 and is safe on return.

        Args:
            step: this step and no other.
            timeout: seconds to wait for the shadow. No answer is never taken for an empty shadow.
            missing_ok: if the shadow cannot be reached, go on from 0 unprotected instead of raising.

        Raises Unreachable, Refused (another job trains this run), StepNotFound, Mismatch, UsageError.
        """
        if self._closed or self._restored:
            raise UsageError(
                "restore() is called once, before training" if self._restored else "this Checkpointer is closed"
            )
        if self._trained:
            raise UsageError("restore() after training has begun; call it right after attach()")
        deadline = time.monotonic() + timeout
        for tap in self._taps:
            tap.settle()
            tap.move_last()
        meeting = Rendezvous(self._address, self._run, self._shadowed.spec, self._token, deadline)
        try:
            agreed = self._agree(meeting, step, missing_ok)
            if agreed.step is not None:
                together(lambda: self._load(agreed, deadline))
            self._begin(agreed)
            if agreed.epoch:
                together(lambda: self._await_first(deadline))
        except BaseException:
            self._retreat()
            raise
        finally:
            meeting.close()
        return self._step

    def _agree(self, meeting: Rendezvous, step: int | None, missing_ok: bool) -> Agreed:
        try:
            return from_rank_zero(lambda: meeting.agree(attempt(), step, self._fresh))
        except Unreachable as error:
            if not missing_ok:
                raise
            if self.rank == 0:
                log.warning("checkmate: %s; training goes on from here, unprotected until it is reached", error)
            me = from_rank_zero(attempt)
            return Agreed(me, Incarnation(1, me.id))

    def _retreat(self) -> None:
        """As before `restore`, but for what it has put into the model: nothing is sent, and it may be called again."""
        self._restored = False
        if self._link is not None:
            self._link.close()
            self._link = self._recorder.link = self._lag.link = None

    def _load(self, agreed: Agreed, deadline: float) -> None:
        left = max(1.0, deadline - time.monotonic())
        reader = ShadowReader(str(self._address), self._run, agreed.step, token=self._token, timeout=left)
        try:
            before = predecessors(self._shadowed, reader.reader.leased)
            self._held = install(self._shadowed, self._sidecars, reader, before, self._replicas.index(self.rank))
        finally:
            reader.close()
        self._restore_buckets(len(before))
        kept = self._held.get("grads", [])
        keep_gradients(self._shadowed, kept)
        self._recorder.keeps_grads = bool(kept)
        rng.install(self._held["rng"]) if "rng" in self._held else None

    def _restore_buckets(self, num_replicas: int) -> None:
        if self._buckets is None:
            return
        if num_replicas != len(self._replicas):
            why: str | None = f"there were {num_replicas} replicas of this model and are {len(self._replicas)}"
        else:
            why = self._buckets.restore(self._held.get("buckets"))
        if why is not None:
            self._drift.append(why)
            if self.rank == self._replicas[0]:
                log.warning(
                    "checkmate: the next gradients may differ in their last bits from an uninterrupted run: %s",
                    why,
                )

    def _begin(self, agreed: Agreed) -> None:
        """Connect, and make what this process holds now the state that the shadow goes on from."""
        self._step = self._first_step = agreed.step or 0
        self._shadow_numerics = agreed.shadow
        self._restored = True
        if self._buckets is not None:
            self._buckets.record()
            if self.rank == self._replicas[0]:
                self._sidecars.extra["buckets"] = self._buckets.state
        if self.rank == self._replicas[0]:
            self._sidecars.extra["grads"] = self._recorder.kept_names
        self._recorder.begin_epoch(agreed.epoch)
        self._link = self._recorder.link = self._lag.link = Link(
            self._address, self._run, agreed.attempt, agreed.incarnation, self.rank, self._shadowed.spec, self._pool,
            epoch=agreed.epoch, life=agreed.life, step=self._step, token=self._token,
            flow=self._mirror.flow if self._mirror is not None else None,
        )  # fmt: skip
        self._finalizer = weakref.finalize(self, self._link.close, 0.0)  # a notebook forgets it, and attaches again
        self._finalizer.atexit = False
        if agreed.step is not None:
            self._recorder.all_anchored()
        elif agreed.epoch:
            self._recorder.close_first(0)

    def _await_first(self, deadline: float) -> None:
        link = self._link
        assert link is not None
        safe = link.wait_for(
            lambda: link.fatal is not None or (link.ack is not None and link.ack.recovery >= self._step),
            max(0.5, deadline - time.monotonic()),
        )
        if link.fatal is not None:
            raise link.fatal
        if not safe:
            raise Unreachable(f"{self._address} did not take step {self._step} in time: {link.trouble or 'no answer'}")

    # ------------------------------------------------------------ training

    def batches(self, loader: Iterable[Any]) -> Batches[Any]:
        """The batches of `loader`, epoch after epoch, from wherever the restored step stood. Never ends by itself.

        The same batches, and the same random numbers afterwards, as ``while True: for batch in loader: …`` without
        interruption. Call it after `restore`, once per loader and in the same order in every run.
        """
        if not self._restored:
            raise UsageError("call restore() before batches()")
        name = f"batches:{len(self._batches)}"
        batches = Batches(loader)
        if name in self._held:
            batches.load_state_dict(self._held.pop(name), self._held.get("rng"))
        self._batches.append(batches)
        self._sidecars.extra[name] = batches.state_dict
        return batches

    def _where(self) -> tuple[Label, bool]:
        """For frames of the backward that runs: what they say of themselves, and whether this step is kept."""
        link, recorder = self._link, self._recorder
        if link is None or self._closed:
            return UNLABELLED, False
        keep = not recorder.gap and link.fatal is None
        return Label(link.incarnation.id, recorder.epoch, self._step + 1, recorder.updates), keep

    def _before(self, index: int) -> None:
        if self._closed:
            return
        if self._restored:
            try:
                self._guarded(lambda: self._recorder.before(index, self._step + 1))
            finally:
                if not self._compared:
                    self._compare_first_gradients()
        elif any(float(group.get("lr", 1.0)) != 0.0 for group in self._shadowed.optimizers[index].param_groups):
            self._trained = True  # torch's own fake step, which leaves parameters alone, has lr 0

    def _after(self, index: int) -> None:
        if not self._closed:
            self._guarded(lambda: self._recorder.after(index))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do our part of a training step. After the first step, whatever goes wrong with it is ours to bear."""
        if self._link is not None and self._link.fatal is not None:
            return
        first = self._link is None or self._step == self._first_step
        try:
            work()
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C, and the user may go on: what is recorded is not all of it
                self._recorder.end_epoch("training was interrupted while a step was recorded")
                raise
            if first or self._link is None:
                raise  # a model that cannot be shadowed is refused here
            log.exception("checkmate: training goes on unprotected")
            self._link.give_up(error if isinstance(error, CheckmateError) else CheckmateError(repr(error)))

    def step(self) -> None:
        """Close the step: everything since the last call belongs to it. Once per iteration, on every rank.

        Without an update since the last call it is a step all the same if a GradScaler skipped one. If gradients are
        being accumulated it is none: they belong to the step that will use them.
        """
        if not self._restored or self._closed:
            raise UsageError(
                "step() on a closed Checkpointer" if self._closed else "call restore() before the first step()"
            )
        recorder, link = self._recorder, self._link
        assert link is not None
        raised = {index for index, tap in enumerate(self._taps) if not tap.settle()}  # an update, or part of one
        if link.fatal is None and recorder.updates == 0 and not raised and self._accumulating():
            self._merged += 1
            if self._merged == 1 and self.rank == 0:
                log.warning(
                    "checkmate: step() without optimizer.step() while gradients are pending: it is merged into the "
                    "next one. Call ckpt.step() once per optimizer.step()."
                )
            return
        for index, tap in enumerate(self._taps):
            if not tap.move_last() or index in raised:
                recorder.distrust(index)
        step = self._step + 1
        try:
            self._guarded(lambda: self._close_step(step))
        finally:
            link.step = self._step = step
        self._guarded(lambda: self._take_up_epoch(link))
        self._lag.tell(self._step)
        self._lag.wait_after(self._step)

    def _close_step(self, step: int) -> None:
        self._step = step  # first: wherever Ctrl-C strikes, no number is given to two steps
        self._recorder.close(step)

    def _accumulating(self) -> bool:
        """Finite gradients that no update has used yet. A GradScaler skips because some are not finite."""
        pending = [g for g in self._recorder.new_grads() if bool(g.count_nonzero())]
        return bool(pending) and all(bool(torch.isfinite(g).all()) for g in pending)

    def _compare_first_gradients(self) -> None:
        """At the first update of a process, all replicas must hold the same gradient. A collective of them, till then.

        Here and not in `step`: ranks that call that a different number of times would wait for each other for ever.
        """
        unprotected = self._link is not None and self._link.fatal is not None  # records nothing
        gathered: list[dict[int, int] | None] = [None] * len(self._sharing)
        digests = None if unprotected else self._recorder.first_gradients or {}
        dist.all_gather_object(gathered, digests, group=self._sharing_group)
        told = {rank: theirs for rank, theirs in zip(self._sharing, gathered, strict=True) if theirs is not None}
        if told and not any(told.values()):
            return  # an update without a gradient, on every rank
        self._compared = True
        self._recorder.first_gradients = None
        if self._sharing_group is not None:
            dist.destroy_process_group(self._sharing_group)
        different: dict[tuple[int, int], list[str]] = {}
        for number, block in enumerate(self._layout.blocks):
            first, *others = [r for r in self._layout.replica_sets[block.replicas] if r in told] or [-1]
            for other in others:
                if told[other].get(number) != told[first].get(number):
                    different.setdefault((first, other), []).append(block.fqn)
        for (first, other), names in different.items():
            self.close(timeout=0)
            raise ReplicasDiffer(
                f"ranks {first} and {other} hold different gradients at optimizer.step(): {', '.join(names[:3])}"
                f"{' and others' if len(names) > 3 else ''}. Every rank that has a parameter must apply the same "
                "averaged gradient: wrap the model in DistributedDataParallel, and edit gradients alike on all ranks. "
                'Two parameters, as of two pipeline stages, need two names: nn.ModuleDict({"stage0": …}).'
            )

    def _take_up_epoch(self, link: Link) -> None:
        """Between two steps: begin the epoch that the shadow asks for."""
        if link.wanted > self._recorder.epoch:
            self._recorder.begin_epoch(link.wanted)
            self._recorder.announce(self._step)

    def stats(self) -> dict[str, Any]:
        """Where the checkpoint stands, as this rank knows it. Costs nothing; never waits.

        ``recovery_step`` is the step that a restart would resume, None while that is not known or there is none;
        ``lag_steps`` how many steps behind `step` it is. ``state``: streaming, anchoring, degraded, gone or refused.
        """
        link, recovery = self._link, self._lag.recovery_step
        return {
            "step": self._step,
            "recovery_step": recovery,
            "lag_steps": None if recovery is None else self._step - recovery,
            "state": "closed" if self._closed else self._lag.state,
            "mode": "drift" if self._drift_reasons() else "exact",
            "drift": self._drift_reasons(),
            "epoch": self._recorder.epoch,
            "incarnation": str(link.incarnation) if link else None,
            "trouble": (str(link.fatal) if link.fatal else link.trouble) if link else "",
            "bytes_sent": link.bytes_sent if link else 0,
            "bytes_tagged": self._mirror.collective.bytes_tagged if self._mirror else 0,
            "bytes_resent": self._mirror.collective.bytes_resent if self._mirror else 0,
            "bytes_repaired": link.bytes_repaired if link else 0,
            "fallbacks": self._mirror.fallbacks if self._mirror else 0,
            "staging_bytes": self._pool.allocated_bytes,
            "staging_used_bytes": self._pool.used_bytes,
            "staging_parts_bytes": self._pool.charged_bytes,
            "gaps": self._recorder.gaps,
            "waited_s": self._lag.waited_s,
            "merged_steps": self._merged,
            "differences": self._lag.reports["differs"],
            "reports": dict(self._lag.reports),
        }

    def _drift_reasons(self) -> list[str]:
        reasons = list(self._drift)
        if self._shadow_numerics is not None:
            reasons += filter(None, [differs(self._shadowed.spec.fingerprint, self._shadow_numerics)])
        if self._shadowed.spec.replay == "fast":
            reasons.append("replay='fast' uses other kernels than the trainer")
        return reasons

    # ------------------------------------------------------------ for the user, now and then

    def wait(self, step: int | None = None, timeout: float | None = None) -> int:
        """Wait until `step` (by default the newest) is safe; returns the step that a restart would resume.

        Raises Unreachable if that takes longer than `timeout` seconds, or cannot be without further steps.
        """
        link = self._link
        if link is None or self._closed:
            raise UsageError("wait() before restore()" if link is None else "wait() on a closed Checkpointer")
        target = self._step if step is None else step
        if target > self._step:
            raise UsageError(f"wait({target}): the newest step is {self._step}")
        lag = self._lag
        began = time.monotonic()
        link.wait_for(lambda: link.fatal is not None or lag.safe(target) or lag.hopeless, timeout)
        recovery = lag.recovery_step
        if recovery is None or recovery < target:
            why = str(link.fatal or link.trouble or (LACKING if lag.hopeless else "no answer"))
            raise Unreachable(
                f"step {target} is not safe after {time.monotonic() - began:.1f} s ({why}); a restart would resume at "
                f"step {recovery}"
            )
        return recovery

    def anchor(self) -> None:
        """Send the whole state with the next step, whatever the shadow holds."""
        self._recorder.distrust_all()

    def audit(self, timeout: float = 60.0) -> dict[str, Any]:
        """Compare every tensor of the newest step, here and at the shadow. Call it between steps, on every rank.

        Returns ``step``, ``compared`` (tensors), ``differing`` (names). What differs is sent anew with the next step.
        Raises Unreachable if no comparison came about.
        """
        link = self._link
        if link is None or not self._restored:
            raise UsageError("audit() before restore()")
        self.wait(timeout=timeout)
        answer = link.audit(Audit(self._step, self._recorder.digests()), timeout)
        if answer is None or answer.moved:
            raise Unreachable(f"the shadow did not compare step {self._step}" + (": it has moved on" if answer else ""))
        names = [f"{self._layout.blocks[d.block].fqn}{' ' + d.key if d.key else ''}" for d in answer.differing]
        return {"step": answer.step, "compared": answer.compared, "differing": names}

    def close(self, timeout: float = 5.0) -> None:
        """Let go of the training loop; give what is on its way up to `timeout` seconds to arrive. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for tap in self._taps:
            tap.remove()
        if self._mirror is not None:
            self._mirror.let_go()
        link = self._link
        if link is None:
            return
        deadline = time.monotonic() + timeout
        try:
            if timeout > 0 and link.streaming and not self._lag.hopeless:
                link.wait_for(
                    lambda: not link.streaming or link.fatal is not None or self._lag.safe(self._step), timeout
                )
        finally:
            link.close(deadline - time.monotonic())

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


#: Those of this process. In a child that it forks their threads are not, and their locks may be held for ever.
_alive: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _abandon_in_child() -> None:
    for checkpointer in list(_alive):
        checkpointer._closed = True
        if checkpointer._finalizer is not None:
            checkpointer._finalizer.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
