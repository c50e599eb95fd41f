"""Python imports this when an interpreter starts that has this folder on its path: a companion, in these tests.

It waits for a store no longer than a second or two; the shipped one does for minutes.
"""

import sys

if sys.orig_argv[1:4] == ["-P", "-m", "stepkeeper.companion"]:
    from stepkeeper.storage import retry

    retry.DEFAULT_PATIENCE = retry.Patience(total_s=0.4)  # type: ignore[misc]  # this is a test
