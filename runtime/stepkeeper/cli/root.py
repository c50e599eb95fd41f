"""Open the root that a command works on, by its URI or path, and distinguish one checkpoint's folder from a root."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import unquote_to_bytes, urlsplit

import typer

from stepkeeper.errors import BadUriError, RestoreError, StepkeeperError, StorageError, TornCheckpointError
from stepkeeper.log import CommitRecord, Log, LogState
from stepkeeper.storage import Store, open_store, root_uri
from stepkeeper.storage.retry import Patience

__all__ = ["Root", "Url", "open_root"]

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The root: a folder's path or file:///…, gs://bucket/prefix, …")
]
_METADATA: Final = ".metadata"
_COMMIT: Final = re.compile(r"(?P<root>.+)/(?P<step>[0-9]+)/[0-9]+-[0-9a-f]{32}")
_STEP: Final = re.compile(r"(?P<root>.+)/(?P<step>[0-9]+)")
_IN_STEP: Final = re.compile(r"[0-9]+-[0-9a-f]{32}/.+")
"""URIs of a checkpoint's and of a step's folder, and paths of objects below the latter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """The root that a command works on."""

    store: Store
    log: Log
    patience: Patience

    @property
    def uri(self) -> str:
        """URI of the root, without a trailing slash."""
        return self.store.uri.rstrip("/")

    def open_log(self) -> LogState:
        """Read the log. Raises BadUriError if there is no folder, or it is a checkpoint's, not a root's."""
        state = self.log.open()
        if state.tail < 0:
            self._check_no_checkpoint()
            if (lacking := self._lacking_folder()) is not None:
                raise BadUriError(
                    f"{lacking}: no such folder. A run creates it with its first save; to check a place before that, "
                    "create it"
                )
        return state

    @contextmanager
    def reading(self, record: CommitRecord) -> Iterator[None]:
        """Raise RestoreError in place of TornCheckpointError if a job deletes the commit while the block reads it."""
        try:
            yield
        except TornCheckpointError as error:
            if record.slot not in self.log.refresh().commits:
                text = f"step {record.step} (sequence {record.slot}) has just been deleted"
                raise RestoreError(text) from error
            raise

    def _lacking_folder(self) -> Path | None:
        """Return the folder if it doesn't exist: its path may be mistyped. In a bucket, any prefix may be new."""
        parts = urlsplit(self.uri)
        folder = Path(os.fsdecode(unquote_to_bytes(parts.path)))
        return folder if parts.scheme == "file" and not folder.is_dir() else None

    def _check_no_checkpoint(self) -> None:
        """Check that a root without a log isn't the folder of a checkpoint, or of a step's checkpoints."""
        named = _COMMIT.fullmatch(self.uri) or _STEP.fullmatch(self.uri)
        if self.patience.retry(lambda: self.store.list(_METADATA)):
            what = "one checkpoint"
        elif named and any(
            _IN_STEP.fullmatch(each.path) for each in self.patience.retry(lambda: self.store.list(""))
        ):
            what = f"the folder of the checkpoints of step {named['step']}"
        else:
            return
        todo = "stock torch.distributed.checkpoint reads it"
        if named:
            todo = f"its root is probably {named['root']}"
        raise BadUriError(f"{self.uri} is {what}, not a root, which has the log of a whole run: {todo}")


@contextmanager
def open_root(context: typer.Context, url: str) -> Iterator[Root]:
    """Open the root at `url`, a URI or a path. Its log isn't read yet. Raises BadUriError, StorageError."""
    patience: Patience = context.obj
    store = _store(url)
    try:
        yield Root(store=store, log=Log(store, patience=patience), patience=patience)
    finally:
        store.close()


def _store(url: str) -> Store:
    try:
        return open_store(root_uri(url))
    except StepkeeperError:
        raise
    except Exception as error:  # raised by a client before any request, for example without credentials
        raise StorageError(f"{url}: {error}") from error
