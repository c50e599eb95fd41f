"""The parts of a demo's picture: training step over wall time, and what happened to it."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from demo.story import Story, lost_steps

__all__ = ["COMMIT", "INK", "LOST", "TRAINING", "draw_training", "mark_time", "two_panels"]

TRAINING, LOST, COMMIT, _DISRUPTION = "#2563eb", "#f97316", "#15803d", "#b91c1c"
_QUIET, _MUTED, INK = "#eef1f6", "#6b7280", "#1f2937"


@contextlib.contextmanager
def two_panels(
    paths: Sequence[Path], *, title: str, heights: tuple[float, float]
) -> Iterator[tuple[Axes, Axes]]:
    """Yield two panels over one time axis, and save them as PNG or SVG, by the suffixes of the paths."""
    with _style():
        figure = Figure(figsize=(12, 7.2), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
        yield upper, lower
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, facecolor="white")


def draw_training(story: Story, steps: Axes, lower: Axes) -> None:
    """Draw steps, commits, resumes and the times in which nothing trains, and both panels' axes."""
    _draw_quiet_times(story, (steps, lower))
    _draw_steps(story, steps)
    _draw_resumes(story, steps)
    _draw_axes(story, steps, lower)


def mark_time(
    ax: Axes, at_s: float, text: str = "", *, color: str = _DISRUPTION, right: bool = False
) -> None:
    """Draw a line at a moment, with a text to the left of its upper end, or to the right."""
    ax.axvline(at_s, color=color, linewidth=1.4, linestyle=(0, (4, 3)), zorder=4)
    ax.annotate(
        text,
        (at_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(5 if right else -5, 2),
        textcoords="offset points",
        ha="left" if right else "right",
        va="top",
        color=color,
        fontsize=9.5,
        fontweight="bold",
    )


def _style() -> AbstractContextManager[None]:
    return mpl.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "axes.edgecolor": "#9ca3af",
            "axes.labelcolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "text.color": INK,
            "xtick.color": _MUTED,
            "ytick.color": _MUTED,
        }
    )


def _draw_quiet_times(story: Story, axes: tuple[Axes, ...]) -> None:
    """Shade the times in which nothing trains, with their length at the bottom."""
    begin_s = 0.0
    for attempt in story.attempts:
        if not attempt.steps:
            continue
        end_s = attempt.steps[0].at_s
        for ax in axes:
            ax.axvspan(begin_s, end_s, color=_QUIET, linewidth=0, zorder=0)
        axes[0].annotate(
            f"{end_s - begin_s:.0f} s",
            ((begin_s + end_s) / 2, 0),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            color=_MUTED,
        )
        begin_s = attempt.steps[-1].at_s


def _draw_steps(story: Story, ax: Axes) -> None:
    for index, attempt in enumerate(story.attempts):
        lost = lost_steps(story, index)
        kept = attempt.steps[: len(attempt.steps) - len(lost)]
        label = "training" if index == 0 else None
        ax.plot(
            [s.at_s for s in kept],
            [s.step for s in kept],
            color=TRAINING,
            linewidth=2.2,
            label=label,
            zorder=3,
        )
        if lost:
            joined = [*kept[-1:], *lost]
            ax.plot(
                [s.at_s for s in joined],
                [s.step for s in joined],
                color=LOST,
                linewidth=4.5,
                solid_capstyle="butt",
                zorder=2,
            )
    if any(lost_steps(story, index) for index in range(len(story.attempts))):
        ax.plot([], [], color=LOST, linewidth=4.5, label="lost work: not committed, done again")
    times = [c.at_s for c in story.commits]
    ax.scatter(
        times,
        [c.step for c in story.commits],
        marker="D",
        s=26,
        color=COMMIT,
        edgecolor="white",
        linewidth=0.7,
        label="commit in the storage log",
        zorder=5,
    )


def _draw_resumes(story: Story, ax: Axes) -> None:
    for index, attempt in enumerate(story.attempts):
        resume = attempt.resume
        if resume is None or not attempt.steps:
            continue
        restored = resume.restored
        ax.plot(
            [restored.at_s, attempt.steps[0].at_s],
            [restored.step, restored.step],
            color=COMMIT,
            linewidth=1.3,
            linestyle=(0, (1, 2)),
            zorder=4,
        )
        ax.scatter(
            [attempt.steps[0].at_s],
            [restored.step],
            s=70,
            facecolor="white",
            edgecolor=COMMIT,
            linewidth=2,
            zorder=6,
        )
        lost = len(lost_steps(story, index - 1))
        ax.annotate(
            f"resumed from step {restored.step}\n(entry {restored.sequence} of the log)\n{_lost_text(lost)}",
            (attempt.steps[0].at_s, restored.step),
            xytext=(-12, 6),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=COMMIT,
            fontsize=9.5,
            # Legible where a short recovery leaves it on the line of the disruption.
            bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},
            zorder=5,
        )


def _lost_text(lost: int) -> str:
    return "no step lost" if lost == 0 else f"{lost} step{'s' if lost > 1 else ''} lost, done again"


def _draw_axes(story: Story, steps: Axes, lower: Axes) -> None:
    steps.axhline(story.total_steps, color="#9ca3af", linewidth=0.8, zorder=1)
    steps.set_ylim(0, story.total_steps * 1.16)
    steps.set_ylabel("training step")
    steps.fill_between([], [], color=_QUIET, label="nothing trains: start, fault, recovery")
    steps.scatter([], [], s=60, facecolor="white", edgecolor=COMMIT, linewidth=2, label="restore")
    # Above the lengths of the times in which nothing trains, which stand at the bottom.
    steps.legend(
        loc="lower right",
        bbox_to_anchor=(1, 0.05),
        frameon=True,
        framealpha=0.95,
        edgecolor="#e5e7eb",
        fontsize=9,
    )
    end_s = story.complete_at_s or max(s.at_s for a in story.attempts for s in a.steps)
    lower.set_xlim(0, end_s * 1.01)
    lower.set_xlabel("time since the job was applied (min:s)")
    lower.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 1.5, 3, 6, 10]))
    lower.xaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{int(s) // 60}:{int(s) % 60:02d}"))
    for ax in (steps, lower):
        ax.grid(axis="y", color="#e5e7eb", linewidth=0.7, zorder=0)
        ax.set_axisbelow(True)
