"""Listen to ranks that say what happens to them: a JSON object in a line of its own, with the name of its event."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fork_server import ForkedProcess

__all__ = ["ended_at_last", "hear", "hear_rest"]


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
