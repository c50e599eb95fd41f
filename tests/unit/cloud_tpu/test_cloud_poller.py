"""All objects of a place share its lists."""

import asyncio

import pytest

from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudNode,
    CloudOperationState,
    CloudQueuedResource,
    CloudRequest,
    CloudTPUError,
    ErrorKind,
    Place,
)
from stepkeeper_operator.cloud_tpu.polling import Poller

PLACE = Place(project="lab-tpus", zone="us-central2-b")
OTHER = Place(project="lab-tpus", zone="us-east5-a")


class ListingCloud:
    """A cloud that only lists."""

    def __init__(self) -> None:
        self.asked: list[tuple[Place, ApiVersion]] = []
        self.error: CloudTPUError | None = None
        self.refused: set[ApiVersion] = set()
        """Versions that may not be used."""

        self.gate = asyncio.Event()
        self.gate.set()

    async def list_queued_resources(
        self, place: Place, version: ApiVersion
    ) -> tuple[CloudQueuedResource, ...]:
        self.asked.append((place, version))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        if version in self.refused:
            raise CloudTPUError(ErrorKind.TERMINAL, "PERMISSION_DENIED", f"no {version}")
        return (CloudQueuedResource(place=place, id="a", state="ACTIVE"),)

    async def list_nodes(self, place: Place, version: ApiVersion) -> tuple[CloudNode, ...]:
        return (CloudNode(place=place, id="a-0", state="READY"),)

    async def get_queued_resource(
        self, place: Place, queued_resource_id: str, version: ApiVersion
    ) -> CloudQueuedResource | None:
        raise NotImplementedError

    async def get_node(self, place: Place, node_id: str, version: ApiVersion) -> CloudNode | None:
        raise NotImplementedError

    async def create_queued_resource(self, request: CloudRequest) -> str:
        raise NotImplementedError

    async def delete_queued_resource(
        self, place: Place, queued_resource_id: str, *, request_id: str, version: ApiVersion
    ) -> str | None:
        raise NotImplementedError

    async def get_operation(self, name: str, version: ApiVersion) -> CloudOperationState | None:
        raise NotImplementedError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_two_hundred_who_ask_at_once_send_one_list() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    cloud.gate.clear()
    asking = [
        asyncio.create_task(poller.list_place(PLACE, ApiVersion.V2, newer_than=990.0)) for _ in range(200)
    ]
    await asyncio.sleep(0)
    cloud.gate.set()
    listings = await asyncio.gather(*asking)
    assert len(cloud.asked) == 1
    assert all(listing is listings[0] for listing in listings)
    assert set(listings[0].resources) == {"a"}
    assert set(listings[0].nodes) == {"a-0"}


async def test_a_listing_that_is_too_old_is_asked_for_again() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    await poller.list_place(PLACE, ApiVersion.V2, newer_than=0.0)
    clock.now = 1010.0
    await poller.list_place(PLACE, ApiVersion.V2, newer_than=999.0)
    assert len(cloud.asked) == 1
    assert (await poller.list_place(PLACE, ApiVersion.V2, newer_than=1000.0)).asked_at == 1010.0
    assert len(cloud.asked) == 2


async def test_an_error_answers_for_all_for_some_seconds_and_holds_up_no_other_place() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    cloud.error = CloudTPUError(ErrorKind.TRANSIENT, "UNAVAILABLE", "down")
    for _ in range(3):
        with pytest.raises(CloudTPUError, match="down"):
            await poller.list_place(PLACE, ApiVersion.V2, newer_than=0.0)
    assert len(cloud.asked) == 1
    cloud.error = None
    assert (await poller.list_place(OTHER, ApiVersion.V2, newer_than=0.0)).resources
    clock.now += 6
    assert (await poller.list_place(PLACE, ApiVersion.V2, newer_than=0.0)).resources


async def test_a_place_is_listed_with_v2alpha1_once_somebody_needs_it() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    for version in (ApiVersion.V2, ApiVersion.V2ALPHA1, ApiVersion.V2):
        await poller.list_place(PLACE, version, newer_than=0.0)
    assert [version for _, version in cloud.asked] == [ApiVersion.V2, ApiVersion.V2ALPHA1]


async def test_a_refusal_of_v2alpha1_hides_nothing_that_v2_shows() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    cloud.refused = {ApiVersion.V2ALPHA1}
    for _ in range(3):
        with pytest.raises(CloudTPUError, match="no v2alpha1"):
            await poller.list_place(PLACE, ApiVersion.V2ALPHA1, newer_than=clock.now - 1)
        assert (await poller.list_place(PLACE, ApiVersion.V2, newer_than=clock.now - 1)).resources
        clock.now += 10
    assert [version for _, version in cloud.asked].count(ApiVersion.V2) == 3


async def test_v2alpha1_that_begins_to_fail_is_replaced_for_those_who_can_do_without() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    await poller.list_place(PLACE, ApiVersion.V2ALPHA1, newer_than=0.0)
    cloud.refused = {ApiVersion.V2ALPHA1}
    clock.now += 10
    listing = await poller.list_place(PLACE, ApiVersion.V2, newer_than=clock.now - 1)
    assert listing.asked_at == clock.now
    cloud.refused = set()
    clock.now += 10
    await poller.list_place(PLACE, ApiVersion.V2ALPHA1, newer_than=clock.now - 1)
    n_asked = len(cloud.asked)
    await poller.list_place(PLACE, ApiVersion.V2, newer_than=clock.now - 1)
    assert len(cloud.asked) == n_asked, "one list for all again"


async def test_a_failing_v2_hides_nothing_that_v2alpha1_shows() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    cloud.refused = {ApiVersion.V2}
    with pytest.raises(CloudTPUError, match="no v2"):
        await poller.list_place(PLACE, ApiVersion.V2, newer_than=0.0)
    assert (await poller.list_place(PLACE, ApiVersion.V2ALPHA1, newer_than=0.0)).resources
    assert (await poller.list_place(PLACE, ApiVersion.V2, newer_than=0.0)).resources
