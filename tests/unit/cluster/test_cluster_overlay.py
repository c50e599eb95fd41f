"""What a job is given to run on a test cluster, and what the examples' own manifests are without it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepcluster.overlay import for_test_cluster

EXAMPLES = Path(__file__).parents[3] / "examples"


def manifest(example: str) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / example / "job.yaml").read_text(encoding="utf-8"))
    return job


@pytest.mark.parametrize("example", ["ddp", "fsdp2", "queued_resource", "text_lm"])
def test_an_examples_manifest_is_for_a_real_cluster(example: str) -> None:
    text = json.dumps(manifest(example))
    assert [word for word in ("PJRT", "hostPath", "object-storage", "localhost") if word in text] == []


def test_a_job_gets_the_clusters_bucket_torch_and_devices_beside_what_it_has() -> None:
    job = manifest("text_lm")
    as_written = copy.deepcopy(job)
    changed = for_test_cluster(job)
    assert job == as_written
    assert changed["spec"]["checkpoint"].pop("uri") == "gs://checkpoints/text-lm"
    pod = changed["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    assert pod.pop("volumes") == [{"name": "torch", "hostPath": {"path": "/opt/torch", "type": "Directory"}}]
    assert trainer.pop("volumeMounts") == [{"name": "torch", "mountPath": "/opt/torch", "readOnly": True}]
    assert trainer.pop("envFrom") == [{"configMapRef": {"name": "object-storage", "optional": True}}]
    assert {each["name"]: each["value"] for each in trainer.pop("env")} == {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "4",
    }
    del job["spec"]["checkpoint"]["uri"]
    assert changed == job, "and nothing else is changed"


def test_the_pods_of_a_job_without_tpus_are_kept_apart_on_the_nodes_that_have_torch() -> None:
    pod = for_test_cluster(manifest("ddp"), nodes=["tpu-0", "tpu-1"], torch_xla=False)["spec"]["template"][
        "spec"
    ]
    assert {each["key"] for each in pod["tolerations"]} == {"google.com/tpu", "cloud.google.com/gke-spot"}
    nodes = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (expression,) = nodes["nodeSelectorTerms"][0]["matchExpressions"]
    assert expression["values"] == ["tpu-0", "tpu-1"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"] == {"matchLabels": {"stepkeeper.dev/job-name": "ddp"}}
    assert "env" not in pod["containers"][0]
