"""``checkmate doctor``: does every copy arrive, once? Where gradients go by multicast: every datagram?"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from typing import Annotated

import typer

from ..doctor import multicast_hosts, multicast_judge
from ..doctor.hosts import REACH_S, observe
from ..doctor.judge import FAILED, OK, UNKNOWN, Line, judge
from ..switch import cluster as description
from .status import AsJson
from .switch import ClusterFile


def doctor(
    cluster: ClusterFile,
    as_json: AsJson = False,
    python: Annotated[
        str, typer.Option(metavar="PATH", help="Python on the hosts, with checkmate installed.")
    ] = sys.executable,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for a host to answer.")] = REACH_S,
) -> None:
    """Send marked packets from each worker, and say link by link whether the shadows see them once, and what is wrong.

    If gradients go by multicast: datagrams to a group that everyone joins. Runs a probe on each host by the
    description's `exec`. Exit 1 if anything failed.
    """
    asked = description.load(cluster)
    if asked.multicast is None:
        lines = judge(asked, observe(asked, python, timeout), str(cluster))
    else:
        lines = multicast_judge.judge(asked, multicast_hosts.observe(asked, python, timeout), str(cluster))
    failed = sum(line.verdict == FAILED for line in lines)
    if as_json:
        print(json.dumps({"ok": not failed, "lines": [asdict(line) for line in lines]}))
    else:
        show(lines)
        print(f"\n{summary(lines)}")
    if failed:
        raise typer.Exit(1)


def show(lines: Iterable[Line]) -> None:
    """What is well on one line per subject; what is not, each on its own, with what mends it below."""
    lines = list(lines)
    width = max(len(line.subject) for line in lines)
    for (subject, verdict), group in groupby(lines, lambda line: (line.subject, line.verdict)):
        texts = [(line.text, line.remedy) for line in group]
        if verdict != FAILED:
            texts = [("; ".join(text for text, _ in texts), "")]
        for text, remedy in texts:
            print(f"{subject:{width}}  {verdict:11}  {text}")
            if remedy:
                print(f"{'':{width}}  {'':11}  mend: {remedy}")


def summary(lines: Iterable[Line]) -> str:
    counts = Counter(line.verdict for line in lines)
    if set(counts) == {OK}:
        return f"all is well: {counts[OK]} checks"
    return f"{counts[FAILED]} failed, {counts[OK]} ok, {counts[UNKNOWN]} not checked"
