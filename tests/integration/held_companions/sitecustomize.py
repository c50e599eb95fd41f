"""Found by companions on their path: what they write of data to a root, or delete, waits while a file is there."""

import os
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any


def _hold(method: str, file: Path) -> None:
    from stepkeeper.storage.posix import PosixStore

    call = getattr(PosixStore, method)

    @wraps(call)
    def held(store: PosixStore, path: str, *arguments: Any) -> None:
        while path.endswith(".distcp") and file.exists():
            time.sleep(0.005)
        call(store, path, *arguments)

    setattr(PosixStore, method, held)


if "STEPKEEPER_TEST_HOLD" in os.environ and "stepkeeper.companion" in sys.orig_argv:
    _hold(os.environ["STEPKEEPER_TEST_HOLD"], Path(os.environ["STEPKEEPER_TEST_HOLD_FILE"]))
