"""Replace torch_xla.experimental.distributed_checkpoint by `import stepkeeper.torch_xla as xc`."""

import glob
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import SupportsIndex

import torch.distributed as dist
from typing_extensions import override

from stepkeeper import manager
from stepkeeper.manager_arguments import Options
from stepkeeper.manager_parts import training_call
from stepkeeper.policy.keep import LastN
from stepkeeper.policy.save import EveryNSteps, SavePolicy
from stepkeeper.quantities import check_whole
from stepkeeper.save.given_state import GivenState
from stepkeeper.save.in_flight import InFlight
from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer
from stepkeeper_planners.errors import LoadMismatchError

__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]


class CheckpointManager(manager.CheckpointManager):
    """The manager with the names and parameters of torch_xla's, so that code written for it runs unchanged.

    The constructor's arguments can be read but not set, since they have already taken effect.

    Ranks:
        All ranks call every method with the same arguments.
    """

    num_of_threads: SupportsIndex = 1
    """Ignored: the companion process bounds its own threads."""

    def __init__(  # noqa: PLR0917  # torch_xla's signature
        self,
        path: str | PathLike[str],
        save_interval: SupportsIndex,
        max_to_keep: SupportsIndex = 0,
        max_pending_async: SupportsIndex = 1,
        num_of_threads: SupportsIndex = 1,
        process_group: dist.ProcessGroup | None = None,
        chkpt_on_preemption: bool = True,
        *,
        options: Options = Options(),
    ) -> None:
        """Construct a manager for the root at `path`. Nothing is read or written yet.

        Args:
            path: The root: a URI (file://…, gs://…) or the path of a folder.
            save_interval: Number of steps between saves.
            max_to_keep: Number of newest commits to keep; 0 keeps all.
            max_pending_async: Number of snapshots that host memory may hold at once, at least 1.
            num_of_threads: Ignored. torch_xla has this parameter.
            process_group: The ranks that save together; by default torch's default group, if there is one.
            chkpt_on_preemption: If True, SIGTERM makes all ranks save one step and stop.
            options: Settings that torch_xla doesn't have. The arguments above replace its `max_pending` and
                `stop_on_notice`.

        Raises:
            BadUriError: `path` names no store.
            ValueError: A number is out of its range.
        """
        self.num_of_threads = num_of_threads
        max_pending = check_whole("max_pending_async", max_pending_async, 1)
        super().__init__(
            path,
            save=check_whole("save_interval", save_interval, 1),
            keep=check_whole("max_to_keep", max_to_keep, 0) or None,
            process_group=process_group,
            options=replace(options, max_pending=max_pending, stop_on_notice=bool(chkpt_on_preemption)),
        )

    @property
    def base_path(self) -> str:
        """The root, with a trailing `/`."""
        return f"{self._arguments.path.rstrip('/')}/"

    @property
    def save_interval(self) -> int | SavePolicy:
        """Number of steps between saves, or the policy if a job has another one."""
        policy = self._arguments.save
        return policy.steps if isinstance(policy, EveryNSteps) else policy

    @property
    def max_to_keep(self) -> int:
        """Number of newest commits to keep; 0 keeps all, or the selection of a job's retention."""
        policy = self._arguments.keep
        return policy.n if isinstance(policy, LastN) else 0

    @property
    def chkpt_on_preemption(self) -> bool:
        """True if SIGTERM makes all ranks save one step and stop."""
        return self._arguments.options.stop_on_notice

    @property
    def pg(self) -> dist.ProcessGroup | None:
        """The process group whose ranks save together: the given one, else torch's default group, else None."""
        is_there = dist.is_available() and dist.is_initialized()
        return self._arguments.process_group or (dist.group.WORLD if is_there else None)

    @training_call
    def should_save(self, step: int) -> bool:
        """Return True if `step` is to be saved, by the interval or because all ranks agreed to stop at it.

        Args:
            step: The finished step, at least 0.
        """
        return self._parts.steps.should_save(step, stopping=self._parts.ending.should_stop_at(step))

    @training_call
    def reached_preemption(self, step: int) -> bool:
        """Return True from the agreed stop step on.

        Args:
            step: The finished step, at least 0.

        Raises:
            ValueError: The manager was constructed with chkpt_on_preemption=False.
        """
        if not self._parts.ending.saves_on_notice:
            raise ValueError("preemption is not watched: construct the manager with chkpt_on_preemption=True")
        return self._parts.ending.should_stop_at(step)

    @training_call
    @override
    def save(  # type: ignore[override]  # torch_xla's parameters, and its result
        self, step: int, state_dict: GivenState, force: bool = False
    ) -> bool:
        """Save `step` if it is due, and wait until it is committed and superfluous commits are deleted.

        Args:
            step: The finished step, at least 0.
            state_dict: A state, or a function that returns one, as `stepkeeper.CheckpointManager.save` takes it.
            force: Save although the step isn't due.

        Returns:
            True if the step was due, or forced, and is committed. False if it wasn't due: nothing was saved.

        Raises:
            PartlyRestoredError: A restore failed halfway, and none has succeeded since. Nothing was saved.
            StepkeeperError: This save or an earlier background save failed.
        """
        in_flight = self._start_save(step, state_dict, force)
        if in_flight is None:
            return False
        self._parts.saver.await_commit(in_flight)
        self._parts.saver.await_upkeep()
        return True

    @training_call
    def save_async(self, step: int, state_dict: GivenState, force: bool = False) -> bool:
        """Take a snapshot of `state_dict` if `step` is due, and save it in the background.

        Args:
            step: The finished step, at least 0.
            state_dict: A state, or a function that returns one, as `stepkeeper.CheckpointManager.save` takes it.
            force: Save although the step isn't due.

        Returns:
            True if the step was due, or forced, and its snapshot is taken. False if it wasn't due: nothing is saved.

        Raises:
            PartlyRestoredError: A restore failed halfway, and none has succeeded since. Nothing was saved.
            StepkeeperError: A background save failed since the last call.
        """
        return self._start_save(step, state_dict, force) is not None

    def _start_save(self, step: int, state_dict: GivenState, force: bool) -> InFlight | None:
        request = self._record_request(step, state_dict)
        if not (self.should_save(request.step) or force):
            return None
        return self._parts.steps.start_save(request)

    @training_call
    @override
    def restore(  # type: ignore[override]  # torch_xla's order of parameters
        self, step: int, state_dict: Mapping[str, object]
    ) -> None:
        """Fill `state_dict` in place from the newest commit of `step`; see `stepkeeper.CheckpointManager.restore`.

        Args:
            step: The step to restore.
            state_dict: The state to fill. Names that only the commit has are skipped.

        Raises:
            LoadMismatchError: `state_dict` has names, shapes or dtypes that don't match the commit. Nothing was
                changed.
            PartlyRestoredError: The restore failed after it had changed `state_dict`. Nothing is saved until one
                succeeds.
            RestoreError: There is no such commit. The message lists the existing ones.
            TornCheckpointError: Bytes of the commit are bad.
        """
        try:
            super().restore(state_dict, check_whole("step", step))
        except LoadMismatchError as error:
            if error.missing or error.mismatched:
                raise
            # Leave out the names that only the commit has. With strict=False, missing names would pass too.
            super().restore(state_dict, step, exclude=[*map(glob.escape, error.unexpected)])

    def all_steps(self) -> list[int]:
        """List the steps that can be restored, without repetition."""
        return self.steps()

    @training_call
    def join(self) -> None:
        """Wait until no save is in flight, and superfluous commits are deleted.

        Nothing is written to the root from then on, until the next save.

        Raises:
            StepkeeperError: One of the saves failed.
        """
        self._parts.saver.wait_until_idle()
        self._parts.saver.await_upkeep()
        self._parts.ending.raise_failure(newest=True)
