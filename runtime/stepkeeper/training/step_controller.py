"""What happens after each step: nothing, a save, or one last save and the stop of all ranks."""

import faulthandler
import operator
import threading
from collections.abc import Mapping
from typing import Final, SupportsIndex

from stepkeeper.companion.progress import Progress, numbers_in
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive, ExitCode, ReportPhase
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.loggers import logger
from stepkeeper.policy.save import AnyOf, Disruptions, OnException, OnPreemption, SavePolicy, parts_of
from stepkeeper.save.pipeline import InFlight
from stepkeeper.save.saver import Saves
from stepkeeper.training.disruptions import Experience
from stepkeeper.training.environment import Environment
from stepkeeper.training.preemption import Notice, NoticeWatcher
from stepkeeper.training.save_decision import Decisions, Seen
from stepkeeper.training.termination import Ending
from stepkeeper.unbroken import LastState

__all__ = ["Stepping", "checked_step"]

_log: Final = logger(__name__)


def checked_step(step: SupportsIndex) -> int:
    """The step as a number that logs and reports hold, whatever library it is of. Raises TypeError, ValueError."""
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"a step is a number of at least 0, not {number}")
    return number


class Stepping:
    """The policy, the notices and the operator's wishes, as the train loop meets them."""

    def __init__(
        self,
        policy: SavePolicy,
        rank_group: RankGroup,
        saves: Saves,
        *,
        progress: Progress,
        companion: Companion,
        environment: Environment | None,
        saves_on_notice: bool,
    ) -> None:
        """Raises ValueError where `policy` saves on preemption, and `saves_on_notice` says not to."""
        parts = tuple(parts_of(policy))
        if OnPreemption() in parts and not saves_on_notice:
            raise ValueError("OnPreemption() and chkpt_on_preemption=False contradict each other")
        self._saves = saves
        self._progress = progress
        self._rank_group = rank_group
        self._companion = companion
        self.saves_on_notice: Final = saves_on_notice
        self.stopped = False
        self._started = self._closed = False
        self._last: LastState | None = LastState() if OnException() in parts else None
        self._experience = Experience()
        policy = AnyOf((policy, OnPreemption())) if saves_on_notice else policy
        self.decisions: Final = Decisions(policy, rank_group, self._seen)
        trigger = None if environment is None else environment.places.notice_file
        self.notices: Final = NoticeWatcher(trigger, progress.flush, self._noticed)
        self.ending: Final = Ending(environment, companion, progress, self.notices)

    def start(self) -> None:
        """This process trains: notices and the wishes of other ranks are heard from now on. Ranks: all.

        A manager that only looks at a root has no thread, and leaves SIGTERM to others.
        """
        if self._closed:
            return
        if not self._started:
            self._started = True
            self.decisions.start()
            self.notices.start(signals=self.saves_on_notice)
            if self.notices.is_deaf:
                _log.warning(
                    "SIGTERM ends this process without a save: only the main thread can take it, and the training "
                    "began in another one. The first call there that trains on takes it"
                )
        elif self.notices.is_deaf and threading.current_thread() is threading.main_thread():
            self.notices.start(signals=self.saves_on_notice)

    @property
    def agreed_to_stop(self) -> bool:
        """All ranks agreed on a step to stop at, and this one has come to it."""
        return self.saves_on_notice and self.decisions.stop_step is not None

    def reached(self, step: int) -> bool:
        """True from the step on that all ranks agreed to stop at. Whether that is heeded or not, it is heard."""
        self.start()
        return self.decisions.stops(step)

    def finished(self, step: int, state: Mapping[str, object], metrics: Mapping[str, object] | None) -> None:
        """`step` is done, and `state` is what came of it."""
        self.start()
        self._progress.finished(step, metrics)
        # What a save needs compiled is compiled now: the first one may be a notice's.
        self._saves.prepare(state)
        if self._last is not None and self._rank_group.world_size == 1:
            self._last.finished(step, state)

    def due(self, step: int) -> bool:
        """True if the policy, or somebody's wish, has `step` saved. Ask `reached` first."""
        return self.decisions.due(step)

    def should_save(self, step: int) -> bool:
        """True if `step` is one to save: by the policy, or because all ranks agreed to stop at it."""
        stopping = self.reached(step)
        last = self._saves.last_begun
        saved = last is not None and last.step >= (self.decisions.stop_step or 0)
        return self.decisions.due(step, stopping=stopping and not saved)

    def begin_save(
        self, step: int, state: Mapping[str, object], metrics: Mapping[str, object] | None
    ) -> InFlight:
        """`step` is being saved, and the policy's clock starts anew."""
        self.decisions.save_begun()
        return self._saves.begin(step, state, metrics=numbers_in(metrics))

    def save_for_exception(self, timeout_s: float) -> None:
        """The last finished step is committed, where the policy has that, it can be done, and the state is unbroken.

        Other ranks can't be asked: they don't know of the exception, and may wait for this one in a collective.
        """
        if self._last is None:
            return
        if self._rank_group.world_size > 1:
            _log.warning("nothing is saved for the exception: all ranks would have to save together")
            return
        intact = self._last.intact()
        self._last.close()
        if intact is None:
            _log.warning("nothing is saved for the exception: the state is no step's as a whole")
        else:
            self._saves.save_for_exception(*intact, timeout_s)

    def close(self) -> None:
        """Nothing is heard or watched any more."""
        self._closed = True
        self.decisions.close()
        self.notices.close()
        if self._last is not None:
            self._last.close()

    def stop(
        self, step: int, state: Mapping[str, object], metrics: Mapping[str, object] | None = None
    ) -> None:
        """The one save of a notice, within what the grace period leaves; once."""
        if self.stopped:
            return
        self.notices.give("peer")
        self._progress.moved(ReportPhase.SAVING)
        if self.ending.saves_first:
            self._saves.save_for_notice(step, state, self.ending.left_s(), numbers_in(metrics))
        self._saves.await_last(self.ending.left_s())
        self.stopped = True

    def follow(self, directive: Directive) -> None:
        """What the operator asks for is under way. Called in the thread that listens to the companion."""
        if directive.stop:
            self.notices.give("directive")
        if directive.checkpoint_now is not None:
            self.decisions.wish_save(directive.checkpoint_now)
        if directive.dump_stacks:
            faulthandler.dump_traceback(2)  # sys.stderr may be something without a file

    def _seen(self) -> Seen:
        """What the policy of rank 0 goes by."""
        begun = self._companion.begun
        past = None if begun is None else begun.past
        return Seen(
            saving=self._saves.in_flight is not None,
            cost=self._saves.cost,
            disruptions=Disruptions()
            if begun is None or past is None
            else self._experience.by_now(begun.claim.slot, past),
        )

    def _noticed(self, notice: Notice) -> None:
        """In the thread where the notice came up."""
        _log.warning("notice (%s): all ranks save one step and stop", notice.source)
        self.decisions.wish_stop()
        # Should the process be killed before it has stopped, this says why.
        self.ending.last_word(ExitCode.SAVED, self._saves.newest, None)
        self._progress.noticed(notice.source)
