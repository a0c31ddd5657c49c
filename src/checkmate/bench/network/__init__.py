"""``checkmate bench network``: what replication by the network costs the workers, and what it brings. Needs root.

Every part runs in network namespaces with real sockets, switch rules and captured packets; each says what it measured
beside the limit measured in the same run. Gradients come from an emulated accelerator: noise of its own for each rank,
another multiple in each step; everything from DDP's hook on is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...errors import UsageError
from ..common import Figure, Outcome
from .capture import capture
from .collective import collective, multicast_collective
from .delivery import delivery
from .egress import egress, multicast_egress
from .goodput import multicast_goodput
from .loss import loss
from .overhead import multicast_overhead, overhead

#: Each gets whether to be quick, and the rate of links where one is limited.
Part = Callable[[bool, str], Iterator[Figure]]
PARTS: dict[str, Part] = {
    "egress": egress,
    "delivery": delivery,
    "collective": collective,
    "overhead": overhead,
    "loss": loss,
    "capture": capture,
    "multicast-egress": multicast_egress,
    "multicast-collective": multicast_collective,
    "multicast-goodput": multicast_goodput,
    "multicast-overhead": multicast_overhead,
}


def measure(quick: bool, only: str | None, rate: str, show: Callable[[Figure], None] = lambda _: None) -> Outcome:
    """Run the benchmark, or one part; `show` gets each figure as soon as it is there."""
    if only is not None and only not in PARTS:
        raise UsageError(f"there is no part {only!r}; there are {', '.join(PARTS)}")
    figures: list[Figure] = []
    chosen = list(PARTS) if only is None else [only]
    for name in chosen:
        for figure in PARTS[name](quick, rate):
            figures.append(figure)
            show(figure)
    methods = [f"{name}: {PARTS[name].__doc__}" for name in chosen]
    return Outcome("network", "\n\n".join([__doc__ or "", *methods]), figures)
