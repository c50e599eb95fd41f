"""Choose what is saved when all ranks stop: a save in flight is finished, and one more is added if there is time."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.errors import (
    FencedError,
    NoticeDeadlineError,
    PeerLostError,
    SaveError,
    StepkeeperError,
    StorageError,
)
from stepkeeper.loggers import logger
from stepkeeper.save.given_state import SaveRequest
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.saver import Saver
from stepkeeper_planners.errors import PlannerError

__all__ = ["StandingSave", "StopChoice", "StopSave", "choose_another_save", "choose_stop_save"]

_log: Final = logger(__name__)
_KEY: Final = "stop/save"
_MAX_CHOICES: Final = 3
"""How often a save of one step is begun at most: what fails once more is not a mishap."""

_ENDS: Final = (PeerLostError, NoticeDeadlineError, TimeoutError, PlannerError)
"""Failures that another attempt doesn't make good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingSave:
    """The newest save before the stop, as one rank knows it."""

    is_of_stop: bool
    """True if it saves the very step that all stop at."""

    failed: bool
    in_flight_s: float | None
    """Seconds since it was started; None if it has ended."""

    left_s: float | None
    """Seconds that this rank has until it is killed; None if nobody has said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopChoice:
    """The choice whether the step that all stop at is saved now."""

    starts: bool
    why: str | None
    """None: there was nothing to choose."""


def choose_stop_save(standing: Sequence[StandingSave], cost_s: float | None) -> StopChoice:
    """Choose for all ranks.

    Adding a save never endangers older commits, but it takes bandwidth from the one in flight: where there is time for
    that one only, it gets all.

    Args:
        standing: The newest save as each rank knows it.
        cost_s: Seconds from the call to the commit of a recent save; None if none was measured.

    """
    if all(each.is_of_stop for each in standing):
        if any(each.failed for each in standing):
            return StopChoice(starts=True, why="the save of this step failed, and is made again")
        return StopChoice(starts=False, why=None)
    running = [each.in_flight_s for each in standing if each.in_flight_s is not None]
    left = [each.left_s for each in standing if each.left_s is not None]
    if not running or not left:
        return StopChoice(starts=True, why=None)
    if cost_s is None:
        return StopChoice(starts=True, why="no save has been measured yet")
    left_s, rest_s = min(left), max(0.0, cost_s - min(running))
    told = f"{left_s:.1f} s are left, the save in flight needs about {rest_s:.1f} s more, and one more {cost_s:.1f} s"
    if rest_s + cost_s <= left_s:
        return StopChoice(starts=True, why=f"{told}: both are made")
    return StopChoice(starts=False, why=f"{told}: only the one in flight is finished")


def choose_another_save(standing: Sequence[StandingSave], cost_s: float | None) -> StopChoice:
    """Choose for all ranks whether the step is saved once more, because the save before the stop has failed.

    Args:
        standing: The save that failed, as each rank knows it.
        cost_s: Seconds from the call to the commit of a recent save; None if none was measured.

    """
    left = [each.left_s for each in standing if each.left_s is not None]
    if cost_s is None or not left or min(left) >= cost_s:
        return choose_stop_save(standing, cost_s)
    told = f"{min(left):.1f} s are left, and a save needs {cost_s:.1f} s"
    return StopChoice(starts=False, why=f"the save failed, and isn't made again: {told}")


class StopSave:
    """Make the save of the step that all ranks stop at."""

    def __init__(self, saver: Saver, rank_group: RankGroup) -> None:
        """Choose nothing yet.

        Args:
            saver: Makes the save.
            rank_group: The ranks, which choose together.

        """
        self._saver = saver
        self._rank_group = rank_group
        self._request: SaveRequest | None = None
        self._n_choices = 0
        self._failure: Exception | None = None
        self._why: str | None = None
        self.choice: str | None = None
        """What was chosen, and why, for people; None while there was nothing to choose."""

    def start(self, request: SaveRequest, timeout_s: float | None) -> None:
        """Make sure that a save of the step is in flight or committed, if there is time for one.

        An error that makes the save impossible in time is logged. The next process resumes the newest commit.

        Args:
            request: The step that all stop at.
            timeout_s: Seconds until this process is killed; None if nobody has said so.

        Ranks:
            All ranks call this, once.

        """
        self._request = replace(request, is_last=True)
        self._start(self._request, timeout_s)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until the newest save has ended. Note and forgive its failure, or that it didn't end in time.

        If it failed, and there is time for another one, the step is saved once more.

        Raises:
            FencedError: Another claim owns the root.
            NoticeDeadlineError: The time of the notice was over before another save was begun.
            PeerLostError: Another rank is lost, and the save is not made again.

        Ranks:
            All ranks call this.

        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if ends_s is None else max(0.0, ends_s - time.monotonic())

        self._await_newest(timeout_s)
        while self._may_start_again() and self._request is not None:
            # A rank that has seen the commit isn't here: it leaves, and none of the others begins anything.
            if not self._start(self._request, left_s()):
                break
            self._await_newest(left_s())
        self._request = None
        if self._saver.newest_save is not None or self._why is not None:
            self._saver.forgive_failure(self._why)

    def _start(self, request: SaveRequest, timeout_s: float | None) -> bool:
        """Start the save of the step if all ranks choose to. Return whether they do; note what refuses it."""
        if not self._agree_to_start(request.step, timeout_s):
            return False
        self._failure = self._why = None
        try:
            self._saver.start_save(request, timeout_s)
        except (StorageError, SaveError, TimeoutError) as error:
            self._failure, self._why = error, f"step {request.step} is not saved for the notice: {error}"
            _log.error("%s", self._why, extra={"step": request.step})
        return True

    def _await_newest(self, timeout_s: float | None) -> None:
        """Wait until the newest save has ended, and note its failure."""
        last = self._saver.newest_save
        if last is None:
            return
        try:
            last.result(timeout_s)
        except FencedError:
            raise
        except (StepkeeperError, PlannerError, TimeoutError) as error:
            _log.exception("the save for the notice failed", extra={"step": last.step})
            self._failure = error
            self._why = f"the save of step {last.step} for the notice failed: {error!r}"

    def _may_start_again(self) -> bool:
        failed = self._failure is not None and not isinstance(self._failure, _ENDS)
        return failed and self._n_choices < _MAX_CHOICES

    def _agree_to_start(self, step: int, left_s: float | None) -> bool:
        """Choose with all ranks whether `step` is saved; False if they can't be asked.

        What each knows of the last save differs, and a save that only some ranks start waits for the rest.
        """
        own = _describe(self._saver.newest_save, step, left_s)
        limit_s = self._rank_group.limits.apart_s if left_s is None else left_s
        again, key = self._n_choices > 0, f"{_KEY}/{self._n_choices}"
        self._n_choices += 1
        try:
            by_rank = self._rank_group.gather(key, asdict(own), limit_s)
            choice = asdict(self._choose(by_rank, again=again)) if by_rank else None
            said = self._rank_group.broadcast(f"{key}/choice", choice, limit_s)
        except PeerLostError as error:
            _log.error("whether step %d is to be saved isn't agreed: %s", step, error, extra={"step": step})
            return False
        if said["why"] is not None:
            self.choice = f"at step {step}, {said['why']}"
            _log.warning("stopping %s", self.choice, extra={"step": step})
        return bool(said["starts"])

    def _choose(self, by_rank: Sequence[Mapping[str, Any]], *, again: bool) -> StopChoice:
        cost = self._saver.cost
        standing = [StandingSave(**each) for each in by_rank]
        choose = choose_another_save if again else choose_stop_save
        return choose(standing, None if cost is None else cost.duration_s)


def _describe(last: InFlight | None, step: int, left_s: float | None) -> StandingSave:
    if last is None:
        return StandingSave(is_of_stop=False, failed=False, in_flight_s=None, left_s=left_s)
    return StandingSave(
        is_of_stop=last.step == step,
        failed=last.failed,
        in_flight_s=None if last.done else last.duration_millis() / 1000,
        left_s=left_s,
    )
