"""Test that a default which is written out, in the spec or by the cloud, is no difference."""

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
