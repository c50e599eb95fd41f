"""Listen to ranks that say what happens to them: a JSON object in a line of its own, with the name of its event."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from fork_server import ForkedProcess

GRACE_S: Final = 5
SILENCE_S: Final = 2.0
"""What a notice leaves where it isn't known how long the grace period is; in a training 22 s, of 30."""

_BUSY_S: Final = 30.0
"""Seconds for the end of the process, and for a machine that has others to run. What waits on does so for minutes."""

Ranks = Callable[..., AbstractContextManager[list[ForkedProcess]]]
"""ranks(case, world_size, folder, **options): they run until the block ends."""


@contextmanager
def ended_at_last(processes: Sequence[ForkedProcess]) -> Iterator[Sequence[ForkedProcess]]:
    """Kill whatever of `processes` still runs when the block ends. If that fails, print what else they have said."""
    has_failed = True
    try:
        yield processes
        has_failed = False
    finally:
        for rank, process in enumerate(processes):
            ended = process.poll()
            process.kill()
            said, _ = process.communicate()
            if has_failed:
                how = "still ran" if ended is None else f"had ended with {ended}"
                print(f"process {rank} {how}, and has said since it was heard:\n{said[-2000:]}")


def hear(process: ForkedProcess, event: str, at_least: int = 0) -> dict[str, Any]:
    """Wait until `process` says `event`, at that step or a later one if it names a step."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):  # Gloo says hello on stdout.
            said: dict[str, Any] = json.loads(line)
            if said["event"] == event and said.get("step", at_least) >= at_least:
                return said
    raise AssertionError(f"a rank ended with {process.wait()} before it said {event!r}")


def hear_rest(process: ForkedProcess) -> list[dict[str, Any]]:
    """Wait until `process` ends, and return what else it has said."""
    out, _ = process.communicate(timeout=200)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def all_end_in_time(
    processes: Sequence[ForkedProcess], told_s: float, options: Mapping[str, float]
) -> list[int]:
    """Return the exit codes of processes with these options that were sent SIGTERM at `told_s` (time.monotonic())."""
    ends_s = told_s + options.get("grace_s", SILENCE_S) + _BUSY_S
    return [process.wait(max(0.0, ends_s - time.monotonic())) for process in processes]
