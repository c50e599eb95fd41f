"""Trainers as processes of their own, with real signals: what becomes of them, and of what they saved."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkedProcess, ForkServer

from stepkeeper.contract import (
    CommitPoint,
    ExitCode,
    Identity,
    Interval,
    OnDisruption,
    Settings,
    Termination,
)
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.pod import pod_environ, pod_identity

TRAINER = Path(__file__).parent / "manager_trainer" / "trainer.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    process: ForkedProcess

    def hear(self, event: str, *, at_least: int = 0) -> dict[str, Any]:
        """The next line of that event (from that step on)."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["event"] == event and said.get("step", 0) >= at_least:
                return said
        raise AssertionError(f"the trainer ended with {self.process.wait()} before it said {event!r}")

    def end(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.wait()


StartTrainer = Callable[..., AbstractContextManager[Trainer]]
"""trainer(uri, n_steps, env, **options): it runs as long as one is in it, if it does not end before."""


@pytest.fixture
def trainer(torch_server: ForkServer) -> StartTrainer:
    @contextmanager
    def trainer(
        uri: str, n_steps: int, env: dict[str, str] | None = None, **options: Any
    ) -> Iterator[Trainer]:
        command = [TRAINER, uri, n_steps, json.dumps(options)]
        process = torch_server.start(command, env=os.environ | (env or {}), stdout=subprocess.PIPE)
        try:
            yield Trainer(process=process)
        finally:
            process.kill()
            process.communicate()

    return trainer


def pod(
    folder: Path, uri: str, *, interval_steps: int = 5, on_disruption: OnDisruption = OnDisruption.SAVE
) -> dict[str, str]:
    """The folder holds what a pod has mounted; the answer is its environment."""
    folder.mkdir()
    settings = Settings(uri=uri, interval=Interval(steps=interval_steps), on_disruption=on_disruption)
    (folder / "settings.json").write_bytes(settings.to_json())
    identity = pod_identity()
    return pod_environ(identity)


def last_word(folder: Path) -> Termination:
    return Termination.from_json((folder / "termination").read_bytes())


def gone(pid: int, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.smoke
def test_sigterm_saves_the_step_and_ends_with_75(tmp_path: Path, trainer: StartTrainer) -> None:
    uri = (tmp_path / "root").as_uri()
    env = pod(tmp_path / "pod", uri, interval_steps=1000)
    with trainer(uri, 100_000, env, pod=str(tmp_path / "pod"), pause_s=0.01, worker=True) as first:
        assert first.hear("worker")["code"] == -signal.SIGTERM
        assert not first.hear("step", at_least=20)["stop"], "a terminated worker is no notice to its parent"
        first.process.send_signal(signal.SIGTERM)
        stopped = next(said for said in iter(lambda: first.hear("step"), None) if said["stop"])
        assert first.end() == ExitCode.SAVED
        assert gone(stopped["pid"])

    head = Log(open_store(uri)).open().latest
    assert head is not None
    assert head.step == stopped["step"]
    assert last_word(tmp_path / "pod") == Termination(
        code=ExitCode.SAVED,
        step=stopped["step"],
        root=Log(open_store(uri)).open().root,
        committed=CommitPoint(sequence=head.slot, step=head.step),
        claim=0,
        notice="sigterm",
        agreed=True,
        rank=0,
    )
    with trainer(uri, head.step + 1, env, pod=str(tmp_path / "pod")) as second:
        assert second.hear("start") | {"w": 0} == {
            "event": "start",
            "step": head.step,
            "w": 0,
            "position": head.step * 7,
        }
        assert second.end() == ExitCode.DONE
    word = last_word(tmp_path / "pod")
    assert (word.code, word.restored) == (ExitCode.DONE, CommitPoint(sequence=head.slot, step=head.step))
    assert word.committed is not None
    assert word.committed.step == head.step + 1


@pytest.mark.smoke
def test_the_notice_file_stops_and_skip_saves_nothing(tmp_path: Path, trainer: StartTrainer) -> None:
    uri = (tmp_path / "root").as_uri()
    env = pod(tmp_path / "pod", uri, on_disruption=OnDisruption.SKIP)
    with trainer(uri, 100_000, env, pod=str(tmp_path / "pod"), pause_s=0.01, wait=True) as first:
        first.hear("committed", at_least=5)
        (tmp_path / "pod" / "notice").touch()
        assert first.end() == ExitCode.SAVED
    word = last_word(tmp_path / "pod")
    head = Log(open_store(uri)).open().latest
    assert head is not None
    assert (word.notice, word.committed) == ("file", CommitPoint(sequence=head.slot, step=head.step))
    assert head.step % 5 == 0


@pytest.mark.smoke
def test_a_killed_trainer_takes_its_companion_along_and_the_next_resumes(
    tmp_path: Path, trainer: StartTrainer
) -> None:
    uri = (tmp_path / "root").as_uri()
    with trainer(uri, 100_000, interval=3, pause_s=0.002) as first:
        pid = first.hear("step", at_least=100)["pid"]
        first.process.kill()
        assert gone(pid)
    head = Log(open_store(uri)).open().latest
    assert head is not None
    with trainer(uri, head.step + 3, interval=3, wait=True) as second:
        assert second.hear("start")["step"] == head.step
        assert second.hear("committed")["step"] == head.step + 3
        assert second.end() == ExitCode.DONE


@pytest.mark.parametrize("told_at_end", [False, True])
def test_an_exception_is_the_last_word(tmp_path: Path, trainer: StartTrainer, told_at_end: bool) -> None:
    uri = (tmp_path / "root").as_uri()
    env = pod(tmp_path / "pod", uri)
    options = {"raise_at": 7, "told_at_end": told_at_end}
    with trainer(uri, 100, env, pod=str(tmp_path / "pod"), **options) as failing:
        assert failing.end() == 1
    word = last_word(tmp_path / "pod")
    assert (word.code, word.step, word.notice) == (1, 6, None)
    assert word.error is not None
    assert word.error.rstrip().endswith("ValueError: the loss is no number")
    head = Log(open_store(uri)).open().latest
    assert head is not None
    assert head.step == 5, "the save that was in flight was finished"
    assert word.committed == CommitPoint(sequence=head.slot, step=5)


@pytest.mark.smoke
@pytest.mark.parametrize("owner", ["earlier start", "other job"])
def test_a_trainer_that_is_fenced_ends_with_77(tmp_path: Path, trainer: StartTrainer, owner: str) -> None:
    uri = (tmp_path / "root").as_uri()
    env = pod(tmp_path / "pod", uri)
    change = {"restart_attempt": "4"} if owner == "earlier start" else {"job": "other", "job_uid": "uid-2"}
    later = env | {Identity.variable(field): value for field, value in change.items()}
    with trainer(uri, 100_000, later, pod=str(tmp_path / "pod"), pause_s=0.01) as first:
        first.hear("step", at_least=6)
        first.process.kill()
    tail = Log(open_store(uri)).open().tail
    with trainer(uri, 100, env, pod=str(tmp_path / "pod")) as fenced:
        assert fenced.end() == ExitCode.FENCED
    word = last_word(tmp_path / "pod")
    assert word.code == ExitCode.FENCED
    assert word.error is not None
    assert "default/" in word.error
    assert Log(open_store(uri)).open().tail == tail, "nothing was appended"


def test_a_later_claim_stops_a_trainer_that_still_runs(tmp_path: Path, trainer: StartTrainer) -> None:
    uri = (tmp_path / "root").as_uri()
    with trainer(uri, 100_000, interval=5, pause_s=0.01) as first:
        first.hear("step", at_least=6)
        with trainer(uri, 0, interval=5) as second:
            assert second.end() == ExitCode.DONE
        assert first.end() == ExitCode.FENCED
