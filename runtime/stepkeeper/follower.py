"""Following a root from another process, as an evaluator does: new commits as they come, each kept while it is used.

Nothing is appended to the log, and nothing is claimed: the training notices nothing of it.
"""

import os
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from typing import Final, Self

from stepkeeper.coordination.rank_group import SoloRankGroup
from stepkeeper.errors import RestoreError, StepkeeperError, TransientStorageError
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.loggers import logger
from stepkeeper.restore.restorer import Restorer
from stepkeeper.retention.deletable import metrics_of
from stepkeeper.retention.pins import Pin, pin_commit, remove_pin
from stepkeeper.storage import Store, open_store
from stepkeeper.training.environment import uri_of
from stepkeeper_planners.loading.selection import LoadRules

__all__ = ["FollowedCommit", "Follower", "follow"]

_log: Final = logger(__name__)


class FollowedCommit:
    """One commit. It isn't deleted as long as it is used: until the next one is asked for, or `close`."""

    def __init__(self, store: Store, restorer: Restorer, record: CommitRecord, pin: Pin | None) -> None:
        self._store, self._restorer, self._record, self._pin = store, restorer, record, pin
        self.sequence: Final = record.slot
        """Its slot in the log."""

        self.step: Final = record.step
        self.uri: Final = f"{store.uri.rstrip('/')}/{record.folder}"
        """Its folder: a checkpoint that stock torch.distributed.checkpoint reads too."""

        self.metrics: Final[Mapping[str, float]] = metrics_of(record)
        """What the training said of the step, as numbers."""

    def load(
        self,
        state: Mapping[str, object],
        *,
        items: Collection[str] | None = None,
        exclude: Collection[str] = (),
        strict: bool = True,
        cast: bool = False,
    ) -> None:
        """`state` is what the commit holds, or what of it is asked for, every block verified; as `restore` does it.

        Raises:
            TornCheckpointError: bytes of it are bad. Nothing is condemned by that.
            RestoreError: it was deleted while it was read, which nothing forbade.
            LoadMismatchError: `state` has other names, shapes or dtypes than the commit.

        """
        rules = LoadRules(items=items, exclude=exclude, strict=strict, cast=cast)
        self._restorer.restore(self._record, state, rules=rules, pinned=self._pin is not None)

    def close(self) -> None:
        """It may be deleted. Where the store gives no answer the pin is left, and said."""
        pin, self._pin = self._pin, None
        if pin is None:
            return
        try:
            remove_pin(self._store, pin)
        except StepkeeperError as error:
            _log.warning(
                "the pin of commit %d is left in %s: %s",
                self.sequence,
                self._store.uri,
                error,
                extra={"step": self.step},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Follower:
    """New commits of HEAD's line, in the order of commits. Ends by `close`, from any thread, or when none comes."""

    def __init__(
        self,
        uri: str,
        *,
        poll_s: float,
        timeout_s: float | None,
        after: int | None,
        every: bool,
        holder: str | None,
    ) -> None:
        if not poll_s > 0:
            raise ValueError(f"poll_s is longer than 0 s, not {poll_s}")
        self._store = open_store(uri_of(uri))
        self._log = Log(self._store)
        self._restorer = Restorer(self._store, SoloRankGroup())
        self._poll_s, self._timeout_s, self._every = poll_s, timeout_s, every
        self._seen = -1 if after is None else after
        self._holder = holder or f"follow by process {os.getpid()} on {socket.gethostname()}"
        self._current: FollowedCommit | None = None
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[FollowedCommit]:
        return self

    def __next__(self) -> FollowedCommit:
        """The next commit; what was answered before may be deleted from now on. Waits for it.

        A store that gives no answer is asked again at the next poll.

        Raises:
            StopIteration: `close` was called, or none came for `timeout_s`.
            StorageError: the store refuses.

        """
        self._let_go()
        waited_s = 0.0
        while not self._closed.is_set():
            found = self._found()
            if found is not None:
                self._current = found
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
        """No commit comes any more, and the last one may be deleted. Whoever waits for the next one goes on."""
        self._closed.set()
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._store.close()

    def _let_go(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()

    def _found(self) -> FollowedCommit | None:
        try:
            state = self._log.refresh() if self._log.state.tail >= 0 else self._log.open()
            if self._next_of(state) is None:
                return None
            pin, record = pin_commit(
                self._log, self._store, self._chosen, holder=self._holder, reason="follow"
            )
        except TransientStorageError as error:
            _log.warning("%s gave no answer, it is asked again: %s", self._store.uri, error)
            return None
        except RestoreError:
            # What was chosen was deleted, and nothing new is there in its place.
            return None
        self._seen = record.slot
        return FollowedCommit(self._store, self._restorer, record, pin)

    def _chosen(self, state: LogState) -> CommitRecord:
        record = self._next_of(state)
        if record is None:
            raise RestoreError(f"{self._store.uri}: what was new is gone")
        return record

    def _next_of(self, state: LogState) -> CommitRecord | None:
        """Of what is new on HEAD's line the newest, or the oldest where every one is wanted."""
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
    holder: str | None = None,
) -> Follower:
    """The commits of `uri` as they come, first the newest that is there: for evaluation beside a training.

    ::

        with stepkeeper.follow("gs://bucket/run") as commits:
            for commit in commits:
                commit.load({"model": model})
                write(commit.step, evaluate(model))

    Whoever is slower than the training skips to the newest; with `every`, each commit comes that isn't deleted yet.
    `after` is the sequence that was had before. Each is pinned while it is used; a process that is killed leaves its
    pin, which `stepkeeper gc --pins` lists by `holder`. Ends when none came for `timeout_s`; by default it never does.

    Raises:
        BadUriError: `uri` names no store.

    """
    return Follower(uri, poll_s=poll_s, timeout_s=timeout_s, after=after, every=every, holder=holder)
