"""Test what a companion does for a trainer, without the processes around it."""

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from stepkeeper.checkpoint import SaveOrder, Structure, verify_objects
from stepkeeper.companion import upkeep as module
from stepkeeper.companion.messages import ClaimRequest, CommitRequest, OpenRequest
from stepkeeper.companion.reporter import LogView
from stepkeeper.companion.session import Session
from stepkeeper.contract import ReportedCommit
from stepkeeper.errors import TransientStorageError
from stepkeeper.log import Claim
from stepkeeper.policy.keep import LastN
from stepkeeper.policy.keep_message import Keep
from stepkeeper.storage.memory import MemoryStore, Operation, named_bucket
from stepkeeper.storage.retry import Patience
from stepkeeper_testing.background import done
from stepkeeper_testing.checkpoints import write_request


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
        rank=0,
        world_size=1,
        step=step,
        claim=claim,
        nonce=secrets.token_hex(16),
        structure=Structure(),
        values=(),
    )
    session.shares.write_share(write_request(order), region)
    _, after = session.commit_save(CommitRequest(folder=order.folder, others=(), duration_millis=1))
    done(after)


def test_what_goes_wrong_after_a_commit_is_said_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], region: int
) -> None:
    complaints: list[str | None] = []
    session = Session(
        OpenRequest(rank=0, world_size=1, uri=f"memory://{secrets.token_hex(4)}"),
        lambda directive: None,
        on_complaint=complaints.append,
    )
    reports = Reports()
    monkeypatch.setattr(session, "reporter", reports)
    claim = session.claim_root(ClaimRequest()).claim.slot

    def broken(*args: object, **options: object) -> None:
        raise ValueError("an odd name")

    with monkeypatch.context() as patch:
        patch.setattr(module, "collect", broken)
        save(session, claim, 1, region)
    assert reports.errors[-1] == "after the commit of step 1: ValueError('an odd name')"
    assert "ValueError: an odd name" in capsys.readouterr().err

    save(session, claim, 2, region)
    assert reports.errors[-1] is None
    save(session, claim, 3, region)
    assert complaints == ["after the commit of step 1: ValueError('an odd name')", None]
    assert capsys.readouterr().err == ""


IMPATIENT = Patience(total_s=0.0, sleep=lambda _: None)


class Root:
    """A root in memory, and companions of it."""

    def __init__(self, region: int) -> None:
        self.name = secrets.token_hex(4)
        self.bucket = named_bucket(self.name)
        self.region = region

    def session(self) -> Session:
        opening = OpenRequest(rank=0, world_size=1, uri=f"memory://{self.name}", keep=Keep(last=(LastN(1),)))
        session = Session(opening, lambda directive: None, patience=IMPATIENT)
        session.resume_claim()
        return session

    def save(self, session: Session, claim: Claim, step: int) -> None:
        save(session, claim.slot, step, self.region)

    @property
    def steps(self) -> list[int]:
        """Steps with data."""
        paths = (path for path in self.bucket.objects if not path.startswith(".stepkeeper"))
        return sorted({int(path.partition("/")[0]) for path in paths})


@pytest.mark.parametrize("operation", ["put_if_absent", "list", "delete"])
def test_a_deletion_cut_short_is_taken_up_after_the_next_save(
    region: int, monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    root = Root(region)
    session = root.session()
    claim = session.claim_root(ClaimRequest()).claim
    root.save(session, claim, 10)
    deleting = False

    def hook(moment: str, asked: Operation, path: str) -> None:
        nonlocal deleting
        deleting = deleting or (
            asked == "put_if_absent" and b'"delete"' in root.bucket.objects.get(path, b"")
        )
        if moment == "after" and asked == operation and deleting:
            raise TransientStorageError("no answer")

    broken = MemoryStore(root.bucket, hook=hook)
    with monkeypatch.context() as patch:
        patch.setattr(session, "_store", broken)
        patch.setattr(session.shares, "_store", broken)
        patch.setattr(session._upkeep, "_store", broken)
        patch.setattr(session._log, "_store", broken)
        root.save(session, claim, 20)
        assert session._upkeep.complaint is not None
        assert root.steps[-1] == 20
    root.save(session, claim, 30)
    assert session._upkeep.complaint is None
    assert root.steps == [30]


def test_a_stale_companion_whose_commit_was_deleted_since_does_not_call_it_damaged(
    region: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root(region)
    session = root.session()
    claim = session.claim_root(ClaimRequest()).claim

    def meanwhile(*args: Any, **options: Any) -> None:
        later = root.session()
        with monkeypatch.context() as patch:
            patch.setattr(module, "verify_objects", verify_objects)
            root.save(later, later.claim_root(ClaimRequest()).claim, 20)
        verify_objects(*args, **options)

    monkeypatch.setattr(module, "verify_objects", meanwhile)
    root.save(session, claim, 10)
    assert session._upkeep.complaint is not None
    assert "FencedError" in session._upkeep.complaint
    assert root.steps == [20]
