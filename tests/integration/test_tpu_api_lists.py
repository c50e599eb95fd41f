"""Lists of the fake Cloud TPU API, and what each version of it shows."""

import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2alpha1

from tpuapi.clients import PARENT, Clients, create_active, create_request, node, node_name, queued_name
from tpuapi.fake import FakeTpu

OTHER_ZONE = "projects/a-project/locations/us-west4-b"
OTHER_PROJECT = "projects/b-project/locations/us-west4-a"


def ids(listed: object) -> list[str]:
    return [each.name.rpartition("/")[2] for each in listed]  # type: ignore[attr-defined]


async def test_the_client_pages_through_more_than_a_page_holds(tpu: FakeTpu, clients: Clients) -> None:
    for number in range(205):
        await clients.alpha.create_queued_resource(request=create_request(f"qr-{number:03}"))
    tpu.forget_calls()
    listed = [each async for each in await clients.alpha.list_queued_resources(parent=PARENT)]
    assert ids(listed) == [f"qr-{number:03}" for number in range(205)]
    assert tpu.count("ListQueuedResources") == 3


async def test_a_page_has_the_size_that_is_asked_for(clients: Clients) -> None:
    """page_size: "The maximum number of items to return"."""
    for name in ("a", "b", "c"):
        await clients.alpha.create_queued_resource(request=create_request(name))
    request = {"parent": PARENT, "page_size": 2}
    pager = await clients.alpha.list_queued_resources(request=request)
    assert ids(pager.queued_resources) == ["a", "b"]
    # What is deleted and created between two pages moves nothing.
    await clients.alpha.delete_queued_resource(request={"name": queued_name("a"), "force": True})
    await clients.alpha.create_queued_resource(request=create_request("aa"))
    request |= {"page_token": pager.next_page_token}
    pager = await clients.alpha.list_queued_resources(request=request)
    assert (ids(pager.queued_resources), pager.next_page_token) == (["c"], "")
    with pytest.raises(exceptions.InvalidArgument, match="page_token"):
        await clients.alpha.list_queued_resources(request={**request, "parent": OTHER_ZONE})


@pytest.mark.parametrize("request_", [{"page_size": -1}, {"page_token": "x"}], ids=["size", "token"])
async def test_a_page_that_cant_be_is_an_invalid_argument(
    clients: Clients, request_: dict[str, object]
) -> None:
    with pytest.raises(exceptions.InvalidArgument):
        await clients.alpha.list_nodes(request={"parent": PARENT, **request_})


async def test_a_list_is_of_one_project_and_zone(tpu: FakeTpu, clients: Clients) -> None:
    for parent, name in ((PARENT, "mine"), (OTHER_ZONE, "zone"), (OTHER_PROJECT, "project")):
        await clients.alpha.create_queued_resource(request=create_request(name, parent=parent))
    tpu.step(100)
    for client in (clients.alpha, clients.v2):
        assert ids([each async for each in await client.list_queued_resources(parent=PARENT)]) == ["mine"]
        assert ids([each async for each in await client.list_nodes(parent=PARENT)]) == ["mine"]
    tpu.set_unreachable(["us-west4-c"])
    everywhere = await clients.v2.list_nodes(parent="projects/a-project/locations/-")
    assert (ids(everywhere.nodes), list(everywhere.unreachable)) == (["mine", "zone"], ["us-west4-c"])


async def test_what_is_offered_is_listed(clients: Clients) -> None:
    types = [each.type_ async for each in await clients.v2.list_accelerator_types(parent=PARENT)]
    assert {"v5litepod-16", "v5p-8", "v6e-256", "v2-8"} <= set(types)
    versions = [each.version async for each in await clients.alpha.list_runtime_versions(parent=PARENT)]
    assert "v2-alpha-tpuv5-lite" in versions


async def test_what_is_not_faked_is_unimplemented(clients: Clients) -> None:
    with pytest.raises(exceptions.MethodNotImplemented):
        await clients.v2.generate_service_identity(request={"parent": PARENT})


class TestVersions:
    """v2 lacks fields that v2alpha1 has; both show the same resources."""

    async def test_v2_shows_no_autocheckpoint_and_no_maintenance(
        self, tpu: FakeTpu, clients: Clients
    ) -> None:
        await create_active(tpu, clients, "qr", spec={"node": node(autocheckpoint_enabled=True)})
        tpu.announce_maintenance("qr", starts_in_s=600)
        alpha = await clients.alpha.get_node(name=node_name("qr"))
        assert alpha.autocheckpoint_enabled
        assert alpha.upcoming_maintenance.maintenance_status.name == "PENDING"
        stable = await clients.v2.get_node(name=node_name("qr"))
        raw = type(stable).pb(stable)
        for field in ("autocheckpoint_enabled", "upcoming_maintenance", "boot_disk_config"):
            assert field not in raw.DESCRIPTOR.fields_by_name
        assert (stable.state.name, stable.queued_resource) == ("READY", queued_name("qr"))

    async def test_v2_shows_no_best_effort(self, clients: Clients) -> None:
        await clients.alpha.create_queued_resource(request=create_request("qr", best_effort={}))
        alpha = await clients.alpha.get_queued_resource(name=queued_name("qr"))
        stable = await clients.v2.get_queued_resource(name=queued_name("qr"))
        assert type(alpha).pb(alpha).WhichOneof("tier") == "best_effort"
        assert type(stable).pb(stable).WhichOneof("tier") is None

    async def test_several_nodes_have_another_name_in_each(self, clients: Clients) -> None:
        many = {"node_count": 2, "node_id_prefix": "np"}
        request = create_request("stable", spec={"node_id": "", "multislice_params": many})
        del request["queued_resource"]["tpu"]["node_spec"][0]["node_id"]
        await clients.v2.create_queued_resource(request=request)
        alpha = await clients.alpha.get_queued_resource(name=queued_name("stable"))
        assert alpha.tpu.node_spec[0].multi_node_params.node_count == 2
        stable = await clients.v2.get_queued_resource(name=queued_name("stable"))
        assert stable.tpu.node_spec[0].multislice_params.node_id_prefix == "np"

    async def test_a_node_says_which_version_created_it(self, tpu: FakeTpu, clients: Clients) -> None:
        await clients.v2.create_queued_resource(request=create_request("stable"))
        await clients.alpha.create_queued_resource(request=create_request("alpha"))
        tpu.step(100)
        assert (await clients.v2.get_node(name=node_name("stable"))).api_version.name == "V2"
        assert (await clients.alpha.get_node(name=node_name("alpha"))).api_version.name == "V2_ALPHA1"
        # v2alpha1 has no word for v2.
        unspecified = tpu_v2alpha1.Node.ApiVersion.API_VERSION_UNSPECIFIED
        assert (await clients.alpha.get_node(name=node_name("stable"))).api_version == unspecified

    async def test_what_was_asked_for_is_read_back(self, clients: Clients) -> None:
        body = node(
            autocheckpoint_enabled=True,
            metadata={"startup-script": "#!/bin/sh\necho\n"},
            labels={"cluster": "a"},
            network_config={"network": "n", "subnetwork": "s", "enable_external_ips": True},
            service_account={"email": "e@x", "scope": ["s"]},
            data_disks=[{"source_disk": "projects/p/zones/z/disks/d", "mode": "READ_ONLY"}],
            accelerator_type=None,
            accelerator_config={"type_": "V5LITE_POD", "topology": "4x4"},
        )
        request = create_request("qr", spec={"node": body}, guaranteed={"min_duration": {"seconds": 3600}})
        await clients.alpha.create_queued_resource(request=request)
        found = await clients.alpha.get_queued_resource(name=queued_name("qr"))
        assert found.tpu.node_spec[0].node == tpu_v2alpha1.Node(body)
        assert found.guaranteed.min_duration.total_seconds() == 3600
