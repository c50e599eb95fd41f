"""Make all ranks act after the same step on a wish that one of them has at any time.

`agreement_rules` has the rules; this module has the threads, the waits and the store access.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from stepkeeper.coordination import agreement_rules as rules
from stepkeeper.coordination.agreement_rules import STOP, STOPS, Position, RankView
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import StepkeeperError

__all__ = ["StepAgreement"]

_POLL_S: Final = 0.1
_LOOK_S: Final = 0.5
"""The interval at which a rank checks for lost ranks, even without a wait."""

_EARLY: Final = "agreement/early"
"""A name in the ranks' store. It has a value if a rank got a notice before all ranks had started."""

_EARLY_LOOK_S: Final = 0.3
_HELD_LOOK_S: Final = 0.2
_ROUND_TIMEOUT_S: Final = 300.0
"""Seconds to wait for a silent rank in a round: a compilation, an import or a collective may hold the GIL. A notice's
deadline and the end of the process cut it short.
"""


class StepAgreement:
    """Agree with the other ranks on the steps after which wishes are due. Call `pass_step` after each step.

    The train thread calls `pass_step`, and is held there during a round. A thread of this object does the rest.
    """

    def __init__(
        self, rank_group: RankGroup, waits: Waits | None = None, on_met: Callable[[], None] = lambda: None
    ) -> None:
        """Store the arguments. A thread calls `on_met` when all ranks have started, before any round."""
        self._rank_group = rank_group
        self._on_met = on_met
        self.received_early_stop = False
        """True if another rank got a notice before all ranks had started."""

        self._is_past_start = threading.Event()
        self._waits = waits or Waits()
        self._changed = threading.Condition()
        self._view = RankView(rank=rank_group.rank)
        self._error: BaseException | None = None
        """The error that ended this object's thread: `pass_step` raises it."""

        self._closing = False
        self._stop_wished_s: float | None = None
        """Time of this rank's wish to stop, by time.monotonic()."""

        self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)

    @property
    def agreed_stop(self) -> str | None:
        """STOP or STOP_ASKED if all ranks have agreed on a stop step that this one hasn't reached."""
        return self._view.agreed_stop

    def start(self) -> None:
        """Listen to the wishes of other ranks from now on."""
        if self._rank_group.world_size > 1:
            self._thread.start()
            threading.Thread(target=self._spread_early, name="early-stop", daemon=True).start()

    def wish(self, name: str) -> bool:
        """Make `name` due at a step that all ranks agree on. Return False if it is pending already."""
        with self._changed:
            before, self._view = self._view, self._view.wish(name)
            if self._view is before:
                return False
            if name in STOPS and self._stop_wished_s is None:
                self._stop_wished_s = time.monotonic()
            if self._rank_group.world_size == 1:
                self._view = self._view.agree_alone()
            self._changed.notify_all()
            return True

    def pass_step(self, step: int) -> tuple[str, ...]:
        """Return the wishes that are due after `step`, the same in every rank.

        Raises PeerLostError if a rank is lost, or doesn't answer or start in time, and NoticeDeadlineError.
        """
        since_s = time.monotonic()
        self._waits.raise_loss()
        with self._changed:
            while self._view.is_held and self._error is None:
                if not self._changed.wait(_HELD_LOOK_S):
                    self._waits.check(since_s)
            if self._error is not None:
                raise self._error
            if self._stop_wished_s is not None and not set(STOPS).isdisjoint(self._view.wishes):
                # The stop has no round yet: the store doesn't answer, or not all ranks have started. Train on, but not
                # beyond the notice's deadline.
                self._waits.check(self._stop_wished_s)
            self._view, due = self._view.pass_step(step)
            return due

    def await_stops(self, timeout_s: float) -> None:
        """Wait until all ranks have reached the stop step: a slower rank needs the others until then.

        A save of that step waits for all ranks by itself; without one, all call this, once. Raises
        PeerLostError and NoticeDeadlineError.
        """
        if self._rank_group.world_size > 1:
            came = self._rank_group.gather("agreement/stopped", {}, timeout_s)
            self._rank_group.broadcast("agreement/all-stopped", {} if came else None, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread. A wait for the store ends first if the rank group was aborted (`RankGroup.abort`)."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._is_past_start.set()
        if self._thread.is_alive():
            self._thread.join(max(0.0, timeout_s))

    def _run(self) -> None:
        try:
            self._meet()
            self._is_past_start.set()
            self._rank_group.watch_peers()
            # A rank that ends before it is connected has no connection that could break.
            self._rank_group.gather("agreement/linked", {}, _ROUND_TIMEOUT_S)
            self._on_met()
            self._hold_rounds()
        except BaseException as error:  # the train thread, which may be held now, raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._is_past_start.set()

    def _meet(self) -> None:
        """Wait until all ranks have started. From then on a silent rank counts as lost, not as late."""
        start_s = self._rank_group.limits.start_s
        met = self._rank_group.gather("agreement/met", {}, start_s)
        self._rank_group.broadcast("agreement/all-met", {"ranks": len(met)} if met else None, 2 * start_s)

    def _spread_early(self) -> None:
        """Spread an early stop among the ranks that have started: the first round may come much later."""
        # The agreement's own thread raises the error that ends waits for the store.
        with suppress(StepkeeperError):
            while not self._is_past_start.wait(_EARLY_LOOK_S):
                if STOP in self._view.wishes:
                    self._rank_group.propose(_EARLY, {})
                    return
                if self._rank_group.read_proposal(_EARLY) is not None:
                    self.received_early_stop = True
                    return

    def _hold_rounds(self) -> None:
        look_s = time.monotonic()
        while not self._closing:
            if time.monotonic() >= look_s:
                self._rank_group.look_for_loss()
                look_s = time.monotonic() + _LOOK_S
            with self._changed:
                if not (self._view.is_held or self._view.wishes or self._closing):
                    self._changed.wait(_POLL_S)
                move = self._view.next_move()
            self._make(move)

    def _make(self, move: rules.Move) -> None:
        """Make a move, which may wait for other ranks, and apply its result."""
        group = self._rank_group
        match move:
            case rules.Listen(number):
                name = self._read_wish(number)
                self._become(lambda view: view.receive_wish(name))
            case rules.Open(number, wish):
                group.propose(f"round/{number}", {"name": wish})
                name = self._read_wish(number)
                self._become(lambda view: view.receive_wish(name))
            case rules.Answer(number, passed):
                answers = group.gather(f"round/{number}/passed", passed._asdict(), _ROUND_TIMEOUT_S)
                positions = tuple(Position(**answer) for answer in answers)
                self._become(lambda view: view.receive_answers(positions))
            case rules.Conclude(number, latest):
                group.broadcast(f"round/{number}/beyond", latest._asdict(), _ROUND_TIMEOUT_S)
                self._become(lambda view: view.receive_conclusion(latest))
            case rules.Await(number):
                beyond = Position(**group.broadcast(f"round/{number}/beyond", None, _ROUND_TIMEOUT_S))
                self._become(lambda view: view.receive_conclusion(beyond))

    def _read_wish(self, number: int) -> str | None:
        found = self._rank_group.read_proposal(f"round/{number}")
        return None if found is None else str(found["name"])

    def _become(self, change: Callable[[RankView], RankView]) -> None:
        with self._changed:
            self._view = change(self._view)
            self._changed.notify_all()
