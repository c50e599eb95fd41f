"""Define the checkpoint manager that a training script uses."""

import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from types import TracebackType
from typing import Self, SupportsIndex

import torch.distributed as dist
from typing_extensions import override

from stepkeeper.contract import CommitPoint, NoticeSource, ReportPhase
from stepkeeper.errors import NoticeDeadlineError
from stepkeeper.log.foreign_steps import ForeignRecord, Restorable
from stepkeeper.loggers import show_by_default
from stepkeeper.manager_arguments import ManagerArguments, Options, build_arguments
from stepkeeper.manager_inspection import ManagerInspection
from stepkeeper.manager_parts import ManagerParts, training_call
from stepkeeper.policy.keep import KeepPolicy
from stepkeeper.policy.save import SavePolicy
from stepkeeper.quantities import check_whole
from stepkeeper.restore.latest import restore_step
from stepkeeper.restore.listing import record_uri
from stepkeeper.results import RestoreResult, StepOutcome
from stepkeeper.save.given_state import GivenState, SaveRequest, build_request, check_target
from stepkeeper.save.in_flight import InFlight
from stepkeeper.stacks.pace import mark_stage
from stepkeeper.training.environment import PodPaths, check_world_size, read_environment
from stepkeeper_planners.loading.load_request import LoadTarget
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["CheckpointManager"]


class CheckpointManager(ManagerInspection):
    """Save the state of a training to a root, restore it, and end the process in order after a notice.

    With an operator::

        with CheckpointManager.from_env() as manager:
            restored = manager.restore(state)
            for step in range(restored.step + 1 if restored else 1, n_steps + 1):
                loss = train_step()
                if manager.step(step, state, {"loss": loss}).stop:
                    break

    `state` is a tree of tensors, objects with state_dict() and load_state_dict(), and plain values. The manager reads
    it only when it saves or restores. When the block is left, the process exits with a code that reports how the
    training ended, unless the training is done.

    Ranks:
        All ranks call every method at the same steps, except where noted.
    """

    _arguments: ManagerArguments

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        save: SupportsIndex | SavePolicy = 1000,
        keep: SupportsIndex | KeepPolicy | None = None,
        total_steps: SupportsIndex | None = None,
        process_group: dist.ProcessGroup | None = None,
        options: Options = Options(),
    ) -> None:
        """Construct a manager for the root at `path`. Nothing is read or written yet.

        Args:
            path: The root: a URI (file://…, gs://…) or the path of a folder.
            save: Number of steps between saves, or a policy of `stepkeeper.policy.save`.
            keep: Number of newest commits to keep, or a policy of `stepkeeper.policy.keep`; None keeps all.
            total_steps: Number of the training's last step, which is saved in any case. Without it, `close` and the end
                of the block save the last finished step.
            process_group: The ranks that save together; by default torch's default group, if there is one.
            options: Settings that few trainings need to change.

        Raises:
            BadUriError: `path` names no store.
            TypeError, ValueError: An argument has the wrong type or is out of its range, or two contradict each other.

        Ranks:
            All ranks call this with the same arguments.
        """
        arguments = build_arguments(
            path, save=save, keep=keep, total_steps=total_steps, process_group=process_group, options=options
        )
        self._open(arguments)

    def _open(self, arguments: ManagerArguments) -> None:
        self._arguments = arguments
        self._parts = ManagerParts(arguments)

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._parts.describe()}>"

    @classmethod
    def from_env(
        cls,
        *,
        save: SupportsIndex | SavePolicy | None = None,
        keep: SupportsIndex | KeepPolicy | None = None,
        process_group: dist.ProcessGroup | None = None,
        options: Options = Options(),
        _places: PodPaths | None = None,
    ) -> Self:
        """Construct the manager with the settings of this container's CheckpointedTrainingJob.

        The job defines when to save and what to keep. Each save, restore and notice writes one line to stderr, unless
        the program has configured logging. A subclass's own `__init__` isn't called.

        Args:
            save: Number of steps, or a policy, that saves further steps besides the job's.
            keep: Number of commits, or a policy, that keeps further commits besides the job's.
            process_group: The ranks that save together; by default torch's default group, if there is one.
            options: Settings that a job has no field for. `local_tier_bytes` also limits a volume that the job mounts.
            _places: Paths of the pod's files, for tests.

        Raises:
            NotInPodError: The operator didn't make this container. The message has the code to write instead.
            ContractError: The operator's settings have an unknown format.
            ProcessGroupError: The job has several hosts that don't form a process group yet.
            TypeError, ValueError: An argument has the wrong type or is out of its range, or two contradict each other.

        Ranks:
            All ranks call this with the same arguments.
        """
        environment = read_environment(_places)
        if environment.places.attempt_folder is None:  # `stepkeeper run` prints such lines itself
            show_by_default()
        check_world_size(environment, process_group)
        arguments = build_arguments(
            environment.settings.uri,
            save=save,
            keep=keep,
            process_group=process_group,
            options=options,
            environment=environment,
        )
        # Without the constructor, whose parameters a subclass may change.
        manager = cls.__new__(cls)
        manager._open(arguments)  # noqa: SLF001  # it is this class's own instance
        return manager

    @training_call
    def restore(
        self,
        state: Mapping[str, object],
        step: int | None = None,
        *,
        items: Collection[str] | None = None,
        exclude: Collection[str] = (),
        strict: bool = True,
        cast: bool = False,
    ) -> RestoreResult | None:
        """Claim the root and restore its latest commit into `state`, or restore the newest commit of `step`.

        Every block is verified when it is read. The restore waits for saves in flight first. A torn latest commit is
        quarantined, and its parent is restored instead.

        With `step`, nothing is claimed or written to the log. The next save continues from the restored commit, and
        newer commits become an abandoned branch. If only a part of the commit is restored, the next save continues from
        the state's earlier origin, if it has one.

        Args:
            state: A tree of tensors, objects with load_state_dict(), and plain values; tensors are filled in place.
            step: The step to restore, of HEAD's line; None restores the latest commit.
            items: Patterns of flat names to restore, which also select everything below them: "model" selects all
                of "model.…". None restores all.
            exclude: Patterns of flat names to leave out.
            strict: If False, fill the common names and leave the rest of `state` unchanged.
            cast: Convert tensors to the dtypes of `state`.

        Returns:
            The restored commit. None, without `step`, if the root never had a commit.

        Raises:
            FencedError: The root belongs to another job, or a later start of this job has begun.
            LoadMismatchError: `state` has other names, shapes or dtypes than the commit. Nothing was changed.
            PartlyRestoredError: The restore failed after it had changed `state`, in any rank. The cause is chained.
                Nothing is saved until another restore succeeds. After all other errors `state` is unchanged.
            RestoreError: No commit can be used; or there is none of `step`, and the message lists the existing ones; or
                it was deleted while it was read.
            TornCheckpointError: Bytes of the commit of `step` are bad.
            TypeError: `state` isn't a state, or is a function; or `step` isn't a whole number.
            UnsupportedValueError: The root never had a commit, and a value in `state` can't be saved.
            ValueError: `state` is empty.

        Ranks:
            All ranks call this with the same arguments.
        """
        check_target(state)
        rules = LoadRules(items=items, exclude=exclude, strict=strict, cast=cast)
        if step is None:
            return self._restore_latest(state, rules)
        return self._restore_step(state, check_whole("step", step), rules)

    def _restore_latest(self, state: Mapping[str, object], rules: LoadRules) -> RestoreResult | None:
        parts = self._parts
        # Until all ranks have the root there is nothing to save: a notice ends these waits soon.
        with parts.ending.notices.starting(lambda: parts.saver.is_root_proven):
            parts.ending.start()
            parts.saver.await_saves_and_prove_root()
            parts.ending.raise_failure()
            parts.progress.set_phase(ReportPhase.RESTORING)
            began_s = time.monotonic()
            target = LoadTarget(state)
            record = parts.latest_restore.restore(target, rules=rules)
        parts.saver.mark_latest_restored(record, state, rules)
        # The state is no longer that of the last finished step.
        parts.steps.last_step.forget()
        parts.prepare_saves(target, is_restored=record is not None)
        parts.save_hooks.log_restore(record, parts.store.uri, time.monotonic() - began_s)
        restored = None if record is None else CommitPoint(sequence=record.slot, step=record.step)
        parts.progress.record_restore(restored)
        # The interval to the next save begins here.
        parts.steps.decider.on_save_started()
        return None if record is None else self._describe(record)

    def _restore_step(self, state: Mapping[str, object], step: int, rules: LoadRules) -> RestoreResult:
        parts = self._parts
        # The cleanup after a save's commit may delete the commit that is being read.
        parts.saver.wait_until_idle()
        parts.ending.raise_failure()
        began_s = time.monotonic()
        record = restore_step(parts.restorer, parts.companion, step, state, rules=rules)
        parts.steps.last_step.forget()
        parts.saver.mark_restored(record, state, rules)
        parts.save_hooks.log_restore(record, parts.store.uri, time.monotonic() - began_s)
        return self._describe(record)

    def _describe(self, record: Restorable) -> RestoreResult:
        sequence = None if isinstance(record, ForeignRecord) else record.slot
        return RestoreResult(sequence=sequence, step=record.step, uri=record_uri(self._parts.store, record))

    @training_call
    def step(self, step: int, state: GivenState, metrics: Mapping[str, object] | None = None) -> StepOutcome:
        """Finish `step`: save it in the background if it is due, and stop here if all ranks agreed to.

        Call this after every step, after the loop's own `torch_xla.sync()`. If nothing is due, it takes microseconds
        and doesn't use the network. After a notice, it returns `stop` once this step is committed, or, if the job's
        setting is Skip, once the saves in flight are committed.

        Args:
            step: Number of the finished step, at least 0.
            state: A tree of tensors, objects with state_dict() and load_state_dict(), and plain values; or a function
                that returns one. The function is called once for each save, and only then.
            metrics: Numbers to store with the commit and to report, by name.

        Returns:
            The save that was started, if any, and whether to leave the loop.

        Raises:
            FencedError: Another claim owns the root.
            PartlyRestoredError: A restore failed halfway, and none has succeeded since.
            StepkeeperError: A background save failed since the last call.
            TypeError: `state` is neither a state nor a function. Errors of a function are raised unchanged.
            UnsupportedValueError: A value in `state` can't be saved. The message names the key.
            ValueError: `state` is empty.

        Ranks:
            All ranks call this with the same steps.
        """
        self._parts.ending.check_open()
        request = build_request(step, state, metrics)
        try:
            return self._finish_step(request)
        except NoticeDeadlineError as error:
            self._parts.ending.stop_unsaved(request.step, error)
            return StepOutcome(step=request.step, stop=True)

    def _finish_step(self, request: SaveRequest) -> StepOutcome:
        parts, step = self._parts, request.step
        parts.steps.record(request)
        parts.steps.last_step.note_finished(request)
        if parts.ending.should_stop_at(step):
            parts.ending.stop_at(request)
            return StepOutcome(step=step, stop=True)
        parts.ending.raise_failure()
        saves = parts.steps.decider.is_save_due(step) and not parts.steps.has_saved(step)
        return StepOutcome(step=step, in_flight=parts.steps.start_save(request) if saves else None)

    @training_call
    def save(self, step: int, state: GivenState, metrics: Mapping[str, object] | None = None) -> InFlight:
        """Take a snapshot of `state`, and save it in the background, whether the step is due or not.

        `state` may change as soon as this returns. If as many saves are in flight as `Options.max_pending` allows, this
        waits for an earlier one. A step may be saved again; its newest commit counts. The end of the block, `close` and
        `wait` wait for the save.

        The latest commit, which `restore(state)` restores, is the one that was saved last, even if its step is lower
        than an earlier one's. Only `step` returns whether the loop should stop: call it after every step too.

        Args:
            step: Number of the finished step, at least 0.
            state: A tree of tensors, objects with state_dict() and load_state_dict(), and plain values; or a function
                that returns one. The function is called once.
            metrics: Numbers to store with the commit and to report, by name.

        Returns:
            The save. Its `result()` waits until it is committed, and returns its `SaveReport`.

        Raises:
            FencedError: Another claim owns the root.
            StepkeeperError: A background save failed since the last call.
            PartlyRestoredError, TypeError, UnsupportedValueError, ValueError: `step` raises them too.

        Ranks:
            All ranks call this with the same arguments.
        """
        request = self._record_request(step, state, metrics)
        return self._parts.steps.start_save(request)

    def _record_request(
        self, step: int, state: GivenState, metrics: Mapping[str, object] | None = None
    ) -> SaveRequest:
        """Check and record a request of another method than `step`. Raises the failure of an earlier save."""
        parts = self._parts
        parts.ending.check_open()
        request = build_request(step, state, metrics)
        # At the agreed stop step, the last save is tried even if an earlier one has failed.
        is_last = parts.ending.should_stop_at(request.step) and parts.ending.saves_on_notice
        if not is_last:
            parts.ending.raise_failure()
        parts.steps.record(request)
        return request

    @training_call
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in flight.

        Args:
            timeout_s: Longest time to wait, in seconds; None sets no limit.

        Returns:
            False if saves were still in flight after `timeout_s`.

        Raises:
            StepkeeperError: A background save failed since the last call.

        Ranks:
            Any rank, on its own.
        """
        ended = self._parts.saver.wait_until_idle(timeout_s)
        self._parts.ending.raise_failure(newest=True)
        return ended

    def phase(self, name: str, limit_s: float | None = None) -> AbstractContextManager[None]:
        """Mark a block, such as an evaluation, as no part of a step: it may take longer before it counts as hanging.

        Args:
            name: Name of the phase, of 1 to 64 printable characters.
            limit_s: Seconds that it may take, greater than 0; None: `spec.hang.startupSeconds` of the job.

        Ranks:
            All ranks mark the same phases, from the train thread.
        """
        return self._parts.progress.in_stage(mark_stage(name, limit_s))

    def request_stop(self) -> None:
        """Make all ranks stop at one of the next steps, as after SIGTERM.

        The last save has no time limit, since no kill follows.

        Ranks:
            Any rank, on its own, from any thread.
        """
        self._parts.ending.notices.record(NoticeSource.CALL, kills=False)

    @training_call
    def close(self) -> None:
        """Finish the training: commit the saves in flight and the last step, and report to the operator.

        The last step is the one of the last call of `step`. It is saved with the present state, unless it is saved
        already, or the state has changed since or was restored. The end of the manager's block does the same, unless an
        exception leaves it or a notice has stopped the training.

        Commits that the saves make superfluous are deleted before. After a stop, this ends the process with exit code
        75, as the end of the block does: training isn't done.

        Raises:
            StepkeeperError: A background save failed.
            PeerLostError: A rank is lost, or didn't come in time.
            SystemExit: `step` returned `stop`, or another rank's program ended itself because of a notice.

        Ranks:
            All ranks call this.
        """
        self._parts.ending.close()

    def __enter__(self) -> Self:
        return self

    @training_call
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._parts.ending.leave_block(error)
