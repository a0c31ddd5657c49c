"""The benchmarks run to their end, and what they compute on the way is right. No time is asserted."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from checkmate.bench.common import BenchmarkFailed, Crew, at_least, at_most, everywhere, quantile, two_cores
from checkmate.bench.network import PARTS
from checkmate.cli import app
from checkmate.errors import UsageError
from tests.network import one_lab, requires_network


def run(*arguments: str) -> dict[str, dict[str, Any]]:
    """`checkmate bench …`; its figures by name."""
    result = CliRunner().invoke(app, ["bench", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    outcome = json.loads(result.stdout)
    assert outcome["benchmark"] == arguments[0]
    assert outcome["method"]
    return {figure["name"]: figure for figure in outcome["figures"]}


@pytest.mark.processes
@pytest.mark.slow
def test_overhead_of_an_emulated_accelerator_sends_half_a_gradient_per_rank_and_compares_with_baselines():
    figures = run(
        "overhead", "--parameters", "50000", "--compute", "0.03", "--block", "2", "--pairs", "1", "--baselines"
    )  # fmt: skip
    gradient_mb = 4 * figures["parameters"]["value"]
    sent_mb = figures["sent per step and rank"]["value"]
    assert gradient_mb / 2 <= sent_mb < gradient_mb / 2 + 0.1
    assert figures["ratio with, median"]["target"] == "≤ 1.01"
    assert {"ratio with a copy engine, median", "ratio with dcp.async_save, median"} <= set(figures)


@pytest.mark.processes
@pytest.mark.slow
def test_overhead_of_real_training_is_measured_under_ddp():
    figures = run("overhead", "--real", "--parameters", "50000", "--block", "2", "--pairs", "2")
    assert figures["ratio with, median"]["target"] == "≤ 1.03"
    assert figures["staging of a rank, by its slice, while lag ≤ 1"]["holds"]


@pytest.mark.processes
@pytest.mark.slow
def test_ingest_is_replayed_right_both_ways():
    figures = run("ingest", "--parameters", "50000", "--steps", "2", "--rounds", "1")  # compares with torch's result
    for replay in ("fast", "match"):
        assert figures[f"{replay}: share of the limit"]["target"] == "≥ 0.75"
        assert figures[f"{replay}: tensors that the shadow holds"]["holds"]


@pytest.mark.processes
@pytest.mark.slow
def test_restore_brings_back_the_same_state_into_one_rank_and_into_two():
    figures = run("restore", "--parameters", "50000", "--rounds", "1")  # compares checksums
    assert {"1 rank: restore by raw TCP", "2 ranks: restore by raw TCP"} <= set(figures)


NETWORK = [*requires_network, pytest.mark.processes, pytest.mark.slow]


class Expected(NamedTuple):
    """Of one part of ``bench network --quick``: what must be exact in however short a run, and what is aimed at."""

    holds: tuple[str, ...] = ()
    targets: tuple[tuple[str, str], ...] = ()


EXPECTED = {
    "egress": Expected(targets=(("2 workers × 1 MB: 3 ports differ by", "≤ 0.1"),)),
    "delivery": Expected(
        holds=(
            "2 workers × 1 MB: gradients taken by the shadow",
            "2 workers × 1 MB: TCP payload captured",
            "2 workers × 1 MB: repaired",
        )
    ),
    "collective": Expected(targets=(("2 ranks × 1 MB: ours by Gloo, div_ and all_reduce", "≤ 1.05"),)),
    "overhead": Expected(),
    "loss": Expected(holds=("5 % of 2 workers × 1 MB: tensors that differ, of 16 compared",)),
    "capture": Expected(),
    "multicast-egress": Expected(
        holds=("2 workers × 1 MB: at the port of each that has joined, of a gradient",),
        targets=(("2 workers × 1 MB: 3 ports differ by", "≤ 0.1"),),
    ),
    "multicast-collective": Expected(
        targets=(("2 ranks × 1 MB, MTU 1500: by multicast by Gloo, div_ and all_reduce", "≤ 1"),)
    ),
    "multicast-goodput": Expected(targets=(("1 to 1: share of the raw rate", "≥ 0.8"),)),
    "multicast-overhead": Expected(targets=(("ratio 3 joined, stopped, by bare, median", "≤ 1.005"),)),
}


class TestNetwork:
    """In the lab: small and few, but with real packets."""

    pytestmark = NETWORK

    def test_every_part_is_known_here(self) -> None:
        assert list(EXPECTED) == list(PARTS)

    @pytest.mark.parametrize("part", PARTS)
    def test_part_measures_what_it_says_and_what_must_be_exact_is(self, part: str) -> None:
        with one_lab():
            figures = run("network", "--quick", "--only", part)
        assert {name.partition(":")[0] for name in figures} == {part}
        for name in EXPECTED[part].holds:
            assert figures[f"{part}: {name}"]["holds"], figures[f"{part}: {name}"]
        for name, target in EXPECTED[part].targets:
            assert figures[f"{part}: {name}"]["target"] == target
        if part == "loss":
            assert figures["loss: 5 % of 2 workers × 1 MB: repaired"]["value"] > 0

    def test_part_that_is_not_there_is_wrong_usage(self) -> None:
        result = CliRunner().invoke(app, ["bench", "network", "--only", "nothing"])
        assert isinstance(result.exception, UsageError)
        assert "there is no part 'nothing'; there are egress, delivery" in str(result.exception)


def test_quantiles_are_values_that_were_measured():
    values = [float(n) for n in range(1, 21)]
    assert quantile(values, 0.5) == 10
    assert quantile(values, 0.95) == 19
    assert quantile([3.0], 0.95) == 3


def test_a_target_holds_at_its_bound():
    assert at_most("ratio", 1.01, 1.01).holds
    assert not at_most("ratio", 1.02, 1.01).holds
    assert at_least("share", 0.75, 0.75).holds
    assert not at_least("share", 0.74, 0.75).holds


class Member:
    def divide(self, by: int) -> float:
        return 1 / by


@pytest.mark.processes
def test_an_error_in_a_process_of_the_benchmark_is_told_with_its_traceback():
    with Crew(Member, [(), ()], [*two_cores()]) as crew:
        assert crew.call("divide", 2) == [0.5, 0.5]
        with pytest.raises(BenchmarkFailed, match="ZeroDivisionError"):
            crew.call("divide", 0)


def test_two_cores_are_among_those_that_may_be_used():
    assert set.union(*two_cores()) <= everywhere()
