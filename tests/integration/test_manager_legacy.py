"""An old root: what stock DCP and torch_xla's manager left there is resumed, on any layout, and stays where it is."""

import json
import logging
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper import RestoreResult
from stepkeeper.errors import PartlyRestoredError, TornCheckpointError
from stepkeeper.log import BeginEntry, CommitEntry, Log
from stepkeeper.storage import open_store
from stepkeeper_testing.trainer import open_manager

SCRIPTS = Path(__file__).parent / "legacy_roots"


def state_at(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), float(step)), "b": torch.ones(3) * step}, "step": step}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 100, 200 and 300 of stock DCP, as different trainers name them."""
    root = tmp_path_factory.mktemp("legacy") / "old"
    for folder, step in (("100", 100), ("step-200", 200), ("checkpoint_300", 300)):
        save(state_at(step), checkpoint_id=root / folder, no_dist=True)
    return root


@pytest.fixture
def root(old: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(old, tmp_path / "root"))


def entries(root: Path) -> Iterator[Any]:
    log = Log(open_store(root.as_uri()))
    return (log.entry(slot).body for slot in range(log.open().tail + 1))


def files(root: Path) -> dict[str, bytes]:
    """Return the other writer's files."""
    found = (path for path in root.glob("*/*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def flip(path: Path) -> None:
    """One bit of "w" is another."""
    data = bytearray(path.read_bytes())
    (step,) = (step for step in (200, 300, 301) if struct.pack("<f", step) * 300 in data)
    data[data.index(struct.pack("<f", step) * 300) + 500] ^= 1
    path.write_bytes(data)


@pytest.mark.smoke
def test_an_old_root_is_resumed_and_left_as_it_is(root: Path, old: Path) -> None:
    state = state_at(0)
    with open_manager(root, keep=1) as manager:
        assert manager.steps() == [100, 200, 300]
        assert manager.metadata(200).tensors["model.w"].shape == (300,)
        result = manager.restore(state)
        assert result is not None
        assert (result.step, result.sequence, result.uri) == (300, None, f"{root.as_uri()}/checkpoint_300")
        assert state["step"] == 300
        assert torch.equal(state["model"]["w"], state_at(300)["model"]["w"])
        for step in (301, 302, 303):
            manager.save(step, state_at(step)).result()
        assert manager.in_flight is None
    begin, *others = entries(root)
    assert isinstance(begin, BeginEntry)
    assert begin.legacy is not None
    assert (begin.base, begin.legacy.step, begin.legacy.folder) == (None, 300, "checkpoint_300")
    first = next(body for body in others if isinstance(body, CommitEntry))
    assert (first.step, first.parent, first.legacy) == (301, None, begin.legacy)
    with open_manager(root) as manager:
        # What retention deleted of ours takes nothing of theirs along.
        assert manager.steps()[:3] == [100, 200, 300]
        assert manager.steps()[-1] == 303
        result = manager.restore(state)
        assert result is not None
        assert result.step == 303
        assert manager.restore(state, 200) == RestoreResult(
            sequence=None, step=200, uri=f"{root.as_uri()}/step-200"
        )
        assert state["step"] == 200
    assert files(root) == files(old)


def test_what_is_bad_is_read_again_and_the_older_one_is_gone_on_from(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(root / "checkpoint_300" / "__0_0.distcp")
    state = state_at(0)
    with open_manager(root) as manager:
        with pytest.raises(PartlyRestoredError, match=r"checkpoint_300.*has the wrong checksum") as raised:
            manager.restore(state, 300)
        assert isinstance(raised.value.__cause__, TornCheckpointError)
        result = manager.restore(state)
        assert result is not None
        assert result.step == state["step"] == 200
        manager.save(201, state).result()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert any("checkpoint_300" in each for each in said)
    bases = [body.legacy for body in entries(root) if isinstance(body, BeginEntry)]
    first, second = (base for base in bases if base is not None)
    assert (first.step, second.step) == (300, 200)
    assert (root / "checkpoint_300").is_dir()
    assert "checkpoint_300" in (second.reason or "")


def test_a_root_of_torch_xlas_manager_is_resumed_on_another_mesh(
    run_on_devices: Callable[..., str], tmp_path: Path
) -> None:
    theirs, ours = (
        json.loads(run_on_devices(SCRIPTS / "xla.py", mode, tmp_path / "root").splitlines()[-1])
        for mode in ("save", "resume")
    )
    assert theirs["steps"] == [2, 4]
    assert (ours["steps"], ours["step"], ours["value"]) == ([2, 4], 4, 4)
    assert ours["bits"] == theirs["bits"]
    assert ours["after"] != theirs["bits"]
    assert ours["steps_after"] == [2, 4, 5]
    (begin, *_) = entries(tmp_path / "root")
    assert (begin.legacy.step, begin.legacy.folder) == (4, "4")
