"""What the ranks say of one step, once all have spoken: do replicas agree, and is every gradient there? Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping

from ..layout import Layout
from ..wire.messages import Part
from .effects import Tell


def disagreement(step: int, parts: Mapping[int, Part], layout: Layout) -> Tell | None:
    """Do the ranks of each replica set tell the same story of this step?"""
    alike = layout.alike
    for rank in range(layout.world_size):
        first, mine = parts[alike[rank][0]], parts[rank]
        if mine is first:
            continue
        if _story(mine) != _story(first):
            text = (
                f"ranks {first.rank} and {rank} took different optimizer steps in step {step}: "
                f"{len(first.updates)} and {len(mine.updates)} updates, or gradients for different parameters"
            )
            return Tell("replicas", text, step, fatal=True)
        for ours, theirs in zip(first.updates, mine.updates, strict=True):
            if ours.agreement != theirs.agreement:
                text = f"ranks {first.rank} and {rank} used different hyper-parameters in step {step}"
                return Tell("replicas", text, step)
    for number, ranks in enumerate(layout.replica_sets):
        lead, *others = (parts[rank] for rank in sorted({alike[rank][0] for rank in ranks}))
        for second in others:  # ranks that share only some of their blocks
            shared = {b for b, block in enumerate(layout.blocks) if block.replicas == number}
            if _story(second, shared) != _story(lead, shared):
                text = (
                    f"ranks {lead.rank} and {second.rank} took different optimizer steps in step {step} with the "
                    "parameters that both hold"
                )
                return Tell("replicas", text, step, fatal=True)
    seen: dict[int, tuple[int, int]] = {}
    for rank in range(layout.world_size):
        for digest in parts[rank].gradients:
            other, value = seen.setdefault(digest.block, (rank, digest.digest))
            if value != digest.digest:
                fqn = layout.blocks[digest.block].fqn if digest.block < len(layout.blocks) else "?"
                text = f"ranks {other} and {rank} hold different gradients of {fqn} in step {step}"
                return Tell("replicas", text, step)
    return None


def uncovered(step: int, parts: Mapping[int, Part], layout: Layout) -> Tell | None:
    """With shards that parts name: is every gradient there once, from end to end?"""
    if layout.tap == "step":
        return None
    blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in parts.values():
        for number, update in enumerate(part.updates):
            for block in update.blocks:
                blocks.setdefault((number, block), [])
            for shard in update.shards or ():
                blocks[number, shard.block].append((shard.offset, shard.offset + shard.nbytes))
    for (_, block), ranges in blocks.items():
        ends = [0]
        for start, stop in sorted(ranges):
            if start != ends[-1]:
                break
            ends.append(stop)
        if len(ends) <= len(ranges) or ends[-1] != layout.blocks[block].nbytes:
            fqn = layout.blocks[block].fqn
            text = f"the ranks' shards of the gradient of {fqn} in step {step} are not the whole gradient once"
            return Tell("replicas", text, step, fatal=True)
    return None


def _story(part: Part, among: Container[int] | None = None) -> list[tuple[int, int, tuple[int, ...]]]:
    """Its updates: number, optimizer, blocks with a gradient. Only of some blocks, where these are named."""
    if among is None:
        return [(number, u.optimizer, tuple(u.blocks)) for number, u in enumerate(part.updates)]
    told = [(number, u.optimizer, tuple(b for b in u.blocks if b in among)) for number, u in enumerate(part.updates)]
    return [entry for entry in told if entry[2]]
