"""Provide the methods of CheckpointManager that inspect commits and the saves of this process."""

from collections.abc import Callable
from functools import partial

from stepkeeper.manager_parts import ManagerParts, training_call
from stepkeeper.quantities import check_whole
from stepkeeper.restore.listing import describe_step, list_steps
from stepkeeper.restore.verify import verify_step
from stepkeeper.results import CheckpointInfo, Health, Verification
from stepkeeper.save.hooks import SaveHook
from stepkeeper.save.in_flight import InFlight

__all__ = ["ManagerInspection"]


class ManagerInspection:
    """Inspect commits of the root and the saves of this process."""

    _parts: ManagerParts

    @property
    def in_flight(self) -> InFlight | None:
        """The newest save, until it has ended; its `result()` waits for the commit."""
        return self._parts.saver.in_flight

    @training_call
    def steps(self) -> list[int]:
        """List the steps that can be restored, which are those of HEAD and its ancestors, without repetition.

        Ranks:
            Any rank, on its own.
        """
        return self._parts.waits.run(partial(list_steps, self._parts.store))

    @training_call
    def metadata(self, step: int) -> CheckpointInfo:
        """Describe the commit of `step`: names, dtypes and shapes, read from its manifests.

        Args:
            step: The saved step.

        Raises:
            RestoreError: There is no such commit, and the message lists the existing ones; or it was deleted while it
                was read.

        Ranks:
            Any rank, on its own.
        """
        return self._parts.waits.run(partial(describe_step, self._parts.store, check_whole("step", step)))

    @training_call
    def verify(self, step: int) -> Verification:
        """Verify every byte of the newest commit of `step` on HEAD's line. One of the ranks reads each byte.

        Nothing is appended to the log, and no commit is quarantined. The call waits for saves in flight first. From
        another thread than the training's, such as a hook's, it doesn't delay later saves, whose commits may make
        retention delete this one.

        Args:
            step: The saved step.

        Returns:
            Number and size of the verified objects.

        Raises:
            RestoreError: There is no such commit, and the message lists the existing ones; or it was deleted while it
                was read.
            TornCheckpointError: Bytes of the commit are bad.
            FencedError: Another claim replaced this process's claim of the root.

        Ranks:
            All ranks call this with the same step.
        """
        # A later commit may delete the one that is read. It can't while training waits for this call.
        self._parts.saver.wait_until_idle()
        return verify_step(self._parts.restorer, self._parts.companion, check_whole("step", step))

    def health(self) -> Health:
        """Describe how checkpointing is doing in this process, from memory alone.

        Ranks:
            Any rank, on its own, from any thread.
        """
        parts, in_flight = self._parts, self.in_flight
        notice, committed = parts.ending.notices.first, parts.saver.lineage.own_commit
        return Health(
            claim=None if parts.companion.claimed_root is None else parts.companion.claimed_root.claim.slot,
            committed_step=None if committed is None else committed.step,
            in_flight_step=None if in_flight is None else in_flight.step,
            error=parts.saver.error,
            complaint=parts.companion.complaint,
            companion_pid=parts.companion.pid,
            notice=None if notice is None else notice.source,
        )

    def on_save(self, hook: SaveHook) -> Callable[[], None]:
        """Call `hook` with a `SaveReport` whenever a save has succeeded or failed.

        Hooks run in a separate thread: no save waits for them, and they may call the manager. Errors of a hook are
        logged.

        Args:
            hook: Called with the report of each save of this rank that ends from now on.

        Returns:
            A function that removes the hook.

        Ranks:
            Any rank, on its own.
        """
        return self._parts.save_hooks.on_save(hook)
