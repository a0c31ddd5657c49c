"""What the switch should do, and what has to change for that. No input, no output, no particular kind of switch.

`rules` says what a cluster asks for. A kind of switch (`nft`, `sonic`) turns that into a *state*: entries by name, each
entry standing after those that it needs. It reads what is there into a state of the same form, in which only entries
that are ours stand; so foreign ones cannot come into a plan. `plan` is the difference of two states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .cluster import Cluster

State = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """TCP packets that come in at `port` and carry `dscp` also go out of each of `copies`, which are sorted."""

    port: str
    dscp: int
    copies: tuple[str, ...]

    def __str__(self) -> str:
        return f"TCP with DSCP {self.dscp} that comes in at {self.port} is copied to {', '.join(self.copies)}"


def rules(cluster: Cluster) -> tuple[Rule, ...]:
    """One rule per worker, none with multicast. A shadow's port is never a source: `Cluster` keeps all ports apart."""
    if cluster.multicast is not None:
        return ()
    copies = tuple(sorted(shadow.port for shadow in cluster.shadows))
    return tuple(Rule(worker.port, cluster.dscp, copies) for worker in cluster.workers)


@dataclass(frozen=True)
class Operation:
    """One entry becomes `after`, from `before`; None is "not there". Never both."""

    name: str
    before: Any
    after: Any

    @property
    def verb(self) -> str:
        return "add" if self.before is None else "remove" if self.after is None else "change"

    def __str__(self) -> str:
        return f"{self.verb} {self.name}"


def plan(found: State, desired: State) -> tuple[Operation, ...]:
    """What makes `found` into `desired`, in an order that works: first what goes, the last needed first."""
    gone = [Operation(name, before, None) for name, before in reversed(list(found.items())) if name not in desired]
    rest = [Operation(name, found.get(name), after) for name, after in desired.items() if after != found.get(name)]
    return (*gone, *rest)
