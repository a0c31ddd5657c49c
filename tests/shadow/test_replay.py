"""One state, several leads: each says how its own blocks step, and no other's word counts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from checkmate import values
from checkmate.errors import Mismatch, ProtocolError
from checkmate.layout import Layout
from checkmate.shadow.replay import Cut, State, check_part
from checkmate.tensors import fingerprint
from checkmate.wire import messages as m

Made = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

#: Optimizers of two pipeline stages, one of them with an LR of its own per group.
MADE: dict[str, Made] = {
    "a": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "b": lambda params: torch.optim.Adam([{"params": params, "lr": 0.3}, {"params": [], "lr": 7.0}]),
}


class Stage:
    """A parameter and its optimizer on the ranks that hold it, and what the first of them says of each step."""

    def __init__(self, name: str, block: int, lead: int) -> None:
        self.block, self.lead = block, lead
        torch.manual_seed(block)
        self.param = torch.nn.Parameter(torch.randn(4, 3))
        self.optimizer = MADE[name]([self.param])

    @property
    def groups(self) -> bytes:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return values.dumps([{k: v for k, v in group.items() if k != "params"} for group in groups])

    @property
    def members(self) -> list[list[int]]:
        return [[self.block] * len(group["params"]) for group in self.optimizer.param_groups]

    def described(self) -> m.Optimizer:
        cls = type(self.optimizer).__name__
        return m.Optimizer("torch.optim", cls, self.groups, self.members, self.lead)

    def train(self, step: int) -> m.Update:
        self.param.grad = torch.full((4, 3), float(step))
        self.optimizer.step()
        return m.Update(0, [self.block], 0, self.groups)


def spec_of(stages: dict[str, Stage], sets: list[list[int]]) -> m.Spec:
    number = {ranks[0]: i for i, ranks in enumerate(sets)}
    blocks = [m.Block(name, "float32", 4, [0, 0], [4, 3], [4, 3], number[s.lead]) for name, s in stages.items()]
    optimizers = [s.described() for s in sorted(stages.values(), key=lambda s: s.lead)]
    return m.Spec(max(map(max, sets)) + 1, sets, blocks, optimizers, fingerprint())


class Trained:
    """Stage a on ranks 0 and 1, stage b on rank 2, and the state that follows them."""

    def __init__(self) -> None:
        self.stages = {"a": Stage("a", 0, 0), "b": Stage("b", 1, 2)}
        self.spec = spec_of(self.stages, [[0, 1], [2]])
        self.layout = Layout(self.spec)
        self.state = State(self.spec, (), m.Incarnation(1, bytes(16)))
        self.step = 0
        anchors = [m.Anchor(s.block, 0, [m.Entry("", "float32", [4, 3], 48)], values.dumps({})) for s in self.all]
        self.apply({0: {"anchors": anchors[:1]}, 2: {"anchors": anchors[1:]}})

    @property
    def all(self) -> list[Stage]:
        return list(self.stages.values())

    def apply(self, more: dict[int, dict[str, Any]]) -> None:
        parts = {r: m.Part(r, self.step, 1, **more.get(r, {})) for r in range(self.layout.world_size)}
        for part in parts.values():
            check_part(part, self.layout)
        by_block = {s.block: s for s in self.all}

        def gradient(update: int, block: int) -> torch.Tensor:
            grad = by_block[block].param.grad
            assert grad is not None
            return grad.clone()

        self.state.apply(
            self.step, parts, self.layout.leads, gradient, lambda block, _: by_block[block].param.detach().clone()
        )
        self.step += 1

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            more = {s.lead: {"updates": [s.train(self.step)], "groups": [s.groups]} for s in self.all}
            self.apply(more)

    def check(self) -> None:
        cut = Cut(self.state)
        for stage in self.all:
            assert torch.equal(cut.tensors[stage.block][0], stage.param)
            kept = stage.optimizer.state[stage.param]
            theirs = {entry.key for entry in cut.held[stage.block].entries[1:]}
            assert theirs == {key for key, value in kept.items() if torch.is_tensor(value)}
            described = cut.optimizers[cut.held[stage.block].optimizer]
            assert (described.groups, described.members, described.rank) == (stage.groups, stage.members, stage.lead)


def test_each_lead_steps_its_own_blocks_with_its_own_class_and_groups() -> None:
    run = Trained()
    run.train(3)
    run.check()
    run.stages["a"].optimizer.param_groups[0]["lr"] = 0.01
    run.train(2)
    run.check()
    assert [values.loads(o.groups)[0]["lr"] for o in run.state.optimizer_specs()] == [0.01, 0.3]


def test_a_lead_that_says_nothing_of_its_groups_means_those_that_it_sent_last() -> None:
    run = Trained()
    run.train(1)
    before = run.state.optimizer_specs()
    run.stages["b"].optimizer.param_groups[0]["lr"] = 0.2
    b = run.stages["b"]
    run.apply({2: {"updates": [b.train(run.step)], "groups": [b.groups], "members": [b.members]}})
    assert run.state.optimizer_specs()[0] == before[0]
    run.check()


def test_stages_may_take_different_numbers_of_updates() -> None:
    run = Trained()
    a, b = run.all
    run.apply({0: {"updates": [a.train(1)]}})
    for step in (2, 3):
        run.apply({2: {"updates": [b.train(step)]}})
    run.check()


def test_the_next_attempt_may_have_its_stages_on_other_ranks_and_in_another_order() -> None:
    run = Trained()
    run.train(2)
    run.state.sidecars = {0: {"rng": b"a"}, 1: {"rng": b"a too"}, 2: {"rng": b"b"}}
    a, b = run.all
    a.block, a.lead, b.block, b.lead = 1, 1, 0, 0
    run.stages = {"b": b, "a": a}
    sets = [[0], [1, 2]]
    run.spec = spec_of(run.stages, sets)
    run.layout = Layout(run.spec)
    run.state.respec(run.spec)
    run.check()
    cut = Cut(run.state)
    assert cut.replica_sets == [[0, 1], [2]]  # until the next step is closed, the sidecars are those of the old ranks
    assert [held.block.replicas for held in cut.held] == [1, 0]
    run.train(2)
    run.check()
    cut = Cut(run.state)
    assert (cut.replica_sets, [held.block.replicas for held in cut.held]) == (sets, [0, 1])
    assert cut.sidecars == {0: {}, 1: {}, 2: {}}


def test_a_stage_with_another_class_does_not_take_over_the_state() -> None:
    run = Trained()
    run.train(1)
    changed = [run.spec.optimizers[0], msgspec.structs.replace(run.spec.optimizers[1], name="AdamW")]
    with pytest.raises(Mismatch, match="the optimizers are"):
        run.state.respec(msgspec.structs.replace(run.spec, optimizers=changed))
    run.check()


@pytest.mark.parametrize(
    ("rank", "more", "match"),
    [
        (0, {"members": [[[0, 1]]]}, "block 1 in a group, which rank 2 leads"),
        (1, {"members": [[[0]]]}, "groups of 1 optimizers, of 0"),
        (2, {"updates": [m.Update(1, [1], 0)]}, "optimizer 1 of lead 2"),
        (0, {"anchors": [m.Anchor(5, 0, [], b"")]}, "anchor of block 5 of 2"),
        (1, {"anchors": [m.Anchor(0, 3, [], b"")]}, "optimizer 3 of lead 0"),
    ],
)
def test_a_part_that_speaks_of_what_its_rank_does_not_lead_is_refused(
    rank: int, more: dict[str, Any], match: str
) -> None:
    with pytest.raises(ProtocolError, match=match):
        check_part(m.Part(rank, 1, 1, **more), Trained().layout)
