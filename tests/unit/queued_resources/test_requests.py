"""Test what is asked of the cloud: names, labels, fields, the API's version, and what counts as another wish."""

from typing import Any

import pytest

from fake_cluster.queued_resources import (
    created,
    decide,
    make_cloud_resource,
    make_node,
    make_resource,
    observe,
)
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion
from stepkeeper_operator.cloud_tpu.naming import make_cloud_id, make_node_ids, parse_cloud_name, parse_number
from stepkeeper_operator.cloud_tpu.request import (
    build_request,
    build_reservation_name,
    choose_api_version,
    hash_spec,
    name_accelerators,
)

GUARANTEED: dict[str, Any] = {"tier": {"guaranteed": {}}}
RESERVED: dict[str, Any] = {"tier": {"guaranteed": {"reserved": True}}}
OFF = {"slices": {"autocheckpointEnabled": False}}
RESERVATIONS = "projects/my-project/locations/us-central2-b/reservations"


def test_the_version_of_the_api_follows_from_the_spec() -> None:
    by_v2: tuple[dict[str, Any], ...] = ({"tier": {"spot": {}}}, GUARANTEED | OFF)
    by_v2alpha1: tuple[dict[str, Any], ...] = (GUARANTEED, {"tier": {"bestEffort": {}}}, RESERVED | OFF)
    assert {choose_api_version(make_resource(**spec).spec) for spec in by_v2} == {ApiVersion.V2}
    assert {choose_api_version(make_resource(**spec).spec) for spec in by_v2alpha1} == {ApiVersion.V2ALPHA1}


def test_names_are_stable_bounded_and_readable_back() -> None:
    assert make_cloud_id("team", "v5e", 0) == "team-v5e"
    assert make_cloud_id("team", "v5e", 12) == "team-v5e-r12"
    assert parse_number("team", "v5e", "team-v5e-r12") == 12
    assert parse_number("team", "v5e", "team-v5e2") is None
    assert make_cloud_id("1st", "x", 0)[0].isalpha()
    long = make_cloud_id("n" * 63, "q" * 40, 999)
    assert len(f"{long}-255") <= 63
    assert long != make_cloud_id("n" * 63, "q" * 39, 999)
    parsed = parse_cloud_name("projects/p/locations/z/queuedResources/i")
    assert parsed is not None
    assert (parsed.project, parsed.zone) == ("p", "z")


def test_the_request_names_owner_labels_and_script() -> None:
    resource = make_resource(
        slices={
            "count": 2,
            "accelerator": "v5p",
            "topology": "2x2x2",
            "labels": {"team": "a"},
            "metadata": {"k": "v"},
            "network": {"network": "net"},
            "serviceAccount": {"email": "x@y.iam"},
            "dataDisks": [{"sourceDisk": "d", "mode": "ReadWrite"}],
            "secureBoot": True,
            "autocheckpointEnabled": True,
        },
        tier={"guaranteed": {"minDurationSeconds": 3600}},
        queueing={"validUntilSeconds": 600},
    )
    request = build_request(resource, number=1, cluster_id="c", script="#!/bin/sh")
    owner = {"cluster": "c", "namespace": "team", "name": "v5e", "uid": "uid-1"}
    labels = {f"stepkeeper-{key}": value for key, value in owner.items()}
    node = {
        "labels": {"team": "a", **labels},
        "network_config": {"network": "net"},
        "data_disks": [{"source_disk": "d", "mode": "READ_WRITE"}],
        "shielded_instance_config": {"enable_secure_boot": True},
        "autocheckpoint_enabled": True,
        "accelerator_config": {"type": "V5P", "topology": "2x2x2"},
    }
    assert {key: request.node[key] for key in node} == node
    assert request.node["metadata"]["startup-script"] == "#!/bin/sh"
    assert "stepkeeper.dev/queued-resource-uid=uid-1" in request.node["metadata"]["stepkeeper-node-labels"]
    assert request.tier == {"guaranteed": {"min_duration": "3600s"}}
    assert request.queueing == {"valid_until_duration": "600s"}
    assert request.node_ids == ("team-v5e-r1-0", "team-v5e-r1-1")
    assert make_node_ids(resource, "x") == (("x-0", "x-1"), "x")


def test_the_hash_changes_with_what_the_cloud_cannot_change() -> None:
    others: tuple[dict[str, Any], ...] = (
        GUARANTEED,
        {"slices": {"image": "x"}},
        {"reservation_name": "r"},
        {"queueing": {"validUntilSeconds": 600}},
    )
    assert len({hash_spec(make_resource(**spec).spec) for spec in ({}, *others)}) == 5


SCOPE = "https://www.googleapis.com/auth/cloud-platform"
ACCOUNT, DISK, SECRET = {"email": "a@b.iam"}, {"sourceDisk": "d"}, {"name": "s"}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another policy": ({}, {"deletion_policy": "Retain", "join_timeout_seconds": 100}),
    "a count of one": ({}, {"slices": {"count": 1}}),
    "autocheckpoint on, guaranteed": (GUARANTEED, {**GUARANTEED, "slices": {"autocheckpointEnabled": True}}),
    "autocheckpoint off, spot": ({}, OFF),
    "an empty network": ({}, {"slices": {"network": {}}}),
    "the default network": ({}, {"slices": {"network": {"network": "default"}}}),
    "flags of the network": ({}, {"slices": {"network": {"externalIps": False, "canIpForward": False}}}),
    "no secure boot": ({}, {"slices": {"secureBoot": False}}),
    "no queueing limits": ({}, {"queueing": {}}),
    "not reserved": (GUARANTEED, {"tier": {"guaranteed": {"reserved": False}}}),
    "empty collections": ({}, {"slices": {"labels": {}, "tags": [], "metadata": {}, "dataDisks": []}}),
    "a disk's mode": (
        {"slices": {"dataDisks": [DISK]}},
        {"slices": {"dataDisks": [{**DISK, "mode": "ReadOnly"}]}},
    ),
    "an account's scopes": (
        {"slices": {"serviceAccount": ACCOUNT}},
        {"slices": {"serviceAccount": {**ACCOUNT, "scopes": [SCOPE]}}},
    ),
    "the path of a reservation": (
        {**RESERVED, "reservationName": "r"},
        {**RESERVED, "reservationName": f"{RESERVATIONS}/r"},
    ),
    "another order of a set": ({"slices": {"tags": ["a", "b"]}}, {"slices": {"tags": ["b", "a"]}}),
    "a script's key": (
        {"slices": {"startupScriptSecretRef": SECRET}},
        {"slices": {"startupScriptSecretRef": {**SECRET, "key": "startup-script"}}},
    ),
}


@pytest.mark.parametrize(("short", "written_out"), SAME.values(), ids=SAME)
def test_a_written_out_default_is_no_change_of_the_spec(
    short: dict[str, Any], written_out: dict[str, Any]
) -> None:
    before = created(QueuedResourceState.ACTIVE, updatePolicy="Recreate", **short)
    resource = make_resource(before.status, updatePolicy="Recreate", **written_out)
    assert hash_spec(before.spec) == hash_spec(resource.spec)
    cloud = make_cloud_resource(before, "ACTIVE")
    decision = decide(resource, observe(cloud, nodes=[make_node(cloud)]))
    assert decision.actions == ()
    assert not decision.status.removing
    asked = build_request(resource, number=0, cluster_id="c", script=None)
    assert asked.request_id == build_request(before, number=0, cluster_id="c", script=None).request_id


def test_accelerators_are_compared_in_the_words_of_what_is_found() -> None:
    slices = make_resource().spec.slices
    for found, named in (
        ({"accelerator_config": {"type": "V5P", "topology": "2x2x1"}}, ("v5e 2x4", "v5p 2x2x1")),
        ({"accelerator_config": {"type": "V9", "topology": "2x2"}}, ("v5e 2x4", "V9 2x2")),
        ({"accelerator_type": "v5litepod-8"}, ("v5litepod-8", "v5litepod-8")),
        ({}, ("v5litepod-8", "None")),
    ):
        assert name_accelerators(slices, found) == named


def test_a_reservation_has_a_full_name() -> None:
    full = f"{RESERVATIONS}/spring"
    for name, path in ((None, None), ("spring", full), (full, full)):
        assert build_reservation_name(make_resource(reservationName=name).spec) == path
