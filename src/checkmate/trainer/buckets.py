"""DDP's buckets: numeric state that no ``state_dict`` carries.

A fresh ``DistributedDataParallel`` sums its first gradients in provisional buckets. After the first
synchronised backward it lays them out anew, in the order in which the parameters became ready on rank 0, and
keeps that layout. Where a gradient lies in its buffer decides in which order a ring adds it up. So from three
ranks on (with two, a + b = b + a) the first gradient after a restart would differ in its last bits from the
uninterrupted run, were the new model not given the old order.

With ``gradient_as_bucket_view`` there is a second difference: DDP divides by N a gradient that was
accumulated in its bucket, and multiplies any other by 1/N. Unless N is a power of two, the two round
differently. So it matters whether gradients outlive their step: whether the user sets them to zero or to
``None``.

`Buckets` records both and brings them back. The methods of the reducer that this takes are private to torch.
Where they are missing, and where DDP offers no way back, `Buckets.restore` says why: training goes on, but in
*drift*.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from .model import uncompiled

_OF_REDUCER = (
    "prepare_for_forward",
    "prepare_for_backward",
    "_autograd_hook",
    "_rebuild_buckets",
    "get_backward_stats",
)


def find_ddp(model: torch.nn.Module) -> tuple[DistributedDataParallel | None, bool]:
    """The wrapper that trains `model`, also if the bare module was given; and whether wrappers train parts of it."""
    model = uncompiled(model)
    if isinstance(model, DistributedDataParallel) or not dist.is_initialized():
        return model if isinstance(model, DistributedDataParallel) else None, False
    parts = set(map(id, model.modules()))
    wrappers = [o for o in gc.get_objects() if type(o) is DistributedDataParallel and id(o.module) in parts]
    whole = [wrapper for wrapper in wrappers if wrapper.module is model]
    return (whole[-1], False) if whole else (None, bool(wrappers))


def ranks_of(ddp: DistributedDataParallel) -> list[int]:
    """The ranks over which it averages; it follows the first of them."""
    return sorted(dist.get_process_group_ranks(ddp.process_group))


class Buckets:
    """How `ddp` fills its buckets. `names` gives the FQN of each of its parameters.

    Call `restore` and `record` before training, in any order, and `state` in every step.
    """

    def __init__(self, ddp: DistributedDataParallel, names: Mapping[torch.nn.Parameter, str]) -> None:
        self._ddp = ddp
        self._names = names
        #: FQNs; ``[]`` while the buckets are the provisional ones; ``None`` where nothing is recorded.
        self.order: list[str] | None = None
        self._hooks: list[RemovableHandle] = []
        self._sample: torch.nn.Parameter | None = None  # stands for all; None where views make no difference
        self._look = False  # if the sample's gradient, there as the step ends, is there in the next backward
        self._cleared = False  # it was not

    def record(self) -> None:
        """Watch the training to come. The hooks for the order go after the first synchronised backward.

        There is no order to record where it does not matter or cannot be restored, and after that backward.
        """
        if self._needless() or self._obstacle():
            return
        parameters = self._reduced()
        if self._sample is None and self._views_differ():
            self._sample = parameters[0]
            self._sample.register_hook(self._before_accumulation)
        if self.order is None and not self._has_reduced():
            self.order = []
            if not self._ddp.find_unused_parameters:
                self._record_order(parameters)

    def state(self) -> dict[str, Any]:
        """What the checkpoint of the step that ends here has to hold: rank 0's, as DDP follows that rank."""
        self._look = self._sample is not None and self._sample.grad is not None
        return {"order": self.order, "views": self._look and not self._cleared}

    def restore(self, state: Mapping[str, Any] | None) -> str | None:
        """Give a model that has not trained yet the buckets of the run whose rank 0 had this `state`.

        A collective, for the world size of that run: every rank calls it with the same state, not between a
        forward and its backward. It costs one all-reduce of a zero gradient. Parameters, buffers and RNG are
        left as found. So is ``.grad``, unless that run kept its gradients in the buckets: then they are zeros
        there. Of the user's hooks only a stateless communication hook runs.

        Returns ``None`` if the next gradients will be summed as in the recorded run, else why that is not
        certain (rank 0's answer counts). Raises what a collective raises when a peer is lost.
        """
        if self._needless():
            return None
        if obstacle := self._obstacle():
            return obstacle
        if state is None or state["order"] is None:
            return "the order of DDP's buckets was not recorded"
        order, views = list[str](state["order"]), bool(state["views"])
        if self._has_reduced():
            return None if order == self.order else "this DDP model has trained already and keeps its buckets"
        if views and self._ddp.find_unused_parameters:
            return "DDP with find_unused_parameters=True offers no way to put kept gradients into its buckets"
        if not order:
            return None
        parameters = self._reduced()
        index = {self._names[parameter]: i for i, parameter in enumerate(parameters)}
        if sorted(order) != sorted(index):
            return f"DDP reduces {len(index)} parameters here, but others in the recorded run ({len(order)})"
        found = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None  # which the reducer takes for zero
        self._reduce_zeros([index[name] for name in order])
        if not views:
            for parameter, grad in zip(parameters, found, strict=True):
                parameter.grad = grad
        self._look, self._cleared = views, not views
        self._end_recording(order)
        return None

    def _reduce_zeros(self, indices: Sequence[int]) -> None:
        """What DDP does in a step and at the start of the next, if parameters become ready in this order."""
        reducer: Any = self._ddp.reducer

        def all_ready(_: torch.Tensor) -> None:
            for index in indices:
                reducer._autograd_hook(index)

        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        # The reducer finishes in a callback of the running backward, so one has to run: that of a scalar of
        # our own. A backward through the parameters would call the hooks that the user has on them.
        with torch.enable_grad():
            scalar = torch.zeros((), device="cpu", requires_grad=True)
            scalar.register_hook(all_ready)
            scalar.clone().backward()
        self._ddp._has_rebuilt_buckets = reducer._rebuild_buckets()

    def _record_order(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        ready: list[str] = []
        counts = False  # as in the reducer: the backwards that count are those after a synchronised forward

        def after_forward(ddp: DistributedDataParallel, *_: object) -> None:
            nonlocal counts
            counts = counts or (torch.is_grad_enabled() and ddp.require_backward_grad_sync)

        def after_accumulation(name: str, _: torch.Tensor) -> None:
            if counts:
                ready.append(name)
                if len(ready) == len(parameters):
                    self._end_recording(ready)

        self._hooks = [self._ddp.register_forward_hook(after_forward)]
        for parameter in parameters:
            hook = partial(after_accumulation, self._names[parameter])
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _end_recording(self, order: list[str]) -> None:
        self.order = order
        while self._hooks:
            self._hooks.pop().remove()

    def _before_accumulation(self, _: torch.Tensor) -> None:
        if self._look:
            self._look = False
            self._cleared = self._sample is not None and self._sample.grad is None

    def _reduced(self) -> list[torch.nn.Parameter]:
        """The parameters as the reducer numbers them."""
        parameters: list[torch.nn.Parameter] = self._ddp._build_params_for_reducer()[0]
        return parameters

    def _has_reduced(self) -> bool:
        return any(self._ddp.reducer.get_backward_stats())  # per parameter, 0 until it was ready once

    def _views_differ(self) -> bool:
        """Whether it matters that a gradient is in its bucket already. A communication hook divides alike."""
        size = self._ddp.process_group.size()
        return self._ddp.gradient_as_bucket_view and size & (size - 1) != 0 and not self._ddp._comm_hooks

    def _needless(self) -> bool:
        """Whether a new model sums like an old one by itself."""
        ddp = self._ddp
        if getattr(ddp, "reducer", None) is None:
            return True  # all parameters are reduced outside of it
        if ddp._comm_hooks and getattr(ddp._comm_hooks[0][1], "sums_by_rank", False):
            return True  # wherever in a bucket they lie
        if ddp.find_unused_parameters and not ddp.static_graph:
            return not self._views_differ()  # the first buckets are kept
        return ddp.process_group.size() <= 2 and not self._stateful_hooks()

    def _stateful_hooks(self) -> list[str]:
        hooks = self._ddp._comm_hooks
        return [hook.__qualname__ for hook, state in hooks if not isinstance(state, ProcessGroup | None)]

    def _obstacle(self) -> str | None:
        """Why zero gradients cannot, or should not, be driven through this model."""
        ddp = self._ddp
        if hooks := self._stateful_hooks():
            return f"DDP's communication hook {hooks[0]} has a state of its own"
        if ddp.static_graph:
            return "DDP with static_graph=True offers no way to bring its buckets back"
        if getattr(ddp, "_use_python_reducer", False):
            return "DDP reduces under compiled autograd"
        if not all(hasattr(ddp.reducer, name) for name in _OF_REDUCER):
            return f"DDP of torch {torch.__version__} is unknown to Checkmate"
        parameters, sparse = ddp._build_params_for_reducer()
        if any(sparse):
            return "DDP expects sparse gradients"
        if len(parameters) != len(ddp.reducer.get_backward_stats()):
            return "parameters were frozen or unfrozen after DDP was made"
        return None
