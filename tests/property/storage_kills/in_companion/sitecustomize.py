"""Python imports this when an interpreter starts that has this folder on its path: a companion, in these tests."""

import sys

if sys.orig_argv[1:4] == ["-P", "-m", "stepkeeper.companion"]:
    from storage_kills.deadly import arm_companion

    arm_companion()
