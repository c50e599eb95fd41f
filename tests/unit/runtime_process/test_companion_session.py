"""What a companion does for a trainer, without the processes around it."""

import os
import secrets
from collections.abc import Iterator

import pytest

from stepkeeper.checkpoint import SaveOrder
from stepkeeper.companion import session as module
from stepkeeper.companion.messages import Begin, Commit, Open, Write
from stepkeeper.companion.reporter import LogView
from stepkeeper.companion.session import Session
from stepkeeper.contract import Commit as ReportedCommit


class Reports:
    def __init__(self) -> None:
        self.errors: list[str | None] = []

    def update_log(self, log: LogView, commit: ReportedCommit | None = None) -> None:
        self.errors.append(log.error)


@pytest.fixture
def region() -> Iterator[int]:
    fd = os.memfd_create("region")
    yield fd
    os.close(fd)


def save(session: Session, claim: int, step: int, region: int) -> None:
    order = SaveOrder(
        rank=0, world_size=1, step=step, claim=claim, nonce=secrets.token_hex(16), tensors=(), values=()
    )
    session.write(Write(order=order), region)
    _, after = session.commit(Commit(folder=order.folder, others=(), duration_millis=1))
    after()


def test_what_goes_wrong_after_a_commit_is_said_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], region: int
) -> None:
    session = Session(
        Open(rank=0, world_size=1, uri=f"memory://{secrets.token_hex(4)}"), lambda directive: None
    )
    reports = Reports()
    monkeypatch.setattr(session, "reporter", reports)
    claim = session.begin(Begin()).claim.slot

    def broken(*args: object) -> None:
        raise ValueError("an odd name")

    with monkeypatch.context() as patch:
        patch.setattr(module, "collect_garbage", broken)
        save(session, claim, 1, region)
    assert reports.errors[-1] == "after the commit of step 1: ValueError('an odd name')"
    assert "after the commit of step 1: ValueError('an odd name')\nTraceback" in capsys.readouterr().err

    save(session, claim, 2, region)
    assert reports.errors[-1] is None
    assert capsys.readouterr().err == ""
