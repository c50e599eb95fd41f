"""Make all ranks do the same thing after the same step, though the wish for it comes up in one of them at any time.

One rank's wish opens a round. In each rank a thread then holds the train thread at its next call, tells the
others which step this rank has passed, and lets the train thread go on once all ranks have answered. The wish
is due at the first step beyond the greatest of these steps, which no rank has passed. That is right for any
step numbers and any interleaving.
"""

import threading
import time
from typing import Final, NamedTuple

from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits

__all__ = ["STOP", "StepAgreement"]

STOP: Final = "stop"
_POLL_S: Final = 0.1
_LOOK_S: Final = 0.5
"""The interval at which a rank checks whether another one is lost, though nothing waits for it just now."""

_HELD_LOOK_S: Final = 0.2
_CLOSE_S: Final = 5.0
_MEET_S: Final = 3600.0
"""The seconds by which ranks may start apart; the rest of the start waits as long."""

_ROUND_TIMEOUT_S: Final = 60.0
_BEFORE_ANY_STEP: Final = -1


class _Agreed(NamedTuple):
    name: str
    beyond: int
    """The wish is due at the first step greater than this."""


class StepAgreement:
    """Agree with the other ranks on the steps after which wishes are due. Call `pass_step` after each step."""

    def __init__(self, rank_group: RankGroup, waits: Waits | None = None) -> None:
        self._rank_group = rank_group
        self._waits = waits or Waits()
        self._changed = threading.Condition()
        self._wishes: list[str] = []
        self._agreed: list[_Agreed] = []
        self._passed = _BEFORE_ANY_STEP
        self._held = False
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)

    @property
    def stop_is_agreed(self) -> bool:
        """True if all ranks have agreed on a step to stop at, and this one hasn't come to it yet."""
        with self._changed:
            return any(agreed.name == STOP for agreed in self._agreed)

    def start(self) -> None:
        """Listen to the wishes of other ranks from now on."""
        if self._rank_group.world_size > 1:
            self._thread.start()

    def wish(self, name: str) -> None:
        """Make `name` due at a step that all ranks agree on.

        Asked for again before that step, it is the same wish.
        """
        with self._changed:
            if name in self._wishes or any(agreed.name == name for agreed in self._agreed):
                return
            if self._rank_group.world_size == 1:
                self._agreed.append(_Agreed(name, _BEFORE_ANY_STEP))
            else:
                self._wishes.append(name)
                self._changed.notify_all()

    def pass_step(self, step: int) -> tuple[str, ...]:
        """Return the wishes that are due now that `step` is finished; every rank gets the same ones.

        Raises:
            PeerLostError: A rank did not answer in time, or did not start, or is lost.
            NoticeDeadlineError: The time of a notice was over before all ranks had answered.

        """
        since_s = time.monotonic()
        self._waits.raise_loss()
        with self._changed:
            while self._held and self._error is None:
                if not self._changed.wait(_HELD_LOOK_S):
                    self._waits.check(since_s)
            if self._error is not None:
                raise self._error
            self._passed = step
            if not self._agreed:
                return ()
            due = tuple(agreed.name for agreed in self._agreed if step > agreed.beyond)
            self._agreed = [agreed for agreed in self._agreed if step <= agreed.beyond]
            return due

    def close(self) -> None:
        """End the thread. One that is stuck in the store, whose host is gone, is left: it keeps no process alive."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._meet()
            self._rank_group.watch_peers()
            self._hold_rounds()
        except BaseException as error:  # it is raised in the train thread, which may be held just now
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _meet(self) -> None:
        """Wait until all ranks have come here. A rank that is silent in a round from here on is lost, not late."""
        met = self._rank_group.gather("agreement/met", {}, _MEET_S)
        self._rank_group.broadcast("agreement/all-met", {"ranks": len(met)} if met else None, _MEET_S)

    def _hold_rounds(self) -> None:
        number = 0
        look_s = time.monotonic()
        while not self._closing:
            if time.monotonic() >= look_s:
                self._rank_group.look_for_loss()
                look_s = time.monotonic() + _LOOK_S
            name = self._next_wish(number)
            if name is not None:
                self._hold_round(number, name)
                number += 1

    def _next_wish(self, number: int) -> str | None:
        """Wait a short while for a rank to open round `number`, and return what it is about; None if none has."""
        with self._changed:
            if not self._wishes and not self._closing:
                self._changed.wait(_POLL_S)
            mine = self._wishes[0] if self._wishes else None
        key = f"round/{number}"
        if mine is not None:
            self._rank_group.propose(key, {"name": mine})
        found = self._rank_group.read_proposal(key)
        return None if found is None else str(found["name"])

    def _hold_round(self, number: int, name: str) -> None:
        with self._changed:
            self._held = True
            passed = self._passed
        answers = self._rank_group.gather(f"round/{number}/passed", {"step": passed}, _ROUND_TIMEOUT_S)
        greatest = {"step": max(answer["step"] for answer in answers)} if answers else None
        agreed = self._rank_group.broadcast(f"round/{number}/beyond", greatest, _ROUND_TIMEOUT_S)
        with self._changed:
            # A list, not a set: a rank that is ahead may wish the same again before this one has come to the first.
            self._agreed.append(_Agreed(name, agreed["step"]))
            self._wishes = [wish for wish in self._wishes if wish != name]
            self._held = False
            self._changed.notify_all()
