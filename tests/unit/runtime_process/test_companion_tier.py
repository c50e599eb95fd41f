"""A companion that is asked to put a save on a local disk first."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepkeeper.checkpoint import SaveOrder, Structure, ValueOrder
from stepkeeper.companion.messages import (
    ClaimRequest,
    OpenRequest,
    WriteRequest,
)
from stepkeeper.companion.session import Session
from stepkeeper.tier import TierPlace
from stepkeeper_testing.checkpoints import write_request

DATA = b"what torch.save wrote of a value"


@pytest.fixture
def region() -> Iterator[int]:
    fd = os.memfd_create("region")
    os.write(fd, DATA)
    yield fd
    os.close(fd)


def write_of(session: Session, step: int) -> WriteRequest:
    claim = session.claim_root(ClaimRequest()).claim.slot if step == 1 else 0
    return write_request(
        SaveOrder(
            rank=0,
            world_size=1,
            step=step,
            claim=claim,
            nonce=secrets.token_hex(16),
            structure=Structure(),
            values=(ValueOrder(fqn="n", start=0, length_bytes=len(DATA)),),
        )
    )


def test_a_disk_that_takes_nothing_is_said_once_until_it_does_again(tmp_path: Path, region: int) -> None:
    disk = tmp_path / "ssd"
    tier, uri = TierPlace(folder=str(disk / "tier")), f"memory://{secrets.token_hex(4)}"
    session = Session(OpenRequest(rank=0, world_size=1, uri=uri, tier=tier), lambda directive: None)

    def stage(step: int) -> tuple[bool, bool]:
        staged = session.shares.stage_share(write_of(session, step), region)
        return staged.held, staged.why_not is not None

    assert [stage(1), stage(2)] == [(False, True), (False, False)]
    disk.mkdir()
    assert stage(3) == (True, False)
    disk.rename(tmp_path / "away")
    assert stage(4) == (False, True)
