"""A trainer's end of a companion, with a real companion process."""

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.companion import client, supervisor
from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import Kind, OpenRequest
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive
from stepkeeper.errors import CompanionError, CompanionLostError


def refuse(_: Directive) -> None:
    raise ValueError("no file behind sys.stderr")


def test_a_directive_that_is_not_followed_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    process = CompanionProcess(refuse)
    process._take({"directive": {"dump_stacks": True}})
    assert "was not followed" in caplog.text
    with pytest.raises(CompanionError, match="before anything was opened"):
        process.send_request(Kind.CLOSE, {})
    process.close()


def test_what_cannot_be_understood_ends_the_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(_: CompanionProcess, message: dict[str, Any]) -> None:
        raise KeyError(message["id"])

    monkeypatch.setattr(client.CompanionProcess, "_take", take)
    process = CompanionProcess(refuse)
    with pytest.raises(CompanionLostError):
        process.send_request(Kind.CLOSE, {}, timeout_s=30)
    assert process.lost
    process.close()


def test_a_full_socket_does_not_outlast_the_time_for_an_answer() -> None:
    process = CompanionProcess(refuse)
    os.kill(process.pid, signal.SIGSTOP)
    for _ in range(1000):
        process.send_state(Kind.STATE, {"error": "x" * 10_000})
    with pytest.raises(CompanionLostError, match="did not answer"):
        process.send_request(Kind.CLOSE, {}, timeout_s=0.2)
    process.close()


def test_a_companion_that_cannot_open_its_root_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[CompanionProcess] = []

    def start(*args: Any) -> CompanionProcess:
        started.append(CompanionProcess(*args))
        return started[-1]

    monkeypatch.setattr(supervisor, "CompanionProcess", start)
    opening = OpenRequest(uri="nothing://here", rank=0, world_size=1)
    companion = Companion(opening, refuse)
    with pytest.raises(ValueError, match="nothing"):
        companion.ensure_process()
    (process,) = started
    assert process._process.poll() is not None
    assert companion.pid is None
    companion.close(5.0)


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
    assert process._process.returncode == 0
    assert process._channel._socket.fileno() == -1
