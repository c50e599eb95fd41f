"""Test the types of a CheckpointedTrainingJob."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from stepkeeper_operator.api.v1alpha1.conditions import Condition, ConditionStatus
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob, PlacementSpec
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, TrainingJobStatus

ACCEPTED = sorted((Path(__file__).parents[2] / "data/crd/accepted").glob("*.yaml"))


def raw_job() -> dict[str, Any]:
    return {
        "apiVersion": "stepkeeper.dev/v1alpha1",
        "kind": "CheckpointedTrainingJob",
        "metadata": {
            "name": "text-lm",
            "namespace": "default",
            "uid": "u-1",
            "creationTimestamp": "2026-11-21T08:55:00Z",
            "managedFields": [],
        },
        "spec": {
            "placement": {"hosts": {"count": 2}},
            "template": {"spec": {"containers": [{"name": "trainer"}]}},
            "checkpoint": {"uri": "gs://bucket/x", "interval": {"every": {"steps": 5}}},
        },
    }


@pytest.mark.parametrize("path", ACCEPTED, ids=lambda path: path.stem)
def test_what_the_api_server_accepts_the_operator_can_read(path: Path) -> None:
    raw = yaml.safe_load(path.read_text())
    raw["metadata"] |= {"namespace": "default", "uid": "u-1"}
    job = CheckpointedTrainingJob.model_validate(raw)
    assert job.spec.placement.n_hosts >= 1
    assert job.to_raw()["spec"]["template"] == raw["spec"]["template"]


def test_a_field_of_the_spec_that_is_not_known_is_kept_to_be_named() -> None:
    raw = raw_job()
    assert list(CheckpointedTrainingJob.model_validate(raw).spec.unknown_fields()) == []
    raw["spec"]["checkpoint"]["interval"]["pace"] = 5
    raw["spec"]["budget"] = {}
    spec = CheckpointedTrainingJob.model_validate(raw).spec
    assert list(spec.unknown_fields()) == ["budget", "checkpoint.interval.pace"]
    assert spec.to_raw() == CheckpointedTrainingJob.model_validate(raw_job()).spec.to_raw()


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
