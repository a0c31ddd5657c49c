"""One rank of a run of the demo, started as by torchrun: `worker FOLDER [options of gpt.py]`.

Notes in FOLDER what the training script does, dies as the plan there says, and leaves `final-<rank>.pt`.
With `--shadow=none` it trains without a checkpointer, and with the collective of tap="mirror".
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import checkmate

from ..trainer.mirror import collective_alone
from . import gpt, plan
from .journal import Journal, Started, Trained, read
from .saboteur import Ambush, Watched


def main(folder: Path, argv: list[str]) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    journal = Journal(folder, attempt, rank)
    journal.write(Started(os.getpid()))
    random.seed(rank)
    np.random.seed(rank)

    attach = checkmate.attach
    kill = next(iter(plan.load(folder)[attempt:]), None)

    def attach_watched(model: torch.nn.Module, optimizer: Any, **options: Any) -> Any:
        ambush = Ambush(kill, model, journal, pids) if kill and kill.rank == rank else None
        return Watched(attach(model, optimizer, **options), journal, ambush)

    def pids() -> list[int]:
        return [started.pid for r in range(ranks) for started in read(folder, attempt, r).of(Started)]

    options = gpt.options(argv)
    alone = options.shadow == plan.NOBODY
    checkmate.attach = attach_nobody if alone else attach_watched  # type: ignore[assignment]  # it need not know

    def log(step: int, loss: float, seconds: float) -> None:
        journal.write(Trained(step, loss, seconds, sent_bytes()))

    trained = gpt.train(options, log)
    torch.save(final_state(*trained), folder / f"final-{rank}.pt")


def attach_nobody(ddp: Any, optimizer: Any, **_: Any) -> gpt.Unprotected:
    collective_alone(ddp, optimizer)
    return gpt.Unprotected()


def sent_bytes() -> int:
    """What has left the interface of the gradients so far, headers included; 0 where none is named."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    counter = Path("/sys/class/net", interface, "statistics/tx_bytes")
    return int(counter.read_text()) if interface and counter.is_file() else 0


def final_state(model: Any, optimizer: Any, scheduler: Any, batches: Any) -> dict[str, Any]:
    """All that the next step would depend on, as `torch.load` reads it with `weights_only`."""
    kind, keys, *rest = np.random.get_state()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "torch rng": torch.get_rng_state(),
        "python rng": random.getstate(),
        "numpy rng": (kind, torch.tensor(keys), *rest),
        "next batch": next(batches),  # equal only if the data position is
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
