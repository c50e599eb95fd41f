"""A training whose script spawns its processes itself: SIGTERM comes to the script alone, and all save one step."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from stepkeeper.contract import EveryInterval, ExitCode, Interval, Settings
from stepkeeper_testing.left_behind import head_of, last_word
from stepkeeper_testing.pod import pod_environ, pod_identity

SCRIPT = Path(__file__).parent / "launching" / "spawning.py"
PATIENCE_S = 150


def pod(folder: Path, root: Path) -> dict[str, str]:
    """Prepare the folder of a pod's own files, and return its environment."""
    folder.mkdir()
    settings = Settings(uri=root.as_uri(), interval=Interval(every=EveryInterval(steps=1000)))
    (folder / "settings.json").write_bytes(settings.to_json())
    return pod_environ(pod_identity(grace_s=60, termination_file=str(folder / "termination")))


def hear(process: subprocess.Popen[str], event: str) -> list[dict[str, object]]:
    """What both ranks say of that event."""
    assert process.stdout is not None
    said = (json.loads(line) for line in process.stdout if line.startswith("{"))
    return list(islice((each for each in said if each["event"] == event), 2))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("method", "starter"),
    [
        ("spawn", ["-m", "stepkeeper.launch", sys.executable]),
        ("fork", []),
        pytest.param("spawn", [], marks=pytest.mark.long),
        pytest.param("forkserver", ["-m", "stepkeeper.launch", sys.executable], marks=pytest.mark.long),
    ],
)
def test_processes_whose_parent_dies_of_sigterm_save_one_step(
    tmp_path: Path, method: str, starter: list[str]
) -> None:
    """torch.multiprocessing has SIGINT sent to them then."""
    folder = tmp_path / "pod"
    env = pod(folder, tmp_path / "root")
    process = subprocess.Popen(
        [sys.executable, *starter, str(SCRIPT), str(folder), method],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert len(hear(process, "runs")) == 2
        process.send_signal(signal.SIGTERM)
        stops = {said["step"] for said in hear(process, "stops")}
        # Its end of the pipe is closed when the last of them has ended.
        assert process.communicate(timeout=PATIENCE_S)
        assert process.returncode == (ExitCode.SAVED if starter else -signal.SIGTERM)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert stops == {head_of(tmp_path).step}
    word = last_word(folder)
    assert word.code == ExitCode.SAVED
    assert word.notice in {"sigterm", "peer"}, "both ranks are told, and either may leave the last word"
