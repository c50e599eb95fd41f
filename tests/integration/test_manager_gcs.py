"""The manager on gs://, its companion and itself both talking to an emulator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from stepcluster import binaries
from stepkeeper import CheckpointManager
from stepkeeper.storage import open_store
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
