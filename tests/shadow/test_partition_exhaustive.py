"""The agreement in every order of delivery, loss and restart, for small cases; at random for larger ones."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import checkmate.shadow.partition
from checkmate.shadow.effects import Acknowledge, Apply, Drop, Effect
from checkmate.shadow.partition import Partition, Verdict
from checkmate.wire.frames import Header, Kind
from checkmate.wire.messages import Part

from .agreement import FAULTS, INVARIANTS, Event, Violation, World
from .ranks import Case, layout

DESIGN = Path(checkmate.shadow.partition.__file__).with_name("DESIGN.md")

ONE = layout(2)  # one block; each of two ranks sends half of it
TWO = layout(2, 1)  # rank 0 owns block 0, rank 1 owns block 1


def uneven(step: int) -> tuple[tuple[int, ...], ...]:
    """No update, one, or two, of which the first leaves a block without a gradient."""
    return ((), ((0, 1),), ((0,), (0, 1)))[step % 3]


CASES = {
    "nothing happens": Case(TWO, chunk=64),
    "many steps": Case(ONE, steps=4),
    "updates differ from step to step": Case(TWO, steps=3, updates=uneven),
    "blocks are anchored in between": Case(TWO, chunk=64, changes=lambda step: (step % 2,)),
    "first anchors": Case(TWO, start="anchoring"),
    "first anchors, a rank reconnects": Case(TWO, start="anchoring", steps=1, cuts=1),
    "first anchors, then a gap": Case(TWO, start="anchoring", gaps=1),
    "unknown run": Case(ONE, start="unknown", steps=3),
    "a gap": Case(ONE, steps=3, gaps=1),
    "a gap, two blocks to anchor": Case(TWO, gaps=1),
    "a gap before the epoch begins": Case(ONE, start="unknown", gaps=1, cuts=1),
    "two gaps": Case(ONE, gaps=2),
    "a rank reconnects": Case(ONE, cuts=1),
    "a rank reconnects in the middle of a slice": Case(layout(4), steps=1, cuts=2, chunk=64),
    "a gap, and a rank reconnects": Case(ONE, gaps=1, cuts=1),
    "the shadow restarts twice": Case(ONE, restarts=2),
    "the shadow restarts while ranks differ in their epoch": Case(ONE, gaps=1, restarts=1),
    "a step cannot be applied": Case(ONE, steps=3, failures=1),
    "a step cannot be applied, and a gap": Case(ONE, gaps=1, failures=1),
    "gated": Case(TWO, gated=True),
    "gated, a gap": Case(ONE, gaps=1, gated=True),
    "gated, a rank reconnects": Case(ONE, cuts=1, gated=True),
}


def explore(case: Case, transitions: set[tuple[str, ...]] | None = None) -> int:
    """Every moment that can be reached, breadth first; from each, calm must lead to a protected one. Counts them."""
    first = World(case, transitions)
    first.check()
    before: dict[int, tuple[int, Event] | None] = {first.key(): None}
    calm: set[int] = set()
    todo = deque([first])
    while todo:
        world = todo.popleft()
        key = world.key()
        event: Event = ("calm", 0)
        try:
            settle(world.copy(), calm)
            for event in world.events():
                after = world.copy()
                if after.do(event) and (found := after.key()) not in before:
                    before[found] = (key, event)
                    todo.append(after)
        except Violation as violation:
            history = [event]
            while (step := before[key]) is not None:
                key, event = step
                history.append(event)
            raise Violation(f"{violation}\nafter {history[::-1]}") from None
    return len(before)


def settle(world: World, known: set[int]) -> None:
    """Without further faults, every step that is closed becomes safe. `known` are moments of which that is known."""
    path = []
    while (key := world.key()) not in known:
        path.append(key)
        if not world.calm():
            world.require_protected()
            break
    known.update(path)


@cache
def explored(name: str) -> tuple[int, frozenset[tuple[str, ...]]]:
    transitions: set[tuple[str, ...]] = set()
    return explore(CASES[name], transitions), frozenset(transitions)


@pytest.mark.parametrize("name", CASES)
def test_every_order_keeps_the_invariants_and_nobody_waits_for_ever(name: str) -> None:
    count, _ = explored(name)
    print(f"{name}: {count} moments")
    assert count > 100


# ---------------------------------------------------------------- the design note


def rows(heading: str) -> list[list[str]]:
    """The first table under a heading of DESIGN.md, without its head."""
    section = DESIGN.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1]
    table = section[section.index("\n|") :].lstrip("\n").split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_invariants_are_those_of_the_design_note() -> None:
    assert [name for name, _ in rows("Invariants") if name not in INVARIANTS] == []
    assert len(rows("Invariants")) == len(INVARIANTS)


def test_transitions_are_those_of_the_design_note() -> None:
    """Every transition seen fits exactly one row, and every row is seen."""
    table = []
    for phases, events, goal, effects in rows("Transitions"):
        names = [rf"({name.rstrip('*')}, ){'?' * name.endswith('*')}" for name in effects.split() if name != "–"]
        table.append((phases.split(", "), events.split(", "), goal, re.compile("".join(names))))
    used = set()
    for phase, event, goal, effects in set[tuple[str, ...]]().union(*(explored(name)[1] for name in CASES)):
        fitting = [
            number
            for number, (phases, events, end, pattern) in enumerate(table)
            if phase in phases and event in events and pattern.fullmatch(f"{effects}, " * bool(effects))
            and goal == (phase if end == "–" else end)
        ]  # fmt: skip
        assert len(fitting) == 1, f"{phase}, {event} -> {goal}: {effects or '–'} fits {len(fitting)} rows"
        used.update(fitting)
    assert used == set(range(len(table)))


# ---------------------------------------------------------------- negative controls


class TrustsParts(Partition):
    """Takes a step for complete as soon as its parts are there."""

    def _advance(self, moved: bool = False) -> list[Effect]:
        for slot in self._slots.values():
            slot.owed.clear()
        return super()._advance(moved)


class OpensGateEarly(Partition):
    def _advance(self, moved: bool = False) -> list[Effect]:
        effects = super()._advance(moved)
        return self._stabilise(self.received) + effects


class IgnoresGaps(Partition):
    def _never(self, step: int, reason: str) -> list[Effect]:
        return self._advance()


class VoidsAcknowledged(Partition):
    """Ends the epoch at a gap without waiting for what may be stable already."""

    def _settle(self, moved: bool) -> list[Effect]:
        if self._gap is not None and self.received >= self._gap[0] - 1:
            return self.end_epoch(self._gap[1])
        return super()._settle(moved)


class BeginsAtTheOldest(Partition):
    """Takes the oldest of the ranks' first steps for that of the epoch."""

    def _start(self, rank: int, step: int) -> list[Effect]:
        if rank not in self._starts:
            self._starts = dict.fromkeys(self._starts, min([step, *self._starts.values()]))
            step = min([step, *self._starts.values()])
        return super()._start(rank, step)


class AcknowledgesFirst(Partition):
    def _advance(self, moved: bool = False) -> list[Effect]:
        return sorted(super()._advance(moved), key=lambda effect: not isinstance(effect, Acknowledge))


class DropsEarly(Partition):
    """Takes buffers for free once their step is stable."""

    def _stabilise(self, step: int) -> list[Effect]:
        effects = super()._stabilise(step)
        return effects + [Drop(effect.step) for effect in effects if isinstance(effect, Apply)]


class ForgetsFrozen(Partition):
    def end_epoch(self, reason: str, epoch: int = 0, *, keep: bool = True) -> list[Effect]:
        effects = super().end_epoch(reason, epoch, keep=keep)
        self.frozen = -1
        return effects


class ForgetsWhatWasLost(Partition):
    """Goes on promising the step that a failed replay has destroyed."""

    def lost(self, epoch: int, kept: int, reason: str) -> list[Effect]:
        return self.end_epoch(reason)


class WholeTooEarly(Partition):
    """Promises steps although blocks lack their state."""

    @property
    def recovery(self) -> int:
        return max(self.stable, self.frozen)


class NeverWaits(Partition):
    def _place(self, header: Header) -> Verdict:
        verdict = super()._place(header)
        return Verdict.TAKE if verdict is Verdict.WAIT else verdict


class TakesTwice(Partition):
    """Lets a duplicate overwrite what has arrived."""

    def begin(self, header: Header) -> Verdict:
        verdict = super().begin(header)
        duplicate = verdict is Verdict.DRAIN and header.epoch == self.epoch and header.kind is not Kind.PART
        return Verdict.TAKE if duplicate else verdict


class MixesEpochs(Partition):
    def part(self, part: Part) -> list[Effect]:
        return super().part(Part(part.rank, part.step, self.epoch, part.gap, part.begins, part.updates, part.anchors))


CONTROLS: list[tuple[str, dict[str, Any], str]] = [
    ("first anchors", {"partition": TrustsParts}, "received exactly"),
    ("gated", {"partition": OpensGateEarly}, "gate"),
    ("a gap", {"partition": IgnoresGaps}, "nobody waits for ever"),
    ("gated, a gap", {"partition": VoidsAcknowledged}, "gate"),
    ("unknown run", {"partition": BeginsAtTheOldest}, "nobody waits for ever"),
    ("nothing happens", {"partition": AcknowledgesFirst}, "effects"),
    ("nothing happens", {"partition": DropsEarly}, "dropped last"),
    ("a gap", {"partition": ForgetsFrozen}, "recovery never falls"),
    ("a step cannot be applied, and a gap", {"partition": ForgetsWhatWasLost}, "truth"),
    ("unknown run", {"partition": WholeTooEarly}, "truth"),
    ("many steps", {"partition": NeverWaits}, "ring"),
    ("a rank reconnects", {"partition": TakesTwice}, "received exactly|memory"),
    ("a gap", {"partition": MixesEpochs}, "no refusal|complete record"),
    ("unknown run", {"complete_once": True}, "complete record"),
    ("a gap before the epoch begins", {"forgets_gaps": True}, "nobody waits for ever"),
    ("a rank reconnects", {"trusts_sent": True}, "nobody waits for ever"),
]


@pytest.mark.parametrize(
    ("name", "mutant", "invariant"), CONTROLS, ids=[getattr(m.get("partition"), "__name__", *m) for _, m, _ in CONTROLS]
)
def test_mutants_are_caught(name: str, mutant: dict[str, Any], invariant: str) -> None:
    with pytest.raises(Violation, match=f"^({invariant})"):
        explore(replace(CASES[name], **mutant))


# ---------------------------------------------------------------- larger cases, at random


class Agreement(RuleBasedStateMachine):
    """Three ranks, three blocks, many steps. Afterwards all is calm, and every step must become safe."""

    @initialize(
        start=st.sampled_from(["streaming", "anchoring", "unknown"]),
        gated=st.booleans(),
        chunk=st.sampled_from([64, 128, 1 << 20]),
        backwards=st.booleans(),
    )
    def begin(self, start: str, gated: bool, chunk: int, backwards: bool) -> None:
        self.backwards = backwards  #: in which order things happen once all is calm
        self.world = World(
            Case(
                layout(3, 1, 2, ranks=3), steps=12, start=start, gaps=3, cuts=4, restarts=1, failures=1, gated=gated,
                chunk=chunk, updates=lambda step: ((), ((0, 1, 2),), ((1,), (0, 2)))[step % 3],
                changes=lambda step: (step % 3,) if step % 4 == 0 else (),
            )
        )  # fmt: skip
        self.world.check()

    def events(self, fault: bool) -> list[Event]:
        return [event for event in self.world.events() if (event[0] in FAULTS) is fault]

    @rule(numbers=st.lists(st.integers(0, 99), min_size=1, max_size=12))
    def happens(self, numbers: list[int]) -> None:
        for number in numbers:
            if events := self.events(fault=False):
                self.world.do(events[number % len(events)])

    @precondition(lambda self: self.events(fault=True))
    @rule(number=st.integers(0, 99))
    def fails(self, number: int) -> None:
        events = self.events(fault=True)
        self.world.do(events[number % len(events)])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            while self.world.calm(self.backwards):
                pass
            self.world.require_protected()


TestAgreement = Agreement.TestCase
TestAgreement.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
