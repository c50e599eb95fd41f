"""What torch_xla's CheckpointManager has, as code written for it calls it."""

import operator
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self, SupportsIndex

import torch.distributed as dist

from stepkeeper.companion.supervisor import Companion
from stepkeeper.policy.save import EveryNSteps, SavePolicy
from stepkeeper.restore import Restorer, list_steps, restore_step
from stepkeeper.save.hooks import Events
from stepkeeper.save.saver import Saves
from stepkeeper.storage import Store
from stepkeeper.training.shutdown import Leaving
from stepkeeper.training.step_controller import Stepping, checked_step
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["DropIn", "Given"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a manager was constructed with: numbers as Python's own, whatever library they were of."""

    path: str
    save_interval: int | SavePolicy
    max_to_keep: int
    max_pending_async: int
    process_group: dist.ProcessGroup | None
    chkpt_on_preemption: bool

    @classmethod
    def of(  # noqa: PLR0917  # the constructor's order
        cls,
        path: str | os.PathLike[str],
        save_interval: SupportsIndex | SavePolicy,
        max_to_keep: SupportsIndex,
        max_pending_async: SupportsIndex,
        process_group: dist.ProcessGroup | None,
        chkpt_on_preemption: bool,
    ) -> Self:
        """Raises TypeError where a number isn't whole, ValueError where none is pending."""
        given = cls(
            path=os.fspath(path),
            save_interval=_interval(save_interval),
            max_to_keep=operator.index(max_to_keep),
            max_pending_async=operator.index(max_pending_async),
            process_group=process_group,
            chkpt_on_preemption=chkpt_on_preemption,
        )
        if given.max_pending_async < 1:
            raise ValueError(f"max_pending_async is at least 1, not {given.max_pending_async}")
        return given

    @property
    def policy(self) -> SavePolicy:
        """Raises ValueError for an interval of no steps."""
        interval = self.save_interval
        return EveryNSteps(interval) if isinstance(interval, int) else interval


def _interval(given: SupportsIndex | SavePolicy) -> int | SavePolicy:
    if isinstance(given, SupportsIndex):
        return operator.index(given)
    if not callable(getattr(given, "due", None)):
        raise TypeError(
            f"save_interval is a number of steps or a policy of stepkeeper.policy.save, not {given!r}"
        )
    return given


class DropIn:
    """The methods of torch_xla's class, by its names and parameters; what is behind a `*` is ours.

    What it was constructed with can be read and, having been acted on, not be set.
    """

    _companion: Companion
    _events: Events
    _given: Given
    _leaving: Leaving
    _restorer: Restorer
    _saves: Saves
    _stepping: Stepping
    _store: Store

    @property
    def base_path(self) -> str:
        """The root, with a `/` behind it."""
        return f"{self._given.path.rstrip('/')}/"

    @property
    def save_interval(self) -> int | SavePolicy:
        """In steps, or the policy that it was constructed with."""
        return self._given.save_interval

    @property
    def max_to_keep(self) -> int:
        """0: all, or what `keep` says."""
        return self._given.max_to_keep

    @property
    def chkpt_on_preemption(self) -> bool:
        """SIGTERM makes all ranks save one step."""
        return self._given.chkpt_on_preemption

    @property
    def pg(self) -> dist.ProcessGroup | None:
        """The ranks that save together: the group that was given, else the default one, if there is one."""
        is_there = dist.is_available() and dist.is_initialized()
        return self._given.process_group or (dist.group.WORLD if is_there else None)

    def should_save(self, step: int) -> bool:
        """True if `step` is one to save: by the policy, or because all ranks agreed to stop at it."""
        return self._stepping.should_save(step)

    def reached_preemption(self, step: int) -> bool:
        """True from the step on that all ranks agreed to stop at. Ranks: all."""
        if not self._stepping.saves_on_notice:
            raise ValueError("preemption isn't watched: construct the manager with chkpt_on_preemption=True")
        return self._stepping.reached(step)

    def save(
        self,
        step: int,
        state_dict: Mapping[str, object],
        force: bool = False,
        *,
        metrics: Mapping[str, object] | None = None,
    ) -> bool:
        """True: `step` was to be saved (`should_save`, or `force`) and is committed."""
        if not self.save_async(step, state_dict, force, metrics=metrics):
            return False
        self._saves.await_this()
        return True

    def save_async(
        self,
        step: int,
        state_dict: Mapping[str, object],
        force: bool = False,
        *,
        metrics: Mapping[str, object] | None = None,
    ) -> bool:
        """True: `step` was to be saved, and its snapshot is taken: `state_dict` may change.

        `in_flight` tells how it goes on. Waits for an earlier save if as many are in flight as may be. Any step may be
        saved again, and is the newest then. Ranks: all.

        Raises:
            StepkeeperError: a save in the background failed since the last call.

        """
        self._leaving.check_open()
        step = checked_step(step)
        if not (self._stepping.reached(step) and self._stepping.saves_on_notice):
            self._leaving.raise_failure()
        self._stepping.finished(step, state_dict, metrics)
        if not (self.should_save(step) or force):
            return False
        self._stepping.begin_save(step, state_dict, metrics)
        return True

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
        """`state_dict` is what the newest commit of `step` on HEAD's line holds. The log is left alone. Ranks: all.

        Waits for saves in flight. The first save after it goes on from that commit: what was newer is an abandoned
        branch then. A part of a commit leaves it at what was restored or saved before, if anything was.
        `items` and `exclude` are patterns of flat names, which select what is below them too: "model" is all of
        "model.…". With `strict=False` what both have is filled and the rest stays as it is; `cast=True` converts
        dtypes.

        Raises:
            FencedError: this process has claimed the root, and another claim owns it now.
            LoadMismatchError: `state_dict` asks for other things than the commit holds. Nothing was changed.
            RestoreError: there is no such commit, and it lists those that there are; or it was deleted while it was
                read, and parts of it are in `state_dict`: restore another one.
            TornCheckpointError: bytes of it are bad.

        """
        # A commit that comes meanwhile may delete what is being read.
        self._saves.wait()
        self._leaving.raise_failure()
        rules = LoadRules(items=items, exclude=exclude, strict=strict, cast=cast)
        record = restore_step(self._restorer, self._companion, step, state_dict, rules=rules)
        self._saves.restored(record, whole=items is None and not exclude)
        self._events.restored(record)

    def all_steps(self) -> list[int]:
        """The steps that can be restored: HEAD's and its ancestors'."""
        return list_steps(self._store)

    def join(self) -> None:
        """No save is in flight. Raises what one of them failed with."""
        self._saves.wait()
        self._leaving.raise_failure(newest=True)
