"""Provide the methods of torch_xla's CheckpointManager, so that code written for it runs unchanged."""

import time
from collections.abc import Collection, Mapping
from functools import partial

import torch.distributed as dist

from stepkeeper.manager_arguments import ManagerArguments
from stepkeeper.manager_parts import ManagerParts, training_call
from stepkeeper.policy.save import SavePolicy
from stepkeeper.restore.latest import restore_step
from stepkeeper.restore.listing import list_steps
from stepkeeper.save.given_state import (
    GivenState,
    SaveRequest,
    check_given_state,
    check_target,
    validate_step,
)
from stepkeeper.save.in_flight import InFlight
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["TorchXlaApi"]


class TorchXlaApi:
    """The methods and attributes of torch_xla's CheckpointManager, with its names and parameters.

    Parameters behind a `*` are stepkeeper's additions. The constructor's arguments can be read but not set: they
    have taken effect already.
    """

    _arguments: ManagerArguments
    _parts: ManagerParts

    @property
    def base_path(self) -> str:
        """The root, with a trailing `/`."""
        return f"{self._arguments.path.rstrip('/')}/"

    @property
    def save_interval(self) -> int | SavePolicy:
        """Number of steps between saves, or the policy that the manager was constructed with."""
        return self._arguments.save_interval

    @property
    def max_to_keep(self) -> int:
        """Number of newest commits to keep; 0 keeps all, or those that the constructor's `keep` selects."""
        return self._arguments.max_to_keep

    @property
    def chkpt_on_preemption(self) -> bool:
        """True if SIGTERM makes all ranks save one step and stop."""
        return self._arguments.chkpt_on_preemption

    @property
    def pg(self) -> dist.ProcessGroup | None:
        """The process group whose ranks save together: the one passed in, else torch's default group, else None."""
        is_there = dist.is_available() and dist.is_initialized()
        return self._arguments.process_group or (dist.group.WORLD if is_there else None)

    @training_call
    def should_save(self, step: int) -> bool:
        """Decide whether to save `step`: because the policy says so, or because all ranks agreed to stop at it.

        Args:
            step: The step that was just finished, at least 0.

        Ranks:
            All ranks call this with the same step.

        """
        return self._parts.steps.should_save(step, stopping=self._parts.ending.should_stop_at(step))

    @training_call
    def reached_preemption(self, step: int) -> bool:
        """Return True from the step on that all ranks agreed to stop at.

        Args:
            step: The step that was just finished, at least 0.

        Raises:
            ValueError: The manager was constructed with chkpt_on_preemption=False.

        Ranks:
            All ranks call this with the same step.

        """
        if not self._parts.ending.saves_on_notice:
            raise ValueError("preemption isn't watched: construct the manager with chkpt_on_preemption=True")
        return self._parts.ending.should_stop_at(step)

    @training_call
    def save(
        self,
        step: int,
        state_dict: GivenState,
        force: bool = False,
        *,
        metrics: Mapping[str, object] | None = None,
    ) -> bool:
        """Save `step` if it is due, and wait until it is committed and what it makes superfluous is deleted.

        Args:
            step: The step that was just finished, at least 0.
            state_dict: A tree of tensors, objects with state_dict(), and plain values; or a function that returns
                one. The function is called once for each save, and only then.
            force: Save although the policy doesn't ask for it.
            metrics: Numbers to store with the commit, by name.

        Returns:
            True if the step was due, or forced, and is committed. False if it wasn't due: nothing was saved, which
            `force=True` would do.

        Raises:
            StepkeeperError: This save failed, or an earlier one in the background did.

        Ranks:
            All ranks call this with the same arguments.

        """
        in_flight = self._start_save(step, state_dict, force, metrics)
        if in_flight is None:
            return False
        self._parts.saver.await_commit(in_flight)
        self._parts.saver.await_upkeep()
        return True

    @training_call
    def save_async(
        self,
        step: int,
        state_dict: GivenState,
        force: bool = False,
        *,
        metrics: Mapping[str, object] | None = None,
    ) -> bool:
        """Take a snapshot of `state_dict` if `step` is due, and save it in the background.

        `state_dict` may change as soon as this returns. `in_flight` tells how the save goes on. If as many saves
        are in flight as max_pending_async allows, this waits for an earlier one. A step may be saved again; its
        newest commit counts.

        Args:
            step: The step that was just finished, at least 0.
            state_dict: A tree of tensors, objects with state_dict(), and plain values; or a function that returns
                one. The function is called once for each save, and only then.
            force: Save although the policy doesn't ask for it.
            metrics: Numbers to store with the commit, by name.

        Returns:
            True if the step was due, or forced, and its snapshot is taken. False if it wasn't due: nothing is saved,
            which `force=True` would do.

        Raises:
            StepkeeperError: A save in the background failed since the last call.
            TypeError: `state_dict` is neither a state nor a function. What a function raises is raised unchanged.
            ValueError: `state_dict` is empty.

        Ranks:
            All ranks call this with the same arguments.

        """
        return self._start_save(step, state_dict, force, metrics) is not None

    def _start_save(
        self, step: int, state_dict: GivenState, force: bool, metrics: Mapping[str, object] | None
    ) -> InFlight | None:
        """Start the save of `step` if it is due; see `save_async`."""
        self._parts.ending.check_open()
        step = validate_step(step)
        check_given_state(state_dict)
        if not (self._parts.ending.should_stop_at(step) and self._parts.ending.saves_on_notice):
            self._parts.ending.raise_failure()
        request = SaveRequest(step=step, state=state_dict, metrics=metrics)
        self._parts.steps.record(request)
        if not (self.should_save(step) or force):
            return None
        return self._parts.steps.start_save(request)

    @training_call
    def restore(
        self,
        step: int,
        state_dict: Mapping[str, object],
        *,
        items: Collection[str] | None = None,
        exclude: Collection[str] = (),
        strict: bool = True,
        cast: bool = False,
    ) -> None:
        """Fill `state_dict` in place from the newest commit of `step` on HEAD's line. The log is left as it is.

        Saves in flight are awaited first. The next save goes on from the restored commit, and newer commits become
        an abandoned branch. If only a part of the commit is restored, the next save goes on from what was restored
        or saved before, if anything was.

        Args:
            step: The step to restore.
            state_dict: A tree of tensors, objects with load_state_dict(), and plain values; tensors are filled in
                place.
            items: Patterns of flat names to restore, which also select everything below them: "model" selects all
                of "model.…". None restores all.
            exclude: Patterns of flat names to leave out.
            strict: If False, fill the names that both have and leave the rest of `state_dict` as it is.
            cast: Convert tensors to the dtypes of `state_dict`.

        Raises:
            FencedError: This process has claimed the root, and another claim owns it now.
            LoadMismatchError: `state_dict` asks for other things than the commit holds. Nothing was changed.
            RestoreError: There is no such commit, and the message lists those that there are; or it was deleted
                while it was read, and parts of it are in `state_dict`: restore another one.
            TornCheckpointError: Bytes of the commit are bad.
            TypeError: `state_dict` is no state, or a function.
            ValueError: `state_dict` is empty.

        Ranks:
            All ranks call this with the same arguments.

        """
        check_target(state_dict)
        # The cleanup after a save's commit may delete the commit that is being read.
        self._parts.saver.wait_until_idle()
        self._parts.ending.raise_failure()
        rules = LoadRules(items=items, exclude=exclude, strict=strict, cast=cast)
        began_s = time.monotonic()
        record = restore_step(self._parts.restorer, self._parts.companion, step, state_dict, rules=rules)
        self._parts.steps.last_step.forget()
        self._parts.saver.mark_restored(record, state_dict, rules)
        self._parts.save_hooks.log_restore(record, self._parts.store.uri, time.monotonic() - began_s)

    @training_call
    def all_steps(self) -> list[int]:
        """List the steps that can be restored, those of HEAD and its ancestors, without repetition."""
        return self._parts.waits.run(partial(list_steps, self._parts.store))

    @training_call
    def join(self) -> None:
        """Wait until no save is in flight, and what the saves make superfluous is deleted.

        Nothing is written to the root from then on, until the next save.

        Raises:
            StepkeeperError: One of the saves failed.

        """
        self._parts.saver.wait_until_idle()
        self._parts.saver.await_upkeep()
        self._parts.ending.raise_failure(newest=True)
