"""Sets of byte ranges: which bytes of a slice have arrived."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class RangeSet:
    """Disjoint, sorted, half-open ranges of non-negative integers. Adjacent ranges are merged."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> int:
        """Add ``[start, stop)``; returns how many of its integers were new."""
        if start >= stop:
            return 0
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        old = sum(self._stops[i] - self._starts[i] for i in range(first, last))
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]
        return (stop - start) - old

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any integer of ``[start, stop)`` is in the set."""
        i = bisect_right(self._stops, start)
        return start < stop and i < len(self._starts) and self._starts[i] < stop

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of ``[start, stop)`` is in the set."""
        i = bisect_right(self._starts, start) - 1
        return start >= stop or (i >= 0 and self._stops[i] >= stop)

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of ``[start, stop)`` that are not in the set, ascending."""
        gaps = []
        for first, last in zip(self._starts, self._stops, strict=True):
            if last <= start:
                continue
            if first >= stop:
                break
            if start < first:
                gaps.append((start, first))
            start = last
        if start < stop:
            gaps.append((start, stop))
        return gaps

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def __repr__(self) -> str:
        return f"RangeSet({list(self)})"
