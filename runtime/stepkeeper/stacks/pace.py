"""Define when a trainer hangs: how long it may take for a step, or stay in a stage between steps. Pure."""

import math
from dataclasses import dataclass, replace
from typing import Final, Self

from stepkeeper.contract import HangLimits, ReportPhase
from stepkeeper.quantities import check_number

__all__ = ["RESTORE", "SAVE", "Pace", "PaceLimits", "Stage", "find_stage", "mark_stage"]

_FACTOR: Final = 10.0
_MAX_NAME: Final = 64
_LEAST_GAPS: Final = 2
"""The number of measured steps without which none is slow: the first ones compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a trainer in which it makes no step: of its start or end, or a phase that the training marks."""

    name: str
    limit_s: int | None = None
    """Seconds after which it hangs; None: the job's `startup_s`."""


START: Final = Stage(name="start")
RESTORE: Final = Stage(name="restore")
SAVE: Final = Stage(name="save")
"""A call of the manager, which may wait for a save, or for other ranks."""

_DONE: Final = Stage(name="done")
_BY_PHASE: Final = {
    ReportPhase.STARTING: START,
    ReportPhase.RESTORING: RESTORE,
    ReportPhase.SAVING: SAVE,
    ReportPhase.DONE: _DONE,
}


def mark_stage(name: str, limit_s: float | None) -> Stage:
    """Build a stage from a training's own arguments. Raises TypeError and ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a phase must be a text, not of type {type(name).__name__}")
    if not (0 < len(name) <= _MAX_NAME and name.isprintable()):
        raise ValueError(f"the name of a phase must have 1 to {_MAX_NAME} printable characters, not {name!r}")
    if limit_s is not None and not 0 < check_number("limit_s", limit_s) < math.inf:
        raise ValueError(f"limit_s must be a number of seconds greater than 0, not {limit_s}")
    return Stage(name=name, limit_s=None if limit_s is None else math.ceil(limit_s))


def find_stage(phase: ReportPhase, marked: Stage | None) -> Stage | None:
    """Return the stage of a trainer in `phase` that has `marked` a stage, or none; None while it makes steps."""
    return _DONE if phase is ReportPhase.DONE else marked or _BY_PHASE.get(phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceLimits:
    """The times after which a trainer's stacks are dumped."""

    least_millis: int | None = None
    """Milliseconds that any step may take; None: only a limit of the job counts."""

    hang: HangLimits | None = None
    """The job's limits, after which the training hangs; None: only steps and marked limits are watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The durations of a training's steps, and the time since it last moved."""

    stage: Stage | None = START
    """None while the trainer makes steps."""

    step: int | None = None
    """The last finished step, if there is one."""

    since_s: float = 0.0
    """When the stage began, or that step ended."""

    n_gaps: int = 0
    """The number of measured durations between two steps. `longest_s` is the longest."""

    longest_s: float = 0.0
    n_noted: int = 0
    """How often the present step was noted as slow. Each time doubles the duration until the next."""

    def see(self, stage: Stage | None, step: int | None, now_s: float) -> Self:
        """Return the pace with this stage, and `step` as the last finished step."""
        if (stage, step) == (self.stage, self.step):
            return self
        moved = replace(self, stage=stage, step=step, since_s=now_s, n_noted=0)
        # Only between two steps with no stage between them.
        if stage is not None or self.stage is not None or step == self.step or None in (step, self.step):
            return moved
        return replace(moved, n_gaps=self.n_gaps + 1, longest_s=max(self.longest_s, now_s - self.since_s))

    def slow_from_s(self, limits: PaceLimits) -> float | None:
        """Return the time from which the present step or stage is slow; None if there is no limit."""
        limit_s = self._find_limit_s(limits)
        return None if limit_s is None else self.since_s + limit_s * 2.0**self.n_noted

    def _find_limit_s(self, limits: PaceLimits) -> float | None:
        if self.stage == _DONE:
            return None
        startup_s = None if limits.hang is None else limits.hang.startup_s
        if self.stage is not None and self.stage.limit_s is not None:
            return self.stage.limit_s
        if self.stage is not None or self.n_gaps < _LEAST_GAPS:
            return startup_s
        if limits.hang is not None and limits.hang.after_s is not None:
            return limits.hang.after_s
        least_ms = limits.least_millis
        return None if least_ms is None else max(least_ms / 1000, _FACTOR * self.longest_s)

    def note(self) -> Self:
        """Return the pace after noting the present step as slow."""
        return replace(self, n_noted=self.n_noted + 1)

    def describe(self, now_s: float) -> str:
        """Describe the slow step or stage as the reason of a dump."""
        lasts_s = now_s - self.since_s
        if self.stage is not None:
            return f"stage {self.stage.name!r} has lasted for {lasts_s:.0f} s"
        if self.n_gaps < _LEAST_GAPS:
            return f"the first steps take long: nothing has followed step {self.step} for {lasts_s:.0f} s"
        no_step = f"no step has followed step {self.step} for {lasts_s:.0f} s"
        return f"{no_step}, and no step before took longer than {self.longest_s:.1f} s"
