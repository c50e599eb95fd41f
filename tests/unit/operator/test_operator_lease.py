"""Test that one operator acts at a time."""

import asyncio
import random
import time

import pytest
from typing_extensions import override

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.cluster import CONFIG_MAPS, Resource, guard_writes
from stepkeeper_operator.errors import ApiError, LeaseLostError
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.lease import LeaseGuard


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


def rival(cluster: FakeCluster, namespace: str) -> LeaseGuard:
    """Make the operator of another release in the same cluster."""
    return LeaseGuard(cluster, namespace=namespace, name="operator", identity=f"{namespace}-0", duration_s=15)


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


async def test_a_second_release_in_the_cluster_does_nothing_and_names_the_first(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = rival(cluster, "train"), rival(cluster, "another")
    await first.acquire()
    told = "operator train-0 of lease train/operator is in this cluster already"
    looks = 0

    async def look(seconds: float) -> None:
        nonlocal looks
        looks += 1
        assert told in second.waits_for
        await first._renew()
        if looks == 10:
            await first.release()

    monkeypatch.setattr(asyncio, "sleep", look)
    await second.acquire()
    assert second.held
    assert second.waits_for == ""
    assert looks == 10
    assert [told in record.message for record in caplog.records if record.levelname == "ERROR"] == [True]


async def test_a_release_whose_operator_died_keeps_another_waiting_only_for_its_lease(
    cluster: FakeCluster, clock: Time
) -> None:
    await rival(cluster, "dead").acquire()
    second = rival(cluster, "train")
    await second.acquire()
    assert second.held
    assert 115 < clock.now < 125


@pytest.mark.parametrize("seed", range(25))
async def test_of_two_releases_that_start_at_once_one_acts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    rng, now = random.Random(seed), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    cluster = Shuffled(rng)
    began: list[LeaseGuard] = []

    async def run(guard: LeaseGuard) -> None:
        await guard.acquire()
        began.append(guard)
        await guard.keep_renewing()

    tasks = [asyncio.ensure_future(run(rival(cluster, name))) for name in ("a", "b", "c")]
    for _ in range(2500):
        cluster.let_one_answer()
        for _ in range(rng.randint(1, 3)):
            await turn()
        assert len(began) <= 1
        now += 0.01
    assert len(began) == 1
    assert began[0].held
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def turn() -> None:
    """Give all tasks a turn; `asyncio.sleep` is a pause of their own here."""
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    loop.call_soon(passed.set_result, None)
    await passed


class Shuffled(FakeCluster):
    """Answer requests in any order, one at a time."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(lambda: 0.0)
        self._rng = rng
        self._open: list[asyncio.Future[None]] = []

    def let_one_answer(self) -> None:
        self._open = [request for request in self._open if not request.done()]
        if self._open:
            self._open.pop(self._rng.randrange(len(self._open))).set_result(None)

    async def _wait(self) -> None:
        request = asyncio.get_running_loop().create_future()
        self._open.append(request)
        await request

    @override
    async def get(self, resource: Resource, namespace: str | None, name: str) -> RawObject | None:
        await self._wait()
        return await super().get(resource, namespace, name)

    @override
    async def list_all(self, resource: Resource, label_selector: str = "") -> tuple[RawObject, ...]:
        await self._wait()
        return await super().list_all(resource, label_selector)

    @override
    async def create(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        await self._wait()
        return await super().create(resource, namespace, body)

    @override
    async def replace(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        await self._wait()
        return await super().replace(resource, namespace, body)


class Silent(FakeCluster):
    """An API server that stops answering."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.silent = False

    @override
    async def replace(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        if self.silent:
            await asyncio.Event().wait()
        return await super().replace(resource, namespace, body)


async def test_a_request_that_hangs_does_not_keep_an_operator_acting_until_its_lease_is_over() -> None:
    cluster = Silent()
    guard = LeaseGuard(cluster, namespace="ns", name="operator", identity="a", duration_s=9)
    await guard.acquire()
    began = time.monotonic()
    cluster.silent = True
    with pytest.raises(LeaseLostError):
        await guard.keep_renewing()
    assert not guard.held
    assert time.monotonic() - began < 9, "it stops acting while the lease still keeps others away"


async def test_a_process_that_stood_still_stops_though_nobody_took_its_lease(
    cluster: FakeCluster, clock: Time
) -> None:
    first = guard(cluster, "a")
    await first.acquire()
    clock.now += 16
    with pytest.raises(LeaseLostError, match="could not be renewed"):
        await first.keep_renewing()


async def test_the_lease_is_looked_at_before_each_write(cluster: FakeCluster) -> None:
    acting = True
    guarded = guard_writes(cluster, acting=lambda: acting)
    made = await guarded.create(CONFIG_MAPS, "ns", {"metadata": {"name": "a", "namespace": "ns"}})
    acting = False
    cluster.writes.clear()
    uid = made["metadata"]["uid"]
    for write in (
        guarded.create(CONFIG_MAPS, "ns", made),
        guarded.replace(CONFIG_MAPS, "ns", made),
        guarded.apply(CONFIG_MAPS, "ns", made),
        guarded.patch_pod_status("ns", "a", {}),
        guarded.set_finalizers(CONFIG_MAPS, "ns", "a", (), uid=uid, resource_version="1"),
        guarded.change_node("n", uid=uid),
        guarded.evict_pod("ns", "a", uid=uid),
        guarded.delete(CONFIG_MAPS, "ns", "a", uid=uid),
    ):
        with pytest.raises(LeaseLostError):
            await write
    assert cluster.writes == []
    assert await guarded.get(CONFIG_MAPS, "ns", "a") is not None


async def test_an_operator_that_may_not_list_leases_says_so_and_does_nothing(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = guard(cluster, "a")
    cluster.refusals["list", "leases"] = ApiError(403, "leases is forbidden")

    async def look(seconds: float) -> None:
        assert (
            first.waits_for == "Leases can't be listed, which show other installations: leases is forbidden"
        )
        cluster.refusals.clear()

    monkeypatch.setattr(asyncio, "sleep", look)
    await first.acquire()
    assert first.waits_for == ""
