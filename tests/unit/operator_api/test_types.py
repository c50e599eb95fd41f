"""Test the types of both kinds: what they read, what they keep, and the hosts of a topology."""

from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from stepkeeper_operator.api.v1alpha1.conditions import Condition, ConditionStatus
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob, PlacementSpec
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, TrainingJobStatus

FOLDERS: Final = (
    (CheckpointedTrainingJob, Path(__file__).parents[2] / "data/crd/accepted"),
    (QueuedResource, Path(__file__).parents[2] / "data/crd/queuedresources/accepted"),
)
ACCEPTED: Final = [(kind, path) for kind, folder in FOLDERS for path in sorted(folder.glob("*.yaml"))]


def read_manifest(path: Path, **spec: Any) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(path.read_text())
    raw["metadata"] |= {"namespace": "default", "uid": "u-1"}
    return raw | {"spec": raw["spec"] | spec}


@pytest.mark.parametrize(("kind", "path"), ACCEPTED, ids=lambda each: getattr(each, "stem", None))
def test_what_the_api_server_accepts_the_operator_can_read(kind: type[Any], path: Path) -> None:
    raw = read_manifest(path)
    found = kind.model_validate(raw)
    assert list(found.spec.unknown_fields()) == []
    assert kind.model_validate(found.to_raw()) == found
    if kind is CheckpointedTrainingJob:
        assert found.spec.placement.n_hosts >= 1
        assert found.to_raw()["spec"]["template"] == raw["spec"]["template"]


DISKS: Final = [{"sourceDisk": "d"}, {"sourceDisk": "e", "readOnly": True}]
SLICES: Final = {"accelerator": "v6e", "topology": "2x4", "image": "v2-alpha-tpuv6e", "dataDisks": DISKS}
INTERVAL: Final = {"every": {"steps": 5}, "pace": 5}


@pytest.mark.parametrize(
    ("kind", "file", "spec", "unknown"),
    [
        (
            QueuedResource,
            FOLDERS[1][1] / "minimal.yaml",
            {"slices": SLICES, "tier": {"spot": {"maxPrice": 1}}},
            ["slices.dataDisks[1].readOnly", "tier.spot.maxPrice"],
        ),
        (
            CheckpointedTrainingJob,
            FOLDERS[0][1] / "minimal.yaml",
            {"checkpoint": {"uri": "gs://bucket/x", "interval": INTERVAL}, "budget": {}},
            ["budget", "checkpoint.interval.pace"],
        ),
    ],
)
def test_fields_of_the_spec_that_are_not_known_are_named_and_not_written(
    kind: type[Any], file: Path, spec: dict[str, Any], unknown: list[str]
) -> None:
    found = kind.model_validate(read_manifest(file, **spec)).spec
    assert list(found.unknown_fields()) == unknown
    assert not {name.rpartition(".")[2] for name in unknown} & set(str(found.to_raw()).split("'"))


def test_a_status_reads_back_as_it_was_written() -> None:
    start = 1_795_251_300
    running = Condition(
        type="Running", status=ConditionStatus.TRUE, reason="AllPodsRunning", last_transition_time=start
    )
    attempt = Attempt(number=1, start=start, cause="SpotPreemption", from_step=0, to_step=7)
    status = TrainingJobStatus(observed_generation=3, conditions=(running,), attempts=(attempt,))
    raw = status.to_raw()
    at = "2026-11-21T08:55:00Z"
    assert raw["conditions"][0]["lastTransitionTime"] == at
    shown = {"number": 1, "start": at, "cause": "SpotPreemption", "fromStep": 0, "toStep": 7}
    assert raw["attempts"] == [shown]
    assert TrainingJobStatus.model_validate(raw) == status


def test_times_have_whole_seconds_so_that_writing_them_again_writes_nothing() -> None:
    assert Attempt.model_validate({"number": 1, "start": 1_795_251_300.75}).start == 1_795_251_300
    assert (
        Attempt.model_validate({"number": 1, "start": "2026-11-21T09:55:00.75+01:00"}).start == 1_795_251_300
    )


@pytest.mark.parametrize(
    ("tpu", "chips", "hosts", "chips_on_a_host"),
    [
        ({"accelerator": "v5p", "topology": "2x2x1"}, 4, 1, 4),
        ({"accelerator": "v5p", "topology": "4x4x4", "slices": 2}, 128, 32, 4),
        ({"accelerator": "v6e", "topology": "2x4"}, 8, 2, 4),
        ({"accelerator": "v6e", "topology": "2x4", "chipsPerHost": 8}, 8, 1, 8),
        ({"accelerator": "v5e", "topology": "1x1"}, 1, 1, 1),
        ({"accelerator": "v5e", "topology": "16x16"}, 256, 64, 4),
        ({"accelerator": "v7x", "topology": "1x1x1"}, 1, 1, 1),
    ],
    ids=lambda value: value["topology"] if isinstance(value, dict) else None,
)
def test_a_topology_says_how_many_chips_and_hosts_there_are(
    tpu: dict[str, Any], chips: int, hosts: int, chips_on_a_host: int
) -> None:
    placement = PlacementSpec.model_validate({"tpu": tpu})
    assert (placement.n_chips, placement.n_hosts, placement.chips_per_host) == (chips, hosts, chips_on_a_host)
    assert placement.n_hosts == placement.n_slices * placement.hosts_per_slice
