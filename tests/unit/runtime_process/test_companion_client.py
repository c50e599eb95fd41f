"""A trainer's end of a companion, with a real companion process."""

import ast
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import stepkeeper
import stepkeeper_planners
from stepkeeper.companion import client, supervisor
from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import Kind, OpenRequest
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive
from stepkeeper.errors import ClosedError, CompanionLostError


def refuse(_: Directive) -> None:
    raise ValueError("no file behind sys.stderr")


def test_the_end_of_the_work_after_a_commit_is_heard_whoever_comes_first() -> None:
    process = CompanionProcess(refuse)
    early = process.upkeep_of(3)
    assert not early.done()
    process._take({"upkept": 3})
    process._take({"upkept": 4})
    unfinished = process.upkeep_of(5)
    process.kill()
    assert early.exception(0) is None
    with pytest.raises(CompanionLostError, match="before it had verified its last commit and deleted old"):
        unfinished.result(60)
    assert process.upkeep_of(4).exception(0) is None, "it was done before"
    assert isinstance(process.upkeep_of(6).exception(0), CompanionLostError)
    process.close()


def test_a_full_socket_does_not_outlast_the_time_for_an_answer() -> None:
    process = CompanionProcess(refuse)
    os.kill(process.pid, signal.SIGSTOP)
    for _ in range(1000):
        process.send_state(Kind.STATE, {"error": "x" * 10_000})
    with pytest.raises(CompanionLostError, match="did not answer"):
        process.send_request(Kind.CLOSE, {}, timeout_s=0.2)
    process.close()


def test_nobody_waits_for_a_killed_companion_that_the_kernel_holds_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a system call of a hung NFS, which SIGKILL doesn't end."""
    monkeypatch.setattr(client, "_KILL_TIMEOUT_S", 0.01)
    monkeypatch.setattr(client, "_EXIT_TIMEOUT_S", 0.01)
    process = CompanionProcess(refuse)
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as held_up, ThreadPoolExecutor() as threads:
        held_up.setattr(process._process, "kill", lambda: None)
        answer = threads.submit(process.send_request, Kind.CLOSE, {}, timeout_s=60)
        while not process._pending:
            pass
        process.kill()
        with pytest.raises(CompanionLostError):
            answer.result(60)
        process.close(0.01)
    assert "has not ended" in caplog.text
    process.close()
    assert process._process.has_ended()


def test_of_a_companion_that_was_dropped_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    companion = Companion(OpenRequest(uri=tmp_path.as_uri(), rank=0, world_size=1), refuse)
    process = companion.ensure_process()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        process.dismiss()
    assert companion.claim_root().claim.slot == 0, "a forked child that drops its copy ends nothing"
    del companion
    gc.collect()
    process._reader.join(30)
    assert not process._reader.is_alive()
    assert process._process.code == 0
    assert process._channel._socket.fileno() == -1


def test_a_manager_closes_in_time_though_a_companion_never_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that starts it hangs, and ends what it has started once it goes on."""
    is_starting, may_start = threading.Event(), threading.Event()
    started: list[CompanionProcess] = []

    def start(*args: Any) -> CompanionProcess:
        is_starting.set()
        may_start.wait()
        started.append(CompanionProcess(*args))
        return started[-1]

    monkeypatch.setattr(supervisor, "CompanionProcess", start)
    companion = Companion(OpenRequest(uri=tmp_path.as_uri(), rank=0, world_size=1), refuse)
    with ThreadPoolExecutor() as threads:
        try:
            process = threads.submit(companion.ensure_process)
            is_starting.wait()
            closing = threads.submit(companion.close, 0.1)
            closing.result(60)
        finally:
            may_start.set()
        with pytest.raises(ClosedError, match="while it started"):
            process.result(60)
    assert "still being started" in caplog.text
    assert started[0]._process.has_ended()


def test_a_companion_finds_the_packages_wherever_the_trainer_found_them(tmp_path: Path) -> None:
    elsewhere = tmp_path / "planners"
    shutil.copytree(Path(stepkeeper_planners.__path__[0]), elsewhere / "stepkeeper_planners")
    script = (
        f"import sys; sys.path.insert(0, {str(elsewhere)!r})\n"
        "from stepkeeper.companion import processes\n"
        "print(processes._package_folders())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == [str(Path(stepkeeper.__path__[0]).parent), str(elsewhere)]
