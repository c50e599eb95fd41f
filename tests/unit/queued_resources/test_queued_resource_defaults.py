"""Test that a default which is written out, in the spec or by the cloud, is no difference."""

from dataclasses import replace
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
from stepkeeper_operator.queued_resources.compare import find_differences
from stepkeeper_operator.queued_resources.request import build_request, hash_spec

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
SPEC_DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "autocheckpoint on, guaranteed": (
        {"tier": {"guaranteed": {}}},
        {"tier": {"guaranteed": {}}, "node": {"autocheckpointEnabled": True}},
    ),
    "autocheckpoint off, spot": ({}, {"node": {"autocheckpointEnabled": False}}),
    "an empty network": ({}, {"node": {"network": {}}}),
    "the default network": ({}, {"node": {"network": {"network": "default"}}}),
    "flags of the network": ({}, {"node": {"network": {"externalIps": False, "canIpForward": False}}}),
    "no secure boot": ({}, {"node": {"secureBoot": False}}),
    "no queueing limits": ({}, {"queueing": {}}),
    "not reserved": ({"tier": {"guaranteed": {}}}, {"tier": {"guaranteed": {"reserved": False}}}),
    "empty collections": ({}, {"node": {"labels": {}, "tags": [], "metadata": {}, "dataDisks": []}}),
    "a disk's mode": (
        {"node": {"dataDisks": [{"sourceDisk": "d"}]}},
        {"node": {"dataDisks": [{"sourceDisk": "d", "mode": "ReadOnly"}]}},
    ),
    "an account's scopes": (
        {"node": {"serviceAccount": {"email": "a@b.iam"}}},
        {"node": {"serviceAccount": {"email": "a@b.iam", "scopes": [SCOPE]}}},
    ),
    "the path of a reservation": (
        {"tier": {"guaranteed": {"reserved": True}}, "reservationName": "r"},
        {
            "tier": {"guaranteed": {"reserved": True}},
            "reservationName": "projects/my-project/locations/us-central2-b/reservations/r",
        },
    ),
    "another order of a set": ({"node": {"tags": ["a", "b"]}}, {"node": {"tags": ["b", "a"]}}),
    "a script's key": (
        {"node": {"startupScriptSecretRef": {"name": "s"}}},
        {"node": {"startupScriptSecretRef": {"name": "s", "key": "startup-script"}}},
    ),
}


@pytest.mark.parametrize(("short", "written_out"), SPEC_DEFAULTS.values(), ids=SPEC_DEFAULTS)
def test_a_written_out_default_is_no_change_of_the_spec(
    short: dict[str, Any], written_out: dict[str, Any]
) -> None:
    before = created(QueuedResourceState.ACTIVE, updatePolicy="Recreate", **short)
    resource = make_resource(before.status, updatePolicy="Recreate", **written_out)
    assert hash_spec(before.spec) == hash_spec(resource.spec)
    cloud = make_cloud_resource(before, "ACTIVE")
    decision = decide(resource, observe(cloud, nodes=[make_node(cloud)]))
    assert decision.actions == ()
    assert not decision.status.bookkeeping.removing
    asked = build_request(resource, number=0, cluster_id="c", script=None)
    assert asked.request_id == build_request(before, number=0, cluster_id="c", script=None).request_id


CLOUD_DEFAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flags that are off": (
        {},
        {"node": {"autocheckpoint_enabled": False, "network_config": {"enable_external_ips": False}}},
    ),
    "the default network": ({"node": {"network": {"network": "default"}}}, {"node": {"network_config": {}}}),
    "the network that was left out": (
        {"node": {"network": {"externalIps": True}}},
        {
            "node": {
                "network_config": {
                    "enable_external_ips": True,
                    "network": "projects/p/global/networks/default",
                    "subnetwork": "projects/p/regions/r/subnetworks/default",
                }
            }
        },
    ),
    "an account that was left out": ({}, {"node": {"service_account": {"email": "default"}}}),
    "its scopes in another order": (
        {"node": {"serviceAccount": {"email": "a@b.iam", "scopes": ["x", "y"]}}},
        {"node": {"service_account": {"email": "a@b.iam", "scope": ["y", "x"]}}},
    ),
    "both ways to name the machines": (
        {},
        {"node": {"accelerator_config": {"type": "V5LITE_POD", "topology": "2x4"}}},
    ),
    "the tier that was left out": ({"tier": {"guaranteed": {}}}, {"tier": {}}),
    "a tier's fields": (
        {"tier": {"guaranteed": {}}},
        {"tier": {"guaranteed": {"reserved": False, "min_duration": "0s"}}},
    ),
    "no reservation": ({}, {"reservation_name": ""}),
}


@pytest.mark.parametrize(("spec", "answered"), CLOUD_DEFAULTS.values(), ids=CLOUD_DEFAULTS)
def test_a_default_that_the_cloud_writes_out_is_no_difference(
    spec: dict[str, Any], answered: dict[str, Any]
) -> None:
    resource = make_resource(**spec)
    asked = build_request(resource, number=0, cluster_id="c", script=None)
    made = make_cloud_resource(resource, "ACTIVE")
    node = {**made.node, **answered.get("node", {})}
    found = replace(made, **{**answered, "node": node})
    assert find_differences(asked, found) == ()
