"""The matrix: kinds of training that a restart must continue to the bit, each with the number of its ranks.

What is element-wise needs no second rank. What concerns gradients across ranks has three, because two hide the order in
which DDP adds; one and four have their share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim import lr_scheduler as schedules
from torch.utils.data import Dataset

from . import loops, models
from .job import FEATURES, Case, Job

Make = Callable[[Any], optim.Optimizer]


def using(name: str, **options: Any) -> Make:
    """An optimizer of ``torch.optim`` over all parameters, in one group."""
    return lambda net: getattr(optim, name)(net.parameters(), **options)


def fresh_lr(name: str, **options: Any) -> Make:
    """With the learning rate as a tensor, one for each attempt."""
    return lambda net: getattr(optim, name)(net.parameters(), lr=torch.tensor(0.02), **options)


ADAMW = using("AdamW", lr=0.02)
MOMENTUM = using("SGD", lr=0.05, momentum=0.9)

# ------------------------------------------------------------------------------------------ optimizers

OPTIMIZERS: dict[str, Make] = {
    "SGD": using("SGD", lr=0.05),
    "SGD, momentum": MOMENTUM,
    "SGD, Nesterov": using("SGD", lr=0.05, momentum=0.9, nesterov=True),
    "SGD, dampening": using("SGD", lr=0.05, momentum=0.9, dampening=0.3),
    "SGD, weight decay": using("SGD", lr=0.05, momentum=0.9, weight_decay=0.1),
    "SGD, maximize": using("SGD", lr=0.01, momentum=0.9, maximize=True),
    "SGD, foreach": using("SGD", lr=0.05, momentum=0.9, foreach=True),
    "SGD, fused": using("SGD", lr=0.05, momentum=0.9, fused=True),
    "Adam": using("Adam", lr=0.02),
    "Adam, amsgrad": using("Adam", lr=0.02, amsgrad=True, weight_decay=0.1),
    "Adam, maximize": using("Adam", lr=0.02, maximize=True),
    "Adam, for-loop": using("Adam", lr=0.02, foreach=False),
    "Adam, foreach": using("Adam", lr=0.02, foreach=True),
    "Adam, fused": using("Adam", lr=0.02, fused=True),
    "Adam, tensor LR": fresh_lr("Adam"),
    "AdamW": ADAMW,
    "AdamW, amsgrad": using("AdamW", lr=0.02, amsgrad=True),
    "AdamW, for-loop": using("AdamW", lr=0.02, foreach=False),
    "AdamW, foreach": using("AdamW", lr=0.02, foreach=True),
    "AdamW, fused": using("AdamW", lr=0.02, fused=True),
    "AdamW, fused, amsgrad": using("AdamW", lr=0.02, fused=True, amsgrad=True),
    "AdamW, fused, tensor LR": fresh_lr("AdamW", fused=True),
    "Adagrad": using("Adagrad", lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adagrad, fused": using("Adagrad", lr=0.05, fused=True),
    "RMSprop": using("RMSprop", lr=0.01),
    "RMSprop, centered": using("RMSprop", lr=0.01, centered=True),
    "RMSprop, momentum": using("RMSprop", lr=0.01, momentum=0.9),
    "Adadelta": using("Adadelta", lr=0.5),
    "Adamax": using("Adamax", lr=0.02),
    "NAdam": using("NAdam", lr=0.02),
    "NAdam, foreach": using("NAdam", lr=0.02, foreach=True),
    "RAdam": using("RAdam", lr=0.02),
    "RAdam, foreach": using("RAdam", lr=0.02, foreach=True),
    "Rprop": using("Rprop", lr=0.01),
    "ASGD": using("ASGD", lr=0.05, t0=3),
    "Adafactor": using("Adafactor", lr=0.05),
}

CASES: dict[str, Case] = {name: Case(models.Net, optimizer, loops.plain) for name, optimizer in OPTIMIZERS.items()}
if hasattr(optim, "Muon"):
    CASES["Muon"] = Case(models.Matrices, using("Muon", lr=0.02), loops.plain)


def muon_and_adamw(net: nn.Module) -> list[optim.Optimizer]:
    matrices = [p for p in net.parameters() if p.ndim == 2]
    vectors = [p for p in net.parameters() if p.ndim != 2]
    return [getattr(optim, "Muon", optim.SGD)(matrices, lr=0.02), optim.AdamW(vectors, lr=0.02)]


CASES["Muon beside AdamW, DDP"] = Case(models.Net, muon_and_adamw, loops.several_optimizers, 3)
CASES["Adafactor, DDP"] = Case(models.Net, using("Adafactor", lr=0.05), loops.plain, 4)
CASES["SGD, DDP"] = Case(models.Net, using("SGD", lr=0.05), loops.plain, 4)

# ------------------------------------------------------------------------------------------ hyper-parameters


def in_groups(net: nn.Module) -> optim.Optimizer:
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1, "name": "matrices"},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 0.005, "betas": (0.8, 0.9)},
    ]
    return optim.AdamW(groups, lr=0.02)


def schedule(make: Callable[[optim.Optimizer], Any]) -> Callable[[Job], dict[str, Any]]:
    return lambda job: {"scheduler": make(job.optimizer)}


def in_sequence(optimizer: optim.Optimizer) -> Any:
    first = schedules.LinearLR(optimizer, 0.1, total_iters=3)
    second = schedules.CosineAnnealingLR(optimizer, 4)
    return schedules.SequentialLR(optimizer, [first, second], [3])


SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "OneCycleLR": partial(schedules.OneCycleLR, max_lr=0.1, total_steps=10),
    "LambdaLR": partial(schedules.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "SequentialLR": in_sequence,
    "cosine with restarts": partial(schedules.CosineAnnealingWarmRestarts, T_0=2, T_mult=2),
}


def lr_moves(states: list[Any]) -> bool:
    return len({float(s["optimizers"][0]["groups"][0]["lr"]) for s in states}) > 2


CASES |= {
    f"schedule, {name}": Case(models.Net, MOMENTUM, loops.scheduled, stateful=schedule(make), matters=lr_moves)
    for name, make in SCHEDULES.items()
}
CASES |= {
    "schedule, OneCycleLR, DDP": Case(
        models.Net, in_groups, loops.scheduled, 3,
        stateful=schedule(partial(schedules.OneCycleLR, max_lr=[0.1, 0.05], total_steps=10)), matters=lr_moves,
    ),
    "schedule, tensor LR": Case(
        models.Net, fresh_lr("AdamW", foreach=False), loops.scheduled,
        stateful=schedule(partial(schedules.ExponentialLR, gamma=0.8)), matters=lr_moves,
    ),
    "schedule, ReduceLROnPlateau": Case(
        models.Net, using("SGD", lr=0.2), loops.on_plateau, 2,
        stateful=schedule(partial(schedules.ReduceLROnPlateau, patience=0, factor=0.7, threshold=0.5)),
        matters=lr_moves,
    ),
    "several groups": Case(models.Net, in_groups, loops.plain, 3),
    "hyper-parameters changed by hand": Case(models.Net, ADAMW, loops.by_hand, 2),
}  # fmt: skip


# ------------------------------------------------------------------------------------------ gradients


def scaler(job: Job) -> dict[str, Any]:
    return {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)}


def fake_step(job: Job) -> None:
    """A DCP save of the user's own: torch runs a step of its own on an optimizer without state."""
    dcp.get_optimizer_state_dict(job.model, job.optimizer)
    assert any("step" in state for state in job.optimizer.state.values())


def compress(job: Job) -> None:
    job.model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def even_layers(net: Any) -> optim.Optimizer:
    return optim.AdamW([*net.layers[0].parameters(), *net.layers[4].parameters()], lr=0.02)


def trained_only(net: nn.Module) -> optim.Optimizer:
    return optim.SGD([param for param in net.parameters() if param.requires_grad], 0.05, 0.9)


def add_pre_hook(job: Job) -> None:
    job.optimizer.register_step_pre_hook(loops.half_of_gradients)


def add_post_hook(job: Job) -> None:
    job.optimizer.register_step_post_hook(loops.clamping_hook)


def add_tensor_hook(job: Job) -> None:
    job.net.layers[1].weight.register_hook(lambda grad: grad * 0.5)


SEVERAL = {"bucket_cap_mb": 0.001}
VIEWS = {**SEVERAL, "gradient_as_bucket_view": True}
UNUSED = {**SEVERAL, "find_unused_parameters": True}

CASES |= {
    "DDP": Case(models.Net, ADAMW, loops.plain, 3),
    "clipping by norm": Case(models.Net, ADAMW, loops.clipped_by_norm, 3),
    "clipping by value": Case(models.Net, MOMENTUM, loops.clipped_by_value, 3),
    "accumulation": Case(models.Net, ADAMW, loops.accumulating, 3),
    "accumulation without sync": Case(models.Net, ADAMW, loops.accumulating_without_sync, 3),
    "accumulation, ckpt.step() too often": Case(models.Net, ADAMW, loops.accumulating_with_steps, 2),
    "communication hook": Case(models.Net, ADAMW, loops.plain, 3, SEVERAL, made=compress),
    "scaler": Case(models.Net, ADAMW, loops.scaled((0, 3)), 3, stateful=scaler),
    "scaler, unscaled and clipped": Case(models.Net, ADAMW, loops.scaled((2,), unscale=True), 2, stateful=scaler),
    "scaler, cleared after the step": Case(models.Net, MOMENTUM, loops.scaled((1, 4), clear=True), stateful=scaler),
    "scaler, fused": Case(
        models.Net, using("AdamW", lr=0.02, fused=True), loops.scaled((0, 3)), 3, stateful=scaler
    ),
    "scaler, fused Adam, unscaled": Case(
        models.Net, using("Adam", lr=0.02, fused=True), loops.scaled((2,), unscale=True), stateful=scaler
    ),
    "scaler, fused SGD": Case(
        models.Net, using("SGD", lr=0.05, momentum=0.9, fused=True), loops.scaled((1, 4)), stateful=scaler
    ),
    "several buckets": Case(models.Net, MOMENTUM, loops.plain, 3, SEVERAL),
    "several buckets, 4 ranks": Case(models.Net, ADAMW, loops.plain, 4, SEVERAL),
    "bucket views": Case(models.Net, ADAMW, loops.plain, 3, VIEWS),
    "bucket views, zeroed in place": Case(models.Net, ADAMW, loops.zeroing, 3, VIEWS),
    "zeroed in place": Case(models.Net, MOMENTUM, loops.zeroing, 3, SEVERAL),
    "zeroed in place after the step": Case(models.Net, MOMENTUM, loops.zeroing_after, 2),
    "cleared after the step": Case(models.Net, MOMENTUM, loops.clearing_after, 2),
    "static graph, 2 ranks": Case(models.Net, MOMENTUM, loops.plain, 2, {**SEVERAL, "static_graph": True}),
    "static graph, 3 ranks": Case(
        models.Net, MOMENTUM, loops.plain, 3, {**SEVERAL, "static_graph": True}, drift="static_graph=True"
    ),
    "find unused": Case(models.Net, ADAMW, loops.plain, 3, UNUSED),
    "missing gradients": Case(models.Net, ADAMW, loops.skipping_a_layer, 3, UNUSED),
    "missing gradients, one rank": Case(models.Net, MOMENTUM, loops.skipping_a_layer),
    "missing gradients, zeroed in place": Case(models.Net, MOMENTUM, loops.skipping_in_place),
    "missing gradients, zeroed in place, DDP": Case(models.Net, ADAMW, loops.skipping_in_place, 3, UNUSED),
    "missing gradients, foreach": Case(models.Net, using("Adam", lr=0.02, foreach=True), loops.skipping_a_layer),
    "average by hand": Case(models.Net, ADAMW, loops.averaging, 3, None),
    "frozen": Case(models.Frozen, ADAMW, loops.plain, 3, SEVERAL),
    "frozen, not in the optimizer": Case(models.Frozen, trained_only, loops.plain, 2),
    "unfrozen in mid-run": Case(models.Frozen, ADAMW, loops.thawing(loops.plain)),
    "unfrozen in mid-run, 2 ranks": Case(models.Frozen, ADAMW, loops.thawing(loops.averaging), 2, None),
    "group added in mid-run": Case(models.Net, even_layers, loops.adding_a_group),
    "group added in mid-run, DDP": Case(models.Net, even_layers, loops.adding_a_group, 3),
    "DCP save before attach": Case(models.Net, ADAMW, loops.plain, made=fake_step),
    "DCP save before restore": Case(models.Net, ADAMW, loops.plain, 2, attached=fake_step),
    "DCP save before the first step": Case(models.Net, ADAMW, loops.plain, 3, begun=fake_step),
    "pre-hook before attach": Case(models.Net, ADAMW, loops.plain, made=add_pre_hook),
    "pre-hook after attach": Case(models.Net, ADAMW, loops.plain, 3, attached=add_pre_hook),
    "pre-hook after restore": Case(models.Net, ADAMW, loops.plain, 2, begun=add_pre_hook),
    "post-hook before attach": Case(models.Net, ADAMW, loops.plain, made=add_post_hook),
    "post-hook after attach": Case(models.Net, ADAMW, loops.plain, 2, attached=add_post_hook),
    "tensor hook": Case(models.Net, ADAMW, loops.plain, 3, made=add_tensor_hook),
    "closure": Case(models.Net, ADAMW, loops.with_closure, 3),
    "closure, one rank": Case(models.Net, MOMENTUM, loops.with_closure),
    "NaN and infinity": Case(models.Net, ADAMW, loops.with_surprises),
    "denormals": Case(models.Net, using("Adam", lr=0.02, eps=1e-30), loops.tiny_gradients),
    "denormals flushed": Case(models.Net, using("Adam", lr=0.02, eps=1e-30), loops.tiny_gradients, flush_denormal=True),
}  # fmt: skip

# ------------------------------------------------------------------------------------------ parameters and buffers


class Augmented(Dataset[Any]):
    """Samples with noise from every generator of the process that loads them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __len__(self) -> int:
        return 10 * self.ranks

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(FEATURES) + float(np.random.rand()) + math.sin(index)
        return noise, noise[:1]


def casting(dtype: torch.dtype, model: Any = models.Net) -> Callable[[], nn.Module]:
    return partial(models.in_dtype, model, dtype)


HALVES: dict[str, tuple[torch.dtype, Make, int]] = {
    "bf16, SGD": (torch.bfloat16, MOMENTUM, 3),
    "bf16, fused SGD": (torch.bfloat16, using("SGD", lr=0.05, fused=True), 1),
    "bf16, AdamW": (torch.bfloat16, ADAMW, 3),
    "bf16, foreach AdamW": (torch.bfloat16, using("AdamW", lr=0.02, foreach=True), 1),
    "bf16, fused AdamW": (torch.bfloat16, using("AdamW", lr=0.02, fused=True), 1),
    "bf16, RMSprop": (torch.bfloat16, using("RMSprop", lr=0.01, momentum=0.9), 1),
    "bf16, fused Adagrad": (torch.bfloat16, using("Adagrad", lr=0.05, fused=True), 1),
    "bf16, NAdam": (torch.bfloat16, using("NAdam", lr=0.02), 1),
    "bf16, ASGD": (torch.bfloat16, using("ASGD", lr=0.05, t0=3), 1),
    "bf16, Adafactor": (torch.bfloat16, using("Adafactor", lr=0.05), 1),
    "fp16, SGD": (torch.float16, MOMENTUM, 3),
    "fp16, Adam": (torch.float16, using("Adam", lr=0.02, eps=1e-4), 1),
    "fp16, fused AdamW": (torch.float16, using("AdamW", lr=0.02, eps=1e-4, fused=True), 1),
    "fp64, AdamW": (torch.float64, ADAMW, 1),
}

CASES |= {
    name: Case(casting(dtype), optimizer, loops.plain, ranks) for name, (dtype, optimizer, ranks) in HALVES.items()
}
WIDE_HALF = casting(torch.float16, models.Wide)
CASES |= {
    "fp16, several threads": Case(WIDE_HALF, using("Adam", lr=0.02, eps=1e-4), loops.plain, threads=2),
    "fp16, several threads, fused": Case(
        WIDE_HALF, using("AdamW", lr=0.02, eps=1e-4, fused=True), loops.plain, threads=2
    ),
    "fp32, several threads": Case(models.Wide, using("AdamW", lr=0.02, fused=True), loops.plain, threads=2),
    "fp32, large": Case(partial(models.Wide, 400), ADAMW, loops.plain, 2),
    "bf16 autocast": Case(models.Net, ADAMW, loops.autocast, 3),
    "tied weights": Case(models.Tied, ADAMW, loops.plain, 3),
    "BatchNorm": Case(models.Normed, ADAMW, loops.plain, 3),
    "BatchNorm, one rank": Case(models.Normed, MOMENTUM, loops.plain),
    "BatchNorm of each rank": Case(models.Normed, ADAMW, loops.plain, 2, {"broadcast_buffers": False}),
    "dropout": Case(partial(models.Net, dropout=0.3), ADAMW, loops.noisy, 3),
    "dropout, one rank": Case(partial(models.Net, dropout=0.3), MOMENTUM, loops.noisy),
    "augmentation in workers": Case(models.Net, ADAMW, loops.noisy, 2, data=Augmented, loader={"num_workers": 2}),
    "augmentation in this process": Case(models.Net, ADAMW, loops.noisy, data=Augmented),
    "odd shapes": Case(models.Odd, ADAMW, loops.plain, 3),
    "odd shapes, SGD": Case(models.Odd, MOMENTUM, loops.plain),
    "odd shapes, foreach": Case(models.Odd, using("RMSprop", lr=0.01, foreach=True), loops.plain),
    "odd shapes, fused": Case(models.Odd, using("Adam", lr=0.02, fused=True), loops.plain),
    "strided": Case(models.Strided, ADAMW, loops.plain),
    "strided, DDP": Case(models.Strided, MOMENTUM, loops.plain, 3),
    "strided, foreach": Case(models.Strided, using("Adam", lr=0.02, foreach=True), loops.plain),
}

# ------------------------------------------------------------------------------------------ several optimizers


def gan_optimizers(net: Any) -> list[optim.Optimizer]:
    return [optim.Adam(net.generator.parameters(), lr=0.02), optim.RMSprop(net.discriminator.parameters(), lr=0.02)]


CASES |= {
    "GAN": Case(models.Gan, gan_optimizers, loops.adversarial),
    "GAN, DDP": Case(models.Gan, gan_optimizers, loops.adversarial, 3, UNUSED),
    "WGAN, clamped in place": Case(models.Gan, gan_optimizers, loops.wasserstein(loops.in_place)),
    "WGAN, clamped through data": Case(models.Gan, gan_optimizers, loops.wasserstein(loops.through_data), 3, UNUSED),
    "WGAN, clamped into a new tensor": Case(models.Gan, gan_optimizers, loops.wasserstein(loops.by_other_tensor)),
}

# ------------------------------------------------------------------------------------------ the network tap

CASES["several dtypes"] = Case(models.Mixed, ADAMW, loops.plain, 3, SEVERAL)
#: Sums in the order of ranks have no drift from the order of buckets. What has a hook of its own is refused.
CASES |= {
    f"{name}, mirrored": replace(case, tap="mirror", drift="")
    for name, case in CASES.items()
    if case.ranks > 1 and case.ddp is not None and case.made is not compress
}
#: By multicast, those that differ in what the collective is given or in what becomes of its gradients. To the others,
#: which differ in what is not a gradient (schedules, groups, RNG, data, buffers), it is the same collective.
BY_MULTICAST = (
    "DDP", "clipping by norm", "accumulation", "accumulation without sync", "scaler",
    "scaler, unscaled and clipped", "several buckets, 4 ranks", "bucket views, zeroed in place",
    "missing gradients", "frozen", "tensor hook", "fp32, large",
    "bf16, AdamW", "BatchNorm", "odd shapes", "strided, DDP", "GAN, DDP", "several dtypes",
)  # fmt: skip
CASES |= {f"{name}, multicast": replace(CASES[f"{name}, mirrored"], tap="multicast") for name in BY_MULTICAST}
