"""Test how the objects that a training holds look in a notebook or a log."""

from pathlib import Path

import torch

import stepkeeper
from stepkeeper import CheckpointManager


def test_a_manager_says_what_it_saves_to_and_how_far_it_is(tmp_path: Path) -> None:
    root = (tmp_path / "root").as_uri()
    manager = CheckpointManager(tmp_path / "root", 1, chkpt_on_preemption=False)
    assert repr(manager) == f"<CheckpointManager {root}, nothing committed>"
    save = manager.step(1, {"w": torch.zeros(2)}).in_flight
    assert save is not None
    committed = save.result(60)
    manager.wait()
    assert repr(manager) == f"<CheckpointManager {root}, step 1 committed>"
    assert repr(save).startswith("<InFlight step 1: Committed, ")
    manager.close()
    assert repr(manager) == f"<CheckpointManager {root}, step 1 committed, closed>"

    with stepkeeper.follow(root) as commits:
        assert repr(commits) == f"<Follower {root}: no commit yet>"
        found = next(commits)
        assert repr(found) == f"<FollowedCommit step 1 (sequence {found.sequence}): {committed.uri}>"
        assert repr(commits) == f"<Follower {root}: last sequence {found.sequence}>"


def test_what_reads_and_writes_plain_checkpoints_says_where() -> None:
    assert repr(stepkeeper.dcp.StorageWriter("/data/1")) == "<StorageWriter '/data/1'>"
    assert repr(stepkeeper.dcp.StorageReader("gs://bucket/1")) == "<StorageReader 'gs://bucket/1'>"
    assert repr(stepkeeper.RandomState()) == "RandomState()"
