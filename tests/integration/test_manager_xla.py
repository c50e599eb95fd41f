"""The manager on tensors that torch_xla shards over four devices, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SHARDED = Path(__file__).parent / "manager_trainer" / "sharded.py"


def run(action: str, uri: str) -> dict[str, Any]:
    env = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, str(SHARDED), action, uri],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_saves_disturb_nothing_and_a_restored_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    uri = (tmp_path / "root").as_uri()
    saved = run("save", uri)
    assert saved["same"], "random numbers and arithmetic are those of a training that never saves"
    assert saved["later_compilations"] == 0, "neither a step nor a snapshot is compiled again"
    restored = run("restore", uri)
    assert restored["step"] == 5
    assert restored["bits"] == saved["bits"]
    assert "devices=[2,2]" in restored["specs"][0]
