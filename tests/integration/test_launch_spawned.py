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
from launched_pods import pods

from stepkeeper.contract import ExitCode
from stepkeeper_testing.left_behind import head_of, last_word

SCRIPT = Path(__file__).parent / "launching" / "spawning.py"
PATIENCE_S = 150


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
    ((folder, env),) = pods(tmp_path, 1)
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
