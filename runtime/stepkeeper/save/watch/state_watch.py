"""Tell, when a state is saved, what would surprise the next start: what its restore would refuse, and stale values."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Final

from stepkeeper.loggers import logger
from stepkeeper.save.snapshot.plan import SnapshotPlan
from stepkeeper.save.watch.next_start import Outline, foresee
from stepkeeper.save.watch.unchanged_values import UnchangedValues
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.differences import Differences
from stepkeeper_planners.loading.load_request import LoadTarget
from stepkeeper_planners.state.resizable import Resizable, list_resizable

__all__ = ["StateWatch"]

_log: Final = logger(__name__)
_SHOWN: Final = 6
_MOMENTS: Final = re.compile(r"(^|\.)state\.\d+\.")
"""Matches the names of an optimizer's per-parameter state."""

_CHANGES: Final = 3
"""After so many saves with other list items each, the cost of that is told."""

_MANY_VALUES: Final = 1000
"""So many values, each an entry of its own, hold up the training by some tenths of a second at each such save."""


class StateWatch:
    """Watch the states of this process's saves, and log what is likely a mistake: each once.

    The next start probably gives its restore the same state as this start. So what that would refuse is told at the
    save, and not by the error of that restore.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Watch.

        Args:
            ranks: This rank, and how many there are. Rank 0 alone logs: all have the same names.

        """
        self._ranks = ranks
        self._speaks = ranks.rank == 0
        self._start: Outline | None = None
        self._resizable: Mapping[str, Resizable] | None = None
        self._plan: SnapshotPlan | None = None
        self._changes = 0
        self._told: set[str] = set()
        """The containers of the entries that were told of."""

        self._unchanged_values = UnchangedValues()

    @property
    def has_start(self) -> bool:
        """True once the state at the start of this process is known."""
        return self._start is not None

    def note_start(self, target: LoadTarget) -> None:
        """Note the state that a restore has filled, or would have filled if there had been a commit.

        Ranks: all ranks call this, as state_dict() may be collective where nothing was restored.
        """
        self._start = None
        try:
            self._start, self._resizable = Outline.of_state(target.flat), target.resizable
        except Exception as error:  # the training can go on; the next restore would raise it
            if self._speaks:
                _log.warning(
                    "the state can't be read before the first step, and the restore of a next start would fail there: "
                    "%r",
                    error,
                )

    def check_save(
        self, step: int, state: Mapping[str, object], plan: SnapshotPlan, *, is_built: bool
    ) -> None:
        """Compare a state that is being saved with the start, and with the saves before.

        Args:
            step: The step that is saved.
            state: Its state.
            plan: Its plan.
            is_built: True if a function of the training has built the state for this save.

        """
        if not self._speaks:
            return
        unchanged = self._unchanged_values.find_unchanged(step, state, is_built=is_built)
        if unchanged is not None:
            _log.warning("%s", unchanged, extra={"step": step})
        if plan is not self._plan:
            self._plan = plan
            saved = Outline.of_plan(plan)
            if self._start is None:
                self._start, self._resizable = saved, list_resizable(state)
            self._check_entries(step, saved)

    def _check_entries(self, step: int, saved: Outline) -> None:
        assert self._start is not None
        assert self._resizable is not None
        found = foresee(self._start, self._resizable, saved, self._ranks)
        if found:
            self._tell(step, found)
        elif self._start.names != saved.names:
            self._changes += 1
            if self._changes == _CHANGES:
                many = len(saved.values) >= _MANY_VALUES
                grown = sorted({name.partition(".")[0] for name in self._start.names ^ saved.names})
                _log.log(
                    logging.WARNING if many else logging.INFO,
                    "%s: stored item by item, with other items in each save, which is then planned anew and holds up "
                    "the training (%d values). Whole(...) around it makes one value of it",
                    ", ".join(grown[:_SHOWN]),
                    len(saved.values),
                    extra={"step": step},
                )

    def _tell(self, step: int, found: Differences) -> None:
        """Tell of what is below other containers than what was told before."""
        below = {
            name: name.rpartition(".")[0] or name
            for name in (*found.unexpected, *found.missing, *found.mismatched)
        }
        if self._told.issuperset(below.values()):
            return
        self._told.update(below.values())
        _log.warning("%s", _describe(step, found), extra={"step": step})


def _describe(step: int, found: Differences) -> str:
    changed = [f"{name}: {reason}" for name, reason in found.mismatched.items()]
    parts = [
        f"{what}: {', '.join(names[:_SHOWN])}{f', … ({len(names)})' if len(names) > _SHOWN else ''}."
        for what, names in (("new", found.unexpected), ("gone", found.missing), ("changed", changed))
        if names
    ]
    what = "names" if found.unexpected or found.missing else "kinds or shapes"
    return (
        f"step {step} is saved with other {what} than the state had at the start of this process ({' '.join(parts)}) "
        "If the next start gives the state as this one did, its restore will refuse the commit. "
        f"{_advise(found.unexpected)}"
    )


def _advise(new: Sequence[str]) -> str:
    if any(map(_MOMENTS.search, new)):
        return (
            "prime_optimizer(optimizer) before restore_latest makes the state that an optimizer has from its first "
            "step on."
        )
    return (
        "Put what gets or loses entries, or becomes another kind of value, into Whole(...), or into PerRank(...) if it "
        "differs between ranks."
    )
