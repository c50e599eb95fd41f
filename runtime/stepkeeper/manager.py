"""The checkpoint manager: what a training loop talks to."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Self, SupportsIndex
from weakref import WeakMethod

import torch.distributed as dist

from stepkeeper.companion.messages import ClaimRequest
from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive, ReportedRestore, ReportPhase
from stepkeeper.coordination.rank_group import open_rank_group
from stepkeeper.errors import BadUriError
from stepkeeper.loggers import identify
from stepkeeper.policy.keep import AnyOf as KeepAnyOf
from stepkeeper.policy.keep import KeepPolicy, from_max_to_keep, from_retention
from stepkeeper.policy.save import AnyOf, Auto, SavePolicy, from_interval, parts_of
from stepkeeper.restore import LatestRestore, Restorer, describe_step, record_uri, verify_step
from stepkeeper.restore.results import CheckpointInfo, RestoreResult, Verification
from stepkeeper.results import Health, StepOutcome
from stepkeeper.save.hooks import Events, SaveHook
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.request import SaveRequest
from stepkeeper.save.saver import Saver
from stepkeeper.storage import check_slashes, open_store
from stepkeeper.tier import LocalTier, NearStore, TierPlace
from stepkeeper.torch_xla_api import TorchXlaApi, TorchXlaArguments
from stepkeeper.training.environment import (
    Environment,
    PodPaths,
    attempt_name,
    build_open_request,
    check_world_size,
    read_environment,
    root_uri,
)
from stepkeeper.training.shutdown import Shutdown
from stepkeeper.training.step_controller import StepController, validate_step
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["CheckpointManager"]


class CheckpointManager(TorchXlaApi):
    """Saves the state of a training to a root, restores it, and ends the process in order when it is told to stop.

    With an operator::

        with CheckpointManager.from_env() as manager:
            restored = manager.restore_latest(state)
            for step in range(restored.step + 1 if restored else 1, n_steps + 1):
                loss = train_step()
                if manager.step(step, state, {"loss": loss}).stop:
                    break

    `state` is a tree of tensors, objects with state_dict() and load_state_dict(), and plain values; it is looked at
    only when it is saved or restored. Leaving the block ends the process with the code that says what became of it,
    unless training is simply done. All ranks call every method at the same steps.
    """

    def __init__(  # noqa: PLR0917  # torch_xla's signature
        self,
        path: str | PathLike[str],
        save_interval: SupportsIndex | SavePolicy = 1000,
        max_to_keep: SupportsIndex = 0,
        max_pending_async: SupportsIndex = 1,
        num_of_threads: SupportsIndex = 1,
        process_group: dist.ProcessGroup | None = None,
        chkpt_on_preemption: bool = True,
        *,
        keep: KeepPolicy | None = None,
        take_over: str | bool = False,
        unsafe_single_writer: bool = False,
        device_budget_bytes: int | None = None,
        local_tier: str | PathLike[str] | None = None,
        local_tier_bytes: int | None = None,
        environment: Environment | None = None,
    ) -> None:
        """A manager for the root `path` (file://…, gs://…, or a folder). Nothing is read or written yet.

        `save_interval` is a number of steps or a policy of `stepkeeper.policy.save`. `max_to_keep` newest commits are
        kept, 0 keeps all; `keep`, a policy of `stepkeeper.policy.keep`, says it in full. `max_pending_async` snapshots
        at most are held in host memory: with 1, a save that comes while one is in flight waits for that one.
        `num_of_threads` is torch_xla's; the companion process has its own bound. With `chkpt_on_preemption`, SIGTERM
        makes all ranks save one step. `take_over` names the job whose root becomes this one's, True is whichever.
        `device_budget_bytes` of this process's devices may hold a snapshot until it is on the host, what is left over
        is waited for; by default that is found out: all of it, and half as much each time that they have no room.
        `local_tier` is a folder on a disk of this host, which saves come by on their way to the root, so that memory is
        free sooner, and which restores read from; `local_tier_bytes` bounds what this process has there.
        `unsafe_single_writer` is said of a store that can't tell two writers apart, and promises that there is one.

        Raises:
            BadUriError: `path` names no store.
            ValueError: a number is out of its range, or two arguments contradict each other.

        """
        given = self._arguments = TorchXlaArguments.from_values(
            path, save_interval, max_to_keep, max_pending_async, process_group, chkpt_on_preemption
        )
        self.num_of_threads = num_of_threads
        tier = _tier_place(local_tier, local_tier_bytes)
        keep = from_max_to_keep(given.max_to_keep, keep)
        self._store = open_store(root_uri(given.path), unsafe_single_writer=unsafe_single_writer)
        self._rank_group = open_rank_group(process_group)
        identify(rank=self._rank_group.rank, attempt=attempt_name(environment))
        opening = build_open_request(
            environment,
            self._rank_group,
            self._store.uri,
            keep,
            tier=tier,
            unsafe_single_writer=unsafe_single_writer,
        )
        self._companion = Companion(
            opening, _weakly(self._direct), claiming=_claiming(given.policy, take_over)
        )
        self._progress = Progress(self._companion.report_state)
        reopen = partial(open_store, self._store.uri, unsafe_single_writer=unsafe_single_writer)
        near = None if tier is None else NearStore(self._store, LocalTier(tier, self._store.uri))
        self._restorer = Restorer(self._store, self._rank_group, reopen=reopen, near=near)
        self._latest = LatestRestore(self._restorer, self._companion)
        self._events = Events()
        self._saver = Saver(
            self._store,
            self._companion,
            self._rank_group,
            self._progress,
            max_pending=given.max_pending_async,
            device_budget_bytes=device_budget_bytes,
            events=self._events,
        )
        self._controller = StepController(
            given.policy,
            self._rank_group,
            self._saver,
            progress=self._progress,
            companion=self._companion,
            environment=environment,
            saves_on_notice=chkpt_on_preemption,
        )
        self._shutdown = Shutdown(
            self._controller, self._saver, self._progress, self._companion, self._rank_group
        )
        if environment is not None:
            # It is told and reports from here on; elsewhere that begins with the training.
            self._controller.start()
            self._companion.ensure_process()

    @classmethod
    def from_env(
        cls,
        *,
        process_group: dist.ProcessGroup | None = None,
        places: PodPaths | None = None,
        max_pending_async: SupportsIndex = 1,
        also_save: SavePolicy | None = None,
        also_keep: KeepPolicy | None = None,
        unsafe_single_writer: bool = False,
        device_budget_bytes: int | None = None,
        local_tier: str | PathLike[str] | None = None,
        local_tier_bytes: int | None = None,
    ) -> Self:
        """The manager that this container's CheckpointedTrainingJob asks for.

        The job says when to save and what to keep; what `also_save` and `also_keep` name is saved and kept besides.
        What else can be given is as the constructor has it.

        A volume that its template mounts at /var/cache/stepkeeper is the `local_tier`, if none is given here;
        `local_tier_bytes` bounds it where there is one.

        Raises:
            NotInPodError: no operator made this container; it says what to write instead.
            ContractError: the operator's settings are of another version.
            ProcessGroupError: the job has several hosts, and they don't form a process group yet.

        """
        environment = read_environment(places)
        check_world_size(environment, process_group)
        settings = environment.settings
        tier = environment.local_tier if local_tier is None else local_tier
        interval = from_interval(settings.interval, total_steps=settings.total_steps)
        retention = from_retention(settings.retention)
        return cls(
            settings.uri,
            interval if also_save is None else AnyOf((interval, also_save)),
            max_pending_async=max_pending_async,
            process_group=process_group,
            keep=retention if also_keep is None else KeepAnyOf((retention, also_keep)),
            unsafe_single_writer=unsafe_single_writer,
            device_budget_bytes=device_budget_bytes,
            local_tier=tier,
            local_tier_bytes=None if tier is None else local_tier_bytes,
            environment=environment,
        )

    @property
    def in_flight(self) -> InFlight | None:
        """The newest save, until it has ended: `result()` waits for its commit."""
        return self._saver.in_flight

    def restore_latest(
        self,
        state: Mapping[str, object],
        *,
        items: Collection[str] | None = None,
        exclude: Collection[str] = (),
        strict: bool = True,
        cast: bool = False,
    ) -> RestoreResult | None:
        """The root is claimed, and `state` is what Latest means in it; None if nothing was ever committed there.

        Tensors are filled in place, Statefuls get theirs by load_state_dict(). Every block that is read is verified;
        a torn commit is quarantined and its parent taken. Saves in flight are awaited first: called again, it restores
        what was saved last. `items`, `exclude`, `strict` and `cast` are as `restore` has them. Ranks: all.

        Raises:
            FencedError: the root belongs to another job, or a later start of this one has begun.
            RestoreError: a commit was meant to be found and none can be used.
            LoadMismatchError: `state` has other names, shapes or dtypes than the commit.

        """
        rules = LoadRules(items=items, exclude=exclude, strict=strict, cast=cast)
        self._controller.start()
        self._saver.await_and_prove()
        self._shutdown.raise_failure()
        self._progress.set_phase(ReportPhase.RESTORING)
        with self._shutdown.record_fencing():
            record = self._latest.restore(state, rules=rules)
        self._saver.restored_latest(record)
        if record is not None:
            # The state is whole: an optimizer that has yet to make its own could not have been restored.
            self._saver.prepare(state)
        self._events.restored(record)
        self._progress.record_restore(
            None if record is None else ReportedRestore(sequence=record.slot, step=record.step)
        )
        self._controller.decider.on_save_started()
        if record is None:
            return None
        return RestoreResult(sequence=record.slot, step=record.step, uri=record_uri(self._store, record))

    def step(
        self, step: int, state: Mapping[str, object], metrics: Mapping[str, object] | None = None
    ) -> StepOutcome:
        """`step` is finished: it is saved in the background if it is due, and all ranks stop here if they were told to.

        Call it after every step, behind the loop's own `torch_xla.sync()`. If nothing is due it costs microseconds
        and no network. When there is a notice, it returns `stop` once this step is committed (or, where the job says
        Skip, once what is in flight is). Ranks: all, with the same steps.

        Raises:
            FencedError: another claim owns the root.
            StepkeeperError: a save in the background failed since the last call.
            UnsupportedValueError: something in `state` can't be saved; it names the key.

        """
        self._shutdown.check_open()
        step = validate_step(step)
        request = SaveRequest(step=step, state=state, metrics=metrics)
        self._controller.on_step_finished(request)
        if self._controller.should_stop_at(step):
            self._controller.save_and_stop(request)
            return StepOutcome(step=step, stop=True)
        self._shutdown.raise_failure()
        if not self._controller.is_save_due(step):
            return StepOutcome(step=step)
        return StepOutcome(step=step, in_flight=self._controller.start_save(request))

    def metadata(self, step: int) -> CheckpointInfo:
        """What the commit of `step` holds: names, dtypes and shapes, read from its manifests.

        Raises:
            RestoreError: there is no such commit, and it lists those that there are; or it was deleted meanwhile.

        """
        return describe_step(self._store, step)

    def verify(self, step: int) -> Verification:
        """Every byte of the newest commit of `step` on HEAD's line is right, each read by one of the ranks. Ranks: all.

        Nothing is appended to the log, nor condemned. Waits for saves in flight. Called in another thread than the
        training's, by a hook for one, it is overtaken by later saves: their commits may have the commit deleted.

        Raises:
            RestoreError: there is no such commit, and it lists those that there are; or it was deleted meanwhile.
            TornCheckpointError: bytes of it are bad.
            FencedError: this process has claimed the root, and another claim owns it now.

        """
        # A commit that comes meanwhile may delete what is being read. It can't where training waits for this call.
        self._saver.wait()
        return verify_step(self._restorer, self._companion, step)

    def wait(self, timeout_s: float | None = None) -> bool:
        """True if no save is in flight any more; False if that took longer than `timeout_s`.

        Raises:
            StepkeeperError: a save in the background failed since the last call.

        """
        ended = self._saver.wait(timeout_s)
        self._shutdown.raise_failure(newest=True)
        return ended

    def health(self) -> Health:
        """How checkpointing is doing in this process, from memory alone."""
        notice = self._controller.notices.notice
        in_flight = self._saver.in_flight
        return Health(
            claim=None if self._companion.begun is None else self._companion.begun.claim.slot,
            committed_step=None if self._saver.committed is None else self._saver.committed.step,
            in_flight_step=None if in_flight is None else in_flight.step,
            error=self._saver.error,
            complaint=self._companion.complaint,
            companion_pid=self._companion.pid,
            notice=None if notice is None else notice.source,
        )

    def on_save(self, hook: SaveHook) -> Callable[[], None]:
        """`hook` is called with a `SaveReport` whenever a save has ended, well or not; the answer takes it away again.

        It is called in a thread for hooks: no save waits for it, it may ask the manager, and what it raises is logged.
        """
        return self._events.on_save(hook)

    def request_stop(self) -> None:
        """All ranks will stop at one of the next steps, as if they had been sent SIGTERM."""
        self._controller.notices.record_notice("call")

    def exit_if_stopped(self) -> None:
        """Nothing; or, if `step` has said stop, the end of this process with code 75. Leaving the block does it too."""
        self._shutdown.exit_if_stopped()

    def close(self) -> None:
        """Training is done: saves in flight are committed, all ranks have come here, the operator was told.

        Raises:
            StepkeeperError: a save in the background failed.
            PeerLostError: a rank didn't come.

        """
        self._shutdown.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shutdown.leave_block(error)

    def _direct(self, directive: Directive) -> None:
        """In the thread that listens to the companion, which is there before what follows its directives."""
        self._controller.follow_directive(directive)


def _weakly(direct: Callable[[Directive], None]) -> Callable[[Directive], None]:
    """Does the same as long as somebody has the manager: the thread that calls it doesn't keep it."""
    held = WeakMethod(direct)

    def follow(directive: Directive) -> None:
        alive = held()
        if alive is not None:
            alive(directive)

    return follow


def _tier_place(folder: str | PathLike[str] | None, most_bytes: int | None) -> TierPlace | None:
    if most_bytes is not None and (folder is None or most_bytes < 1):
        raise ValueError("local_tier_bytes is at least 1, and bounds a local_tier")
    if folder is None:
        return None
    path = fspath(folder)
    check_slashes(path)
    if "://" in path:
        raise BadUriError(f"local_tier is the path of a folder on this host's own disk, got {path!r}")
    return TierPlace(folder=str(Path(path).absolute()), most_bytes=most_bytes)


def _claiming(policy: SavePolicy, take_over: str | bool) -> ClaimRequest:
    return ClaimRequest(
        take_over=take_over if isinstance(take_over, str) else None,
        take_over_any=take_over is True,
        asks_past=any(isinstance(part, Auto) for part in parts_of(policy)),
    )
