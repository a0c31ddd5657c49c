"""Planning, on states that are plain dictionaries."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from checkmate.switch.cluster import Cluster
from checkmate.switch.rules import Operation, Rule, plan, rules
from tests.switch.clusters import TWO_WORKERS, clusters

STATES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 3))


def carry_out(operations: tuple[Operation, ...], switch: dict[str, Any]) -> dict[str, Any]:
    """A model of a switch: refuses what does not start from what is there, as a transaction does."""
    switch = dict(switch)
    for operation in operations:
        assert switch.get(operation.name) == operation.before
        assert operation.before != operation.after
        switch.pop(operation.name, None)
        if operation.after is not None:
            switch[operation.name] = operation.after
    return switch


def test_each_worker_is_copied_to_every_shadow() -> None:
    assert rules(TWO_WORKERS) == (Rule("w0", 43, ("s0", "s1")), Rule("w1", 43, ("s0", "s1")))


@given(clusters())
def test_port_of_a_shadow_is_never_a_source(cluster: Cluster) -> None:
    asked = rules(cluster)
    assert {rule.port for rule in asked}.isdisjoint(port for rule in asked for port in rule.copies)
    assert {rule.port for rule in asked} == {worker.port for worker in cluster.workers}


@given(STATES, STATES, st.dictionaries(st.sampled_from("XYZ"), st.integers(0, 3)))
def test_plan_gives_the_desired_state_and_touches_nothing_foreign(
    found: dict[str, int], desired: dict[str, int], foreign: dict[str, int]
) -> None:
    after = carry_out(plan(found, desired), {**foreign, **found})
    assert after == {**foreign, **desired}
    assert plan({name: value for name, value in after.items() if name not in foreign}, desired) == ()


@given(STATES, st.dictionaries(st.sampled_from("XYZ"), st.integers(0, 3)))
def test_removal_leaves_what_was_there_before(desired: dict[str, int], foreign: dict[str, int]) -> None:
    applied = carry_out(plan({}, desired), foreign)
    assert carry_out(plan(desired, {}), applied) == foreign


def test_what_is_needed_comes_first_and_goes_last() -> None:
    state = {"table": 1, "chain": 2, "rule": 3}
    assert [operation.name for operation in plan({}, state)] == ["table", "chain", "rule"]
    assert [operation.name for operation in plan(state, {})] == ["rule", "chain", "table"]


def test_what_goes_goes_before_anything_comes() -> None:
    operations = plan({"table": 1, "old": 2}, {"table": 1, "new": 2})
    assert [str(operation) for operation in operations] == ["remove old", "add new"]
