"""Construct the parts of a checkpoint manager and connect them."""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive, NoticeSource
from stepkeeper.coordination.rank_group import RankGroup, open_rank_group
from stepkeeper.coordination.waits import Waits, call_weakly
from stepkeeper.ending.shell import EndingShell
from stepkeeper.ending.watch import EndingParts
from stepkeeper.errors import FencedError, NoticeDeadlineError, PeerLostError
from stepkeeper.loggers import identify, logger
from stepkeeper.manager_arguments import ManagerArguments, build_claim_request
from stepkeeper.restore.latest import LatestRestore
from stepkeeper.restore.restorer import Restorer
from stepkeeper.save.hooks import SaveHooks
from stepkeeper.save.saver import Saver
from stepkeeper.stacks.meeting import StackMeeting
from stepkeeper.stacks.pace import RESTORE, SAVE
from stepkeeper.storage import open_store, root_uri
from stepkeeper.tier import CachedStore, LocalTier
from stepkeeper.training.environment import attempt_name, build_open_request
from stepkeeper.training.rehearsal import collect_progress
from stepkeeper.training.steps import TrainSteps
from stepkeeper_planners.errors import UnsupportedValueError
from stepkeeper_planners.loading.load_request import LoadTarget

__all__ = ["ManagerParts", "training_call"]

P = ParamSpec("P")
R = TypeVar("R")

_log: Final = logger(__name__)
_ADDRESS_S: Final = 300.0
"""The time that ranks wait for rank 0's address."""


class ManagerParts:
    """Hold the parts of one manager. Only the manager keeps this object alive; no thread or part does."""

    def __init__(self, given: ManagerArguments) -> None:
        """Construct the parts. Nothing is read or written yet, and outside an operator's pod nothing runs."""
        self.store: Final = open_store(
            root_uri(given.path), unsafe_single_writer=given.options.unsafe_single_writer
        )
        self.waits: Final = Waits()
        self.rank_group: Final = open_rank_group(given.process_group, self.waits)
        identify(rank=self.rank_group.rank, attempt=attempt_name(given.environment))
        meeting = StackMeeting(self.rank_group.rank, self.rank_group.world_size)
        self.companion: Final = self._build_companion(given, meeting)
        self.progress: Final = collect_progress(
            given.environment, self.rank_group, self.companion.report_state
        )
        self.restorer: Final = self._build_restorer(given)
        self.latest_restore: Final = LatestRestore(self.restorer, self.companion)
        self.save_hooks: Final = SaveHooks()
        self.saver: Final = self._build_saver(given)
        self.steps: Final = self._build_steps(given, meeting)
        self.ending: Final = EndingShell(
            EndingParts(
                steps=self.steps,
                saver=self.saver,
                rank_group=self.rank_group,
                progress=self.progress,
                companion=self.companion,
                waits=self.waits,
                environment=given.environment,
                saves_on_notice=given.options.stop_on_notice,
            )
        )
        if given.environment is not None:
            self._meet_operator()

    def _build_companion(self, given: ManagerArguments, meeting: StackMeeting) -> Companion:
        return Companion(
            build_open_request(
                given.environment,
                self.rank_group,
                self.store.uri,
                given.keep,
                tier=given.tier,
                unsafe_single_writer=given.options.unsafe_single_writer,
            ),
            call_weakly(self.follow_directive),
            claiming=build_claim_request(given.policy, given.options.take_over),
            stack_meeting=meeting,
            pace_limits=given.pace_limits,
        )

    def _build_restorer(self, given: ManagerArguments) -> Restorer:
        store, tier = self.store, given.tier
        return Restorer(
            store,
            self.rank_group,
            reopen=partial(open_store, store.uri, unsafe_single_writer=given.options.unsafe_single_writer),
            cached_store=None if tier is None else CachedStore(store, LocalTier(tier, store.uri)),
            waits=self.waits,
        )

    def _build_saver(self, given: ManagerArguments) -> Saver:
        return Saver(
            self.store,
            self.companion,
            self.rank_group,
            self.progress,
            max_pending=given.options.max_pending,
            tolerated_failures=given.options.on_save_failure,
            keep=given.keep,
            device_budget_bytes=given.options.device_budget_bytes,
            all_first=given.options.replicas == "first",
            save_hooks=self.save_hooks,
            waits=self.waits,
            mixed_state=self.restorer.mixed_state,
        )

    def _build_steps(self, given: ManagerArguments, meeting: StackMeeting) -> TrainSteps:
        link = call_weakly(self.companion.link_stacks)
        return TrainSteps(
            given.policy,
            self.rank_group,
            self.saver,
            progress=self.progress,
            companion=self.companion,
            saves_on_notice=given.options.stop_on_notice,
            waits=self.waits,
            on_met=partial(_link_companions, self.rank_group, meeting, link),
        )

    def describe(self) -> str:
        """Describe the root and its newest commit in one line, from memory alone."""
        committed = self.saver.lineage.own_commit or self.saver.lineage.restored_commit
        saving = self.saver.in_flight
        summary = [self.store.uri]
        if self.rank_group.world_size > 1:
            summary.append(f"rank {self.rank_group.rank} of {self.rank_group.world_size}")
        summary.append("nothing committed" if committed is None else f"step {committed.step} committed")
        if saving is not None:
            summary.append(f"step {saving.step} in flight")
        if self.ending.is_closed:
            summary.append("closed")
        return ", ".join(summary)

    def prepare_saves(self, target: LoadTarget, *, is_restored: bool) -> None:
        """Compile the programs that saves need, plan the first save, and note which optimizers have state already.

        This uses the state as it was before the restore: another call of state_dict() could disturb the loaded
        state, and the compiled programs are the same. After a restore, another thread plans. Where nothing was
        restored, this one does, so that errors come early: it raises UnsupportedValueError if a value can't be saved.
        """
        try:
            flat = target.flat
        except Exception as error:  # the training can continue; the next restore would raise it
            if self.rank_group.rank == 0:
                _log.warning(
                    "reading the state before the first step failed, and the next start's restore would fail too: %r",
                    error,
                )
            return
        try:
            self.saver.prepare(flat, in_background=is_restored)
        except (UnsupportedValueError, ValueError) as error:
            if isinstance(error, UnsupportedValueError) and not is_restored:
                raise
            # The restore may have replaced the value, or the first step may fill an empty state. If not, the first save
            # raises it.
            _log.info("preparing saves failed, the first save retries: %s", error)

    def follow_directive(self, directive: Directive) -> None:
        """Follow the operator's directive. Runs in the thread that listens to the companion."""
        if directive.stop:
            self.ending.notices.record(NoticeSource.DIRECTIVE, kills=False)
        self.steps.follow_save_request(directive)

    def _meet_operator(self) -> None:
        """Start the parts that elsewhere the training starts: the operator expects reports, and may send directives."""
        self.ending.start()
        with self.waits.in_call():
            self.companion.ensure_process()


class _HasParts(Protocol):
    _parts: ManagerParts


M = TypeVar("M", bound=_HasParts)


def training_call(call: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Register, while the manager's method `call` runs, that the training is in it. Remember a fence that it raises.

    The call's waits end at a notice's deadline. If it is stuck anyway, the process is ended before the kill. Its time
    is no part of a step.
    """
    stage = RESTORE if call.__name__ == "restore" else SAVE

    @wraps(call)
    def noted(manager: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        parts = manager._parts  # noqa: SLF001  # it decorates the manager's own methods
        try:
            with parts.progress.in_stage(stage), parts.waits.in_call():
                return call(manager, *args, **kwargs)
        except FencedError as error:
            parts.saver.failures.record_fence(error)
            raise

    return noted


def _link_companions(
    group: RankGroup, meeting: StackMeeting, link: Callable[[Mapping[str, Any]], None]
) -> None:
    """Pass this rank's companion the address of rank 0's, once all ranks have met. A failure is logged."""
    # An empty dict means that there is no address, so that no rank waits for one.
    own = (meeting.describe(group.store_host) or {}) if group.rank == 0 else None
    try:
        address = group.broadcast("companions", own, _ADDRESS_S)
    except (PeerLostError, NoticeDeadlineError) as error:
        _log.warning("stack requests do not reach all ranks: %s", error)
        return
    if group.rank != 0 and address:
        link(address)
