"""What a user's training loop does in one step. Each takes the job and a batch; `job.step` steps are done before."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .job import Job

Train = Callable[[Job, Tensor, Tensor], None]


def loss_of(job: Job, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(job.model(x), y)


def plain(job: Job, x: Tensor, y: Tensor) -> None:
    job.optimizer.zero_grad()
    loss_of(job, x, y).backward()
    job.optimizer.step()


def noisy(job: Job, x: Tensor, y: Tensor) -> None:
    """Draws from every generator."""
    noise = 0.1 * torch.randn_like(x) * float(np.random.uniform(0.5, 1.5))
    plain(job, x + noise, y * random.uniform(0.5, 1.5))


def zeroing(job: Job, x: Tensor, y: Tensor) -> None:
    """Sets gradients to zero instead of None, before the backward."""
    job.optimizer.zero_grad(set_to_none=False)
    loss_of(job, x, y).backward()
    job.optimizer.step()


def zeroing_after(job: Job, x: Tensor, y: Tensor) -> None:
    loss_of(job, x, y).backward()
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=False)


def clearing_after(job: Job, x: Tensor, y: Tensor) -> None:
    loss_of(job, x, y).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def scheduled(job: Job, x: Tensor, y: Tensor) -> None:
    plain(job, x, y)
    job.stateful["scheduler"].step()


def on_plateau(job: Job, x: Tensor, y: Tensor) -> None:
    job.optimizer.zero_grad()
    loss = loss_of(job, x, y)
    loss.backward()
    job.optimizer.step()
    metric = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(metric)
    job.stateful["scheduler"].step(metric.item())


def by_hand(job: Job, x: Tensor, y: Tensor) -> None:
    """Changes hyper-parameters before some updates, and after others."""
    group = job.optimizer.param_groups[0]
    if job.step == 2:
        group["lr"] *= 0.3
        group["betas"] = (0.8, 0.95)
    plain(job, x, y)
    if job.step in (0, 4):
        group["weight_decay"] += 0.1


def clipped_by_norm(job: Job, x: Tensor, y: Tensor) -> None:
    job.optimizer.zero_grad()
    loss_of(job, x, y).backward()
    assert nn.utils.clip_grad_norm_(job.net.parameters(), 0.05) > 0.05
    job.optimizer.step()


def clipped_by_value(job: Job, x: Tensor, y: Tensor) -> None:
    job.optimizer.zero_grad()
    loss_of(job, x, y).backward()
    assert max(p.grad.abs().max() for p in job.net.parameters() if p.grad is not None) > 0.01
    nn.utils.clip_grad_value_(job.net.parameters(), 0.01)
    job.optimizer.step()


def accumulating(job: Job, x: Tensor, y: Tensor) -> None:
    job.optimizer.zero_grad()
    for part in range(2):
        (loss_of(job, x[part::2], y[part::2]) / 2).backward()
    job.optimizer.step()


def accumulating_without_sync(job: Job, x: Tensor, y: Tensor) -> None:
    job.optimizer.zero_grad()
    for part in range(2):
        with nullcontext() if part else job.model.no_sync():
            (loss_of(job, x[part::2], y[part::2]) / 2).backward()
    job.optimizer.step()


def accumulating_with_steps(job: Job, x: Tensor, y: Tensor) -> None:
    """Calls ``ckpt.step()`` for every part; the checkpointer merges those without an update into the next."""
    job.optimizer.zero_grad()
    for part in range(2):
        if part and job.ckpt is not None:
            job.ckpt.step()
        (loss_of(job, x[part::2], y[part::2]) / 2).backward()
    job.optimizer.step()


def scaled(skipped: tuple[int, ...], *, unscale: bool = False, clear: bool = False) -> Train:
    """With a GradScaler, which meets an infinite gradient in the steps `skipped`."""

    def train(job: Job, x: Tensor, y: Tensor) -> None:
        scaler = job.stateful["scaler"]
        if not clear:
            job.optimizer.zero_grad()
        loss = loss_of(job, x, y) * (float("inf") if job.step in skipped else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(job.optimizer)
            nn.utils.clip_grad_norm_(job.net.parameters(), 0.05)
        before = scaler.get_scale()
        scaler.step(job.optimizer)
        scaler.update()
        assert (scaler.get_scale() < before) == (job.step in skipped)
        if clear:
            job.optimizer.zero_grad()

    return train


def skipping_a_layer(job: Job, x: Tensor, y: Tensor) -> None:
    """Layer 2 gets no gradient in odd steps, nor in the first."""
    job.optimizer.zero_grad()
    F.mse_loss(job.model(x, skip=job.step % 2 == 1 or job.step == 0), y).backward()
    assert (job.net.layers[2].weight.grad is None) == (job.step % 2 == 1 or job.step == 0)
    job.optimizer.step()


def skipping_in_place(job: Job, x: Tensor, y: Tensor) -> None:
    """Layer 2 gets its only gradient in step 5. From then on it has one of zeros, which still moves it."""
    job.optimizer.zero_grad(set_to_none=False)
    F.mse_loss(job.model(x, skip=job.step != 4), y).backward()
    job.optimizer.step()


def averaging(job: Job, x: Tensor, y: Tensor) -> None:
    """What DDP does, by hand."""
    job.optimizer.zero_grad()
    loss_of(job, x, y).backward()
    for param in job.net.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= job.case.ranks
    job.optimizer.step()


def thawing(train: Train) -> Train:
    """Layer 2 trains from step 4 on."""

    def thaw(job: Job, x: Tensor, y: Tensor) -> None:
        if job.step >= 3:
            job.net.layers[2].requires_grad_(True)
        train(job, x, y)

    return thaw


def adding_a_group(job: Job, x: Tensor, y: Tensor) -> None:
    """Layer 2 joins the optimizer in step 3, with a learning rate of its own."""
    if job.step == 2:
        job.optimizer.add_param_group({"params": list(job.net.layers[2].parameters()), "lr": 0.003})
    job.model.zero_grad()
    loss_of(job, x, y).backward()
    job.optimizer.step()


def with_closure(job: Job, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        job.optimizer.zero_grad()
        loss = loss_of(job, x, y)
        loss.backward()
        return loss

    if job.step % 2:
        job.optimizer.step(closure)
    else:
        job.optimizer.step(closure=closure)


def adversarial(job: Job, x: Tensor, y: Tensor) -> None:
    """Two updates of the discriminator, and one of the generator in every other step."""
    generator, discriminator = job.optimizers
    for _ in range(2):
        discriminator.zero_grad()
        job.model(x, torch.randn(len(x), 2)).backward()
        discriminator.step()
    if job.step % 2 == 0:
        generator.zero_grad()
        job.model(None, torch.randn(len(x), 2)).backward()
        generator.step()


def wasserstein(clamp: Callable[[nn.Parameter], Any]) -> Train:
    """As `adversarial`, with weights clamped between the updates and after the last."""

    def train(job: Job, x: Tensor, y: Tensor) -> None:
        generator, discriminator = job.optimizers
        for _ in range(2):
            discriminator.zero_grad()
            job.model(x, torch.randn(len(x), 2)).backward()
            discriminator.step()
            for param in job.net.discriminator.parameters():
                clamp(param)
        generator.zero_grad()
        job.model(None, torch.randn(len(x), 2)).backward()
        generator.step()

    return train


def through_data(param: nn.Parameter) -> None:
    param.data.clamp_(-0.05, 0.05)


@torch.no_grad()
def in_place(param: nn.Parameter) -> None:
    param.clamp_(-0.05, 0.05)


def by_other_tensor(param: nn.Parameter) -> None:
    param.data = param.data.clamp(-0.05, 0.05)


def several_optimizers(job: Job, x: Tensor, y: Tensor) -> None:
    for optimizer in job.optimizers:
        optimizer.zero_grad()
    loss_of(job, x, y).backward()
    for optimizer in job.optimizers:
        optimizer.step()


def autocast(job: Job, x: Tensor, y: Tensor) -> None:
    job.optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(job, x, y)
    loss.backward()
    job.optimizer.step()


def tiny_gradients(job: Job, x: Tensor, y: Tensor) -> None:
    """Gradients whose squares are denormal numbers."""
    job.optimizer.zero_grad()
    (loss_of(job, x, y) * 1e-21).backward()
    job.optimizer.step()


def with_surprises(job: Job, x: Tensor, y: Tensor) -> None:
    """Puts a NaN and an infinity into the gradient, once each."""
    job.optimizer.zero_grad()
    loss_of(job, x, y).backward()
    for step, value in ((2, float("nan")), (4, float("inf"))):
        if job.step == step:
            job.net.layers[1].weight.grad[3, 5] = value
    job.optimizer.step()


def half_of_gradients(optimizer: Any, *_: object) -> None:
    """A step pre-hook of the user's that edits gradients."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)


def clamping_hook(optimizer: Any, *_: object) -> None:
    """A step post-hook of the user's that edits weights."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            through_data(param)
