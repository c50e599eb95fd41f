"""Follow a root from another process, such as an evaluator: read each new commit while a pin prevents its deletion.

Following doesn't append to the log or claim the root, and doesn't disturb the training.
"""

import math
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
"""Seconds that the cleanup at SIGTERM may wait for the store. Pods usually have 30 s."""


class FollowedCommit:
    """Read one commit of a followed root.

    The commit isn't deleted until the next one is requested, or until `close`.
    """

    def __init__(self, store: Store, restorer: Restorer, record: CommitRecord, pin: HeldPin | None) -> None:
        self._restorer, self._record, self._pin = restorer, record, pin
        if pin is not None:
            # For objects that are never closed, after an exception or with a dropped generator. At the process's end
            # `release_all_pins` does it.
            finalize(self, pin.request_release).atexit = False
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
        """Fill `state` in place from this commit, or from the selected part of it. Every block is verified.

        Args:
            state: A tree of tensors, objects with state_dict() and load_state_dict(), and plain values, as
                `CheckpointManager.restore` takes it.
            items: Patterns of flat names to load, which also select everything below them; None loads all.
            exclude: Patterns of flat names to leave out.
            strict: If False, fill the common names and leave the rest of `state` unchanged.
            cast: Convert tensors to the dtypes of `state`.

        Raises:
            PartlyRestoredError: The load failed after it had changed `state`. The cause is chained.
            TornCheckpointError: Bytes of the commit are bad. The commit isn't quarantined.
            RestoreError: The commit was deleted while it was read, because it has no pin or the pin was lost.
            LoadMismatchError: `state` has other names, shapes or dtypes than the commit.
            TypeError: `state` isn't a state, or is a function.
            ValueError: `state` is empty.
        """
        check_target(state)
        rules = LoadRules(items=items, exclude=exclude, strict=strict, cast=cast)
        # Forget which names a failed load has left half filled: a follower saves nothing, and may load into another
        # state each time.
        self._restorer.mixed_state.clear()
        self._restorer.restore(self._record, state, rules=rules, is_pinned=self._is_pinned)

    def close(self) -> None:
        """Remove the pin, so that the commit may be deleted.

        If the store doesn't answer, the pin stays until its lease expires, and a warning is logged.
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
    """Iterate over the new commits of HEAD's line, in commit order.

    The iteration ends when `close` is called, from any thread, or when no commit came within the timeout. `follow`
    makes a follower. As a context manager it closes itself and its store.
    """

    def __init__(
        self, uri: str, *, poll_s: float, timeout_s: float | None, after: int | None, every: bool
    ) -> None:
        if not poll_s > 0:
            raise ValueError(f"poll_s must be greater than 0, not {poll_s}")
        self._store = open_store(root_uri(uri))
        self._log = Log(self._store)
        self._restorer = Restorer(self._store, SoloRankGroup())
        self._poll_s, self._timeout_s, self._every = poll_s, timeout_s, every
        # Slots begin at 0, so every commit is later than -1.
        self._seen = -1 if after is None else after
        self._current: FollowedCommit | None = None
        self._has_warned_of_empty_root = False
        self._closed = threading.Event()
        self._pinning = threading.RLock()
        """Held while a commit is pinned, so that a thread that closes the iteration waits and finds the pin.

        A signal handler that closes it in the same thread doesn't wait.
        """

        self._sigterm = clean_up_at_sigterm(self._end_process, limit_s=_SIGTERM_S)

    @override
    def __repr__(self) -> str:
        seen = "no commit yet" if self._seen < 0 else f"last sequence {self._seen}"
        return f"<{type(self).__name__} {self._store.uri}: {seen}>"

    def __iter__(self) -> Iterator[FollowedCommit]:
        return self

    def __next__(self) -> FollowedCommit:
        """Wait for the next commit and return it. The previous commit may be deleted from now on.

        If the store doesn't answer, the next poll retries.

        Raises:
            StopIteration: `close` was called, or no commit came within the timeout.
            StorageError: The store refuses.
        """
        self._release_current()
        waited_s = 0.0
        while not self._closed.is_set():
            found = self._pin_next()
            if found is not None:
                return found
            left_s = math.inf if self._timeout_s is None else self._timeout_s - waited_s
            if left_s <= 0:
                break
            pause_s = min(self._poll_s, left_s)
            self._closed.wait(pause_s)
            waited_s += pause_s
        raise StopIteration

    def close(self) -> None:
        """End the iteration and release the last commit. A thread that waits for the next commit continues."""
        self._end()
        self._sigterm.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._store.close()

    def _end_process(self) -> None:
        """Remove the pins of all readers of this process before SIGTERM ends it."""
        self._end()
        release_all_pins()

    def _end(self) -> None:
        self._closed.set()
        with self._pinning:
            current = self._current
        if current is not None:
            current.close()

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
            # A signal handler has called `close` in this thread meanwhile, and saw no pin yet.
            found.close()
            return None
        return found

    def _find_next(self) -> FollowedCommit | None:
        try:
            state = self._log.refresh()
            self._warn_of_empty_root(state)
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
            _log.warning("%s did not answer, retrying: %s", self._store.uri, error)
            return None
        except RestoreError:
            # The chosen commit was deleted, and there is no newer one.
            return None
        self._seen = record.slot
        return FollowedCommit(self._store, self._restorer, record, pin)

    def _warn_of_empty_root(self, state: LogState) -> None:
        """Warn once that there is no log yet: the evaluator may be early, or the root may be mistyped."""
        if state.tail < 0 and not self._has_warned_of_empty_root:
            self._has_warned_of_empty_root = True
            _log.warning("%s: no commit here yet; waiting for the first one", self._store.uri)

    def _choose_next(self, state: LogState) -> CommitRecord:
        record = self._next_commit(state)
        if record is None:
            raise RestoreError(f"{self._store.uri}: the new commits were deleted")
        return record

    def _next_commit(self, state: LogState) -> CommitRecord | None:
        """Select the newest of the new commits of HEAD's line, or the oldest if every commit is wanted."""
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
    """Follow the commits of a root as they come, starting with the newest, for evaluation beside a training.

    ::

        with stepkeeper.follow("gs://bucket/run") as commits:
            for commit in commits:
                commit.load({"model": model})
                write(commit.step, evaluate(model))

    An empty root is waited for, with one warning. A reader that is slower than the training skips to the newest commit.
    Each commit is pinned while it is in use. The pin is removed when the loop ends for any reason, and when SIGTERM
    ends the process. A killed process leaves its pin, which expires after the training has continued for a while.

    Args:
        uri: The root: a URI (file://…, gs://…) or the path of a folder.
        poll_s: Seconds between checks of the log; greater than 0.
        timeout_s: Seconds without a commit after which the iteration ends; None never ends it.
        after: Sequence of the last commit that was handled before. Only later commits are returned.
        every: Yield every new commit that isn't deleted yet, in order, instead of skipping to the newest.

    Returns:
        An iterator over FollowedCommit, which is also a context manager.

    Raises:
        BadUriError: `uri` names no store.
        ValueError: `poll_s` isn't greater than 0.

    Ranks:
        One process on its own, without a process group.
    """
    return Follower(uri, poll_s=poll_s, timeout_s=timeout_s, after=after, every=every)
