"""Trainers as processes of their own, with real signals: what becomes of them, of what they saved, and of their log."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkedProcess, ForkServer
from rank_talk import hear

from stepkeeper.contract import (
    CommitPoint,
    EndKind,
    EveryInterval,
    ExitCode,
    Identity,
    Interval,
    OnDisruption,
    Settings,
    Termination,
)
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.left_behind import head_of, last_word
from stepkeeper_testing.pod import pod_environ, pod_identity

TRAINER = Path(__file__).parent / "manager_trainer" / "trainer.py"

StartTrainer = Callable[..., AbstractContextManager[ForkedProcess]]
"""trainer(uri, n_steps, env, **options): it runs as long as one is in it, if it does not end before."""


@pytest.fixture
def trainer(torch_server: ForkServer, tmp_path: Path) -> StartTrainer:
    @contextmanager
    def trainer(
        uri: str, n_steps: int, env: dict[str, str] | None = None, **options: Any
    ) -> Iterator[ForkedProcess]:
        command = [TRAINER, uri, n_steps, json.dumps(options)]
        with (tmp_path / "stderr").open("w") as errors:
            process = torch_server.start(
                command, env=os.environ | (env or {}), stdout=subprocess.PIPE, stderr=errors
            )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    return trainer


def end(process: ForkedProcess) -> int:
    process.communicate(timeout=60)
    return process.wait()


def pod(
    folder: Path, uri: str, *, steps: int = 5, on_disruption: OnDisruption = OnDisruption.SAVE
) -> dict[str, str]:
    """Make a folder that holds what a pod has mounted, and return its environment."""
    folder.mkdir()
    settings = Settings(
        uri=uri, interval=Interval(every=EveryInterval(steps=steps)), on_disruption=on_disruption
    )
    (folder / "settings.json").write_bytes(settings.to_json())
    return pod_environ(pod_identity())


def gone(pid: int, timeout_s: float = 60.0) -> bool:
    """A zombie, which nobody in this container may reap, is as gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.smoke
def test_sigterm_saves_the_step_and_ends_with_75(tmp_path: Path, uri: str, trainer: StartTrainer) -> None:
    env = pod(tmp_path / "pod", uri, steps=1000)
    with trainer(uri, 100_000, env, pod=str(tmp_path / "pod"), pause_s=0.01, worker=True) as first:
        assert hear(first, "worker")["code"] == -signal.SIGTERM
        assert not hear(first, "step", 20)["stop"], "a terminated worker is no notice to its parent"
        first.send_signal(signal.SIGTERM)
        stopped = next(said for said in iter(lambda: hear(first, "step"), None) if said["stop"])
        assert end(first) == ExitCode.SAVED
        assert gone(stopped["pid"])
    head = head_of(tmp_path)
    assert head.step == stopped["step"]
    assert last_word(tmp_path / "pod") == Termination(
        code=ExitCode.SAVED,
        step=stopped["step"],
        root=Log(open_store(uri)).open().root,
        committed=CommitPoint(sequence=head.slot, step=head.step),
        claim=0,
        notice="sigterm",
        agreed_step=stopped["step"],
        kind=EndKind.SAVED,
        rank=0,
    )
    with trainer(uri, head.step + 1, env, pod=str(tmp_path / "pod")) as second:
        start = hear(second, "start")
        assert (start["step"], start["position"]) == (head.step, head.step * 7)
        assert end(second) == ExitCode.DONE
    word = last_word(tmp_path / "pod")
    assert (word.code, word.restored) == (ExitCode.DONE, CommitPoint(sequence=head.slot, step=head.step))
    assert word.committed is not None
    assert word.committed.step == head.step + 1


@pytest.mark.smoke
def test_the_notice_file_stops_and_skip_saves_nothing(
    tmp_path: Path, uri: str, trainer: StartTrainer
) -> None:
    env = pod(tmp_path / "pod", uri, on_disruption=OnDisruption.SKIP)
    with trainer(uri, 100_000, env, pod=str(tmp_path / "pod"), pause_s=0.01, wait=True) as first:
        hear(first, "committed", 5)
        (tmp_path / "pod" / "notice").touch()
        assert end(first) == ExitCode.SAVED
    word, head = last_word(tmp_path / "pod"), head_of(tmp_path)
    assert (word.notice, word.committed) == ("file", CommitPoint(sequence=head.slot, step=head.step))
    assert head.step % 5 == 0


@pytest.mark.smoke
@pytest.mark.parametrize("owner", ["earlier start", "other job"])
def test_a_trainer_that_is_fenced_ends_with_77(
    tmp_path: Path, uri: str, trainer: StartTrainer, owner: str
) -> None:
    env = pod(tmp_path / "pod", uri)
    change = {"restart_attempt": "4"} if owner == "earlier start" else {"job": "other", "job_uid": "uid-2"}
    later = env | {Identity.variable(field): value for field, value in change.items()}
    with trainer(uri, 100_000, later, pod=str(tmp_path / "pod"), pause_s=0.01) as first:
        hear(first, "step", 6)
        first.kill()
    tail = Log(open_store(uri)).open().tail
    with trainer(uri, 100, env, pod=str(tmp_path / "pod")) as fenced:
        assert end(fenced) == ExitCode.FENCED
    word = last_word(tmp_path / "pod")
    assert word.code == ExitCode.FENCED
    assert "default/" in (word.error or "")
    assert Log(open_store(uri)).open().tail == tail, "nothing was appended"


def test_a_later_claim_stops_a_trainer_that_still_runs(uri: str, trainer: StartTrainer) -> None:
    with trainer(uri, 100_000, interval=5, pause_s=0.01) as first:
        hear(first, "step", 6)
        with trainer(uri, 0, interval=5) as second:
            assert end(second) == ExitCode.DONE
        assert end(first) == ExitCode.FENCED


def shown(trainer: StartTrainer, folder: Path, uri: str, n_steps: int, code: ExitCode, **options: Any) -> str:
    """Return what a pod's log shows of a trainer that saves each step, which has ended with that code."""
    env = pod_environ(pod_identity()) if (folder / "pod").exists() else pod(folder / "pod", uri, steps=1)
    with trainer(uri, n_steps, env, pod=str(folder / "pod"), wait=True, **options) as process:
        assert end(process) == code
    return (folder / "stderr").read_text()


@pytest.mark.smoke
def test_a_pod_shows_a_line_for_each_save_restore_notice_and_fence(
    tmp_path: Path, uri: str, trainer: StartTrainer
) -> None:
    said = shown(trainer, tmp_path, uri, 1, ExitCode.DONE)
    assert re.search(
        r"INFO stepkeeper \(rank 0, start 0\.0\): nothing to restore: file://\S+/root holds no", said
    )
    assert len(re.findall(r"INFO stepkeeper \(.*\): step 1 is committed as 1 \(.* KiB\) after", said)) == 1
    said = shown(trainer, tmp_path, uri, 9, ExitCode.SAVED, asks_at=2)
    assert len(re.findall(r"INFO .*: step 1 is restored from file://\S+/root after \d+\.\d s\n", said)) == 1
    assert len(re.findall(r"WARNING .*: notice \(call\): all ranks save one step and stop\n", said)) == 1
    SmallRoot(uri).log.begin(pod_identity(restart_attempt=1), host="host-7")
    said = shown(trainer, tmp_path, uri, 9, ExitCode.FENCED)
    assert (
        len(re.findall(r"ERROR stepkeeper \(.*\): fenced, nothing more is saved here: .*host-7", said)) == 1
    )


@pytest.mark.parametrize("configured", ["before", "after"])
def test_a_training_that_configures_logging_decides(
    tmp_path: Path, uri: str, trainer: StartTrainer, configured: str
) -> None:
    said = shown(trainer, tmp_path, uri, 1, ExitCode.DONE, logging=configured)
    assert "stepkeeper (rank" not in said
    assert said.count("own step 1 is committed") == (1 if configured == "after" else 0)


def test_a_companion_is_gone_with_its_trainer_though_a_forked_child_has_its_socket() -> None:
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "companion_process" / "forked.py")],
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        said = json.loads(trainer.stdout.readline())
        try:
            assert not gone(said["companion"], 0.3)
            trainer.kill()
            trainer.wait()
            assert gone(said["companion"], 60)
            assert not gone(said["child"], 0.1), "it still has the socket"
        finally:
            trainer.kill()
            os.kill(said["child"], signal.SIGKILL)
