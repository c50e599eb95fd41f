"""Choose for all ranks what they save at the end. Rank 0 calls these pure functions with a value from each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["EndChoice", "LastStepOfRank", "NewestSave", "StopChoice", "choose_end", "choose_stop_save"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestSave:
    """The newest save before a stop, as one rank knows it."""

    is_of_stop: bool = False
    """True if it saves the stop step."""

    failed: bool = False
    in_flight_s: float | None = None
    """Seconds since its start; None if it has ended, or there was none."""

    left_s: float | None
    """Seconds until this rank is killed; None if unknown."""


class StopChoice(NamedTuple):
    """The choice whether to save the stop step, at which all ranks stop."""

    starts: bool
    why: str | None = None
    """The reason, for messages; None if the rules left no choice."""


def choose_stop_save(newest: Sequence[NewestSave], cost_s: float | None, *, again: bool) -> StopChoice:
    """Choose whether to start a save of the stop step, besides one that may be in flight.

    Another save never endangers older commits, but it takes bandwidth from the one in flight. If there is time for
    only one, the one in flight gets all of it. `newest` has a value from each rank. `cost_s` is the seconds from the
    call to the commit of a recent save; None if none was measured. `again`: an earlier save of this step failed.
    """
    left = [each.left_s for each in newest if each.left_s is not None]
    if again and cost_s is not None and left and min(left) < cost_s:
        why = f"the save failed and is not retried: {min(left):.1f} s are left, a save needs {cost_s:.1f} s"
        return StopChoice(False, why)
    if all(each.is_of_stop for each in newest):
        # It is saved, or being saved, on every rank. A failure on one rank fails it for all.
        has_failed = any(each.failed for each in newest)
        return StopChoice(has_failed, "the save of this step failed and is retried" if has_failed else None)
    running_s = [each.in_flight_s for each in newest if each.in_flight_s is not None]
    if not running_s or not left:
        # Nothing competes for the bandwidth, or nothing limits the time.
        return StopChoice(True)
    if cost_s is None:
        return StopChoice(True, "no save was measured before")
    left_s, more_s = min(left), max(0.0, cost_s - min(running_s))
    times = f"{left_s:.1f} s are left, the save in flight needs about {more_s:.1f} s more, and one more {cost_s:.1f} s"
    if more_s + cost_s <= left_s:
        return StopChoice(True, f"{times}: both run")
    return StopChoice(False, f"{times}: only the one in flight is finished")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStepOfRank:
    """One rank's last step at the training's end."""

    step: int | None
    """The last finished step, if it isn't saved; None if there is nothing to save."""

    changed: bool
    """True if the state has changed since the step."""

    stops: bool = False
    """True if the program ended itself because of a notice: training isn't done."""


class EndChoice(NamedTuple):
    """The choice for all ranks at the training's end."""

    saves: bool
    """True to save the last finished step."""

    stops: bool
    """True if a program ended itself because of a notice: training isn't done."""

    loss: str | None = None
    """Why the last step isn't saved, for messages; None if it is, or there is none."""


def choose_end(ends: Sequence[LastStepOfRank]) -> EndChoice:
    """Choose whether all ranks save their last step, and whether training is done."""
    stops = any(end.stops for end in ends)
    steps = sorted({end.step for end in ends if end.step is not None})
    # A save needs all ranks at one step, each with the state that the step left.
    if not steps:
        return EndChoice(False, stops)
    loss = None
    if len(steps) > 1 or any(end.step is None for end in ends):
        listed = ", ".join(map(str, steps))
        loss = (
            f"the last step is not saved: the ranks end at different steps (unsaved: {listed}). The next start "
            "resumes from the newest commit"
        )
    elif any(end.changed for end in ends):
        loss = (
            f"step {steps[0]}, the last one, is not saved: the state has changed since. Call step() after the last "
            "change of each step, or save the last step when it is finished (total_steps=)"
        )
    return EndChoice(loss is None, stops, loss)
