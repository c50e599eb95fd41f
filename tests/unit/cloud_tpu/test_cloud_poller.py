"""All objects of a place share its lists."""

import asyncio
from collections.abc import Mapping

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
REFUSED = CloudTPUError(ErrorKind.TERMINAL, "PERMISSION_DENIED", "not permitted")
DOWN = CloudTPUError(ErrorKind.TRANSIENT, "UNAVAILABLE", "down")


class ListingCloud:
    """A cloud that only lists."""

    def __init__(self) -> None:
        self.asked: list[tuple[Place, ApiVersion]] = []
        self.errors: dict[ApiVersion, CloudTPUError] = {}
        """Errors of lists by each version."""

        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def versions(self) -> list[ApiVersion]:
        return [version for _, version in self.asked]

    async def list_queued_resources(
        self, place: Place, version: ApiVersion
    ) -> tuple[CloudQueuedResource, ...]:
        self.asked.append((place, version))
        await self.gate.wait()
        if version in self.errors:
            raise self.errors[version]
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

    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
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
    asking = [asyncio.create_task(poller.list_place(PLACE, newer_than=990.0)) for _ in range(200)]
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
    await poller.list_place(PLACE, newer_than=0.0)
    clock.now = 1010.0
    await poller.list_place(PLACE, newer_than=999.0)
    assert len(cloud.asked) == 1
    assert (await poller.list_place(PLACE, newer_than=1000.0)).asked_at == 1010.0
    assert len(cloud.asked) == 2


async def test_an_error_answers_for_all_for_some_seconds_and_holds_up_no_other_place() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    cloud.errors = dict.fromkeys(ApiVersion, DOWN)
    for _ in range(3):
        with pytest.raises(CloudTPUError, match="down"):
            await poller.list_place(PLACE, newer_than=0.0)
    assert cloud.versions == [ApiVersion.V2ALPHA1, ApiVersion.V2]
    cloud.errors.clear()
    assert (await poller.list_place(OTHER, newer_than=0.0)).resources
    clock.now += 6
    assert (await poller.list_place(PLACE, newer_than=0.0)).resources


async def test_every_place_is_listed_by_v2alpha1_which_shows_all() -> None:
    cloud, clock = ListingCloud(), Clock()
    listing = await Poller(cloud, clock=clock).list_place(PLACE, newer_than=0.0)
    assert (listing.version, listing.refusal) == (ApiVersion.V2ALPHA1, "")
    assert cloud.versions == [ApiVersion.V2ALPHA1]


async def test_where_v2alpha1_is_refused_v2_answers_and_says_so() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    cloud.errors[ApiVersion.V2ALPHA1] = REFUSED
    for _ in range(4):
        listing = await poller.list_place(PLACE, newer_than=clock.now - 1)
        assert (listing.version, listing.refusal) == (ApiVersion.V2, "PERMISSION_DENIED")
        assert listing.resources
        clock.now += 60
    assert cloud.versions == [ApiVersion.V2ALPHA1, *[ApiVersion.V2] * 4], (
        "a refusal isn't asked for again at once"
    )


async def test_a_permission_that_is_given_later_is_noticed() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    cloud.errors[ApiVersion.V2ALPHA1] = REFUSED
    await poller.list_place(PLACE, newer_than=clock.now - 1)
    cloud.errors.clear()
    clock.now += 299
    assert (await poller.list_place(PLACE, newer_than=clock.now - 1)).version is ApiVersion.V2
    clock.now += 1
    assert (await poller.list_place(PLACE, newer_than=clock.now - 1)).version is ApiVersion.V2ALPHA1


async def test_a_passing_error_of_v2alpha1_is_told_only_if_it_lasts() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    cloud.errors[ApiVersion.V2ALPHA1] = DOWN
    refusals = []
    for _ in range(7):
        listing = await poller.list_place(PLACE, newer_than=clock.now - 1)
        assert listing.version is ApiVersion.V2
        refusals.append(listing.refusal)
        clock.now += 50
    assert refusals == [*[""] * 6, "UNAVAILABLE"]
    cloud.errors.clear()
    assert (await poller.list_place(PLACE, newer_than=clock.now - 1)).version is ApiVersion.V2ALPHA1


async def test_what_fails_by_both_says_nothing_about_v2alpha1() -> None:
    cloud, clock = ListingCloud(), Clock()
    poller = Poller(cloud, clock=clock)
    cloud.errors = dict.fromkeys(ApiVersion, REFUSED)
    with pytest.raises(CloudTPUError, match="PERMISSION_DENIED"):
        await poller.list_place(PLACE, newer_than=0.0)
    cloud.errors.clear()
    clock.now += 6
    assert (await poller.list_place(PLACE, newer_than=0.0)).version is ApiVersion.V2ALPHA1


async def test_without_credentials_one_version_is_asked() -> None:
    cloud, clock = ListingCloud(), Clock()
    error = CloudTPUError(ErrorKind.CREDENTIALS, "UNAUTHENTICATED", "no credentials")
    cloud.errors[ApiVersion.V2ALPHA1] = error
    with pytest.raises(CloudTPUError, match="no credentials"):
        await Poller(cloud, clock=clock).list_place(PLACE, newer_than=0.0)
    assert cloud.versions == [ApiVersion.V2ALPHA1]
