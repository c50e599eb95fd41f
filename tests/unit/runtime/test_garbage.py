"""Test which commits a policy keeps, and deletion: the log goes first, pins hold, and other writers' files stay."""

import math
from collections.abc import Sequence

import pytest
from store_parts.behind import Behind

from stepkeeper.checkpoint.manifest import checkpoint_folder
from stepkeeper.contract import Best, BestMode, Retention
from stepkeeper.contract.wire import decode, encode
from stepkeeper.log import Log
from stepkeeper.policy.keep import (
    AnyOf,
    BestN,
    Committed,
    EveryNSteps,
    EverySeconds,
    Keep,
    KeepPolicy,
    LastN,
    MaxAge,
    from_retention,
)
from stepkeeper.retention.garbage import Garbage, gc, sweep
from stepkeeper.retention.pins import Pin, put_pin, remove_pin
from stepkeeper.storage.base import StreamedStore
from stepkeeper_testing.checkpoints import SmallRoot, save_small
from stepkeeper_testing.memory import MemoryStore

NONCE = "a" * 32


def delete(root: SmallRoot, slot: int) -> Garbage:
    (record,) = root.log.delete(root.claim, lambda state: [slot])
    return Garbage(folder=record.folder, slot=record.slot)


def pin(root: SmallRoot, slot: int, nonce: str = NONCE) -> Pin:
    pin = Pin(slot=slot, nonce=nonce, holder="an evaluation")
    put_pin(root.store, pin)
    return pin


def folders(root: SmallRoot) -> set[str]:
    return {path.partition("/")[0] for path in root.contents()} - {".stepkeeper"}


def collected(root: SmallRoot, *, dry_run: bool = False) -> list[str]:
    return [each.folder for each in gc(Log(root.store), root.store, dry_run=dry_run).collected]


def test_what_is_pinned_keeps_its_data_until_its_last_pin_is_gone(root: SmallRoot) -> None:
    root.play("begin 10 20 30 40")
    pins = [pin(root, 1), pin(root, 1, "f" * 32)]
    unread = f".stepkeeper/pins/00000003-{NONCE}"
    root.change(unread, b"what a later release writes")
    deleted = [delete(root, 1), delete(root, 2), delete(root, 3)]
    left = sweep(root.store, deleted)
    assert left == (deleted[0], deleted[2])
    assert folders(root) == {"10", "30", "40"}
    remove_pin(root.store, pins[0])
    assert sweep(root.store, left) == left
    remove_pin(root.store, pins[1])
    root.change(unread, None)
    assert sweep(root.store, left) == ()
    assert folders(root) == {"40"}


def test_garbage_of_earlier_claims_goes_and_nothing_else(root: SmallRoot) -> None:
    root.play("begin 10 20 !2")
    torn = root.give_up(30)
    root.play("begin")
    mine = root.give_up(40)
    later = f"{checkpoint_folder(50, root.claim.slot + 3, NONCE)}/x"
    alien = ["10/.metadata", "10/0/x", "20/0-short/x", f"notes/0-{NONCE}/x", f"007/0-{NONCE}/x"]
    for path in (*alien, later):
        root.store.write(path, [b"not ours, or not ours to take"])
    pin(root, 77)  # a slot that the log doesn't have
    before = root.contents()
    assert collected(root, dry_run=True) == [torn]
    assert root.contents() == before
    report = gc(Log(root.store), root.store)
    (found,) = report.collected
    assert (found.folder, found.n_objects, found.slot) == (torn, 1, None)
    assert report.pinned == ()
    assert {*before} - {*root.contents()} == {path for path in before if path.startswith(torn)}
    assert any(path.startswith(mine) for path in root.contents())


def test_what_proofs_left_goes_once_a_later_claim_has_begun(root: SmallRoot) -> None:
    root.play("begin begin")
    over = [f".stepkeeper/probes/{name}-{NONCE}" for name in ("00000000", "00000001", "create-00000001")]
    stays = [
        *(f".stepkeeper/probes/{name}-{NONCE}" for name in ("00000002", "create-00000002")),
        ".stepkeeper/probes/00000000-theirs",
        f".stepkeeper/probes/{NONCE}",
        f"probes/00000000-{NONCE}",
    ]
    for path in over + stays:
        root.store.write(path, [b"x"])
    report = gc(root.log, root.store, dry_run=True)
    assert sorted(report.remnants) == sorted(over)
    assert set(over) <= set(root.contents())
    assert gc(root.log, root.store) == report
    assert not set(over) & set(root.contents())
    assert set(stays) <= set(root.contents())


class Streamed(Behind):
    """A store that takes four uploads at once, and so two deletions."""

    streams = 4


def test_where_many_requests_at_once_are_fast_metadata_is_deleted_before_the_rest_all_the_same() -> None:
    memory, deleted = MemoryStore(), list[str]()
    store = Streamed(memory)
    assert isinstance(store, StreamedStore)
    log = Log(store)
    claim = log.begin()
    doomed, _ = (save_small(log, store, claim, step).folder for step in (10, 20))
    for name in ("__0_1.distcp", "theirs.txt"):
        store.write(f"{doomed}/{name}", [b"data"])
    log.delete(claim, lambda state: [1])
    memory.hook = lambda moment, operation, path: deleted.append(path) if operation == "delete" else None
    assert sweep(store, [Garbage(folder=doomed, slot=1)]) == ()
    assert deleted[:2] == [f"{doomed}/.metadata"] * 2, "before and after"
    assert [path for path in memory.bucket.objects if path.startswith(doomed)] == [f"{doomed}/theirs.txt"]


def line(*steps: int) -> list[Committed]:
    return [Committed(sequence=slot, step=step) for slot, step in enumerate(steps, 1)]


def timed(*times: float | None) -> list[Committed]:
    return [Committed(sequence=slot, step=slot, time_unix_s=time) for slot, time in enumerate(times, 1)]


def scored(*losses: float | None) -> list[Committed]:
    return [
        Committed(sequence=slot, step=slot, metrics={} if loss is None else {"loss": loss})
        for slot, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("policy", "commits", "kept"),
    [
        (LastN(2), line(10, 20, 30), [2, 3]),
        (LastN(5), line(10, 20), [1, 2]),
        (LastN(2), line(30, 10, 20), [2, 3]),
        (LastN(1), [], []),
        (EveryNSteps(20), line(10, 20, 30, 40), [2, 4]),
        (EveryNSteps(20), line(0, 5, 20, 20), [1, 3, 4]),
        (EverySeconds(60), timed(0, 30, 60, 90, 150), [1, 3, 5]),
        (EverySeconds(60), timed(0, 59, 118), [1, 3]),
        (EverySeconds(60), timed(None, 10, 20), [1, 2]),
        (EverySeconds(60), timed(100, 40, 160), [1, 2, 3]),
        (MaxAge(60), timed(0, 39, 40, 100), [3, 4]),
        (MaxAge(60), timed(None, 0, 100), [1, 3]),
        (MaxAge(60), timed(None, None), [1, 2]),
        (BestN(2, "loss", "min"), scored(3.0, 1.0, 2.0, 4.0), [2, 3]),
        (BestN(2, "loss", "max"), scored(3.0, 1.0, 2.0, 4.0), [1, 4]),
        (BestN(1, "loss", "min"), scored(1.0, 1.0, 1.0), [3]),
        (BestN(1, "loss", "max"), scored(1.0, 1.0, 0.0), [2]),
        (BestN(1, "loss", "min"), scored(math.nan, 5.0, math.nan), [2]),
        (BestN(1, "loss", "max"), scored(math.nan, -math.inf), [2]),
        (BestN(1, "loss", "min"), scored(None, 2.0, 1.0, None), [1, 3, 4]),
        (BestN(1, "loss", "min", keep_without=False), scored(None, 2.0, 1.0, None), [3]),
        (BestN(1, "accuracy", "max", keep_without=False), scored(2.0, 1.0), []),
        (AnyOf((LastN(1), EveryNSteps(20))), line(10, 20, 30, 50), [2, 4]),
        (AnyOf(()), line(10), []),
    ],
)
def test_truth_table(policy: KeepPolicy, commits: Sequence[Committed], kept: list[int]) -> None:
    assert sorted(policy.kept(commits)) == kept


def test_a_policy_reaches_another_process_whole() -> None:
    best = (BestN(2, "loss", "min"), BestN(1, "accuracy", "max", keep_without=False))
    nested = AnyOf((EveryNSteps(100), EverySeconds(3600), AnyOf((MaxAge(86400), LastN(7)))))
    arrived = decode(Keep, encode(Keep.from_policy(AnyOf((LastN(3), nested, *best))))).policy
    flat = {LastN(3), LastN(7), EveryNSteps(100), EverySeconds(3600), MaxAge(86400), *best}
    assert set(arrived.policies) == flat


def test_times_are_asked_for_only_where_they_matter() -> None:
    assert not Keep.from_policy(AnyOf((LastN(1), EveryNSteps(2), BestN(1, "loss", "min")))).needs_times
    assert Keep.from_policy(MaxAge(1)).needs_times
    assert Keep.from_policy(EverySeconds(1)).needs_times


def test_a_policy_of_ones_own_cannot_be_told_and_is_refused() -> None:
    class Mine:
        def kept(self, commits: Sequence[Committed]) -> frozenset[int]:
            return frozenset()

    with pytest.raises(TypeError, match="LastN, EveryNSteps, EverySeconds, BestN, MaxAge, AnyOf"):
        Keep.from_policy(AnyOf((LastN(1), Mine())))


def test_settings_become_policies() -> None:
    assert from_retention(Retention()) == LastN(3)
    assert from_retention(Retention(last=0)) == LastN(1)
    assert from_retention(Retention(last=2, every_steps=500)) == AnyOf((LastN(2), EveryNSteps(500)))
    for mode, kept in ((BestMode.MIN, "min"), (BestMode.MAX, "max")):
        retention = Retention(best=Best(metric="loss", mode=mode, count=2), max_age_seconds=60)
        assert from_retention(retention) == AnyOf((LastN(3), BestN(2, "loss", kept), MaxAge(60)))
