"""The checkpoint manager: what a training loop talks to."""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch.distributed as dist

from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive, ReportPhase, Restored, Retention
from stepkeeper.env import Environment, Places, check_ranks, opening_of, read_environment, uri_of
from stepkeeper.gang import open_gang
from stepkeeper.leaving import Leaving
from stepkeeper.policy import EveryNSteps, SavePolicy, from_interval
from stepkeeper.progress import Progress
from stepkeeper.restore import Restorer
from stepkeeper.results import CheckpointInfo, Health, RestoreResult, StepOutcome
from stepkeeper.saves import Saves
from stepkeeper.saving import InFlight
from stepkeeper.stepping import Stepping
from stepkeeper.storage import open_store

__all__ = ["CheckpointManager"]


class CheckpointManager:
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
        path: str,
        save_interval: int | SavePolicy = 1000,
        max_to_keep: int = 0,
        max_pending_async: int = 1,
        process_group: dist.ProcessGroup | None = None,
        chkpt_on_preemption: bool = True,
        *,
        retention: Retention | None = None,
        environment: Environment | None = None,
    ) -> None:
        """A manager for the root `path` (file://…, gs://…, or a folder). Nothing is read or written yet.

        `save_interval` is a number of steps or a policy. `max_to_keep` newest commits are kept, 0 keeps all;
        `retention` says it in full. `max_pending_async` snapshots at most are held in host memory: with 1, a save
        that comes while one is in flight waits for that one. With `chkpt_on_preemption`, SIGTERM makes all ranks
        save one step.

        Raises:
            BadUriError: `path` names no store.
            ValueError: a number is out of its range.

        """
        if isinstance(save_interval, int):
            save_interval = EveryNSteps(save_interval)
        if max_to_keep < 0 or max_pending_async < 1:
            raise ValueError("max_to_keep is at least 0 (all are kept), max_pending_async at least 1")
        if retention is None and max_to_keep:
            retention = Retention(last=max_to_keep)
        self._store = open_store(uri_of(path))
        self._gang = open_gang(process_group)
        opening = opening_of(environment, self._gang, self._store.uri, retention)
        self._companion = Companion(opening, self._direct)
        self._progress = Progress(self._companion.tell)
        self._restorer = Restorer(self._store, self._companion, self._gang)
        self._saves = Saves(self._store, self._companion, self._gang, self._progress, max_pending_async)
        self._stepping = Stepping(
            save_interval,
            self._gang,
            self._saves,
            progress=self._progress,
            companion=self._companion,
            environment=environment,
            saves_on_notice=chkpt_on_preemption,
        )
        self._leaving = Leaving(self._stepping, self._saves, self._progress, self._companion, self._gang)
        self._stepping.start()
        if environment is not None:
            # It reports from here on; elsewhere it is started when something is to be written.
            self._companion.process()

    @classmethod
    def from_env(
        cls, *, process_group: dist.ProcessGroup | None = None, places: Places | None = None
    ) -> Self:
        """The manager that this container's CheckpointedTrainingJob asks for.

        Raises:
            NotInPodError: no operator made this container; it says what to write instead.
            ContractError: the operator's settings are of another version.
            ProcessGroupError: the job has several hosts, and they don't form a process group yet.

        """
        environment = read_environment(places=places)
        check_ranks(environment, process_group)
        settings = environment.settings
        return cls(
            settings.uri,
            from_interval(settings.interval, total_steps=settings.total_steps),
            process_group=process_group,
            retention=settings.retention,
            environment=environment,
        )

    @property
    def in_flight(self) -> InFlight | None:
        """The newest save, until it has ended: `result()` waits for its commit."""
        return self._saves.in_flight

    def restore_latest(self, state: Mapping[str, object]) -> RestoreResult | None:
        """The root is claimed, and `state` is what Latest means in it; None if nothing was ever committed there.

        Tensors are filled in place, Statefuls get theirs by load_state_dict(). Every block that is read is verified;
        a torn commit is quarantined and its parent taken. Saves in flight are awaited first: called again, it restores
        what was saved last. Ranks: all.

        Raises:
            FencedError: the root belongs to another job, or a later start of this one has begun.
            RestoreError: a commit was meant to be found and none can be used.
            LoadMismatchError: `state` has other names, shapes or dtypes than the commit.

        """
        self._saves.await_and_prove()
        self._leaving.raise_failure()
        self._progress.moved(ReportPhase.RESTORING)
        with self._leaving.fenced_said():
            record = self._restorer.latest(state)
        self._saves.restored(record)
        self._progress.restored(None if record is None else Restored(sequence=record.slot, step=record.step))
        self._stepping.decisions.save_begun()
        return None if record is None else self._restorer.result(record)

    def step(
        self, step: int, state: Mapping[str, object], metrics: Mapping[str, object] | None = None
    ) -> StepOutcome:
        """`step` is finished: it is saved in the background if it is due, and all ranks stop here if they were told to.

        Call it after every step, behind the loop's own `torch_xla.sync()`. If nothing is due it costs microseconds
        and no network. When there is a notice, it returns `stop` once this step is committed (or, where the job
        says Skip, once what is in flight is). Ranks: all, with the same steps.

        Raises:
            FencedError: another claim owns the root.
            StepkeeperError: a save in the background failed since the last call.
            UnsupportedValueError: something in `state` can't be saved; it names the key.

        """
        self._leaving.check_open()
        self._progress.finished(step, metrics)
        if self._stepping.reached(step):
            self._stepping.stop(step, state)
            return StepOutcome(step=step, stop=True)
        self._leaving.raise_failure()
        if not self._stepping.due(step):
            return StepOutcome(step=step)
        return StepOutcome(step=step, in_flight=self._stepping.begin_save(step, state))

    def should_save(self, step: int) -> bool:
        """True if `step` is one to save: by the policy, or because all ranks agreed to stop at it."""
        return self._stepping.should_save(step)

    def reached_preemption(self, step: int) -> bool:
        """True from the step on that all ranks agreed to stop at. Ranks: all."""
        if not self._stepping.saves_on_notice:
            raise ValueError("preemption isn't watched: construct the manager with chkpt_on_preemption=True")
        return self._stepping.reached(step)

    def save(self, step: int, state: Mapping[str, object], force: bool = False) -> bool:
        """True: `step` was to be saved (`should_save`, or `force`) and is committed."""
        if not self.save_async(step, state, force):
            return False
        assert self._saves.last_begun is not None
        self._saves.last_begun.result()
        return True

    def save_async(self, step: int, state: Mapping[str, object], force: bool = False) -> bool:
        """True: `step` was to be saved, and its snapshot is taken: `state` may change.

        `in_flight` tells how it goes on. Waits for an earlier save if as many are in flight as may be. Ranks: all.

        Raises:
            StepkeeperError: a save in the background failed since the last call.

        """
        self._leaving.check_open()
        if not (self._stepping.reached(step) and self._stepping.saves_on_notice):
            self._leaving.raise_failure()
        self._progress.finished(step, None)
        if not (self.should_save(step) or force):
            return False
        self._stepping.begin_save(step, state)
        return True

    def restore(self, step: int, state: Mapping[str, object]) -> None:
        """`state` is what the newest commit of `step` on HEAD's line holds. The log is left alone. Ranks: all.

        Raises:
            RestoreError: there is no such commit; it lists those that there are.
            TornCheckpointError: bytes of it are bad.

        """
        self._leaving.raise_failure()
        self._saves.restored(self._restorer.step(step, state))

    def all_steps(self) -> list[int]:
        """The steps that can be restored: HEAD's and its ancestors'."""
        return self._restorer.steps()

    def metadata(self, step: int) -> CheckpointInfo:
        """What the commit of `step` holds: names, dtypes and shapes, read from its manifests.

        Raises:
            RestoreError: there is no such commit; it lists those that there are.

        """
        return self._restorer.describe(step)

    def join(self) -> None:
        """No save is in flight. Raises what one of them failed with."""
        self.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True if no save is in flight any more; False if that took longer than `timeout_s`.

        Raises:
            StepkeeperError: a save in the background failed since the last call.

        """
        ended = self._saves.wait(timeout_s)
        self._leaving.raise_failure(newest=True)
        return ended

    def health(self) -> Health:
        """How checkpointing is doing in this process, from memory alone."""
        notice = self._stepping.notices.notice
        in_flight = self._saves.in_flight
        return Health(
            claim=None if self._companion.begun is None else self._companion.begun.claim.slot,
            committed_step=None if self._saves.committed is None else self._saves.committed.step,
            in_flight_step=None if in_flight is None else in_flight.step,
            error=self._saves.error,
            companion_pid=self._companion.pid,
            notice=None if notice is None else notice.source,
        )

    def request_stop(self) -> None:
        """All ranks will stop at one of the next steps, as if they had been sent SIGTERM."""
        self._stepping.notices.give("call")

    def exit_if_stopped(self) -> None:
        """Nothing; or, if `step` has said stop, the end of this process with code 75. Leaving the block does it too."""
        self._leaving.exit_if_stopped()

    def close(self) -> None:
        """Training is done: saves in flight are committed, all ranks have come here, the operator was told.

        Raises:
            StepkeeperError: a save in the background failed.
            GangError: a rank didn't come.

        """
        self._leaving.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.leave(error)

    def _direct(self, directive: Directive) -> None:
        """In the thread that listens to the companion, which is there before what follows its directives."""
        self._stepping.follow(directive)
