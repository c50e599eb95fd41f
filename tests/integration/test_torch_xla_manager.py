"""torch_xla's CheckpointManager and ours see the same; and the loop that its documentation shows runs as it stands."""

import json
import subprocess
from pathlib import Path

import pytest
from fork_server import ForkServer

SCRIPTS = Path(__file__).parent / "torch_xla_dropin"
THEIRS = "torch_xla.experimental.distributed_checkpoint"


@pytest.mark.smoke
def test_code_written_for_it_sees_the_same(devices_server: ForkServer, tmp_path: Path) -> None:
    folders = {"stepkeeper": tmp_path / "ours", THEIRS: tmp_path / "theirs"}
    processes = []
    try:
        for module, folder in folders.items():
            folder.mkdir()
            with (folder / "stderr").open("w") as errors:
                processes.append(
                    devices_server.start(
                        [SCRIPTS / "managing.py", module, folder], stdout=subprocess.DEVNULL, stderr=errors
                    )
                )
        for process, folder in zip(processes, folders.values(), strict=True):
            assert process.wait(280) == 0, (folder / "stderr").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
    ours, theirs = (json.loads((folder / "seen.json").read_text()) for folder in folders.values())
    assert theirs["saves"]["restored"] == theirs["saves"]["digests"], "what is compared with is right itself"
    for part, seen in theirs.items():
        if isinstance(seen, dict):
            for name in seen:
                assert ours[part][name] == seen[name], f"{part}: {name}"
        assert ours[part] == seen, part
