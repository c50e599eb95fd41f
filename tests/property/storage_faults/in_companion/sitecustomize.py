"""Python imports this when an interpreter starts that has this folder on its path: a companion, in these tests.

It waits for a store no longer than a second or two; the shipped one does for minutes.
"""

import os
import sys

if sys.orig_argv[1:4] == ["-P", "-m", "stepkeeper.companion"]:
    from stepkeeper.storage import retry

    retry.DEFAULT_PATIENCE = retry.Patience(total_s=0.4)  # type: ignore[misc]  # this is a test
    if "STORAGE_EMULATOR_HOST" in os.environ:
        from stepkeeper.storage import gcs_upload

        gcs_upload.CALL_TIMEOUT_S = (0.7, 0.7)  # type: ignore[misc]  # this is a test
        from stepkeeper.storage.gcs import GcsStore

        assert GcsStore.__init__.__kwdefaults__ is not None
        GcsStore.__init__.__kwdefaults__["retry_s"] = 0.2
