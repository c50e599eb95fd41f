"""Ranks of manager_trainer/waiting.py, which wait for what won't come, and the time in which a notice ends them."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from fork_server import ForkedProcess
from rank_talk import hear_rest

from stepkeeper.log import Log
from stepkeeper.storage import open_store

__all__ = ["GRACE_S", "SILENCE_S", "Ranks", "ends_in_time", "ends_within", "head_step"]

GRACE_S: Final = 5
SILENCE_S: Final = 2.0
"""What a notice leaves where nobody has said how long the grace period is; in a training 22 s, of 30."""

_END_S: Final = 5.0
"""What the end of the process may take then."""

_SLACK_S: Final = 1.5
"""A kernel that has other processes to run."""

_PYTHONS_END_S: Final = 30.0
"""The interpreter's own end, which frees all modules: a third of a second of a core, on a busy machine many more. Who
knows when it would be killed isn't there to see that time.
"""

Ranks = Callable[..., AbstractContextManager[list[ForkedProcess]]]
"""ranks(case, world_size, folder, **options): they run until the block ends."""


def ends_within(process: ForkedProcess, timeout_s: float) -> int:
    """Return the exit code of a process that ends within `timeout_s` seconds."""
    began_s = time.monotonic()
    code = process.wait(timeout_s)
    print(f"ended with {code} after {time.monotonic() - began_s:.1f} s")
    return code


def ends_in_time(
    process: ForkedProcess, told_s: float, options: Mapping[str, float], *, is_told: bool = True
) -> int:
    """Return the exit code of a process that is over before it would be killed, or gone where it knows when that is.

    Over is all that it has to do, and Python's functions at exit.

    Args:
        process: The process.
        told_s: When it was sent SIGTERM, by time.monotonic(), or another rank was.
        options: Those of the process.
        is_told: False if SIGTERM went to another rank, which has told this one: nobody kills it soon.

    """
    limit_s = options.get("grace_s", SILENCE_S + _END_S)
    code = process.wait(told_s + limit_s + _SLACK_S + _PYTHONS_END_S - time.monotonic())
    gone_s = time.monotonic() - told_s
    over_s = next((said["at_s"] - told_s for said in hear_rest(process) if said["event"] == "over"), gone_s)
    print(
        f"{code}: over {over_s:.1f} s and gone {gone_s:.1f} s after the notice, which leaves {limit_s:.1f} s"
    )
    assert (gone_s if is_told and "grace_s" in options else over_s) <= limit_s + _SLACK_S
    return code


def head_step(tmp_path: Path) -> int:
    """Return HEAD's step, of which every object is there."""
    head = Log(open_store((tmp_path / "root").as_uri())).open().latest
    assert head is not None
    return head.step
