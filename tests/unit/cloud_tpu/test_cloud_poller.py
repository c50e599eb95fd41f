"""All objects of a place share its lists."""

import asyncio

import pytest

from fake_cluster.queued_resources import PLACE, make_cloud_resource, make_resource
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudTPUError, Place
from stepkeeper_operator.cloud_tpu.polling import Listing, Poller
from tpuapi.cloud import FakeCloud

OTHER = Place(project=PLACE.project, zone="us-east5-a")
V2, ALPHA = ApiVersion.V2, ApiVersion.V2ALPHA1
REFUSED, DOWN = "PERMISSION_DENIED", "UNAVAILABLE"


class Site:
    """A cloud with one resource, and a poller, with one clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cloud = FakeCloud(lambda: self.now)
        self.cloud.add(make_cloud_resource(make_resource(), "ACTIVE"))
        self.poller = Poller(self.cloud, clock=lambda: self.now)

    async def look(self, newer_than: float | None = None, place: Place = PLACE) -> Listing:
        """Ask for a list that isn't older than now, or than that."""
        return await self.poller.list_place(
            place, newer_than=self.now - 1 if newer_than is None else newer_than
        )

    def fail(self, code: str, *versions: ApiVersion) -> None:
        for version in versions:
            self.cloud.inject_error("ListQueuedResources", code, None, version=version)

    @property
    def asked(self) -> list[ApiVersion]:
        return [call.version for call in self.cloud.calls if call.method == "ListQueuedResources"]


async def test_two_hundred_who_ask_at_once_send_one_list_by_v2alpha1_which_shows_all() -> None:
    site = Site()
    site.cloud.hold("ListQueuedResources")
    asking = [asyncio.create_task(site.look(990.0)) for _ in range(200)]
    await asyncio.sleep(0)
    site.cloud.release("ListQueuedResources")
    listings = await asyncio.gather(*asking)
    assert site.asked == [ALPHA]
    assert all(listing is listings[0] for listing in listings)
    assert set(listings[0].resources) == set(listings[0].nodes) == {"team-v5e"}
    assert (listings[0].version, listings[0].refusal) == (ALPHA, "")


async def test_a_listing_that_is_too_old_is_asked_for_again() -> None:
    site = Site()
    await site.look()
    site.now = 1010.0
    await site.look(999.0)
    assert len(site.asked) == 1
    assert (await site.look(1000.0)).asked_at == 1010.0
    assert len(site.asked) == 2


async def test_an_error_answers_for_all_for_some_seconds_and_holds_up_no_other_place() -> None:
    site = Site()
    site.fail(DOWN, *ApiVersion)
    for _ in range(3):
        with pytest.raises(CloudTPUError, match=DOWN):
            await site.look()
    assert site.asked == [ALPHA], "an error that passes, or that v2 would have too, isn't asked about again"
    site.cloud.clear_faults()
    assert not (await site.look(place=OTHER)).resources
    site.now += 6
    assert (await site.look()).resources


async def test_where_v2alpha1_is_refused_v2_answers_and_says_so() -> None:
    site = Site()
    site.fail(REFUSED, ALPHA)
    for _ in range(4):
        listing = await site.look()
        assert (listing.version, listing.refusal) == (V2, REFUSED)
        assert listing.resources
        site.now += 60
    assert site.asked == [ALPHA, *[V2] * 4], "a refusal isn't asked for again at once"
    site.cloud.clear_faults()
    site.now += 59
    assert (await site.look()).version is V2
    site.now += 1
    assert (await site.look()).version is ALPHA, "a permission that is given later is noticed"


async def test_what_fails_by_both_says_nothing_about_v2alpha1() -> None:
    site = Site()
    site.fail(REFUSED, *ApiVersion)
    with pytest.raises(CloudTPUError, match=REFUSED):
        await site.look()
    site.cloud.clear_faults()
    site.now += 6
    assert (await site.look()).version is ALPHA
