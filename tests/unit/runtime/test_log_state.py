"""Test what the rules of the log say of single entries, without a store."""

from functools import reduce

import pytest

from stepkeeper.errors import LogFormatError
from stepkeeper.log.entries import BeginEntry, Body, CommitEntry, DeleteEntry, QuarantineEntry, RestoredEntry
from stepkeeper.log.records import ForeignBase, ManifestRef
from stepkeeper.log.state import LogState, applied

FOREIGN = ForeignBase(step=5, folder="5")


def commit(step: int, parent: int | None, legacy: ForeignBase | None = None) -> CommitEntry:
    manifest = ManifestRef(path="manifest.0.json", size_bytes=1, crc32c=1)
    return CommitEntry(
        step=step, folder=f"{step}/0-a", size_bytes=1, manifest=manifest, parent=parent, legacy=legacy
    )


def apply(state: LogState, body: Body) -> LogState:
    return applied(state, state.tail + 1, 0, "a" * 32, body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (BeginEntry(base=2), "slot 4 names commit 2, which isn't live there"),
        (BeginEntry(base=7), "slot 4 names commit 7, which isn't live there"),
        (BeginEntry(base=1, legacy=FOREIGN), "slot 4 goes on from two things, commit 1 and "),
        (QuarantineEntry(commit=2, reason="again"), "slot 4 names commit 2, which isn't live there"),
        (RestoredEntry(commit=2), "slot 4 names commit 2, which isn't live there"),
        (DeleteEntry(commits=(1, 7)), "slot 4 names commit 7, which isn't there"),
        (BeginEntry(base=1, branch=True), "begins a branch, and goes on from something too"),
        (BeginEntry(legacy=FOREIGN, branch=True), "begins a branch, and goes on from something too"),
        (BeginEntry(scratch=True, branch=True), "begins a branch, and goes on from something too"),
        (commit(30, parent=2), "slot 4 has parent 2, but the log goes on from 1 there"),
        (
            commit(30, parent=1, legacy=FOREIGN),
            "slot 4 goes on from ForeignBase.*, but the log from None there",
        ),
    ],
)
def test_an_entry_that_contradicts_those_before_it_is_refused(body: Body, message: str) -> None:
    """Slots 1 and 2 hold commits; slot 3 condemns the second."""
    before: list[Body] = [
        BeginEntry(),
        commit(10, None),
        commit(20, 1),
        QuarantineEntry(commit=2, reason="bad"),
    ]
    with pytest.raises(LogFormatError, match=message):
        apply(reduce(apply, before, LogState()), body)
