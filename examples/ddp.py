"""The least that a DDP loop needs to have every step checkpointed, and to stop in good order at SIGTERM.

    checkmate shadow --listen 127.0.0.1:7070 &
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/ddp.py --shadow tcp://127.0.0.1:7070

Kill the workers with SIGKILL, and torchrun starts them again; they go on from the step that they had finished.

torchrun hands SIGTERM on to the workers: they finish the step, wait until it is safe, and end well. Ctrl-C reaches them
as a KeyboardInterrupt in the middle of a step. After either, torchrun prints a traceback of its own and exits with 1;
the same command goes on from the newest finished step. ``examples/gpt.py`` says what the variable is for.

With ``--tap mirror`` the network copies the gradients to the shadow (``docs/network.md``); to try it on one machine, as
root, start the shadow with ``--capture lo`` and the ranks with ``GLOO_SOCKET_IFNAME=lo``.
"""

from __future__ import annotations

import argparse
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import checkmate


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--shadow", required=True, metavar="ADDRESS", help="tcp://HOST:PORT of a shadow")
    # Not --run: torchrun looks at the script's options too, and takes it for its own --run-path.
    parser.add_argument("--name", default="ddp", help="what the shadow keeps this run under")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--tap", default="step", choices=["step", "mirror", "multicast"], help="how gradients reach the shadow"
    )
    args = parser.parse_args()

    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and data on every rank
    images = torch.randn(2048, 1, 8, 8)
    data = TensorDataset(images, images.mean((1, 2, 3)).gt(0).long())
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(576, 2)
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=args.steps + 1)
    torch.manual_seed(1 + dist.get_rank())  # another dropout on each rank

    ckpt = checkmate.attach(
        model, optimizer, shadow=args.shadow, run=args.name, stateful={"scheduler": scheduler}, tap=args.tap
    )
    first = ckpt.restore()
    say(f"going on from step {first}")
    batches = ckpt.batches(loader)
    for step in range(first, args.steps):
        inputs, labels = next(batches)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ckpt.step()
        if (step + 1) % 50 == 0:
            say(f"step {step + 1}: loss {loss.item():.6f}, a restart would resume at {ckpt.stats()['recovery_step']}")
        if on_any_rank(bool(terminated)):
            say(f"SIGTERM in step {step + 1}")
            break
    say(f"step {ckpt.wait(timeout=20)} is safe")  # within the time that torchrun gives its workers, 30 s
    ckpt.close()
    dist.destroy_process_group()


def on_any_rank(flag: bool) -> bool:
    """A collective. All ranks leave the loop at the same step, though the signal may find them at different ones."""
    found = torch.tensor([float(flag)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
