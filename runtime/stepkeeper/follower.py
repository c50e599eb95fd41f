"""Follow a root from another process, as an evaluator does: read each new commit while a pin keeps it from deletion.

Following appends nothing to the log and claims nothing: the training doesn't notice it.
"""

import os
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from typing import Final, Self
from weakref import finalize

from typing_extensions import override

from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.ending.before_manager import clean_up_at_sigterm
from stepkeeper.errors import RestoreError, TransientStorageError
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.loggers import logger
from stepkeeper.restore.restorer import Restorer
from stepkeeper.retention.deletable import metrics_of
from stepkeeper.retention.held_pin import HeldPin, hold_commit, release_all_pins
from stepkeeper.save.given_state import check_target
from stepkeeper.storage import Store, open_store, root_uri
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["FollowedCommit", "Follower", "follow"]

_log: Final = logger(__name__)
_SIGTERM_S: Final = 5.0
"""How long the end by SIGTERM may wait for the store. Pods usually have 30 s."""


class FollowedCommit:
    """Read one commit of a followed root.

    The commit isn't deleted while it is in use: until the next commit is requested, or `close`.
    """

    def __init__(self, store: Store, restorer: Restorer, record: CommitRecord, pin: HeldPin | None) -> None:
        self._restorer, self._record, self._pin = restorer, record, pin
        if pin is not None:
            # Also if nobody closes this: a loop that was left by an exception, a generator that is dropped.
            finalize(self, pin.let_go).atexit = False
        self.sequence: Final = record.slot
        """Slot in the log."""

        self.step: Final = record.step
        """The training step that was saved."""

        self.uri: Final = f"{store.uri.rstrip('/')}/{record.folder}"
        """URI of the folder: a checkpoint that stock torch.distributed.checkpoint reads too."""

        self.metrics: Final[Mapping[str, float]] = metrics_of(record)
        """The step's metrics that the training passed, as numbers."""

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} step {self.step} (sequence {self.sequence}): {self.uri}>"

    def load(
        self,
        state: Mapping[str, object],
        *,
        items: Collection[str] | None = None,
        exclude: Collection[str] = (),
        strict: bool = True,
        cast: bool = False,
    ) -> None:
        """Fill `state` in place from this commit, or with the part of it that is selected. Every block is verified.

        Args:
            state: A tree of tensors, objects with state_dict() and load_state_dict(), and plain values, as
                `CheckpointManager.restore` takes it.
            items: Patterns of flat names to load, which also select everything below them; None loads all.
            exclude: Patterns of flat names to leave out.
            strict: If False, fill the names that both have and leave the rest of `state` as it is.
            cast: Convert tensors to the dtypes of `state`.

        Raises:
            PartlyRestoredError: Something failed after `state` was changed; the cause is chained.
            TornCheckpointError: Bytes of the commit are bad. The commit is not quarantined for that.
            RestoreError: The commit was deleted while it was read: it has no pin, or the pin was lost.
            LoadMismatchError: `state` has other names, shapes or dtypes than the commit.
            TypeError: `state` is no state, or a function.
            ValueError: `state` is empty.

        """
        check_target(state)
        rules = LoadRules(items=items, exclude=exclude, strict=strict, cast=cast)
        # Nothing is saved from here, and an earlier load was perhaps one into another state.
        self._restorer.mixed_state.clear()
        self._restorer.restore(self._record, state, rules=rules, is_pinned=self._is_pinned)

    def close(self) -> None:
        """Remove the pin: the commit may be deleted now.

        If the store doesn't answer, the pin stays until its lease is over, and a warning is logged.
        """
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.release()

    def _is_pinned(self) -> bool:
        return self._pin is not None and self._pin.is_held()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Follower:
    """Iterate over the new commits of HEAD's line, in the order in which they were committed.

    The iteration ends when `close` is called, from any thread, or when no commit came for the timeout. `follow`
    makes one; as a context manager it closes itself and its store.
    """

    def __init__(
        self,
        uri: str,
        *,
        poll_s: float,
        timeout_s: float | None,
        after: int | None,
        every: bool,
    ) -> None:
        if not poll_s > 0:
            raise ValueError(f"poll_s is longer than 0 s, not {poll_s}")
        self._store = open_store(root_uri(uri))
        self._log = Log(self._store)
        self._restorer = Restorer(self._store, SoloRankGroup())
        self._poll_s, self._timeout_s, self._every = poll_s, timeout_s, every
        self._seen = -1 if after is None else after
        self._current: FollowedCommit | None = None
        self._is_silence_told = False
        self._closed = threading.Event()
        self._pinning = threading.RLock()
        """Held while a commit is pinned: a thread that closes the iteration then waits, and finds the pin.

        A signal handler that closes it in between, in this very thread, goes on without waiting.
        """

        self._sigterm = clean_up_at_sigterm(self._end_process, limit_s=_SIGTERM_S)
        self._sigterm.start()

    @override
    def __repr__(self) -> str:
        seen = "no commit yet" if self._seen < 0 else f"last sequence {self._seen}"
        return f"<{type(self).__name__} {self._store.uri}: {seen}>"

    def __iter__(self) -> Iterator[FollowedCommit]:
        return self

    def __next__(self) -> FollowedCommit:
        """Wait for the next commit and return it. The commit returned before may be deleted from now on.

        If the store doesn't answer, it is asked again at the next poll.

        Raises:
            StopIteration: `close` was called, or no commit came for the timeout.
            StorageError: The store refuses.

        """
        self._release_current()
        waited_s = 0.0
        while not self._closed.is_set():
            found = self._pin_next()
            if found is not None:
                return found
            if self._timeout_s is not None and waited_s >= self._timeout_s:
                break
            pause_s = (
                self._poll_s if self._timeout_s is None else min(self._poll_s, self._timeout_s - waited_s)
            )
            self._closed.wait(pause_s)
            waited_s += pause_s
        raise StopIteration

    def close(self) -> None:
        """End the iteration and release the last commit. A thread that waits for the next commit goes on."""
        self._closed.set()
        with self._pinning:
            current = self._current
        if current is not None:
            current.close()
        self._sigterm.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._store.close()

    def _end_process(self) -> None:
        """Remove the pins of all readers of this process, which SIGTERM ends now."""
        self.close()
        release_all_pins()

    def _release_current(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()

    def _pin_next(self) -> FollowedCommit | None:
        """Pin the next commit, unless the iteration was closed."""
        with self._pinning:
            if self._closed.is_set():
                return None
            found = self._current = self._find_next()
        if found is not None and self._closed.is_set():
            found.close()
            return None
        return found

    def _find_next(self) -> FollowedCommit | None:
        try:
            state = self._log.refresh() if self._log.state.tail >= 0 else self._log.open()
            self._tell_silence(state)
            if self._next_commit(state) is None:
                return None
            pin, record = hold_commit(
                self._log,
                self._store,
                self._choose_next,
                holder=f"follow by process {os.getpid()}",
                host=socket.gethostname(),
                reason="follow",
            )
        except TransientStorageError as error:
            _log.warning("%s gave no answer, it is asked again: %s", self._store.uri, error)
            return None
        except RestoreError:
            # The chosen commit was deleted, and there is no newer one.
            return None
        self._seen = record.slot
        return FollowedCommit(self._store, self._restorer, record, pin)

    def _tell_silence(self, state: LogState) -> None:
        """Say once that there is no log yet: the evaluator may be early, and the root may be mistyped."""
        if state.tail < 0 and not self._is_silence_told:
            self._is_silence_told = True
            _log.warning("%s: nothing has been saved here yet; a first commit is waited for", self._store.uri)

    def _choose_next(self, state: LogState) -> CommitRecord:
        record = self._next_commit(state)
        if record is None:
            raise RestoreError(f"{self._store.uri}: what was new is gone")
        return record

    def _next_commit(self, state: LogState) -> CommitRecord | None:
        """Select from the new commits of HEAD's line the newest, or the oldest if every commit is wanted."""
        new = [record for record in state.line if record.slot > self._seen]
        if not new:
            return None
        return new[-1] if self._every else new[0]


def follow(
    uri: str,
    *,
    poll_s: float = 10.0,
    timeout_s: float | None = None,
    after: int | None = None,
    every: bool = False,
) -> Follower:
    """Follow the commits of a root as they come, starting with the newest. Made for evaluation beside a training.

    ::

        with stepkeeper.follow("gs://bucket/run") as commits:
            for commit in commits:
                commit.load({"model": model})
                write(commit.step, evaluate(model))

    A root that has nothing yet is waited for, which one warning says. A reader that is slower than the training skips
    to the newest commit. Each commit is pinned while it is in use. The pin is removed when the loop is left, however it
    is left, and when SIGTERM ends the process. A process that is killed leaves its pin, which counts no more once the
    training has gone on for a while without the reader.

    Args:
        uri: The root: a URI (file://…, gs://…) or the path of a folder.
        poll_s: Seconds between two looks at the log; greater than 0.
        timeout_s: End the iteration when no commit came for so many seconds; None never ends it.
        after: Sequence of the last commit that was handled before; only later commits come.
        every: Yield every new commit that isn't deleted yet, in order, instead of skipping to the newest.

    Returns:
        An iterator over FollowedCommit, which is also a context manager.

    Raises:
        BadUriError: `uri` names no store.
        ValueError: `poll_s` isn't greater than 0.

    Ranks:
        One process on its own. No other rank takes part, and no process group is used.

    """
    return Follower(uri, poll_s=poll_s, timeout_s=timeout_s, after=after, every=every)
