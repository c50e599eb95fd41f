"""The controller of QueuedResources with google's client, against a Cloud TPU service over the network."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.client import GoogleCloudTPU
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, Place
from tpuapi.cloud import FakeCloud
from tpuapi.wire import serving

PLACE = Place(project="my-project", zone="us-west4-a")
ACTIVE = QueuedResourceState.ACTIVE


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
    async with serving(tpu, max_page_size=1) as address:
        client = GoogleCloudTPU(endpoint=address, insecure=True)

        async def make(**spec: Any) -> Site:
            return Site(tpu, client, **spec)

        yield make
        await client.close()


@pytest.mark.smoke
@pytest.mark.parametrize("tier", [{"guaranteed": {}}, {"spot": {}}, {"bestEffort": {}}])
async def test_it_is_created_joined_and_deleted(make_site: MakeSite, tier: dict[str, Any]) -> None:
    site = await make_site(tier=tier, slices={"count": 2})
    await site.become_active()
    assert site.world.status.joined == "2/2"
    assert site.world.status.provider == f"tpu.googleapis.com/{'v2' if 'spot' in tier else 'v2alpha1'}"
    assert (
        site.world.status.autocheckpoint
        == {"guaranteed": "On", "spot": "Off", "bestEffort": "Off"}[next(iter(tier))]
    )
    assert site.world.condition("Degraded") == ("False", "AsExpected")
    assert await site.world.record_writes(rounds=2) == []
    await site.vanish()


@pytest.mark.parametrize("tier", [{"guaranteed": {}}, {"spot": {}}])
async def test_what_was_retained_is_taken_up_by_the_next_object_of_the_name(
    make_site: MakeSite, tier: dict[str, Any]
) -> None:
    spec: dict[str, Any] = {
        "tier": tier,
        "slices": {
            "count": 2,
            "network": {"network": "default"},
            "tags": ["b", "a"],
            "labels": {"team": "x"},
        },
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
    await site.run(60, until=lambda: site.world.status.operator.number == 1)
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
