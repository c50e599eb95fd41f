"""Test which commits a policy keeps."""

import math
from collections.abc import Sequence

import pytest

from stepkeeper.contract import Best, BestMode, Retention
from stepkeeper.contract.wire import decode, encode
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
