"""The story of a run as a picture: training step over wall time."""

from pathlib import Path

from matplotlib.axes import Axes

from demo.drawing import LOST, TRAINING, draw_training, mark_time, two_panels
from demo.story import Story, lost_steps

__all__ = ["draw"]


def draw(story: Story, *paths: Path, title: str) -> None:
    """Draw a picture of the story to each of the paths: a PNG or an SVG, by its suffix."""
    with two_panels(paths, title=title, heights=(3.4, 1)) as (steps, losses):
        draw_training(story, steps, losses)
        _draw_losses(story, losses)
        for disruption in story.disruptions:
            mark_time(steps, disruption.at_s, f"{disruption.name}\n{disruption.node}")
            mark_time(losses, disruption.at_s)


def _draw_losses(story: Story, ax: Axes) -> None:
    for index, attempt in enumerate(story.attempts):
        lost = lost_steps(story, index)
        kept = attempt.steps[: len(attempt.steps) - len(lost)]
        ax.plot([s.at_s for s in kept], [s.loss for s in kept], color=TRAINING, linewidth=1.2, zorder=3)
        joined = [*kept[-1:], *lost] if lost else []
        ax.plot([s.at_s for s in joined], [s.loss for s in joined], color=LOST, linewidth=2, zorder=3)
    ax.set_ylabel("loss")
