"""The controller of QueuedResources with google's client, against a Cloud TPU service over the network."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.client import GoogleCloudTPU
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, Place
from stepkeeper_operator.queued_resources.naming import make_labels
from tpuapi.cloud import FakeCloud
from tpuapi.wire import serving

PLACE = Place(project="my-project", zone="us-west4-a")
ACTIVE = QueuedResourceState.ACTIVE
NODE = {"accelerator_type": "v5litepod-8", "runtime_version": "v2-alpha-tpuv5-lite"}


class Site:
    """A world whose operator asks the service, and the passing of their time."""

    def __init__(self, tpu: FakeCloud, client: GoogleCloudTPU, **spec: Any) -> None:
        self.tpu = tpu
        self.client = client
        self.world = ResourceWorld(
            now=tpu.now(), service=client, project=PLACE.project, zone=PLACE.zone, **spec
        )

    async def run(
        self, rounds: int, *, until: Callable[[], bool] = lambda: False, seconds: float = 10
    ) -> None:
        for _ in range(rounds):
            for _ in range(3):
                await self.world.reconcile()
            if until():
                return
            self.tpu.step(seconds)
            self.world.now = self.tpu.now()
            self.world.sync_hosts(await self.client.list_nodes(PLACE, ApiVersion.V2ALPHA1))

    async def become_active(self) -> None:
        await self.run(40, until=lambda: self.world.condition("NodesJoined") == ("True", "AllHostsJoined"))
        assert self.world.status.state is ACTIVE

    async def list_ids(self) -> list[str]:
        return [r.id for r in await self.client.list_queued_resources(PLACE, ApiVersion.V2ALPHA1)]

    async def vanish(self) -> None:
        self.world.delete()
        await self.run(60, until=lambda: self.world.raw is None)
        assert self.world.raw is None
        assert await self.list_ids() == []
        assert await self.client.list_nodes(PLACE, ApiVersion.V2ALPHA1) == ()
        assert self.world.cluster.list_objects("nodes") == []


MakeSite = Callable[..., Awaitable[Site]]


@pytest.fixture
async def make_site(tpu: FakeCloud) -> AsyncIterator[MakeSite]:
    @asynccontextmanager
    async def connected() -> AsyncIterator[GoogleCloudTPU]:
        async with serving(tpu) as address:
            client = GoogleCloudTPU(endpoint=address, insecure=True)
            yield client
            await client.close()

    async with connected() as client:

        async def make(**spec: Any) -> Site:
            return Site(tpu, client, **spec)

        yield make


@pytest.mark.parametrize("tier", [{"guaranteed": {}}, {"spot": {}}, {"bestEffort": {}}])
async def test_it_is_created_joined_and_deleted(make_site: MakeSite, tier: dict[str, Any]) -> None:
    site = await make_site(tier=tier, node={"count": 2})
    await site.become_active()
    assert site.world.status.joined == "2/2"
    assert site.world.status.api_version == ("v2" if "spot" in tier else "v2alpha1")
    assert (
        site.world.status.autocheckpoint
        == {"guaranteed": "On", "spot": "Off", "bestEffort": "Off"}[next(iter(tier))]
    )
    assert site.world.condition("Degraded") == ("False", "AsExpected")
    assert await site.world.record_writes() == []
    await site.vanish()


async def test_a_preempted_one_is_made_anew_within_the_quota(make_site: MakeSite, tpu: FakeCloud) -> None:
    site = await make_site()
    tpu.set_quota("v5litepod", 8)
    await site.become_active()
    tpu.preempt("team-v5e")
    await site.run(40, until=lambda: site.world.status.bookkeeping.number == 1)
    await site.become_active()
    assert await site.list_ids() == ["team-v5e-r1"]
    assert "QuotaExhausted" not in site.world.events
    await site.vanish()


async def test_quota_is_gone_and_comes_back(make_site: MakeSite, tpu: FakeCloud) -> None:
    site = await make_site()
    tpu.set_quota("v5litepod", 0)
    await site.run(10)
    assert site.world.condition("QuotaExhausted") == ("True", "QuotaExhausted")
    tpu.set_quota("v5litepod", None)
    await site.run(40)
    await site.become_active()
    assert site.world.condition("QuotaExhausted") == ("False", "QuotaSuffices")


async def test_quota_that_a_state_tells_of_is_tried_again_ever_more_slowly(
    make_site: MakeSite, tpu: FakeCloud
) -> None:
    site = await make_site()
    tpu.quota_refused_at_call = False
    tpu.set_quota("v5litepod", 0)
    created_at: list[float] = []
    for number in range(3):
        wanted = "team-v5e" if number == 0 else f"team-v5e-r{number}"
        for _ in range(400):
            await site.run(1)
            if wanted in await site.list_ids():
                break
        created_at.append(site.world.now)
    first_s, second_s = created_at[1] - created_at[0], created_at[2] - created_at[1]
    assert first_s >= 300
    assert second_s >= first_s + 200
    assert site.world.condition("QuotaExhausted") == ("True", "QuotaExhausted")
    await site.vanish()


@pytest.mark.parametrize("tier", [{"guaranteed": {}}, {"spot": {}}])
async def test_what_was_retained_is_taken_up_by_the_next_object_of_the_name(
    make_site: MakeSite, tier: dict[str, Any]
) -> None:
    spec: dict[str, Any] = {
        "tier": tier,
        "node": {"count": 2, "network": {"network": "default"}, "tags": ["b", "a"], "labels": {"team": "x"}},
        "project": PLACE.project,
        "zone": PLACE.zone,
        "deletionPolicy": "Retain",
    }
    site = await make_site(**{key: value for key, value in spec.items() if key not in {"project", "zone"}})
    await site.become_active()
    site.world.delete()
    await site.run(2)
    assert site.world.raw is None
    assert await site.list_ids() == ["team-v5e"]
    site.world.make_object("uid-2", adopt="team-v5e", **{**spec, "deletionPolicy": "Delete"})
    await site.become_active()
    assert await site.list_ids() == ["team-v5e"]
    assert site.world.status.joined == "2/2"
    await site.vanish()


async def make_by_hand(client: GoogleCloudTPU, *, count: int) -> None:
    many = tuple(f"team-v5e-{index}" for index in range(count))
    request = CloudRequest(
        place=PLACE,
        id="team-v5e",
        request_id="",
        api_version=ApiVersion.V2,
        node_ids=("team-v5e",) if count == 1 else many,
        node_id_prefix=None if count == 1 else "team-v5e",
        node={**NODE, "labels": {"team": "blue"}},
        tier={"spot": {}},
        queueing={},
    )
    await client.create_queued_resource(request)


@pytest.mark.parametrize("count", [1, 2])
async def test_of_two_clusters_one_adopts_what_both_name(make_site: MakeSite, count: int) -> None:
    first = await make_site(node={"count": count}, adopt="team-v5e")
    second = await make_site(
        node={"count": count}, adopt="team-v5e", cluster_id="another-cluster", uid="uid-2"
    )
    await make_by_hand(first.client, count=count)
    for _ in range(25):
        await first.run(1)
        second.world.now = first.world.now
        await second.run(1, seconds=0)
    accepted = {site.world.condition("Accepted"): site for site in (first, second)}
    assert accepted.keys() == {("True", "Accepted"), ("False", "NotOurs")}
    owner, other = accepted["True", "Accepted"], accepted["False", "NotOurs"]
    cluster_id = "cluster-uid" if owner is first else "another-cluster"
    nodes = await owner.client.list_nodes(PLACE, ApiVersion.V2)
    assert len(nodes) == count
    for node in nodes:
        assert node.labels == {"team": "blue", **make_labels(owner.world.resource.metadata, cluster_id)}
    other.world.delete()
    await other.run(10)
    assert other.world.raw is None
    assert await owner.list_ids() == ["team-v5e"]
    owner.world.now = other.world.now
    await owner.vanish()


async def test_a_creation_whose_answer_is_lost_is_found_again(make_site: MakeSite, tpu: FakeCloud) -> None:
    site = await make_site()
    tpu.inject_error("CreateQueuedResource", "UNAVAILABLE", 1, after_commit=True)
    await site.become_active()
    assert await site.list_ids() == ["team-v5e"]
    await site.vanish()


async def test_an_object_is_gone_soon_after_what_a_lost_answer_made_was_listed(
    make_site: MakeSite, tpu: FakeCloud
) -> None:
    site = await make_site()
    tpu.inject_error("CreateQueuedResource", "UNAVAILABLE", 1, after_commit=True)
    await site.run(3)
    assert site.world.status.state is QueuedResourceState.PROVISIONING
    deleted_at = site.world.now
    await site.vanish()
    assert site.world.now - deleted_at <= 30


async def test_an_operator_that_is_killed_during_the_creation_makes_no_second(make_site: MakeSite) -> None:
    site = await make_site()
    site.world.kill_at = 3
    await site.become_active()
    assert await site.list_ids() == ["team-v5e"]


async def test_maintenance_is_told_with_its_window(make_site: MakeSite, tpu: FakeCloud) -> None:
    site = await make_site(tier={"guaranteed": {}})
    await site.become_active()
    tpu.announce_maintenance("team-v5e", starts_in_s=3600, lasts_s=600)
    await site.run(10)
    assert site.world.condition("MaintenanceScheduled") == ("True", "Pending")
    assert site.world.status.next_maintenance_time == int(site.world.now) + 3600 - 100


async def test_a_refusal_is_told_in_the_services_words(make_site: MakeSite) -> None:
    site = await make_site(node={"acceleratorType": "v9-8"})
    await site.run(4)
    assert site.world.condition("Accepted") == ("False", "Refused")
    accepted = next(c for c in site.world.status.conditions if c.type == "Accepted")
    assert "INVALID_ARGUMENT" in accepted.message
    assert "v9-8" in accepted.message
    await site.vanish()


async def test_an_expired_request_is_removed_and_stays_gone(make_site: MakeSite, tpu: FakeCloud) -> None:
    site = await make_site(queueing={"validUntilSeconds": 60}, recreatePolicy={"onFailed": "Keep"})
    tpu.set_capacity("v5litepod", 0)
    await site.run(40)
    assert site.world.status.state is QueuedResourceState.GONE
    assert await site.list_ids() == []
    await site.vanish()


@pytest.mark.parametrize("rounds", [1, 2, 4, 8, 12])
async def test_a_deletion_at_any_time_leaves_nothing(make_site: MakeSite, rounds: int) -> None:
    site = await make_site()
    await site.run(rounds)
    await site.vanish()


async def test_a_service_without_v2alpha1_serves_what_doesnt_need_it(tpu: FakeCloud) -> None:
    tpu.inject_error("*", "UNIMPLEMENTED", None, version=ApiVersion.V2ALPHA1)
    async with serving(tpu) as address:
        client = GoogleCloudTPU(endpoint=address, insecure=True)
        site = Site(tpu, client)
        for _ in range(12):
            await site.world.reconcile()
            await site.world.reconcile()
            tpu.step(10)
            site.world.now = tpu.now()
            site.world.sync_hosts(await client.list_nodes(PLACE, ApiVersion.V2))
        assert site.world.condition("NodesJoined") == ("True", "AllHostsJoined")
        assert site.world.condition("MaintenanceScheduled") == ("Unknown", "NotTold")
        message = next(c.message for c in site.world.status.conditions if c.type == "MaintenanceScheduled")
        assert "UNIMPLEMENTED" in message
        await client.close()


async def test_maintenance_of_spot_machines_is_told_too(make_site: MakeSite, tpu: FakeCloud) -> None:
    site = await make_site()
    await site.become_active()
    assert site.world.condition("MaintenanceScheduled") == ("False", "NotAnnounced")
    tpu.announce_maintenance("team-v5e", starts_in_s=3600, lasts_s=600)
    await site.run(10)
    assert site.world.condition("MaintenanceScheduled") == ("True", "Pending")


@pytest.mark.parametrize("method", ["DeleteQueuedResource", "GetQueuedResource"])
@pytest.mark.parametrize("code", ["PERMISSION_DENIED", "INVALID_ARGUMENT"])
async def test_a_deletion_that_was_refused_once_is_asked_for_again_soon(
    make_site: MakeSite, tpu: FakeCloud, method: str, code: str
) -> None:
    site = await make_site()
    await site.become_active()
    began_at = site.world.now
    tpu.inject_error(method, code, 1)
    await site.vanish()
    assert site.world.now - began_at <= 300
    assert tpu.count("DeleteQueuedResource") == (2 if method == "DeleteQueuedResource" else 1)


@pytest.mark.parametrize("method", ["DeleteQueuedResource", "GetQueuedResource"])
async def test_a_recreation_whose_deletion_was_refused_says_so_and_goes_on(
    make_site: MakeSite, tpu: FakeCloud, method: str
) -> None:
    site = await make_site()
    await site.become_active()
    tpu.preempt("team-v5e")
    tpu.inject_error(method, "PERMISSION_DENIED", None)
    await site.run(30, until=lambda: site.world.condition("Degraded") == ("True", "DeletionBlocked"))
    assert site.world.condition("Degraded") == ("True", "DeletionBlocked")
    await site.run(60)
    assert await site.list_ids() == ["team-v5e"]
    tpu.clear_faults()
    lifted_at = site.world.now
    await site.run(60, until=lambda: site.world.status.bookkeeping.number == 1)
    assert site.world.now - lifted_at <= 360
    await site.become_active()
    assert site.world.condition("Degraded") == ("False", "AsExpected")
    assert await site.list_ids() == ["team-v5e-r1"]


NODE_NAME, RESOURCE_NAME = (f"{PLACE.parent}/{kind}/team-v5e" for kind in ("nodes", "queuedResources"))
UNKNOWN_NUMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "state of a node": (NODE_NAME, {"state": 77}),
    "health of a node": (NODE_NAME, {"health": 77}),
    "status of maintenance": (NODE_NAME, {"upcoming_maintenance": {"maintenance_status": 77}}),
    "kind of maintenance": (NODE_NAME, {"upcoming_maintenance": {"type_": 77}}),
    "state of a queued resource": (RESOURCE_NAME, {"state": {"state": 77}}),
}


@pytest.mark.parametrize("tier", [{"guaranteed": {}}, {"spot": {}}])
@pytest.mark.parametrize("what", UNKNOWN_NUMBERS)
async def test_a_number_that_google_s_client_does_not_know_is_shown_and_keeps_no_machine(
    make_site: MakeSite, tpu: FakeCloud, what: str, tier: dict[str, Any]
) -> None:
    site = await make_site(tier=tier)
    await site.become_active()
    name, fields = UNKNOWN_NUMBERS[what]
    tpu.shown[name] = fields
    await site.run(8)
    assert "UNKNOWN(77)" in str(site.world.raw)
    assert await site.list_ids() == ["team-v5e"]
    await site.vanish()
