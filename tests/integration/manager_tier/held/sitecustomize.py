"""Found by companions on their path: what they write of data to a root waits while the file that is named there is."""

import os
import sys
import time
from collections.abc import Sequence
from functools import wraps
from pathlib import Path


def _hold(file: Path) -> None:
    from stepkeeper.storage.base import Buffer
    from stepkeeper.storage.posix import PosixStore

    write = PosixStore.write

    @wraps(write)
    def held(store: PosixStore, path: str, parts: Sequence[Buffer]) -> None:
        while path.endswith(".distcp") and file.exists():
            time.sleep(0.005)
        write(store, path, parts)

    PosixStore.write = held  # type: ignore[assignment, method-assign]  # that is the point


if "STEPKEEPER_TEST_HOLD" in os.environ and "stepkeeper.companion" in sys.orig_argv:
    _hold(Path(os.environ["STEPKEEPER_TEST_HOLD"]))
