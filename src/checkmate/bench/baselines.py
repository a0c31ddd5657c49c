"""Saving every step in the ways that torch itself offers, for comparison. Files go to a folder, without fsync."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

Group = dist.ProcessGroup
#: Saves the state of a step; returns what there is to wait for before the next save, if anything.
Save = Callable[[dict[str, Any], str, Group], "Future[Any] | None"]


def _torch_save(state: dict[str, Any], folder: str, group: Group) -> None:
    if dist.get_rank() == 0:
        torch.save(state, os.path.join(folder, "state.pt"))


def _dcp_save(state: dict[str, Any], folder: str, group: Group) -> None:
    dcp.save(state, checkpoint_id=os.path.join(folder, "dcp"), process_group=group)


def _dcp_async_save(state: dict[str, Any], folder: str, group: Group) -> Future[Any]:
    saving = dcp.async_save(state, checkpoint_id=os.path.join(folder, "dcp-async"), process_group=group)
    return saving if isinstance(saving, Future) else saving.upload_completion


BASELINES: dict[str, Save] = {
    "with torch.save by rank 0": _torch_save,
    "with dcp.save": _dcp_save,
    "with dcp.async_save": _dcp_async_save,
}


class Saver:
    """What a training loop calls once per step, with one of `BASELINES`."""

    def __init__(self, name: str, folder: str) -> None:
        self._save, self._folder = BASELINES[name], folder
        self._group: Group = dist.new_group()  # an asynchronous save uses it while training uses the other
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # DCP overwrites, as is wanted
        self._pending: Future[Any] | None = None

    def step(self, state: dict[str, Any]) -> None:
        """Returns when training may go on: an asynchronous save goes on meanwhile, but never two at once."""
        self.wait()
        self._pending = self._save(state, self._folder, self._group)

    def wait(self) -> None:
        """Until the last step is saved."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
