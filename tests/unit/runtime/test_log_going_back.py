"""A claim that is followed by another one of the same process, with an older base."""

from collections.abc import Callable

import pytest

from stepkeeper.errors import FencedError, RestoreError, TransientStorageError, UnknownOutcomeError
from stepkeeper.log import BeginEntry, Claim, ForeignBase, Log
from stepkeeper.policy.keep import LastN
from stepkeeper.retention.deletable import choose_deletable
from stepkeeper.storage.memory import MemoryBucket, MemoryStore
from stepkeeper.storage.retry import Patience

CommitStep = Callable[..., int]
NONCE = "ab" * 16
NO_PATIENCE = Patience(total_s=0, sleep=lambda _: None)


def test_what_is_committed_next_descends_from_the_older_one(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    claim = log.begin()
    first, second, third = (commit(log, claim, step) for step in (1, 2, 3))
    back = log.begin(base=first, after=claim, nonce=NONCE)
    assert back == Claim(slot=third + 1, nonce=NONCE)
    fourth = commit(log, back, 4)
    state = Log(MemoryStore(bucket)).open()
    assert [(record.step, record.parent) for record in state.line] == [(4, first), (1, None)]
    assert {record.slot for record in state.live} == {first, second, third, fourth}
    with pytest.raises(FencedError, match="claim 0 is stale"):
        commit(log, claim, 5)
    # Kept until the line has a verified commit of their steps.
    assert choose_deletable(state, LastN(9), {first}) == ()
    assert choose_deletable(state, LastN(9), {fourth}) == (second, third)


def test_on_what_head_is_nothing_is_begun(log: Log, commit: CommitStep) -> None:
    claim = log.begin()
    commit(log, claim, 1)
    head = commit(log, claim, 2)
    tail = log.state.tail
    assert log.begin(base=head, after=claim, nonce=NONCE) == claim
    assert log.state.tail == tail
    older = ForeignBase(step=100, folder="100", reason="step 200 was read bad")
    back = log.begin(base=older, after=claim)
    tail = log.state.tail
    assert log.begin(base=ForeignBase(step=100, folder="100"), after=back) == back
    assert log.state.tail == tail


def test_a_stale_claim_is_not_followed_and_stays_stale_on_head(
    log: Log, bucket: MemoryBucket, commit: CommitStep
) -> None:
    claim = log.begin()
    first, head = commit(log, claim, 1), commit(log, claim, 2)
    Log(MemoryStore(bucket)).begin()
    for base in (first, head):
        with pytest.raises(FencedError, match="claim 0 is stale"):
            log.begin(base=base, after=claim, nonce=NONCE)


def test_what_is_gone_is_not_gone_on_from(log: Log, commit: CommitStep) -> None:
    claim = log.begin()
    first, _ = commit(log, claim, 1), commit(log, claim, 2)
    log.quarantine(claim, first, "bad")
    with pytest.raises(RestoreError, match="is quarantined"):
        log.begin(base=first, after=claim, nonce=NONCE)
    assert commit(log, claim, 3) == log.state.head


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("restarted", [True, False])
def test_asked_again_for_the_same_begin_it_is_put_once(
    log: Log, bucket: MemoryBucket, commit: CommitStep, *, applied: bool, restarted: bool
) -> None:
    """Also by the process that follows a lost one: it isn't fenced by what that has put."""
    claim = log.begin()
    first, second = commit(log, claim, 1), commit(log, claim, 2)
    left = ["one"]

    def hook(moment: str, operation: str, path: str) -> None:
        if operation == "put_if_absent" and moment == ("after" if applied else "before") and left:
            left.pop()
            raise TransientStorageError("no answer")

    lossy = Log(MemoryStore(bucket, hook=hook), patience=NO_PATIENCE)
    with pytest.raises(UnknownOutcomeError):
        lossy.begin(base=first, after=claim, nonce=NONCE)
    asked = Log(MemoryStore(bucket)) if restarted else lossy
    back = asked.begin(base=first, after=claim, nonce=NONCE)
    assert back == Claim(slot=second + 1, nonce=NONCE)
    assert asked.state.tail == second + 1
    assert isinstance(asked.entry(back.slot).body, BeginEntry)
    commit(asked, back, 4)
    assert asked.begin(base=first, after=claim, nonce=NONCE) == back
