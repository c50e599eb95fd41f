"""Test that one operator acts at a time."""

import asyncio
import time

import pytest

from stepkeeper_operator.cluster import Resource
from stepkeeper_operator.errors import ApiError, LeaseLostError
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.lease import LeaseGuard
from stepkeeper_operator.testing import FakeCluster


class Time:
    """Let time pass at once when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(lambda: 0.0)


def guard(cluster: FakeCluster, identity: str) -> LeaseGuard:
    return LeaseGuard(cluster, namespace="ns", name="operator", identity=identity, duration_s=15)


def holder(cluster: FakeCluster) -> str:
    return str(cluster.objects["leases", "ns", "operator"]["spec"]["holderIdentity"])


async def test_the_first_operator_holds_the_lease_at_once(cluster: FakeCluster, clock: Time) -> None:
    first = guard(cluster, "a")
    assert not first.held
    await first.acquire()
    assert first.held
    assert holder(cluster) == "a"
    assert clock.now == 100


async def test_a_second_operator_waits_until_the_lease_of_a_dead_one_is_over(
    cluster: FakeCluster, clock: Time
) -> None:
    await guard(cluster, "a").acquire()
    second = guard(cluster, "b")
    await second.acquire()
    assert clock.now > 115
    assert holder(cluster) == "b"


async def test_a_lease_that_was_given_back_is_taken_at_once(cluster: FakeCluster, clock: Time) -> None:
    first, second = guard(cluster, "a"), guard(cluster, "b")
    await first.acquire()
    await first.release()
    assert not first.held
    await second.acquire()
    assert clock.now == 100
    assert second.held


async def test_an_operator_that_is_restarted_in_place_takes_its_own_lease(
    cluster: FakeCluster, clock: Time
) -> None:
    await guard(cluster, "a").acquire()
    await guard(cluster, "a").acquire()
    assert clock.now == 100


async def test_an_operator_whose_lease_was_taken_stops_acting(cluster: FakeCluster, clock: Time) -> None:
    first = guard(cluster, "a")
    await first.acquire()
    lease = cluster.objects["leases", "ns", "operator"]
    cluster.put("leases", lease | {"spec": lease["spec"] | {"holderIdentity": "b"}})
    with pytest.raises(LeaseLostError, match="taken by 'b'"):
        await first.keep_renewing()
    assert not first.held
    assert clock.now < 110


async def test_an_operator_that_cannot_renew_stops_before_another_may_start(
    cluster: FakeCluster, clock: Time
) -> None:
    first = guard(cluster, "a")
    await first.acquire()
    cluster.refusals["replace", "leases"] = ApiError(0, "no answer")
    with pytest.raises(LeaseLostError, match="could not be renewed"):
        await first.keep_renewing()
    assert clock.now <= 115


async def test_of_two_that_want_it_at_once_the_slower_one_waits(cluster: FakeCluster, clock: Time) -> None:
    first, second = guard(cluster, "a"), guard(cluster, "b")
    seen = cluster.get
    calls = 0

    async def overtaken(resource: Resource, namespace: str | None, name: str) -> RawObject | None:
        nonlocal calls
        calls += 1
        answer = await seen(resource, namespace, name)
        if calls == 1:
            cluster.get = seen  # type: ignore[method-assign]  # the first look only
            await first.acquire()
        return answer

    cluster.get = overtaken  # type: ignore[method-assign]  # between its look and its write the other one writes
    await second.acquire()
    assert clock.now > 115
    assert holder(cluster) == "b"
