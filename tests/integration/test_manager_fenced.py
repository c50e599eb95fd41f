"""A trainer whose root was claimed by another ends with 77, whatever else it fails with, and says who claimed it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager
from stepkeeper.contract import ExitCode
from stepkeeper.errors import FencedError, MissingObjectError, OtherJobsRootError, SaveError
from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.pod import pod_identity

STATE = {"w": torch.zeros(4)}


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def open_manager(uri: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(uri, 1, chkpt_on_preemption=False, **options)


def claimed_by_a_job(uri: str) -> None:
    Log(open_store(uri)).begin(pod_identity(restart_attempt=3), host="node-7")


def test_an_error_that_the_newer_claim_has_caused_is_no_error_of_its_own(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder was collected while it was writing there."""
    manager = open_manager(uri)
    manager.save(1, STATE)
    claimed_by_a_job(uri)

    def collected(*_: object, **__: object) -> None:
        raise MissingObjectError(2, "No such file or directory")

    monkeypatch.setattr("stepkeeper.save.persist.write_share", collected)
    with pytest.raises(
        FencedError, match=r"claimed the root for start \[0, 3\] of .+ on host node-7"
    ) as raised:
        manager.save(2, STATE)
    assert isinstance(raised.value.__cause__, MissingObjectError)


@pytest.mark.parametrize("claims", ["by a restore", "by a save"])
def test_who_waited_until_the_root_was_freed_ends_as_ever(uri: str, claims: str) -> None:
    claimed_by_a_job(uri)
    with open_manager(uri) as manager:
        for _ in range(2):
            with pytest.raises(OtherJobsRootError):
                manager.restore_latest(STATE)
        Log(open_store(uri)).begin(take_over=True)
        if claims == "by a restore":
            manager.restore_latest(STATE)
        else:
            manager.save(1, STATE)


def test_who_is_told_to_stop_once_it_is_fenced_is_not_said_to_have_saved(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save for the notice fails otherwise: of all failures, the fence is the one to end with."""

    def train() -> None:
        with CheckpointManager(uri, 1) as manager:
            manager.step(1, STATE)
            claimed_by_a_job(uri)
            manager.step(2, STATE)
            manager._parts.saver.wait_until_idle()
            manager.request_stop()

            def gives_up(*_: object) -> None:
                raise SaveError("a peer gave up")

            monkeypatch.setattr("stepkeeper.save.pipeline.persist_save", gives_up)
            assert manager.step(3, STATE).stop

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == ExitCode.FENCED
