"""The processes of companions, and the packets between them and their trainers."""

import errno
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stepkeeper.companion import channel, client, supervisor
from stepkeeper.companion.channel import Channel, Outbox
from stepkeeper.companion.client import CompanionProcess
from stepkeeper.companion.messages import Kind, OpenRequest
from stepkeeper.companion.processes import ChildProcess, ParentProcess, start_process
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive
from stepkeeper.errors import CompanionLostError


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


def test_a_parent_has_ended_once_another_process_is_the_parent(has_pidfd: bool) -> None:
    assert not ParentProcess(os.getppid()).has_ended()
    assert ParentProcess(os.getpid()).has_ended(), "it was reaped, and its pid is another's: this one's"
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert ParentProcess(gone.pid).has_ended()


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("size", [10, 40_000, 5_000_000])
def test_a_message_of_any_size_arrives_whole_with_its_descriptors(
    ends: tuple[Channel, Channel], size: int
) -> None:
    left, right = ends
    fd = os.memfd_create("test")
    os.write(fd, b"shared")
    left.send({"text": "x" * size, "n": [1, None]}, [fd])
    os.close(fd)
    packet = right.receive()
    assert packet is not None
    assert packet.message == {"text": "x" * size, "n": [1, None]}
    (received,) = packet.fds
    assert os.pread(received, 10, 0) == b"shared"
    os.close(received)
    left.close()
    assert right.receive() is None


class Ended:
    """A process that has ended, by a descriptor or without."""

    def __init__(self, end_fd: int | None = None) -> None:
        self.end_fd = end_fd

    def has_ended(self) -> bool:
        return True


def test_nothing_is_waited_for_from_a_process_that_has_ended_whoever_holds_the_other_end(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_LOOK_AGAIN_MILLIS", 1)
    left, right = ends
    told, tells = os.pipe()
    os.close(tells)
    assert left.receive(Ended()) is None
    assert left.receive(Ended(told)) is None
    os.close(told)
    right.send({"n": 1})
    packet = left.receive(Ended())
    assert packet is not None, "what it has sent before is received"
    assert packet.message == {"n": 1}
    assert left.receive(Ended()) is None


def fill(channel: Channel) -> int:
    """Fill the socket, and return the number of messages that it holds."""
    for number in itertools.count():
        try:
            channel.send({"filler": number}, timeout_s=0.0)
        except TimeoutError:
            return number
    raise AssertionError


def test_messages_that_have_to_arrive_are_kept_while_the_trainer_takes_none(
    ends: tuple[Channel, Channel],
) -> None:
    companion, trainer = ends
    outbox = Outbox(companion)
    n_fillers = fill(companion)
    outbox.offer({"directive": {}})
    for number in range(3):
        outbox.send({"id": number, "body": {}})
    packets = [trainer.receive() for _ in range(n_fillers + 3)]
    messages = [packet.message for packet in packets if packet is not None]
    assert messages[n_fillers:] == [{"id": number, "body": {}} for number in range(3)]
    outbox.offer({"directive": {}})
    last = trainer.receive()
    assert last is not None
    assert last.message == {"directive": {}}, "a directive is lost only while there is no room for it"


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
    assert "did not end" in caplog.text
    process.close()
    assert process._process.has_ended()


def test_a_failed_early_start_is_raised_by_the_call_that_needs_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_start(on_directive: object) -> CompanionProcess:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(supervisor, "CompanionProcess", refuse_start)
    unhandled: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    companion = Companion(OpenRequest(uri=tmp_path.as_uri(), rank=0, world_size=1), refuse)
    companion.start_early()
    for thread in threading.enumerate():
        if thread.name == "companion-start":
            thread.join()
    assert not unhandled
    with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)):
        companion.ensure_process()


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


def test_a_process_that_somebody_else_has_reaped_has_ended_with_an_unknown_code(has_pidfd: bool) -> None:
    child = started("")
    os.waitpid(child.pid, 0)
    assert child.has_ended()
    assert child.code is None
    child.kill()
