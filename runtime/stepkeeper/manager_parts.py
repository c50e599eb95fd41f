"""Construct the parts of a checkpoint manager and connect them."""

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar
from weakref import WeakMethod

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive
from stepkeeper.coordination.companion_links import link_companions
from stepkeeper.coordination.rank_group import open_rank_group
from stepkeeper.coordination.waits import Waits
from stepkeeper.loggers import identify
from stepkeeper.manager_arguments import TorchXlaArguments, build_claim_request
from stepkeeper.policy.keep import KeepPolicy
from stepkeeper.restore import LatestRestore, Restorer
from stepkeeper.save.hooks import SaveHooks
from stepkeeper.save.saver import Saver
from stepkeeper.stacks.meeting import StackMeeting
from stepkeeper.storage import open_store, root_uri
from stepkeeper.tier import CachedStore, LocalTier, TierPlace
from stepkeeper.training.closing import Closing
from stepkeeper.training.environment import Environment, attempt_name, build_open_request
from stepkeeper.training.shutdown import Shutdown
from stepkeeper.training.step_controller import StepController

__all__ = ["ManagerParts"]

Given = TypeVar("Given")


class ManagerParts:
    """Hold the parts of one manager. The manager alone keeps this object alive: no thread and no part does."""

    def __init__(
        self,
        given: TorchXlaArguments,
        *,
        keep: KeepPolicy | None,
        tier: TierPlace | None,
        take_over: str | bool,
        unsafe_single_writer: bool,
        device_budget_bytes: int | None,
        stacks_after_s: float | None,
        environment: Environment | None,
    ) -> None:
        """Construct the parts. Nothing is read or written yet, and outside an operator's pod nothing is started.

        Args:
            given: The manager's arguments that torch_xla's has too.
            keep: The policy that selects which commits stay; None keeps all.
            tier: The local disk that saves go through and restores read from, if any.
            take_over: Name of the job whose root may become this one's; True allows any.
            unsafe_single_writer: The user promises that a store without exclusive creates has a single writer.
            device_budget_bytes: Device memory that a snapshot may use, in bytes; None finds it out.
            stacks_after_s: Seconds that any step may take before stacks are dumped; None watches no steps.
            environment: What the operator told this process; None without an operator.

        """
        self.store: Final = open_store(root_uri(given.path), unsafe_single_writer=unsafe_single_writer)
        self.waits: Final = Waits()
        self.rank_group: Final = open_rank_group(given.process_group, self.waits)
        rank_group = self.rank_group
        identify(rank=rank_group.rank, attempt=attempt_name(environment))
        meeting = StackMeeting(rank_group.rank, rank_group.world_size)
        self.companion: Final = Companion(
            build_open_request(
                environment,
                rank_group,
                self.store.uri,
                keep,
                tier=tier,
                unsafe_single_writer=unsafe_single_writer,
            ),
            _call_weakly(self.follow_directive),
            claiming=build_claim_request(given.policy, take_over),
            stack_meeting=meeting,
            stacks_after_s=stacks_after_s,
            limits=rank_group.limits,
        )
        self.progress: Final = Progress(self.companion.report_state)
        self.restorer: Final = Restorer(
            self.store,
            rank_group,
            reopen=partial(open_store, self.store.uri, unsafe_single_writer=unsafe_single_writer),
            cached_store=None if tier is None else CachedStore(self.store, LocalTier(tier, self.store.uri)),
            waits=self.waits,
        )
        self.latest_restore: Final = LatestRestore(self.restorer, self.companion)
        self.save_hooks: Final = SaveHooks()
        self.saver: Final = Saver(
            self.store,
            self.companion,
            rank_group,
            self.progress,
            max_pending=given.max_pending_async,
            device_budget_bytes=device_budget_bytes,
            save_hooks=self.save_hooks,
            waits=self.waits,
        )
        self.controller: Final = StepController(
            given.policy,
            rank_group,
            self.saver,
            progress=self.progress,
            companion=self.companion,
            environment=environment,
            saves_on_notice=given.chkpt_on_preemption,
            waits=self.waits,
            on_met=partial(link_companions, rank_group, meeting, _call_weakly(self.companion.link_stacks)),
        )
        self.closing: Final = Closing(self.controller, self.saver, self.progress, self.companion, rank_group)
        self.shutdown: Final = Shutdown(
            self.controller, self.saver, self.progress, rank_group, closing=self.closing, waits=self.waits
        )
        if environment is not None:
            self._meet_operator()

    def describe(self) -> str:
        """Say in one line which root this is, and how far it is saved. From memory alone."""
        committed = self.saver.own_commit or self.saver.restored_commit
        saving = self.saver.in_flight
        said = [self.store.uri]
        if self.rank_group.world_size > 1:
            said.append(f"rank {self.rank_group.rank} of {self.rank_group.world_size}")
        said.append("nothing committed" if committed is None else f"step {committed.step} committed")
        if saving is not None:
            said.append(f"step {saving.step} in flight")
        if self.closing.is_closed:
            said.append("closed")
        return ", ".join(said)

    def follow_directive(self, directive: Directive) -> None:
        """Do what the operator asks for. Runs in the thread that listens to the companion."""
        # Looked up late: the companion is constructed before the controller.
        self.controller.follow_directive(directive)

    def _meet_operator(self) -> None:
        """Start what elsewhere the training starts: the operator expects reports, and may send directives."""
        self.controller.start()
        with self.waits.in_call():
            self.companion.ensure_process()


def _call_weakly(act: Callable[[Given], None]) -> Callable[[Given], None]:
    """Return a function that calls the method `act` as long as its object lives, and doesn't keep that alive."""
    held = WeakMethod(act)

    def call(given: Given) -> None:
        alive = held()
        if alive is not None:
            alive(given)

    return call
