"""A pipeline of two stages with two replicas each, as one run: a step is kept for all four ranks, or for none.

    ranks 0, 1: the first layers   ── activations ──>   ranks 2, 3: the last layers
                                   <── gradients ───

    checkmate shadow --listen 127.0.0.1:7070 &
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/pipeline.py --shadow tcp://127.0.0.1:7070

Each stage averages gradients over a process group of its own. Kill the workers with SIGKILL, and torchrun starts them
again; they go on from the step that all had finished. Parameters have names of their own on each stage ("stage0.…"):
one name means one parameter, on every rank that has it.

With ``--tap mirror`` the network copies the gradients of both groups to the shadow (``docs/network.md``); to try it on
one machine, as root, start the shadow with ``--capture lo`` and the ranks with ``GLOO_SOCKET_IFNAME=lo``.
``examples/ddp.py`` stops in good order at SIGTERM as well, and ``examples/gpt.py`` says what the variable above is for.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import checkmate

STAGES, REPLICAS = 2, 2
FEATURES, HIDDEN, BATCH = 8, 64, 32


class Pipeline:
    """This rank's part of it: `stage` of the model, on every other part of the data."""

    def __init__(self) -> None:
        rank = dist.get_rank()
        if dist.get_world_size() != STAGES * REPLICAS:
            raise SystemExit(f"this example needs {STAGES * REPLICAS} ranks, there are {dist.get_world_size()}")
        self.stage, self.replica = divmod(rank, REPLICAS)
        self.partner = (rank + REPLICAS) % (STAGES * REPLICAS)
        # Every rank makes every group, whether it is in it or not.
        groups = [dist.new_group(range(stage * REPLICAS, (stage + 1) * REPLICAS)) for stage in range(STAGES)]
        torch.manual_seed(self.stage)  # the same weights on all replicas
        layers = (
            nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Dropout(0.1), nn.Linear(HIDDEN, HIDDEN)),
            nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)),
        )[self.stage]
        named = nn.Sequential(OrderedDict([(f"stage{self.stage}", layers)]))
        self.model = DistributedDataParallel(named, process_group=groups[self.stage])
        torch.manual_seed(100 + rank)  # another dropout on each rank

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Forward and backward through both stages; the loss, on the last one."""
        if self.stage == 0:
            hidden = self.model(x)
            dist.send(hidden.detach(), self.partner)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, self.partner)
            hidden.backward(gradient)
            return 0.0
        hidden = torch.empty(len(x), HIDDEN)
        dist.recv(hidden, self.partner)
        hidden.requires_grad_()
        loss = nn.functional.mse_loss(self.model(hidden), y)
        loss.backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, self.partner)
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--shadow", required=True, metavar="ADDRESS", help="tcp://HOST:PORT of a shadow")
    parser.add_argument("--name", default="pipeline", help="what the shadow keeps this run under")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--tap", default="step", choices=["step", "mirror", "multicast"], help="how gradients reach the shadow"
    )
    args = parser.parse_args()

    dist.init_process_group("gloo")
    pipeline = Pipeline()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, FEATURES, generator=generator)
    data = TensorDataset(x, x.square().mean(1, keepdim=True))
    # Both stages go through the data in the same order: one uses the inputs, the other the labels.
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, REPLICAS, pipeline.replica))
    optimizer = torch.optim.AdamW(pipeline.model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    ckpt = checkmate.attach(
        pipeline.model, optimizer, shadow=args.shadow, run=args.name, stateful={"scheduler": scheduler}, tap=args.tap
    )
    first = ckpt.restore()
    say(f"going on from step {first}")
    batches = ckpt.batches(loader)
    for step in range(first, args.steps):
        optimizer.zero_grad()
        loss = pipeline.backward(*next(batches))
        nn.utils.clip_grad_norm_(pipeline.model.parameters(), 1.0)  # of this stage
        optimizer.step()
        scheduler.step()
        ckpt.step()
        if (step + 1) % 20 == 0:
            say(f"step {step + 1}: loss {loss:.9f}, a restart would resume at {ckpt.stats()['recovery_step']}")
    say(f"step {ckpt.wait(timeout=20)} is safe")
    ckpt.close()
    dist.destroy_process_group()


def say(text: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:  # of the last stage, which knows the loss
        print(text, flush=True)


if __name__ == "__main__":
    main()
