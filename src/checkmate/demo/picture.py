"""Both loss curves, one on top of the other, with the kills."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from textwrap import fill

from .journal import Notes, Trained, attempts
from .plan import MOMENTS
from .verdict import Result

INK, FAINT, GRID, CALM, LIVELY, ALARM = "#26323f", "#8795a4", "#e6eaee", "#f4c27a", "#1c5d99", "#cf3f3f"
#: How much of the picture's width a label takes; one that would run into another stands lower.
LABEL_WIDTH = 0.19


def draw(calm: Path, stormy: Path, ranks: int, result: Result, path: Path) -> None:
    """Writes a PNG to `path`. Raises ImportError where matplotlib is not installed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), dpi=160)
    axes = figure.add_axes((0.07, 0.1, 0.9, 0.72))
    (notes,) = attempts(calm, ranks)
    steps, losses = _losses(notes)
    label = "uninterrupted, without Checkmate"
    axes.plot(steps, losses, color=CALM, linewidth=8, solid_capstyle="round", label=label)
    for attempt, notes in enumerate(attempts(stormy, ranks)):
        again, losses = _losses(notes)
        axes.plot(again, losses, color=LIVELY, linewidth=1.8, marker="o", markersize=3.6)
        if attempt:
            axes.plot(again[:1], losses[:1], "o", color="white", markeredgecolor=LIVELY, markersize=8)
    axes.plot([], color=LIVELY, linewidth=1.8, marker="o", markersize=3.6, label="killed, with Checkmate")
    axes.plot([], "o", color="white", markeredgecolor=LIVELY, markersize=8, label="restored from the shadow")

    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.3 * (high - low))  # room for the labels
    width, previous, lowered = LABEL_WIDTH * len(steps), -2.0 * len(steps), False
    for kill in result.kills:
        at = kill.step - 0.5
        axes.axvline(at, color=ALARM, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
        to_left = at + width > len(steps)
        lowered = not lowered and at - previous < (2 if to_left else 1) * width
        previous = at
        axes.annotate(
            f"step {kill.step}: SIGKILL\n{fill(MOMENTS[kill.moment], 27)}\n{kill.lost_steps} steps lost",
            xy=(at, 0.82 if lowered else 0.985),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-6 if to_left else 6, 0),
            textcoords="offset points",
            ha="right" if to_left else "left",
            va="top",
            color=ALARM,
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )

    axes.margins(x=0.02)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelcolor=INK)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss, nats per byte", color=INK)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, frameon=False, labelcolor=INK)
    ending = "DIFFERENT in the end" if result.faults else "the same to the last bit"
    title = f"All workers killed {len(result.kills)} times, and {ending}"
    figure.text(0.07, 0.925, title, color=ALARM if result.faults else INK, fontsize=17, weight="bold")
    model = f"GPT, {result.parameters / 1e6:.1f} M parameters, {ranks} ranks"
    figure.text(0.97, 0.03, model, color=FAINT, ha="right")
    figure.savefig(path)


def _losses(notes: list[Notes]) -> tuple[list[int], list[float]]:
    """The steps that all ranks have trained, and the means of their losses."""
    by_rank = [{event.step: event.loss for event in rank.of(Trained)} for rank in notes]
    steps = [step for step in by_rank[0] if all(step in losses for losses in by_rank)]
    return steps, [fmean(losses[step] for losses in by_rank) for step in steps]
