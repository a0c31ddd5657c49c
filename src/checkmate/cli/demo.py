"""`checkmate demo`: kill all workers of a training run, again and again; it ends with the same bits."""

from __future__ import annotations

import random
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..demo import plan, runs, traffic
from ..lab import Lab
from .lab import links_table

if TYPE_CHECKING:
    from ..demo.verdict import Result

#: What gpt.py is given: a job small enough for two runs of three ranks on two cores.
OPTIONS = ["--batch=8", "--context=64"]

#: How many faults are shown; --json has them all.
MOST_FAULTS = 10


def demo(
    seed: Annotated[int | None, typer.Option(help="Repeats a demo; drawn and printed if not given.")] = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps of training.")] = 40,
    ranks: Annotated[int, typer.Option(min=1, help="Worker processes, under DDP.")] = 3,
    kills: Annotated[int, typer.Option(min=0, help="How often all of them are killed.")] = 3,
    network: Annotated[
        bool, typer.Option("--network", help="In a lab (as root), with tap='mirror': the switch feeds the shadow.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for picture and logs.")] = Path("checkmate-demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a small GPT twice: in peace without Checkmate, and with it while all workers are SIGKILLed.

    The exit code is 1 unless both runs end bit-identical and no kill has lost more than one finished step.
    """
    began = time.monotonic()
    seed = random.randrange(1000) if seed is None else seed
    try:
        planned = plan.draw(seed, steps, kills, ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if network and ranks < 2:
        raise typer.BadParameter("--network needs --ranks of 2 or more: who is alone exchanges no gradients")
    console = Console(stderr=as_json)
    console.print(f"A GPT learns the source text of Python's standard library on {ranks} ranks; seed {seed}.")
    try:
        result = _run_both(seed, ranks, steps, planned, network, out, console)
    except runs.RunFailed as failure:
        console.print(f"The demo failed: {failure}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    seconds = time.monotonic() - began
    if as_json:
        facts = {"seed": seed, "steps": steps, "ranks": ranks, "seconds": seconds}
        print(msgspec.json.encode(facts | msgspec.structs.asdict(result)).decode())
    else:
        _show(result, console)
        again = f"checkmate demo {'--network ' if network else ''}--seed {seed}"
        console.print(f"{seconds:.0f} s in all. The same again: {again}")
    raise typer.Exit(1 if result.faults else 0)


def _run_both(
    seed: int, ranks: int, steps: int, kills: list[plan.Kill], network: bool, out: Path, console: Console
) -> Result:
    """Trains twice, compares and draws. Leaves files in `out` and no process."""
    calm, stormy = out / "uninterrupted", out / "killed"
    for folder in (calm, stormy):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    out.mkdir(parents=True, exist_ok=True)
    options = [*OPTIONS, f"--steps={steps}", f"--seed={seed}"]
    # Both sum by the same collective. In the first run the switch has no rules, and there is no shadow.
    alone = [f"--shadow={plan.NOBODY}", "--tap=mirror"] if network else []
    tap = "mirror" if network else "step"
    without, with_rules = (Lab(ranks, shadows, rules=bool(shadows)) if network else nullcontext() for shadows in (0, 1))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        first = progress.add_task("uninterrupted, without Checkmate", total=steps, note="")
        second = progress.add_task("killed, with Checkmate", total=steps, note="", start=False)

        def show_first(trained: int, _: int) -> None:
            progress.update(first, completed=trained)

        def show_second(trained: int, attempts: int) -> None:
            progress.update(second, completed=trained, note=f"{attempts - 1} of {len(kills)} kills")

        with without as lab:
            runs.train(calm, ranks, [], [*options, *alone], show_first, lab)
        progress.start_task(second)
        with with_rules as lab, runs.shadow(out / "shadow.log", lab) as address:
            runs.train(stormy, ranks, kills, [*options, f"--shadow={address}", f"--tap={tap}"], show_second, lab)
            seen = traffic.read(lab, address, calm, stormy, ranks) if lab else None
    with console.status("comparing them bit by bit"):
        from ..demo import picture, verdict  # torch, at last: the first line shall come at once

        result = verdict.judge(calm, stormy, ranks, len(kills), seen)
    if not result.faults:
        verdict.discard_states(calm, stormy)
    try:
        picture.draw(calm, stormy, ranks, result, file := out / "losses.png")
        console.print(f"Both loss curves: {file}")
    except ImportError:
        console.print("No picture: matplotlib is missing (pip install 'checkmate-ckpt[plot]')", markup=False)
    return result


def _show(result: Result, console: Console) -> None:
    table = Table("all workers SIGKILLed", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("in step", "resumed at", "lost", "restore"):
        table.add_column(column, justify="right")
    for kill in result.kills:
        numbers = kill.step, kill.resumed, kill.lost_steps
        table.add_row(plan.MOMENTS[kill.moment], *map(str, numbers), f"{kill.restore_s:.2f} s")
    console.print(table)

    if result.traffic:
        console.print("Second run, whole: gradients on w0, w1, …; parts and restores on mgmt0")
        console.print(links_table(result.traffic.links))
    facts = Table.grid(padding=(0, 2))
    times = f"{result.step_s_without * 1e3:.0f} ms without, {result.step_s_with * 1e3:.0f} ms with Checkmate"
    facts.add_row("median step", f"{times}: ratio {result.step_time_ratio:.2f},")
    facts.add_row("", "ranks and shadow sharing the cores of this machine")
    if seen := result.traffic:
        sent = f"{seen.step_bytes_without:,.0f} bytes without rules and shadow, {seen.step_bytes_with:,.0f} with"
        facts.add_row("a worker sends", f"{sent}: ratio {seen.ratio:.4f}, per step")
        facts.add_row("the shadow got", f"{seen.overheard_bytes:,} bytes of gradients from copies of the switch,")
        facts.add_row("", f"and asked workers for {seen.repaired_bytes:,} that did not come that way")
    facts.add_row("compared", f"{result.parameters / 1e6:.1f} M parameters, optimizer state, LR, scheduler,")
    facts.add_row("", "RNG, data position and every loss, on all ranks")
    facts.add_row("control", f"one flipped bit is {'' if result.flipped_bit_noticed else 'NOT '}noticed")
    facts.add_row("verdict", "[bold red]failed" if result.faults else "[bold green]bit-identical")
    console.print(facts)
    for fault in result.faults[:MOST_FAULTS]:
        console.print(f"  {fault}", style="red", markup=False, highlight=False)
    if (more := len(result.faults) - MOST_FAULTS) > 0:
        console.print(f"  and {more} more", style="red")
