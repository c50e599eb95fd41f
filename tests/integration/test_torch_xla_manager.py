"""torch_xla's CheckpointManager and ours see the same; and the loop that its documentation shows runs as it stands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stepkeeper.log import Log
from stepkeeper.storage import open_store

SCRIPTS = Path(__file__).parent / "torch_xla_dropin"
THEIRS = "torch_xla.experimental.distributed_checkpoint"
XLA = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}


def started(script: str, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, SCRIPTS / script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def ended(process: "subprocess.Popen[str]", said: str = "") -> str:
    try:
        out, errors = process.communicate(said, timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    return out


def test_code_written_for_it_sees_the_same(tmp_path: Path) -> None:
    folders = {"stepkeeper": tmp_path / "ours", THEIRS: tmp_path / "theirs"}
    processes = []
    for module, folder in folders.items():
        folder.mkdir()
        processes.append(started("managing.py", module, folder, env=XLA))
    for process in processes:
        ended(process)
    ours, theirs = (json.loads((folder / "seen.json").read_text()) for folder in folders.values())
    assert theirs["saves"]["restored"] == theirs["saves"]["digests"], "what is compared with is right itself"
    for part, seen in theirs.items():
        if isinstance(seen, dict):
            for name in seen:
                assert ours[part][name] == seen[name], f"{part}: {name}"
        assert ours[part] == seen, part


def test_the_documented_loop_runs_beside_an_evaluator(tmp_path: Path) -> None:
    root = tmp_path / "root"
    looking = started("looking.py", root, 0.2)
    first = json.loads(ended(started("documented.py", root, 45, env=XLA)))
    assert (first["tracked"], first["saved"]) == ([], [0, 10, 20, 30, 40])
    assert first["steps"] == first["saved"]
    assert len(set(first["compiled"][22:])) == 1, "two saves in, nothing is compiled any more"
    second = json.loads(ended(started("documented.py", root, 12, env=XLA)))
    assert (second["tracked"], second["saved"]) == (first["steps"], [0, 10])
    seen = json.loads(ended(looking, "\n"))
    assert seen["looks"] > 3
    log = Log(open_store(root.as_uri()))
    kinds = [log.entry(slot).kind for slot in range(log.open().tail + 1)]
    assert kinds.count("begin") == 2, "one of each training, none of the evaluator"
