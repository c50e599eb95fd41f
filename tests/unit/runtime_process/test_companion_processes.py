"""Processes that the trainer starts, watched by descriptor, and without one where a sandbox lacks the call."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.companion.processes import ChildProcess, ParentProcess, start_process


@pytest.fixture(params=[True, False], ids=["with pidfd_open", "without pidfd_open"])
def has_pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if not request.param:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    return bool(request.param)


def started(script: str) -> ChildProcess:
    with Path(os.devnull).open("rb") as end:
        return start_process([sys.executable, "-c", script], dict(os.environ), end.fileno(), 3)


def test_a_process_that_ends_is_reaped_and_its_code_known(has_pidfd: bool) -> None:
    child = started("raise SystemExit(7)")
    assert (child.end_fd is not None) == has_pidfd
    assert child.wait(60)
    assert child.code == 7
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, 0)
    child.kill()


def test_a_process_that_somebody_else_has_reaped_has_ended_with_an_unknown_code(has_pidfd: bool) -> None:
    child = started("")
    os.waitpid(child.pid, 0)
    assert child.has_ended()
    assert child.code is None
    child.kill()


def test_a_process_starts_with_its_end_only_and_stop_signals_blocked() -> None:
    script = (
        "import os, signal, sys\n"
        "stops = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}\n"
        "sys.exit(stops != signal.pthread_sigmask(signal.SIG_BLOCK, [])"
        " or os.getpgrp() != os.getpid() or not os.path.samestat(os.fstat(0), os.fstat(3)))\n"
    )
    child = started(script)
    assert child.wait(60)
    assert child.code == 0


def test_a_forked_copy_leaves_the_process_alone() -> None:
    child = started("import time; time.sleep(600)")
    pid = os.fork()
    if pid == 0:
        child.forget_after_fork()
        child.kill()
        os._exit(0 if child.end_fd is None and child.has_ended() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert not child.has_ended()
    child.kill()
    assert child.wait(60)


def test_a_parent_has_ended_once_another_process_is_the_parent(has_pidfd: bool) -> None:
    assert not ParentProcess(os.getppid()).has_ended()
    assert ParentProcess(os.getpid()).has_ended(), "it was reaped, and its pid is another's: this one's"
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert ParentProcess(gone.pid).has_ended()


_CLOSING = """
import os
import sys

from stepkeeper.companion.__main__ import close_inherited

own = open(sys.argv[1], "w")
_, inherited = os.pipe()
os.set_inheritable(inherited, True)
close_inherited(-1)
own.write("still open")
own.close()
try:
    os.fstat(inherited)
except OSError:
    print("closed")
"""


def test_a_companion_closes_what_it_has_inherited_and_nothing_that_its_interpreter_opened(
    tmp_path: Path,
) -> None:
    opened = tmp_path / "opened"
    told = subprocess.run(
        [sys.executable, "-c", _CLOSING, str(opened)], check=True, capture_output=True, text=True
    )
    assert told.stdout == "closed\n"
    assert opened.read_text(encoding="utf-8") == "still open"
