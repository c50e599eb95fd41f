"""Found by companions on their path: what they write of data to a root waits while a file is there."""

import os
import sys
import time
from pathlib import Path
from typing import Any


def _hold(file: Path) -> None:
    from stepkeeper.storage.posix import PosixStore

    write = PosixStore.write

    def held(store: PosixStore, path: str, *arguments: Any) -> None:
        while path.endswith(".distcp") and file.exists():
            time.sleep(0.005)
        write(store, path, *arguments)

    PosixStore.write = held  # type: ignore[assignment, method-assign]  # that is the point


if "STEPKEEPER_TEST_HOLD_FILE" in os.environ and "stepkeeper.companion" in sys.orig_argv:
    _hold(Path(os.environ["STEPKEEPER_TEST_HOLD_FILE"]))
