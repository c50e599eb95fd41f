"""torch_xla's CheckpointManager and ours see the same; and the loop that its documentation shows runs as it stands."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer

from stepkeeper.log import Log
from stepkeeper.storage import open_store

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


def test_the_documented_loop_runs_beside_an_evaluator(
    run_on_devices: Callable[..., str], torch_server: ForkServer, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    looking = torch_server.start(
        [SCRIPTS / "looking.py", root, 0.2], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        first = json.loads(run_on_devices(SCRIPTS / "documented.py", root, 45))
        assert (first["tracked"], first["saved"]) == ([], [0, 10, 20, 30, 40])
        assert first["steps"] == first["saved"]
        assert len(set(first["compiled"][22:])) == 1, "two saves in, nothing is compiled any more"
        second = json.loads(run_on_devices(SCRIPTS / "documented.py", root, 12))
        assert (second["tracked"], second["saved"]) == (first["steps"], [0, 10])
        said, _ = looking.communicate("\n")
        assert json.loads(said)["looks"] > 3
    finally:
        looking.kill()
    log = Log(open_store(root.as_uri()))
    kinds = [log.entry(slot).kind for slot in range(log.open().tail + 1)]
    assert kinds.count("begin") == 2, "one of each training, none of the evaluator"
