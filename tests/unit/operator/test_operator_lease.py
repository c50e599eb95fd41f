"""Test that one operator acts at a time."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.cluster.protocol import guard_writes
from stepkeeper_operator.cluster.resources import CONFIG_MAPS
from stepkeeper_operator.errors import ApiError, LeaseLostError
from stepkeeper_operator.lease import LeaseGuard


class Time:
    """Let time pass at once during sleeps."""

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


@pytest.mark.parametrize(
    ("first", "second", "gives_back", "waits"),
    [
        pytest.param(guard, "b", False, True, id="the other one has died"),
        pytest.param(guard, "b", True, False, id="the other one has given it back"),
        pytest.param(guard, "a", False, False, id="it is the same one, restarted in place"),
        pytest.param(rival, "b", False, True, id="one of another release has died"),
    ],
)
async def test_an_operator_waits_for_the_lease_of_another_as_long_as_it_may_be_held(
    cluster: FakeCluster,
    clock: Time,
    first: Callable[[FakeCluster, str], LeaseGuard],
    second: str,
    *,
    gives_back: bool,
    waits: bool,
) -> None:
    before = first(cluster, "a")
    assert not before.held
    await before.acquire()
    assert before.held
    assert clock.now == 100
    if gives_back:
        await before.release()
        assert not before.held
    after = guard(cluster, second)
    await after.acquire()
    assert after.held
    assert cluster.objects["leases", "ns", "operator"]["spec"]["holderIdentity"] == second
    assert 115 < clock.now < 125 if waits else clock.now == 100


@pytest.mark.parametrize(
    ("why", "until", "said"),
    [
        ("was taken", 110, "taken over by 'b'"),
        ("can't renew", 115.001, "could not be renewed"),
        ("stood still", 120, "could not be renewed"),
    ],
)
async def test_an_operator_that_cannot_renew_stops_before_another_may_start(
    cluster: FakeCluster, clock: Time, why: str, until: float, said: str
) -> None:
    first = guard(cluster, "a")
    await first.acquire()
    if why == "was taken":
        lease = cluster.objects["leases", "ns", "operator"]
        cluster.put("leases", lease | {"spec": lease["spec"] | {"holderIdentity": "b"}})
    elif why == "can't renew":
        cluster.refusals["replace", "leases"] = ApiError(0, "no answer")
    else:
        clock.now += 16
    with pytest.raises(LeaseLostError, match=said):
        await first.keep_renewing()
    assert not first.held
    assert clock.now < until


async def test_a_request_that_hangs_does_not_keep_an_operator_acting_until_its_lease_is_over(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = LeaseGuard(cluster, namespace="ns", name="operator", identity="a", duration_s=3)
    await guard.acquire()
    began = time.monotonic()

    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(cluster, "replace", hang)
    with pytest.raises(LeaseLostError):
        await guard.keep_renewing()
    assert not guard.held
    assert time.monotonic() - began < 3, "it stops acting while the lease still keeps others away"


async def test_a_second_release_in_the_cluster_does_nothing_and_names_the_first(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = rival(cluster, "train"), rival(cluster, "another")
    await first.acquire()
    told = "operator train-0 with lease train/operator is already in this cluster"
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
    assert (second.held, second.waits_for, looks) == (True, "", 10)
    assert [told in record.message for record in caplog.records if record.levelname == "ERROR"] == [True]


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        ((), ("ml",), True),
        (("ml",), (), True),
        (("ml", "lab"), ("vision", "ml"), True),
        (("ml",), ("vision",), False),
    ],
)
async def test_a_second_release_acts_in_namespaces_that_the_first_does_not_watch(
    cluster: FakeCluster, clock: Time, first: tuple[str, ...], second: tuple[str, ...], *, waits: bool
) -> None:
    for place, namespaces in (("a", first), ("b", second)):
        made = LeaseGuard(
            cluster, namespace=place, name="o", identity=place, duration_s=15, watched=namespaces
        )
        await made.acquire()
    assert (clock.now > 100) is waits


async def test_an_operator_that_may_not_list_leases_says_so_and_does_nothing(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = guard(cluster, "a")
    cluster.refusals["list", "leases"] = ApiError(403, "leases is forbidden")

    async def look(seconds: float) -> None:
        assert first.waits_for.startswith("cannot list the Leases of other installations")
        assert "leases is forbidden" in first.waits_for
        cluster.refusals.clear()

    monkeypatch.setattr(asyncio, "sleep", look)
    await first.acquire()
    assert (first.waits_for, cluster.refusals) == ("", {}), "it has waited"


@pytest.mark.parametrize("make", [guard, rival], ids=["one release", "several releases"])
@pytest.mark.parametrize("seed", range(15))
async def test_of_two_releases_that_start_at_once_one_acts(
    seed: int, make: Callable[[FakeCluster, str], LeaseGuard], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, now = random.Random(seed), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    cluster = FakeCluster(lambda: 0.0)
    requests = delay_requests(cluster, monkeypatch)
    began: list[LeaseGuard] = []

    async def run(guard: LeaseGuard) -> None:
        await guard.acquire()
        began.append(guard)
        await guard.keep_renewing()

    tasks = [asyncio.ensure_future(run(make(cluster, name))) for name in ("a", "b", "c")]
    for _ in range(2500):
        if requests:
            requests.pop(rng.randrange(len(requests))).set_result(None)
        for _ in range(rng.randint(1, 3)):
            await turn()
        requests[:] = [request for request in requests if not request.done()]
        assert len(began) <= 1
        now += 0.01
    assert len(began) == 1
    assert began[0].held
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def delay_requests(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Future[None]]:
    """Let each request wait until its future, of those that are returned, has a result."""
    requests: list[asyncio.Future[None]] = []

    def late(request: Callable[..., Any]) -> Callable[..., Any]:
        async def wait(*args: Any) -> Any:
            requests.append(asyncio.get_running_loop().create_future())
            await requests[-1]
            return await request(*args)

        return wait

    for name in ("get", "list_all", "create", "replace"):
        monkeypatch.setattr(cluster, name, late(getattr(cluster, name)))
    return requests


async def turn() -> None:
    """Give all tasks a turn; `asyncio.sleep` is a pause of their own here."""
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    loop.call_soon(passed.set_result, None)
    await passed


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
