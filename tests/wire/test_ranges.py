"""`RangeSet` against a plain set of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from checkmate.wire.ranges import RangeSet

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20)


@given(RANGES, st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_range_set_is_a_set_of_integers(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    ranges, plain = RangeSet(), set[int]()
    for start, stop in added:
        assert ranges.add(start, stop) == len(set(range(start, stop)) - plain)
        plain |= set(range(start, stop))
    wanted = set(range(*asked))
    assert ranges.covers(*asked) is (wanted <= plain)
    assert ranges.overlaps(*asked) is bool(wanted & plain)
    assert {n for start, stop in ranges for n in range(start, stop)} == plain


@given(RANGES)
def test_ranges_are_sorted_and_never_touch(added: list[tuple[int, int]]) -> None:
    ranges = RangeSet()
    for start, stop in added:
        ranges.add(start, stop)
    found = list(ranges)
    assert all(start < stop for start, stop in found)
    assert all(stop < start for (_, stop), (start, _) in pairwise(found))


@given(st.permutations(range(0, 640, 64)))
def test_pieces_in_any_order_become_one_range(starts: list[int]) -> None:
    ranges = RangeSet()
    assert sum(ranges.add(start, start + 64) for start in starts) == 640
    assert repr(ranges) == "RangeSet([(0, 640)])"
    assert ranges.add(100, 500) == 0


def test_nothing_is_in_an_empty_set() -> None:
    ranges = RangeSet()
    assert ranges.add(5, 5) == ranges.add(9, 3) == 0
    assert not list(ranges)
    assert ranges.covers(7, 7)
    assert not ranges.covers(7, 8)
    assert not ranges.overlaps(0, 2**63)
