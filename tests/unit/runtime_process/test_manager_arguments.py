"""Test a manager's arguments, as code for torch_xla's manager or from a configuration passes them."""

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

import stepkeeper
from stepkeeper import CheckpointManager
from stepkeeper.errors import BadUriError
from stepkeeper.policy.save import EverySeconds


def test_paths_and_numbers_may_be_of_any_library(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "root", np.int64(3), np.int32(2), np.int64(1), np.int64(1))
    assert manager.base_path == f"{tmp_path}/root/"
    assert [manager.should_save(step) for step in range(4)] == [True, False, False, True]
    for number in (manager.save_interval, manager.max_to_keep):
        assert type(number) is int
    manager.close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((2.5,), TypeError),
        (("10",), TypeError),
        ((0,), ValueError),
        ((10, -1), ValueError),
        ((10, 0, 0.5), TypeError),
    ],
)
def test_what_is_no_number_of_steps_is_refused_at_once(
    tmp_path: Path, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        CheckpointManager(str(tmp_path), *arguments)


@pytest.mark.parametrize(
    ("path", "whole"),
    [
        (Path("gs://bucket/run"), "gs://bucket/run"),
        ("gs:/bucket/run", "gs://bucket/run"),
    ],
)
def test_a_uri_that_lost_a_slash_is_no_folder(path: str | Path, whole: str) -> None:
    with pytest.raises(BadUriError, match=f"pass '{whole}', a str"):
        CheckpointManager(path, 10)
    with pytest.raises(BadUriError, match=f"pass '{whole}', a str"):
        stepkeeper.follow(str(path))


def test_a_root_in_the_memory_of_this_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "dir", {"path": "/run", "target_protocol": "memory"})
    for uri in ("memory://run", "dir://run/a"):
        with pytest.raises(BadUriError, match=f"{uri!r} is in the memory of one process.* temporary folder"):
            CheckpointManager(uri, 10)


def test_a_home_folder_is_written_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("~/root", 10, local_tier="~/disk") as manager:
        assert manager.base_path == f"{tmp_path}/root/"
        manager.save(1, {"w": torch.ones(2)}, force=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["disk", "root"]


@pytest.mark.parametrize("name", ["base_path", "save_interval", "max_to_keep", "chkpt_on_preemption", "pg"])
def test_what_would_change_nothing_is_not_set_in_silence(tmp_path: Path, name: str) -> None:
    manager = CheckpointManager(str(tmp_path), EverySeconds(60))
    assert manager.save_interval == EverySeconds(60)
    assert manager.pg is None
    with pytest.raises(AttributeError, match=name):
        setattr(manager, name, 2)
    manager.close()


@pytest.mark.parametrize("tier", ["gs://bucket/tier", "file:///disk", Path("gs://bucket/tier")])
def test_a_local_tier_is_a_folder(tmp_path: Path, tier: str | Path) -> None:
    with pytest.raises(BadUriError, match=r"on this host's own disk|pathlib removes a slash"):
        CheckpointManager(str(tmp_path), 10, local_tier=tier)
