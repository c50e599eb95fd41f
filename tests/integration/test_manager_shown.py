"""What a pod's log shows of checkpoints where the training says nothing about logging, and where it does."""

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from fork_server import ForkServer

from stepkeeper.contract import Identity, Interval, Settings
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.pod import pod_identity

TRAINER = Path(__file__).parent / "manager_trainer" / "shown.py"


def run(
    server: ForkServer, folder: Path, *, configured: str = "no", slow: bool = False, code: int = 0
) -> str:
    settings = Settings(uri=(folder / "root").as_uri(), interval=Interval(steps=1))
    (folder / "settings.json").write_bytes(settings.to_json())
    identity = pod_identity()
    env = {Identity.variable(each.name): str(getattr(identity, each.name)) for each in fields(identity)}
    done = server.run(
        [TRAINER, folder, configured, "slow" if slow else "fast"], env={**os.environ, **env}, timeout=250
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def test_a_pod_shows_a_line_for_each_save_restore_and_notice(
    torch_server: ForkServer, tmp_path: Path
) -> None:
    said = run(torch_server, tmp_path)
    assert re.search(
        r"INFO stepkeeper \(rank 0, start 0\.0\): nothing to restore: file://\S+/root holds no", said
    )
    assert (
        len(re.findall(r"INFO stepkeeper \(.*\): step 1 is committed as 1 \(24\.\d MiB\) after", said)) == 1
    )

    said = run(torch_server, tmp_path, slow=True, code=75)
    assert re.search(r"INFO .*: restoring step 1: .* of 24\.\d MiB after \d+ s, .*/s\n", said)
    assert len(re.findall(r"INFO .*: step 1 is restored from file://\S+/root after \d+\.\d s\n", said)) == 1
    assert len(re.findall(r"WARNING .*: notice \(call\): all ranks save one step and stop\n", said)) == 1


@pytest.mark.smoke
def test_a_pod_shows_that_it_was_fenced(torch_server: ForkServer, tmp_path: Path) -> None:
    run(torch_server, tmp_path)
    root = SmallRoot((tmp_path / "root").as_uri())
    root.log.begin(pod_identity(restart_attempt=1), host="host-7")
    said = run(torch_server, tmp_path, code=77)
    assert (
        len(re.findall(r"ERROR stepkeeper \(.*\): fenced, nothing more is saved here: .*host-7", said)) == 1
    )


@pytest.mark.parametrize("configured", ["before", "after"])
def test_a_training_that_configures_logging_decides(
    torch_server: ForkServer, tmp_path: Path, configured: str
) -> None:
    said = run(torch_server, tmp_path, configured=configured)
    assert "stepkeeper (rank" not in said
    assert said.count("own step 1 is committed") == (1 if configured == "after" else 0)
