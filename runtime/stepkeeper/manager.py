"""The checkpoint manager: what a training loop talks to."""

import faulthandler
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import torch.distributed as dist

from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive, ExitCode, ReportPhase, Restored, Retention
from stepkeeper.decisions import Decisions
from stepkeeper.ending import Ending, exit_code_of, traceback_of
from stepkeeper.env import Environment, Places, check_ranks, opening_of, read_environment, uri_of
from stepkeeper.errors import ClosedError, FencedError, GangError, StepkeeperError
from stepkeeper.gang import open_gang
from stepkeeper.policy import EveryNSteps, SavePolicy, from_interval
from stepkeeper.preemption import Notice, NoticeWatcher
from stepkeeper.progress import Progress
from stepkeeper.restore import Restorer
from stepkeeper.results import CheckpointInfo, Health, RestoreResult, StepOutcome
from stepkeeper.saves import Saves
from stepkeeper.saving import InFlight
from stepkeeper.storage import open_store

__all__ = ["CheckpointManager"]

_log: Final = logging.getLogger(__name__)
_MEET_S: Final = 3600.0


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
        self._decisions = Decisions(save_interval, self._gang)
        self._saves = Saves(self._store, self._companion, self._gang, self._progress, max_pending_async)
        self._saves_on_notice = chkpt_on_preemption
        self._stopped = False
        self._closed = False
        trigger = None if environment is None else environment.places.notice_file
        self._notices = NoticeWatcher(trigger, self._progress.flush, self._noticed)
        self._ending = Ending(environment, self._companion, self._progress, self._notices)
        self._decisions.start()
        self._notices.start(signals=chkpt_on_preemption)
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
        self._raise_failure()
        self._progress.moved(ReportPhase.RESTORING)
        with self._fenced_said():
            record = self._restorer.latest(state)
        self._saves.restored(record)
        self._progress.restored(None if record is None else Restored(sequence=record.slot, step=record.step))
        self._decisions.save_begun()
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
        self._check_open()
        self._progress.finished(step, metrics)
        if self._decisions.stops(step):
            self._stop(step, state)
            return StepOutcome(step=step, stop=True)
        self._raise_failure()
        if not self._decisions.due(step):
            return StepOutcome(step=step)
        return StepOutcome(step=step, in_flight=self._begin_save(step, state))

    def should_save(self, step: int) -> bool:
        """True if `step` is one to save: by the policy, or because all ranks agreed to stop at it."""
        stopping = self._decisions.stops(step) and self._saves_on_notice  # always: it hears the ranks
        last = self._saves.last_begun
        saved = last is not None and last.step >= (self._decisions.stop_step or 0)
        return self._decisions.due(step) or (stopping and not saved)

    def reached_preemption(self, step: int) -> bool:
        """True from the step on that all ranks agreed to stop at. Ranks: all."""
        if not self._saves_on_notice:
            raise ValueError("preemption isn't watched: construct the manager with chkpt_on_preemption=True")
        return self._decisions.stops(step)

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
        self._check_open()
        if not (self._decisions.stops(step) and self._saves_on_notice):
            self._raise_failure()
        self._progress.finished(step, None)
        if not (self.should_save(step) or force):
            return False
        self._begin_save(step, state)
        return True

    def restore(self, step: int, state: Mapping[str, object]) -> None:
        """`state` is what the newest commit of `step` on HEAD's line holds. The log is left alone. Ranks: all.

        Raises:
            RestoreError: there is no such commit; it lists those that there are.
            TornCheckpointError: bytes of it are bad.

        """
        self._raise_failure()
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
        self._raise_failure(newest=True)
        return ended

    def health(self) -> Health:
        """How checkpointing is doing in this process, from memory alone."""
        notice = self._notices.notice
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
        self._notices.give("call")

    def exit_if_stopped(self) -> None:
        """Nothing; or, if `step` has said stop, the end of this process with code 75. Leaving the block does it too."""
        if self._stopped:
            self._end(ExitCode.SAVED, None)
            sys.exit(ExitCode.SAVED)

    def close(self) -> None:
        """Training is done: saves in flight are committed, all ranks have come here, the operator was told.

        Raises:
            StepkeeperError: a save in the background failed.
            GangError: a rank didn't come.

        """
        if self._closed:
            return
        self.wait()
        if self._gang.world_size > 1:
            met = self._gang.gather("done", {}, _MEET_S)
            self._gang.broadcast("all-done", {"ranks": len(met)} if met else None, _MEET_S)
        self._progress.moved(ReportPhase.DONE)
        self._end(ExitCode.DONE, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed:
            return
        failure = error
        if error is None or exit_code_of(error) == ExitCode.DONE:
            try:
                self._leave(chosen=error is not None)
            except StepkeeperError as late:
                failure = late
            else:
                return
        assert failure is not None
        self._end_with(failure)
        if isinstance(failure, FencedError | GangError):
            # Their codes mean something; Python's own for an exception is 1.
            sys.excepthook(type(failure), failure, failure.__traceback__)
            raise SystemExit(exit_code_of(failure)) from failure
        if failure is not error:
            raise failure

    def _leave(self, *, chosen: bool) -> None:
        """Training is done; or not, where ranks agreed to stop, or where exit code 0 was `chosen` after a notice."""
        agreed = self._saves_on_notice and self._decisions.stop_step is not None
        if agreed or (chosen and self._notices.settled() is not None):
            self._saves.await_last(self._ending.left_s())
            self._stopped = True
        self.exit_if_stopped()
        self.close()

    def _direct(self, directive: Directive) -> None:
        """In the thread that listens to the companion."""
        if directive.stop:
            self._notices.give("directive")
        if directive.checkpoint_now is not None:
            self._decisions.wish_save(directive.checkpoint_now)
        if directive.dump_stacks:
            faulthandler.dump_traceback(2)  # sys.stderr may be something without a file

    def _noticed(self, notice: Notice) -> None:
        """In the thread where the notice came up."""
        _log.warning("notice (%s): all ranks save one step and stop", notice.source)
        self._decisions.wish_stop()
        # Should the process be killed before it has stopped, this says why.
        self._ending.last_word(ExitCode.SAVED, self._saves.newest, None)
        self._progress.noticed(notice.source)

    def _begin_save(self, step: int, state: Mapping[str, object]) -> InFlight:
        self._decisions.save_begun()
        return self._saves.begin(step, state)

    def _stop(self, step: int, state: Mapping[str, object]) -> None:
        """The one save of a notice, within what the grace period leaves; once."""
        if self._stopped:
            return
        self._notices.give("peer")
        self._progress.moved(ReportPhase.SAVING)
        if self._ending.saves_first:
            self._saves.save_for_notice(step, state, self._ending.left_s())
        self._saves.await_last(self._ending.left_s())
        self._stopped = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this manager is closed; construct another one")

    def _raise_failure(self, *, newest: bool = False) -> None:
        self._check_open()
        with self._fenced_said():
            self._saves.raise_failure(newest=newest)

    @contextmanager
    def _fenced_said(self) -> Iterator[None]:
        """A FencedError from within is the last word already, whatever the program makes of it."""
        try:
            yield
        except FencedError as error:
            self._ending.last_word(ExitCode.FENCED, self._saves.newest, str(error))
            raise

    def _end_with(self, error: BaseException) -> None:
        """The process is about to end with `error`: a save in flight is given a little time, peers none."""
        text = traceback_of(error)
        if not isinstance(error, GangError):
            self._saves.wait(self._ending.save_s(alone=self._gang.world_size == 1))
        if text is not None:
            self._progress.failed(text)
        self._end(exit_code_of(error), text)

    def _end(self, code: int, error: str | None) -> None:
        """The last word is written, the last report sent, everything of ours that runs has ended."""
        if self._closed:
            return
        self._closed = True
        self._ending.last_word(code, self._saves.newest, error or self._saves.error)
        self._gang.abort()
        self._decisions.close()
        self._notices.close()
        self._progress.flush()
        self._companion.close(self._ending.closing_s())
        self._saves.close()
