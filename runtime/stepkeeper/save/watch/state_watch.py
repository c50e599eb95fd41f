"""Tell, when a state is saved, what would surprise the next start: other names than at this start, and stale values."""

import re
from collections.abc import Mapping
from typing import Final

from stepkeeper.loggers import logger
from stepkeeper.save.snapshot.plan import SnapshotPlan
from stepkeeper.save.watch.stale_values import StaleValues
from stepkeeper_planners.state.resizable import list_resizable
from stepkeeper_planners.state.tree import list_leaves, resolve_state

__all__ = ["StateWatch"]

_log: Final = logger(__name__)
_SHOWN: Final = 6
_MOMENTS: Final = re.compile(r"(^|\.)state\.\d+\.")
"""Matches the names of an optimizer's per-parameter state."""

_CHANGES: Final = 3
"""After so many saves with other list items each, the cost of that is told."""


class StateWatch:
    """Watch the states of this process's saves, and log what is likely a mistake. Each kind is logged once.

    The next start probably gives its restore the same names as this start. So what a save has besides, or lacks, is
    told at the save, and not by the error of that restore.
    """

    def __init__(self, *, speaks: bool) -> None:
        """Watch.

        Args:
            speaks: False if another rank logs: all ranks have the same names.

        """
        self._speaks = speaks
        self._names: frozenset[str] | None = None
        self._resizable: frozenset[str] | None = None
        self._plan: SnapshotPlan | None = None
        self._changes = 0
        self._told = False
        self._stale_values = StaleValues()

    def note_target(self, state: Mapping[str, object]) -> None:
        """Note that a restore of a whole commit is about to fill `state`. Nothing in it is called."""
        self._names, self._resizable = None, frozenset(list_resizable(state))

    def note_unfilled(self, state: Mapping[str, object]) -> None:
        """Note the names of `state`, which would have been filled if there had been a commit.

        Ranks: all ranks call this, as state_dict() may be collective.
        """
        try:
            self._names = frozenset(name for name, _ in list_leaves(resolve_state(state)))
        except Exception as error:  # the training can go on; the next restore would raise it
            if self._speaks:
                _log.warning(
                    "the state can't be read before the first step, and the restore of a next start would fail there: "
                    "%r",
                    error,
                )

    def note_names(self, state: Mapping[str, object], names: frozenset[str]) -> None:
        """Note the names of the state that saves are prepared for, unless those at the start are known."""
        if self._resizable is None:
            self._resizable = frozenset(list_resizable(state))
        if self._names is None:
            self._names = names

    def check_save(self, step: int, state: Mapping[str, object], plan: SnapshotPlan) -> None:
        """Compare a state that is being saved with the start, and with the saves before."""
        if not self._speaks:
            return
        stale = self._stale_values.find_stale(step, state)
        if stale is not None:
            _log.warning("%s", stale, extra={"step": step})
        if plan is not self._plan:
            self._plan = plan
            self.note_names(state, plan.names)
            self._check_names(step, plan.names)

    def _check_names(self, step: int, now: frozenset[str]) -> None:
        assert self._names is not None
        new, gone = now - self._names, self._names - now
        hard_new = sorted(name for name in new if not self._is_resizable(name))
        hard_gone = sorted(name for name in gone if not self._is_resizable(name))
        if (hard_new or hard_gone) and not self._told:
            self._told = True
            _log.warning("%s", _describe(step, hard_new, hard_gone), extra={"step": step})
        if len(new) + len(gone) > len(hard_new) + len(hard_gone):
            self._changes += 1
            if self._changes == _CHANGES:
                _log.info(
                    "lists or dicts in the state are stored item by item, and have other items in each save, which is "
                    "then planned anew. Whole(...) around one makes one value of it",
                    extra={"step": step},
                )

    def _is_resizable(self, name: str) -> bool:
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        return self._resizable is not None and not self._resizable.isdisjoint(prefixes)


def _describe(step: int, new: list[str], gone: list[str]) -> str:
    found = [
        f"{what}: {', '.join(names[:_SHOWN])}{f', … ({len(names)})' if len(names) > _SHOWN else ''}."
        for what, names in (("new", new), ("gone", gone))
        if names
    ]
    advice = (
        "prime_optimizer(optimizer) before restore_latest makes the state that an optimizer has from its first step on."
        if any(map(_MOMENTS.search, new))
        else "Put what gets or loses entries into Whole(...), or into PerRank(...) if it differs between ranks."
    )
    return (
        f"step {step} is saved with other names than the state had at the start of this process ({' '.join(found)}) If "
        f"the next start gives the state as this one did, its restore will refuse the commit. {advice}"
    )
