"""One import is changed, and the same code sees the same: attributes, plans, data, what is restored."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

SCRIPTS = Path(__file__).parent / "torch_xla_dropin"
THEIRS = "torch_xla.experimental.distributed_checkpoint"


def seen_alike(server: ForkServer, tmp_path: Path, script: str) -> tuple[Any, Any]:
    """Return what a script has seen with our library, and with torch_xla's, which is the same."""
    folders = {"stepkeeper.torch_xla": tmp_path / "ours", THEIRS: tmp_path / "theirs"}
    processes = []
    try:
        for module, folder in folders.items():
            folder.mkdir()
            command = [SCRIPTS / script, module, folder]
            with (folder / "stderr").open("w") as errors:
                processes.append(server.start(command, stdout=subprocess.DEVNULL, stderr=errors))
        for process, folder in zip(processes, folders.values(), strict=True):
            assert process.wait(280) == 0, (folder / "stderr").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
    ours, theirs = (json.loads((folder / "seen.json").read_text()) for folder in folders.values())
    for part, seen in theirs.items():
        if isinstance(seen, dict):
            for name in seen:
                assert ours[part][name] == seen[name], f"{part}: {name}"
        assert ours[part] == seen, part
    return ours, theirs


@pytest.mark.smoke
def test_code_written_for_the_manager_sees_the_same(devices_server: ForkServer, tmp_path: Path) -> None:
    _, theirs = seen_alike(devices_server, tmp_path, "managing.py")
    assert theirs["saves"]["restored"] == theirs["saves"]["digests"], "what is compared with is right itself"


def test_same_code_sees_the_same(devices_server: ForkServer, tmp_path: Path) -> None:
    ours, _ = seen_alike(devices_server, tmp_path, "user.py")
    assert len(ours["by hand"]["items"]) > 10
