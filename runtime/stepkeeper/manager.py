"""Define the checkpoint manager that a training script uses."""

import operator
import time
from collections.abc import Collection, Mapping
from os import PathLike, fspath
from types import TracebackType
from typing import Self, SupportsIndex

import torch.distributed as dist
from typing_extensions import override

from stepkeeper.contract import CommitPoint, NoticeSource, ReportPhase
from stepkeeper.errors import NoticeDeadlineError
from stepkeeper.loggers import show_by_default
from stepkeeper.manager_arguments import (
    ManagerArguments,
    build_tier_place,
    check_count,
    check_seconds,
    convert_interval,
)
from stepkeeper.manager_inspection import ManagerInspection
from stepkeeper.manager_parts import ManagerParts, training_call
from stepkeeper.policy.keep import AnyOf as KeepAnyOf
from stepkeeper.policy.keep import KeepPolicy, from_max_to_keep, from_retention
from stepkeeper.policy.save import AnyOf, SavePolicy, from_interval
from stepkeeper.restore.listing import record_uri
from stepkeeper.results import RestoreResult, StepOutcome
from stepkeeper.save.given_state import (
    GivenState,
    SaveRequest,
    check_given_state,
    check_target,
    validate_step,
)
from stepkeeper.storage import expand_home
from stepkeeper.torch_xla_api import TorchXlaApi
from stepkeeper.training.environment import Environment, PodPaths, check_world_size, read_environment
from stepkeeper_planners.loading.load_request import LoadTarget
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["CheckpointManager"]


class CheckpointManager(ManagerInspection, TorchXlaApi):
    """Save the state of a training to a root, restore it, and end the process in order when it is told to stop.

    With an operator::

        with CheckpointManager.from_env() as manager:
            restored = manager.restore_latest(state)
            for step in range(restored.step + 1 if restored else 1, n_steps + 1):
                loss = train_step()
                if manager.step(step, state, {"loss": loss}).stop:
                    break

    `state` is a tree of tensors, objects with state_dict() and load_state_dict(), and plain values. The manager looks
    at it only when it saves or restores. Leaving the block ends the process with the exit code that tells how the
    training ended, except when the training is simply done.

    Ranks:
        All ranks call every method at the same steps, unless the method says otherwise.

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
        total_steps: SupportsIndex | None = None,
        stacks_after_s: float | None = None,
        environment: Environment | None = None,
    ) -> None:
        """Construct a manager for the root at `path`. Nothing is read or written yet.

        Args:
            path: The root: a URI (file://…, gs://…) or the path of a folder.
            save_interval: Number of steps between saves, or a policy of `stepkeeper.policy.save`.
            max_to_keep: Number of newest commits to keep; 0 keeps all.
            max_pending_async: Number of snapshots that host memory may hold at once, at least 1. With 1, a save waits
                until the save before it has ended.
            num_of_threads: Accepted because torch_xla has it, and ignored: the companion process bounds its own
                threads.
            process_group: The ranks that save together; by default torch's default group, if there is one.
            chkpt_on_preemption: If True, SIGTERM makes all ranks save one step and stop.
            keep: A policy of `stepkeeper.policy.keep`, instead of `max_to_keep`.
            take_over: Name of the job whose root becomes this one's; True takes over the root of any job.
            unsafe_single_writer: Promise that a store that can't tell two writers apart has only one.
            device_budget_bytes: Device memory of this process, in bytes, that a snapshot may use until it is in host
                memory; what doesn't fit waits. None starts with all of it and halves it each time that the devices
                have no room.
            local_tier: A folder on a disk of this host. Saves are staged there on their way to the root, so that
                host memory is free sooner, and restores read from it.
            local_tier_bytes: Number of bytes that this process may use in `local_tier`; None sets no limit.
            total_steps: Number of the training's last step, which is saved whatever `save_interval` says. Without it,
                `close` and the end of the block save the last step that was finished.
            stacks_after_s: Number of seconds after which the stacks of all ranks' threads are written to the log while
                a step takes ten times longer than any before it. None watches no steps.
            environment: The identity and settings from the operator; `from_env` passes them.

        Raises:
            BadUriError: `path` names no store.
            ValueError: A number is out of its range, or two arguments contradict each other.

        Ranks:
            All ranks call this with the same arguments.

        """
        self.num_of_threads = num_of_threads
        kept = operator.index(max_to_keep)
        self._arguments = ManagerArguments(
            path=expand_home(fspath(path)),
            save_interval=convert_interval(save_interval),
            max_to_keep=kept,
            max_pending_async=check_count("max_pending_async", max_pending_async),
            process_group=process_group,
            chkpt_on_preemption=chkpt_on_preemption,
            total_steps=None if total_steps is None else check_count("total_steps", total_steps),
            keep=from_max_to_keep(kept, keep),
            tier=build_tier_place(local_tier, local_tier_bytes),
            take_over=take_over,
            unsafe_single_writer=unsafe_single_writer,
            device_budget_bytes=device_budget_bytes,
            stacks_after_s=check_seconds("stacks_after_s", stacks_after_s),
            environment=environment,
        )
        self._parts = ManagerParts(self._arguments)

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._parts.describe()}>"

    @classmethod
    def from_env(
        cls,
        *,
        process_group: dist.ProcessGroup | None = None,
        places: PodPaths | None = None,
        max_pending_async: SupportsIndex = 1,
        also_save: SavePolicy | None = None,
        also_keep: KeepPolicy | None = None,
        take_over: str | bool = False,
        unsafe_single_writer: bool = False,
        device_budget_bytes: int | None = None,
        local_tier: str | PathLike[str] | None = None,
        local_tier_bytes: int | None = None,
        stacks_after_s: float | None = 300.0,
    ) -> Self:
        """Construct the manager that this container's CheckpointedTrainingJob asks for.

        The job says when to save and what to keep. One line for each save, restore and notice goes to stderr, unless
        the program has configured logging. Arguments that the constructor has too mean the same here.

        Args:
            process_group: The ranks that save together; by default torch's default group, if there is one.
            places: Paths of the pod's files; by default those of a real pod.
            max_pending_async: Number of snapshots that host memory may hold at once, at least 1.
            also_save: A policy that saves steps besides those that the job asks for.
            also_keep: A policy that keeps commits besides those that the job keeps.
            take_over: Name of the job whose root becomes this one's; True takes over the root of any job.
            unsafe_single_writer: Promise that a store that can't tell two writers apart has only one.
            device_budget_bytes: Device memory of this process, in bytes, that a snapshot may use.
            local_tier: A folder on a disk of this host; by default the volume that the job's template mounts at
                /var/cache/stepkeeper, if it mounts one.
            local_tier_bytes: Number of bytes that this process may use in the local tier, where there is one.
            stacks_after_s: Number of seconds after which a step that takes ten times longer than any before it has the
                stacks of all ranks written to the log and into the report. None watches no steps.

        Raises:
            NotInPodError: No operator made this container; the message says what to write instead.
            ContractError: The operator's settings are of another version.
            ProcessGroupError: The job has several hosts, and they don't form a process group yet.

        Ranks:
            All ranks call this with the same arguments.

        """
        environment = read_environment(places)
        show_by_default()
        check_world_size(environment, process_group)
        settings = environment.settings
        tier = environment.local_tier if local_tier is None else local_tier
        interval = from_interval(settings.interval)
        retention = from_retention(settings.retention)
        return cls(
            settings.uri,
            interval if also_save is None else AnyOf((interval, also_save)),
            max_pending_async=max_pending_async,
            process_group=process_group,
            keep=retention if also_keep is None else KeepAnyOf((retention, also_keep)),
            take_over=take_over,
            unsafe_single_writer=unsafe_single_writer,
            device_budget_bytes=device_budget_bytes,
            local_tier=tier,
            local_tier_bytes=None if tier is None else local_tier_bytes,
            total_steps=settings.total_steps,
            stacks_after_s=stacks_after_s,
            environment=environment,
        )

    @training_call
    def restore_latest(
        self,
        state: Mapping[str, object],
        *,
        items: Collection[str] | None = None,
        exclude: Collection[str] = (),
        strict: bool = True,
        cast: bool = False,
    ) -> RestoreResult | None:
        """Claim the root and restore its latest commit into `state`.

        Every block that is read is verified. A torn commit is quarantined, and its parent is restored instead. Saves
        in flight are awaited first: a second call restores what was saved last.

        Args:
            state: A tree of tensors, objects with load_state_dict(), and plain values; tensors are filled in place.
            items: Patterns of flat names to restore, which also select everything below them; None restores all.
            exclude: Patterns of flat names to leave out.
            strict: If False, fill the names that both have and leave the rest of `state` as it is.
            cast: Convert tensors to the dtypes of `state`.

        Returns:
            The commit that was restored; None if nothing was ever committed in the root.

        Raises:
            FencedError: The root belongs to another job, or a later start of this job has begun.
            RestoreError: The root has commits, but none of them can be used.
            LoadMismatchError: `state` has other names, shapes or dtypes than the commit.
            TypeError: `state` is no state, or a function.
            UnsupportedValueError: Nothing was ever committed, and something in `state` can't be saved.
            ValueError: `state` is empty.

        Ranks:
            All ranks call this with the same arguments.

        """
        parts = self._parts
        check_target(state)
        rules = LoadRules(items=items, exclude=exclude, strict=strict, cast=cast)
        saver = parts.saver
        with parts.ending.notices.starting(lambda: saver.is_root_proven):
            parts.ending.start()
            parts.saver.await_saves_and_prove_root()
            parts.ending.raise_failure()
            parts.progress.set_phase(ReportPhase.RESTORING)
            began_s = time.monotonic()
            target = LoadTarget(state)
            record = parts.latest_restore.restore(target, rules=rules)
        parts.saver.mark_latest_restored(record, state, rules)
        parts.steps.last_step.forget()
        parts.prepare_saves(target, is_restored=record is not None)
        parts.save_hooks.log_restore(record, parts.store.uri, time.monotonic() - began_s)
        parts.progress.record_restore(
            None if record is None else CommitPoint(sequence=record.slot, step=record.step)
        )
        parts.steps.decider.on_save_started()
        if record is None:
            return None
        return RestoreResult(sequence=record.slot, step=record.step, uri=record_uri(parts.store, record))

    @training_call
    def step(self, step: int, state: GivenState, metrics: Mapping[str, object] | None = None) -> StepOutcome:
        """Finish `step`: save it in the background if it is due, and stop here if all ranks were told to.

        Call this after every step, after the loop's own `torch_xla.sync()`. If nothing is due, it takes microseconds
        and doesn't use the network. After a notice, it returns `stop` once this step is committed; where the job says
        Skip, once the saves in flight are committed.

        Args:
            step: Number of the step that was just finished, at least 0.
            state: A tree of tensors, objects with state_dict() and load_state_dict(), and plain values; or a function
                that returns one. The function is called once for each save, and only then.
            metrics: Numbers to store with the commit and to report, by name.

        Returns:
            The save that was started, if any, and whether to leave the loop.

        Raises:
            FencedError: Another claim owns the root.
            StepkeeperError: A save in the background failed since the last call.
            TypeError: `state` is neither a state nor a function. What a function raises is raised unchanged.
            UnsupportedValueError: Something in `state` can't be saved; the message names the key.
            ValueError: `state` is empty.

        Ranks:
            All ranks call this with the same steps.

        """
        parts = self._parts
        parts.ending.check_open()
        step = validate_step(step)
        check_given_state(state)
        request = SaveRequest(step=step, state=state, metrics=metrics)
        try:
            return self._finish_step(request)
        except NoticeDeadlineError as error:
            parts.ending.stop_unsaved(step, error)
            return StepOutcome(step=step, stop=True)

    def _finish_step(self, request: SaveRequest) -> StepOutcome:
        parts, step = self._parts, request.step
        parts.steps.record(request)
        parts.steps.last_step.note_finished(request)
        if parts.ending.should_stop_at(step):
            parts.ending.stop_at(request)
            return StepOutcome(step=step, stop=True)
        parts.ending.raise_failure()
        if not parts.steps.decider.is_save_due(step):
            return StepOutcome(step=step)
        return StepOutcome(step=step, in_flight=parts.steps.start_save(request))

    @training_call
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in flight.

        Args:
            timeout_s: Longest time to wait, in seconds; None waits as long as it takes.

        Returns:
            False if saves were still in flight after `timeout_s`.

        Raises:
            StepkeeperError: A save in the background failed since the last call.

        Ranks:
            Any rank, on its own.

        """
        ended = self._parts.saver.wait_until_idle(timeout_s)
        self._parts.ending.raise_failure(newest=True)
        return ended

    def request_stop(self) -> None:
        """Make all ranks stop at one of the next steps, as if they had been sent SIGTERM.

        The last save gets all the time that it takes: nobody kills the process for this.

        Ranks:
            Any rank, on its own, from any thread.

        """
        self._parts.ending.notices.hear(NoticeSource.CALL, kills=False)

    @training_call
    def exit_if_stopped(self) -> None:
        """End this process with exit code 75 if `step` has returned `stop`. Leaving the manager's block does it too.

        Raises:
            SystemExit: `step` has returned `stop`.
            FencedError: It has, and another claim owns the root.

        """
        self._parts.ending.exit_if_stopped()

    @training_call
    def close(self) -> None:
        """Finish the training: commit the saves in flight and the last step, and report to the operator.

        The last step is the one that `step` was called for last. It is saved, as the state is now, unless it is
        already, or the state has changed since or was restored. The end of the manager's block does the same, if no
        exception leaves it and no notice has stopped the training.

        What the saves make superfluous is deleted before. After a stop, this ends the process with exit code 75, as the
        end of the block does: training isn't done.

        Raises:
            StepkeeperError: A save in the background failed.
            PeerLostError: A rank did not come.
            SystemExit: `step` has returned `stop`, or another rank's program has ended itself because of a notice.

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
