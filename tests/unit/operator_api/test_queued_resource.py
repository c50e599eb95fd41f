"""Test the types of a QueuedResource."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource

MANIFESTS = Path(__file__).parents[2] / "data/crd/queuedresources"
ACCEPTED = sorted((MANIFESTS / "accepted").glob("*.yaml"))


def read(raw: dict[str, Any]) -> QueuedResource:
    raw["metadata"] |= {"namespace": "default", "uid": "u-1"}
    return QueuedResource.model_validate(raw)


def minimal(**spec: object) -> QueuedResource:
    raw = yaml.safe_load((MANIFESTS / "accepted/minimal.yaml").read_text())
    raw["spec"] |= spec
    return read(raw)


@pytest.mark.parametrize("path", ACCEPTED, ids=lambda path: path.stem)
def test_what_the_api_server_accepts_the_operator_can_read(path: Path) -> None:
    raw = yaml.safe_load(path.read_text())
    resource = read(raw)
    assert list(resource.spec.unknown_fields()) == []
    assert QueuedResource.model_validate(resource.to_raw()) == resource


def test_unknown_fields_are_found_in_lists_and_in_objects_without_fields() -> None:
    slices = {
        "accelerator": "v6e",
        "topology": "2x4",
        "image": "v2-alpha-tpuv6e",
        "dataDisks": [{"sourceDisk": "d"}, {"sourceDisk": "e", "readOnly": True}],
    }
    resource = minimal(slices=slices, tier={"spot": {"maxPrice": 1}})
    assert list(resource.spec.unknown_fields()) == ["slices.dataDisks[1].readOnly", "tier.spot.maxPrice"]
