"""A process that takes part in a rehearsal: what it records, and when it is preempted."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from stepkeeper.contract import ATTEMPT_FOLDER_VARIABLE, Identity, Rehearsal, Settings
from stepkeeper.contract.settings import EveryInterval, Interval
from stepkeeper.contract.wire import encode_json
from stepkeeper.log.claims import owner_of
from stepkeeper.training.environment import Environment, PodPaths, read_environment
from stepkeeper.training.rehearsal import collect_progress
from stepkeeper_testing.pod import pod_environ, pod_identity


class Group:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


SETTINGS = Settings(uri="file:///root", interval=Interval(every=EveryInterval(steps=5)))


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that the process would have sent itself. Timers don't run."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(threading.Timer, "start", lambda _: None)
    return sent


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """As `stepkeeper run` makes it."""
    for name, value in pod_environ(pod_identity(job_uid="")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(ATTEMPT_FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "settings.json").write_bytes(SETTINGS.to_json())
    return read_environment()


def take_part(environment: Environment, rehearsal: Rehearsal, rank: int = 0, world_size: int = 1) -> None:
    """Finish five steps."""
    folder = environment.places.settings_folder
    (folder / "rehearsal.json").write_bytes(encode_json(rehearsal))
    progress = collect_progress(environment, Group(rank, world_size), lambda _: None)  # type: ignore[arg-type]
    for step in range(1, 6):
        losses = torch.tensor([0.1, 0.2])
        progress.record_step(step, {"loss": torch.tensor(0.1 * step), "losses": losses, "text": "x"})


def test_all_steps_are_recorded_with_all_bits(
    environment: Environment, tmp_path: Path, signals: list[int]
) -> None:
    take_part(environment, Rehearsal())
    lines = [json.loads(line) for line in (tmp_path / "metrics.0.jsonl").read_text().splitlines()]
    assert [step for step, _ in lines] == [1, 2, 3, 4, 5]
    assert lines[0][1] == {
        "loss": repr(torch.tensor(0.1).item()),
        "losses": repr(torch.tensor([0.1, 0.2]).tolist()),
        "text": "'x'",
    }
    assert signals == []


@pytest.mark.parametrize(("kills", "number"), [(False, signal.SIGTERM), (True, signal.SIGKILL)])
def test_the_chosen_rank_is_preempted_once(
    environment: Environment, tmp_path: Path, signals: list[int], kills: bool, number: int
) -> None:
    rehearsal = Rehearsal(step=3, kills=kills, rank=5)
    take_part(environment, rehearsal, rank=0, world_size=2)
    assert signals == []
    take_part(environment, rehearsal, rank=1, world_size=2)
    assert signals == [number]
    assert (tmp_path / "preempted").read_text() == "3"


def test_a_process_of_a_run_has_its_files_in_the_attempts_folder_and_no_name_in_the_log(
    environment: Environment, tmp_path: Path
) -> None:
    assert environment.settings == SETTINGS
    assert environment.places == PodPaths(
        settings_folder=tmp_path,
        notice_file=tmp_path / "notice",
        termination_file=Path(environment.identity.termination_file),
        token_file=tmp_path / "token",
        local_tier_folder=tmp_path,
        attempt_folder=tmp_path,
    )
    assert environment.local_tier is None
    assert owner_of(environment.identity) is None
    assert Identity.present(os.environ)
