"""Trains a small GPT on the source text of Python's standard library, a checkpoint of every step included.

    checkmate shadow --listen 127.0.0.1:7070 &
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 3 --max-restarts 9 examples/gpt.py --shadow tcp://127.0.0.1:7070

Kill its workers whenever you like: torchrun starts them again, they resume at the step they had reached,
and the run ends with the very bits that it would have ended with anyway.
Without --shadow the same loop trains unprotected.

The variable is for torchrun: by default all of its attempts share one store, where the ranks of a new one
find the addresses of their dead predecessors (https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import checkmate

VOCABULARY = 256  # the text is read as bytes


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class Block(nn.Module):
    """Attention and a perceptron, each around a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class GPT(nn.Module):
    """A decoder-only transformer over bytes; with the defaults of `options` it has 3.2 M parameters."""

    def __init__(self, context: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.tokens.weight  # tied, as in GPT-2

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss in nats per byte of predicting `y` from `x`, both int64 of shape (batch, context)."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(self.dropout(h))))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class StandardLibrary(Dataset[tuple[Tensor, Tensor]]):
    """The modules of Python's standard library, one after the other, cut into windows of `context` bytes."""

    def __init__(self, context: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context :][: self.context + 1].long()
        return window[:-1], window[1:]


class Unprotected:
    """What the loop holds instead of a checkpointer when there is no shadow."""

    def restore(self) -> int:
        return 0

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        for epoch in itertools.count():
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from loader

    def step(self) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


def print_step(step: int, loss: float, seconds: float) -> None:
    if dist.get_rank() == 0:
        print(f"step {step:5d}   loss {loss:.4f}   {seconds * 1e3:.0f} ms", flush=True)


Trained = tuple[nn.Module, torch.optim.Optimizer, LRScheduler, Iterator[tuple[Tensor, Tensor]]]


def train(args: argparse.Namespace, log: Callable[[int, float, float], None] = print_step) -> Trained:
    """Trains under torchrun; returns the model, the optimizer, the scheduler and the batches not yet used.

    `log` is called on every rank after each step, with its number (the first is 1), loss and seconds.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(GPT(args.context, args.width, args.heads, args.layers, args.dropout))
    torch.manual_seed(args.seed + rank)  # dropout differs between the ranks, the initial weights do not

    data = StandardLibrary(args.context)
    loader = DataLoader(data, args.batch, sampler=DistributedSampler(data, seed=args.seed), drop_last=True)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    scheduler = OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps + 1)

    ckpt: Any = Unprotected()
    if args.shadow:
        stateful = {"scheduler": scheduler}
        ckpt = checkmate.attach(model, optimizer, shadow=args.shadow, run=args.name, stateful=stateful, tap=args.tap)
    first = ckpt.restore()
    batches = ckpt.batches(loader)
    for step in range(first, args.steps):
        started = time.perf_counter()
        x, y = next(batches)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ckpt.step()
        log(step + 1, loss.item(), time.perf_counter() - started)
    ckpt.wait()
    ckpt.close()
    dist.destroy_process_group()
    return model, optimizer, scheduler, batches


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    add = parser.add_argument
    add("--shadow", default="", metavar="ADDRESS", help="tcp://HOST:PORT; empty: train without Checkmate")
    # Not --run: torchrun looks at the script's options too, and takes it for its own --run-path.
    add("--name", default="gpt", help="what the shadow keeps this run under")
    add(
        "--tap",
        default="step",
        choices=("step", "mirror", "multicast"),
        help="where the gradient is read; docs/network.md",
    )
    add("--steps", type=int, default=1000)
    add("--batch", type=int, default=8, help="windows per rank and step")
    add("--context", type=int, default=64, help="bytes per window")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=256)
    add("--dropout", type=float, default=0.1)
    add("--lr", type=float, default=2e-3, help="the highest learning rate of the cycle")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(options())
