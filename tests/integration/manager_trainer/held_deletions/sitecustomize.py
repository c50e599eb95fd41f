"""Found by companions on their path: what they delete of a root waits while the file that is named there is."""

import os
import sys
import time
from functools import wraps
from pathlib import Path


def _hold(file: Path) -> None:
    from stepkeeper.storage.posix import PosixStore

    delete = PosixStore.delete

    @wraps(delete)
    def held(store: PosixStore, path: str) -> None:
        while path.endswith(".distcp") and file.exists():
            time.sleep(0.005)
        delete(store, path)

    PosixStore.delete = held  # type: ignore[assignment, method-assign]  # that is the point


if "STEPKEEPER_TEST_HOLD" in os.environ and "stepkeeper.companion" in sys.orig_argv:
    _hold(Path(os.environ["STEPKEEPER_TEST_HOLD"]))
