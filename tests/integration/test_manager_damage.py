"""Damage to each kind of object of the newest commit, and what a restore makes of it."""

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper.errors import LogFormatError, LogGapError, SaveError
from stepkeeper.log import Log
from stepkeeper.log.tail import slot_path
from stepkeeper.storage import open_store
from stepkeeper_testing.damage import contents, flip
from stepkeeper_testing.trainer import open_manager


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 are committed here."""
    root = tmp_path_factory.mktemp("damage") / "whole"
    with open_manager(root.as_uri()) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step)).result()
    return root


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(step)), "n": step}


def damage(path: Path, how: str) -> None:
    if how == "flipped":
        flip(path, path.stat().st_size // 2)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "gone":
        path.unlink()
    else:
        path.with_name("__7_7.distcp").write_bytes(b"a stranger's")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "how", "step"),
    [
        ("__0_0.distcp", "flipped", 1),
        ("__0_0.distcp", "gone", 1),
        ("manifest.0.json", "flipped", 1),
        ("manifest.0.json", "gone", 1),
        # Only stock torch reads it: a restore needs nothing of it, but the commit isn't proven to be whole.
        (".metadata", "flipped", 2),
        (".metadata", "gone", 2),
        ("__0_0.distcp", "joined by a stranger's", 2),
    ],
)
def test_what_is_damaged_is_said_loudly_and_the_step_before_is_restored(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, how: str, step: int
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole, root)
    (folder,) = (root / "2").iterdir()
    damage(folder / name, how)
    state = {"w": torch.zeros(3000), "n": 0}
    with open_manager(root.as_uri()) as manager:
        result = manager.restore(state)
        assert result is not None
        assert result.step == step
        assert state["n"] == step
        assert torch.equal(torch.as_tensor(state["w"]), torch.full((3000,), float(step)))
        manager.save(3, state_at(3)).result()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    is_harmed = "stranger" not in how
    assert any(name in each for each in said) == is_harmed
    commits = Log(open_store(root.as_uri())).open().commits.values()
    assert [record.verified for record in commits if record.step == 2] == [not is_harmed]
    assert [record.step for record in commits if record.quarantined] == ([2] if step == 1 else [])
    assert folder.is_dir(), "what was condemned stays for people to look at"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("slot", "how"),
    # Slot 0 holds the index; 2 is the commit that a start would go on from.
    [(0, "flipped"), (0, "cut"), (0, "gone"), (1, "flipped"), (1, "gone"), (2, "flipped"), (2, "cut")],
)
def test_a_damaged_log_is_named_and_nothing_is_done(whole: Path, tmp_path: Path, slot: int, how: str) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole, root)
    path = root / slot_path(slot)
    damage(path, how)
    before = contents(root)
    with open_manager(root.as_uri()) as manager:
        for act in (lambda: manager.restore({"w": torch.zeros(3000), "n": 0}), manager.steps):
            with pytest.raises((LogFormatError, LogGapError), match=slot_path(slot)):
                act()
        with pytest.raises((LogFormatError, LogGapError), match=slot_path(slot)):
            manager.save(3, state_at(3)).result()
        with suppress(SaveError):
            manager.wait()
    assert contents(root) == before
