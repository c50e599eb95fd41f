"""Ranks of manager_trainer/waiting.py, which wait for what won't come, and the time in which a notice ends them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Final

from fork_server import ForkedProcess
from processor_waits import ProcessorWaits
from rank_talk import hear_rest

__all__ = ["GRACE_S", "SILENCE_S", "Ranks", "all_end_in_time", "ends_in_time", "ends_within"]

GRACE_S: Final = 5
SILENCE_S: Final = 2.0
"""What a notice leaves where nobody has said how long the grace period is; in a training 22 s, of 30."""

_END_S: Final = 5.0
"""What the end of the process may take then."""

_SLACK_S: Final = 1.5
"""A kernel that has other processes to run."""

_BUSY_S: Final = 60.0
"""What other processes may take of a process's time until it is taken for one that doesn't end."""

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


def ends_in_time(process: ForkedProcess, told_s: float, options: Mapping[str, float]) -> int:
    """Return the exit code of a process that was sent SIGTERM, and ends as `all_end_in_time` says."""
    return all_end_in_time([process], told_s, options)[0]


def all_end_in_time(
    processes: Sequence[ForkedProcess], told_s: float, options: Mapping[str, float]
) -> list[int]:
    """Return the exit codes of processes that are over before they would be killed, or gone where they know when.

    Over is all that one has to do, and Python's functions at exit. Not counted is time in which it could have run and
    other processes had the processors.

    Args:
        processes: The processes.
        told_s: When they were sent SIGTERM, by time.monotonic().
        options: Theirs.

    """
    limit_s = options.get("grace_s", SILENCE_S + _END_S)
    with ExitStack() as stack:
        all_waits = [stack.enter_context(ProcessorWaits([process.pid])) for process in processes]
        ends = [(process.wait(_BUSY_S + limit_s + _PYTHONS_END_S), time.monotonic()) for process in processes]
    for process, waits, (code, gone_at_s) in zip(processes, all_waits, ends, strict=True):
        said = (each["at_s"] for each in hear_rest(process) if each["event"] == "over")
        over_at_s = next(said, gone_at_s)
        counts_at_s = gone_at_s if "grace_s" in options else over_at_s
        busy_s = waits.until_s(counts_at_s)
        print(
            f"{code}: over {over_at_s - told_s:.1f} s and gone {gone_at_s - told_s:.1f} s after the notice, "
            f"which leaves {limit_s:.1f} s; until then others had the processor for {busy_s:.1f} s"
        )
        assert counts_at_s - told_s - busy_s <= limit_s + _SLACK_S
    return [code for code, _ in ends]
