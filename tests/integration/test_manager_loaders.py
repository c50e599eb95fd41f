"""A trainer whose DataLoader's workers die while its last save is written, as a process of its own."""

from pathlib import Path

from fork_server import ForkServer

from stepkeeper.contract import ExitCode
from stepkeeper.log import Log
from stepkeeper.storage import open_store

TRAINER = Path(__file__).parent / "manager_trainer" / "loaders.py"


def test_the_stops_save_is_made_although_the_workers_of_the_data_die(
    torch_server: ForkServer, tmp_path: Path
) -> None:
    process = torch_server.run([TRAINER, tmp_path], timeout=200)
    assert process.returncode == ExitCode.SAVED, process.stderr
    assert "DataLoader worker" in process.stderr
    assert Log(open_store((tmp_path / "root").as_uri())).open().latest is not None
