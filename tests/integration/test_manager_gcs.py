"""The manager on gs://, its companion and itself both talking to an emulator."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_faults.proxy import Fault, faulty
from torch.distributed.checkpoint.state_dict_saver import save

from stepcluster import binaries
from stepkeeper import CheckpointManager
from stepkeeper.storage import open_store
from stepkeeper.storage.gcs import GcsStore
from stepkeeper_testing.gcs import BUCKET, fake_gcs_server


@pytest.fixture(scope="module")
def gcs_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fake-gcs-server")
    with fake_gcs_server(binaries.ensure()["fake-gcs-server"], folder) as address:
        yield address


def test_a_training_resumes_from_a_bucket(gcs_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_address)
    uri = f"gs://{BUCKET}/runs/one"
    state: dict[str, Any] = {"w": torch.randn(300, 300), "step": 0}
    saved = {}
    with CheckpointManager(uri, 1, max_to_keep=2, chkpt_on_preemption=False) as manager:
        assert manager.restore_latest(state) is None
        for step in range(1, 5):
            state["w"] += 1
            state["step"] = step
            saved[step] = state["w"].clone()
            manager.step(step, state)
    other: dict[str, Any] = {"w": torch.zeros(300, 300), "step": 0}
    with CheckpointManager(uri, 1, chkpt_on_preemption=False) as manager:
        result = manager.restore_latest(other)
        assert result is not None
        assert result.uri.startswith(f"{uri}/4/")
        assert 4 in manager.all_steps()
    assert other["step"] == 4
    assert torch.equal(other["w"], saved[4])


def test_a_training_resumes_though_the_first_reading_of_each_entry_is_bad(
    gcs_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"gs://{BUCKET}/runs/flipped"
    entry, read = re.compile(r"stepkeeper/log/[0-9]{8}\.json\?.*alt=media"), set[str]()

    def rule(method: str, about: str) -> Fault:
        found = entry.search(about)
        if method != "GET" or found is None or found[0] in read:
            return "none"
        read.add(found[0])
        return "flipped"

    with faulty(gcs_address) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.address)
        for last in (2, 4):
            read.clear()
            proxy.break_by(rule)
            state: dict[str, Any] = {"w": torch.full((300,), -1.0), "step": 0}
            with CheckpointManager(uri, 1, chkpt_on_preemption=False) as manager:
                result = manager.restore_latest(state)
                assert (None if result is None else result.step) == (None if last == 2 else 2)
                assert state["step"] == last - 2
                for step in (last - 1, last):
                    state["w"].fill_(step)
                    state["step"] = step
                    manager.save(step, state)
        assert proxy.bad_over


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_an_old_root_in_a_bucket_is_resumed(
    gcs_address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_address)
    uri = f"gs://{BUCKET}/runs/old"
    store = open_store(uri)
    for step in (100, 200):
        save(
            {"w": torch.full((300,), float(step)), "step": step},
            checkpoint_id=tmp_path / str(step),
            no_dist=True,
        )
        for path in (tmp_path / str(step)).iterdir():
            if step == 100 or path.name != ".metadata":
                store.write(f"{step}/{path.name}", [path.read_bytes()])
    store.close()
    state: dict[str, Any] = {"w": torch.zeros(300), "step": 0}
    with CheckpointManager(uri, 1, chkpt_on_preemption=False) as manager:
        result = manager.restore_latest(state)
        assert result is not None
        assert (result.uri, state["step"]) == (f"{uri}/100", 100)
        assert torch.equal(state["w"], torch.full((300,), 100.0))
        manager.save(101, state)
        assert manager.all_steps() == [100, 101]


def test_a_local_disk_spares_the_bucket_and_is_not_needed(
    gcs_address: str, monkeypatch: pytest.MonkeyPatch, folder_with_room: Path
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_address)
    uri, disk = f"gs://{BUCKET}/runs/tier", folder_with_room / "disk"
    reads: list[str] = []
    read = GcsStore.read

    def noted(store: GcsStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith(".distcp"):
            reads.append(path)
        return read(store, path, offset, length)

    monkeypatch.setattr(GcsStore, "read", noted)
    saved = torch.randn(5 << 20)
    with CheckpointManager(uri, 1, local_tier=disk, chkpt_on_preemption=False) as manager:
        for step in (1, 2):
            manager.save(step, {"w": saved + step})

    def restored() -> None:
        state = {"w": torch.zeros(5 << 20)}
        with CheckpointManager(uri, 1, local_tier=disk, chkpt_on_preemption=False) as manager:
            result = manager.restore_latest(state)
        assert result is not None
        assert result.step == 2
        assert torch.equal(state["w"], saved + 2)

    restored()
    assert reads == []
    shutil.rmtree(disk)
    restored()
    assert {path.partition("/")[0] for path in reads} == {"2"}
