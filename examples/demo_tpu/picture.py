"""The story of a run as a picture: training step over wall time, above what happened to its machines."""

from pathlib import Path

from matplotlib.axes import Axes

from demo.drawing import COMMIT, INK, draw_training, mark_time, two_panels
from demo.story import Story
from demo_tpu.story import MachinesStory, Span, spans

__all__ = ["draw"]

_WAITS, _COMES, _RUNS, _GOES, _NOTHING = "#fde68a", "#bfdbfe", "#86efac", "#fca5a5", "#e5e7eb"
_RESOURCE = {
    "WaitingForResources": _WAITS,
    "Creating": _COMES,
    "Provisioning": _COMES,
    "Active": _RUNS,
    "taken away": _GOES,
    "Suspending": _GOES,
    "Suspended": _GOES,
    "Deleting": _GOES,
}
_HOST = {"joined": _RUNS}
_JOB = {
    "Suspending": _GOES,
    "Suspended": _WAITS,
    "Starting": _COMES,
    "Running": _RUNS,
    "Restarting": _GOES,
    "Complete": _RUNS,
}
_LANE_HEIGHT = 0.64
_LETTER = 0.008
"""Width of a letter, as a share of the axis."""
_ANNOUNCED = "#b45309"


def draw(story: Story, machines: MachinesStory, *paths: Path, title: str) -> None:
    """Draw a picture of the story to each of the paths: a PNG or an SVG, by its suffix."""
    end_s = story.complete_at_s or max(view.at_s for view in machines.views)
    with two_panels(paths, title=title, heights=(2.6, 1)) as (steps, lanes):
        draw_training(story, steps, lanes)
        _draw_window(machines, steps, lanes)
        _draw_saved_ahead(story, machines, steps)
        resource = [(view.at_s, "taken away" if view.lost else view.state) for view in machines.views]
        host = [(view.at_s, "joined" if view.joined else "") for view in machines.views]
        _draw_lane(lanes, 2, spans(resource, end_s), _RESOURCE)
        _draw_lane(lanes, 1, spans(host, end_s), _HOST)
        _draw_lane(lanes, 0, spans(machines.phases, end_s), _JOB)
        lanes.set_yticks([2, 1, 0], ["queued resource", "its host", "job"])
        lanes.set_ylim(-0.6, 2.6)
        lanes.grid(visible=False)


def _draw_window(machines: MachinesStory, steps: Axes, lanes: Axes) -> None:
    window = machines.window
    if window is None:
        return
    mark_time(lanes, window.announced_s, color=_ANNOUNCED)
    mark_time(lanes, window.begin_s)
    mark_time(steps, window.announced_s, "maintenance\nis announced", color=_ANNOUNCED)
    mark_time(steps, window.begin_s, "it begins,\nthe machine goes", right=True)


def _draw_saved_ahead(story: Story, machines: MachinesStory, ax: Axes) -> None:
    answer = machines.answer
    commit = next((c for c in story.commits if answer is not None and c.sequence == answer.sequence), None)
    if commit is None:
        return
    ax.annotate(
        f"step {commit.step}\nis saved ahead",
        (commit.at_s, commit.step),
        xytext=(8, -8),
        textcoords="offset points",
        ha="left",
        va="top",
        color=COMMIT,
        fontsize=9.5,
        # Legible on the line of the window, which is near.
        bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},
        zorder=5,
    )


def _draw_lane(ax: Axes, lane: int, states: list[Span], colors: dict[str, str]) -> None:
    """Draw bars with the states' names, as far as these have room."""
    axis_s = ax.get_xlim()[1]
    for span in states:
        if not span.state:
            continue
        length_s = span.end_s - span.begin_s
        color = colors.get(span.state, _NOTHING)
        ax.barh(lane, length_s, _LANE_HEIGHT, span.begin_s, color=color, edgecolor="white", zorder=2)
        if length_s > len(span.state) * _LETTER * axis_s:
            middle_s = span.begin_s + length_s / 2
            ax.text(middle_s, lane, span.state, ha="center", va="center", fontsize=8.5, color=INK, zorder=3)
