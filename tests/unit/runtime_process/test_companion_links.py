"""The way between the companions of all ranks where rank 0 can't listen."""

import errno
from collections.abc import Mapping
from typing import Any, NoReturn

import pytest

from stepkeeper.companion.messages import OpenRequest
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.companion_links import link_companions
from stepkeeper.stacks import meeting
from stepkeeper.stacks.meeting import StackMeeting

OPENING = OpenRequest(uri="memory://links", rank=0, world_size=2)


class OfTwo:
    """One of two ranks. What rank 0 says is recorded, and is what the other one hears."""

    store_host = None

    def __init__(self, rank: int, said: list[Mapping[str, Any] | None]) -> None:
        self.rank = rank
        self._said = said

    def broadcast(self, _name: str, value: Mapping[str, Any] | None, _timeout_s: float) -> dict[str, Any]:
        if self.rank == 0:
            self._said.append(value)
        return dict(self._said[-1] or {})


def refuse_to_listen() -> NoReturn:
    raise OSError(errno.EMFILE, "too many open files")


def companion_at(place: StackMeeting) -> Companion:
    return Companion(OPENING, lambda _directive: None, stack_meeting=place)


def link_both(place: StackMeeting) -> list[Mapping[str, Any]]:
    """Link both ranks, and return the addresses that the other one is linked with."""
    said: list[Mapping[str, Any] | None] = []
    linked: list[Mapping[str, Any]] = []
    host: Any = OfTwo(0, said)
    link_companions(host, place, linked.append)
    assert linked == [], "rank 0 is called"
    other: Any = OfTwo(1, said)
    link_companions(other, StackMeeting(1, 2), linked.append)
    return linked


def test_where_rank_0_cannot_listen_nobody_waits_for_it_and_its_own_stacks_are_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "listen", refuse_to_listen)
    place = StackMeeting(0, 2)
    opening, fds = companion_at(place)._with_stacks(OPENING)
    assert opening.stacks is not None
    assert (opening.stacks.secret, len(fds)) == (None, 1)
    assert link_both(place) == []
    (record,) = caplog.records
    assert "it can't listen: OSError(24" in record.getMessage()
