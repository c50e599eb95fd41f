"""Found by companions on their path: while the file that is named there is, they write or delete no data of a root."""

import os
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any


def _hold(file: Path, operation: str) -> None:
    from stepkeeper.storage.posix import PosixStore

    call = getattr(PosixStore, operation)

    @wraps(call)
    def held(store: PosixStore, path: str, *args: Any) -> None:
        while path.endswith(".distcp") and file.exists():
            time.sleep(0.005)
        call(store, path, *args)

    setattr(PosixStore, operation, held)


if "STEPKEEPER_TEST_HOLD" in os.environ and "stepkeeper.companion" in sys.orig_argv:
    _hold(Path(os.environ["STEPKEEPER_TEST_HOLD"]), os.environ["STEPKEEPER_TEST_HELD"])
