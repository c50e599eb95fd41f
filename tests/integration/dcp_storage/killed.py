"""Saves in forked children that are killed before and after each single storage operation: what is left?"""

import os
import signal
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper.dcp import StorageReader, StorageWriter, folder
from stepkeeper.errors import RestoreError
from stepkeeper.storage import open_store

_OPERATIONS: Final = ("put_if_absent", "write", "read", "list", "delete")


class Mortal:
    """A store whose process is killed at its n-th operation: even numbers before it, odd ones after."""

    n_done = 0
    killed_at = -1

    def __init__(self, uri: str, **options: Any) -> None:
        self._store = open_store(uri, **options)
        self.uri, self.close = self._store.uri, self._store.close

    def __getattr__(self, name: str) -> Any:
        if name not in _OPERATIONS:
            raise AttributeError(name)
        return partial(self._done, getattr(self._store, name))

    def _done(self, operation: Any, *arguments: Any) -> Any:
        self._live()
        answer = operation(*arguments)
        self._live()
        return answer

    def _live(self) -> None:
        if Mortal.n_done == Mortal.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        Mortal.n_done += 1


def state(fill: float) -> dict[str, Any]:
    return {"w": torch.full((300, 10), fill), "n": int(fill)}


def killed_at(number: int, there: Path, fill: float) -> bool:
    """A save was killed at that place; False: it ended before."""
    child = os.fork()
    if child == 0:
        Mortal.killed_at = number
        with patch.object(folder, "open_store", Mortal):
            save(state(fill), storage_writer=StorageWriter(there))
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def found(there: Path) -> float | None:
    """Return which fill can be read, the same by us and by torch; None if none can."""
    try:
        StorageReader(there).read_metadata()
    except RestoreError:
        assert not (there / ".metadata").exists()
        return None
    fills: set[float] = set()
    for reader in (StorageReader(there), FileSystemReader(there)):
        loaded = state(0.0)
        load(loaded, storage_reader=reader)
        assert torch.equal(loaded["w"], torch.full((300, 10), float(loaded["n"])))
        fills.add(loaded["n"])
    assert len(fills) == 1
    return fills.pop()


def main(root: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for earlier in (None, 1.0):
        seen: Counter[float | None] = Counter()
        number, was_killed = 0, True
        while was_killed:
            there = root / f"{earlier}-{number}"
            if earlier:
                save(state(earlier), storage_writer=StorageWriter(there))
            was_killed = killed_at(number, there, 2.0)
            seen[found(there)] += 1
            # The next save finds its way, and leaves nothing of the killed one.
            save(state(3.0), storage_writer=StorageWriter(there))
            after = state(0.0)
            load(after, storage_reader=StorageReader(there))
            assert torch.equal(after["w"], torch.full((300, 10), 3.0))
            names = {path.name for path in there.iterdir() if not path.name.startswith(".tmp-")}
            assert len(names) == 3, names
            number += 1
        print(earlier, dict(seen))
        assert set(seen) == {earlier, 2.0, None}
        assert number > 10
        # Nothing can be read from after the old `.metadata` goes until after the new one is put. Between the two are
        # a deletion and a put of a manifest, each with a place before it and one behind.
        assert earlier is None or seen[None] == 6, seen


if __name__ == "__main__":
    main(Path(sys.argv[1]))
