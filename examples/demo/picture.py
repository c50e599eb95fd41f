"""The story of a run as a picture: training step over wall time."""

from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from demo.story import Story, lost_steps

__all__ = ["draw"]

_TRAINING, _LOST, _COMMIT, _DISRUPTION = "#2563eb", "#f97316", "#15803d", "#b91c1c"
_QUIET, _MUTED, _INK = "#eef1f6", "#6b7280", "#1f2937"


def draw(story: Story, path: Path, *, title: str) -> None:
    """Draw a picture of the story to `path`: a PNG or an SVG, by its suffix."""
    with _style():
        figure = Figure(figsize=(12, 7.2), layout="constrained")
        steps, losses = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
        figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
        _draw_quiet_times(story, (steps, losses))
        _draw_steps(story, steps)
        _draw_disruptions(story, steps)
        _draw_resumes(story, steps)
        _draw_losses(story, losses)
        _draw_axes(story, steps, losses)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, facecolor="white")


def _style() -> AbstractContextManager[None]:
    return mpl.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "axes.edgecolor": "#9ca3af",
            "axes.labelcolor": _INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "text.color": _INK,
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
            color=_TRAINING,
            linewidth=2.2,
            label=label,
            zorder=3,
        )
        if lost:
            joined = [*kept[-1:], *lost]
            ax.plot(
                [s.at_s for s in joined],
                [s.step for s in joined],
                color=_LOST,
                linewidth=4.5,
                solid_capstyle="butt",
                zorder=2,
            )
    ax.plot([], [], color=_LOST, linewidth=4.5, label="lost work: not committed, done again")
    times = [c.at_s for c in story.commits]
    ax.scatter(
        times,
        [c.step for c in story.commits],
        marker="D",
        s=26,
        color=_COMMIT,
        edgecolor="white",
        linewidth=0.7,
        label="commit in the storage log",
        zorder=5,
    )


def _draw_disruptions(story: Story, ax: Axes) -> None:
    for disruption in story.disruptions:
        ax.axvline(disruption.at_s, color=_DISRUPTION, linewidth=1.4, linestyle=(0, (4, 3)), zorder=4)
        ax.annotate(
            f"{disruption.name}\n{disruption.node}",
            (disruption.at_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-5, 2),
            textcoords="offset points",
            ha="right",
            va="top",
            color=_DISRUPTION,
            fontsize=9.5,
            fontweight="bold",
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
            color=_COMMIT,
            linewidth=1.3,
            linestyle=(0, (1, 2)),
            zorder=4,
        )
        ax.scatter(
            [attempt.steps[0].at_s],
            [restored.step],
            s=70,
            facecolor="white",
            edgecolor=_COMMIT,
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
            color=_COMMIT,
            fontsize=9.5,
            # Legible where a short recovery leaves it on the line of the disruption.
            bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},
            zorder=5,
        )


def _lost_text(lost: int) -> str:
    return "no step lost" if lost == 0 else f"{lost} step{'s' if lost > 1 else ''} lost, done again"


def _draw_losses(story: Story, ax: Axes) -> None:
    for index, attempt in enumerate(story.attempts):
        lost = lost_steps(story, index)
        kept = attempt.steps[: len(attempt.steps) - len(lost)]
        ax.plot([s.at_s for s in kept], [s.loss for s in kept], color=_TRAINING, linewidth=1.2, zorder=3)
        joined = [*kept[-1:], *lost] if lost else []
        ax.plot([s.at_s for s in joined], [s.loss for s in joined], color=_LOST, linewidth=2, zorder=3)
    for disruption in story.disruptions:
        ax.axvline(disruption.at_s, color=_DISRUPTION, linewidth=1.4, linestyle=(0, (4, 3)), zorder=4)
    ax.set_ylabel("loss")


def _draw_axes(story: Story, steps: Axes, losses: Axes) -> None:
    steps.axhline(story.total_steps, color="#9ca3af", linewidth=0.8, zorder=1)
    steps.set_ylim(0, story.total_steps * 1.16)
    steps.set_ylabel("training step")
    steps.fill_between([], [], color=_QUIET, label="nothing trains: start, fault, recovery")
    steps.scatter([], [], s=60, facecolor="white", edgecolor=_COMMIT, linewidth=2, label="restore")
    steps.legend(loc="lower right", frameon=True, framealpha=0.95, edgecolor="#e5e7eb", fontsize=9)
    end_s = story.complete_at_s or max(s.at_s for a in story.attempts for s in a.steps)
    losses.set_xlim(0, end_s * 1.01)
    losses.set_xlabel("time since the job was applied (min:s)")
    losses.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 1.5, 3, 6, 10]))
    losses.xaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{int(s) // 60}:{int(s) % 60:02d}"))
    for ax in (steps, losses):
        ax.grid(axis="y", color="#e5e7eb", linewidth=0.7, zorder=0)
        ax.set_axisbelow(True)
