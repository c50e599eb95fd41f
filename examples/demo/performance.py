"""Run a demo: how it ends, and the check of its claims."""

import signal
import sys
from collections.abc import Callable, Sequence

from demo.director import DemoError
from demo.kubectl import Kubectl, KubectlError
from stepcluster.errors import ClusterError

__all__ = ["describe_attempts", "judge", "perform"]


def perform(play: Callable[[], int]) -> int:
    """Play, and return the exit code. A demo ends as by Ctrl-C in any case: nothing keeps running."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return play()
    except KeyboardInterrupt:
        print("interrupted; nothing is left running", file=sys.stderr)
        return 130
    except (ClusterError, DemoError, KubectlError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def judge(broken: Sequence[str], *, as_claimed: str) -> int:
    """Print the claims that the run does not support, or what it showed; return the exit code."""
    for line in broken:
        print(f"NOT AS CLAIMED: {line}", file=sys.stderr)
    if not broken:
        print(f"as claimed: {as_claimed}")
    return 1 if broken else 0


def describe_attempts(kubectl: Kubectl, job: str) -> str:
    """Return the attempts from the output of `kubectl describe`."""
    lines = kubectl.run("describe", "ctj", job).splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip() == "Attempts:"), len(lines))
    depth = len(lines[start]) - len(lines[start].lstrip()) if start < len(lines) else 0
    end = start + 1
    while end < len(lines) and len(lines[end]) - len(lines[end].lstrip()) > depth:
        end += 1
    return "\n".join(lines[start:end])
