"""What a job is given to run on a test cluster, and what is seen of its starts."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepcluster.api import read_audit
from stepcluster.errors import CommandError
from stepcluster.overlay import for_test_cluster
from stepcluster.shelljobs import Gangs, until

EXAMPLES = Path(__file__).parents[3] / "examples"


def manifest(example: str) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / example / "job.yaml").read_text(encoding="utf-8"))
    return job


@pytest.mark.parametrize("example", ["ddp", "fsdp2", "queued_resource", "text_lm"])
def test_an_examples_manifest_is_for_a_real_cluster(example: str) -> None:
    text = json.dumps(manifest(example))
    assert [word for word in ("PJRT", "hostPath", "object-storage", "localhost") if word in text] == []


def test_a_job_gets_the_clusters_bucket_torch_and_devices_and_nothing_else_is_changed() -> None:
    job = manifest("text_lm")
    as_written = copy.deepcopy(job)
    changed = for_test_cluster(job)
    assert job == as_written
    assert changed["spec"]["checkpoint"].pop("uri") == "gs://checkpoints/text-lm"
    pod = changed["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    added = [pod.pop("volumes"), *(trainer.pop(key) for key in ("volumeMounts", "envFrom", "env"))]
    assert [each["name"] for each in added[3]] == ["PJRT_DEVICE", "CPU_NUM_DEVICES"]
    del job["spec"]["checkpoint"]["uri"]
    assert changed == job


def pod_event(
    job: str, kind: str = "ADDED", *, jobset: str = "a", start: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    labels = {
        "stepkeeper.dev/jobset-number": f"{start[0]}",
        "jobset.sigs.k8s.io/restart-attempt": f"{start[1]}",
        "jobset.sigs.k8s.io/jobset-uid": jobset,
    }
    meta = {"name": job, "uid": f"pod of {job}", "labels": labels, "ownerReferences": [{"uid": job}]}
    return {"type": kind, "object": {"metadata": meta, "status": {"phase": "Running"}}}


FIRST = pod_event("first")
DELETED = "the JobSet is deleted"


@pytest.mark.parametrize(
    ("events", "seen", "together"),
    [
        pytest.param(
            [FIRST, pod_event("q", start=(0, 1))], [(0, 0), (0, 1)], [(0, 0), (0, 1)], id="two starts at once"
        ),
        pytest.param(
            [FIRST, pod_event("q")],
            [(0, 0), (0, 0)],
            [(0, 0), (0, 0)],
            id="a Job that its JobSet makes again",
        ),
        pytest.param(
            [FIRST, DELETED, pod_event("q"), pod_event("first", "DELETED"), pod_event("next", jobset="b")],
            [(0, 0), (0, 0)],
            [],
            id="a Job that a deleted JobSet makes again is no start",
        ),
        pytest.param(
            [FIRST, DELETED, pod_event("next", jobset="b", start=(1, 0))],
            [(0, 0), (1, 0)],
            [(0, 0), (1, 0)],
            id="the next JobSet beside pods of the deleted one",
        ),
    ],
)
def test_pods_of_two_starts_are_found(
    events: list[Any], seen: list[tuple[int, int]], together: list[tuple[int, int]]
) -> None:
    gangs = Gangs()
    for event in events:
        if event is DELETED:
            gangs.jobset_is_deleted()
        else:
            gangs.saw(event)
    assert (gangs.seen, gangs.together) == (seen, together)


def test_what_is_waited_for_is_looked_at_again_while_the_api_server_is_away() -> None:
    answers: list[bool | CommandError] = [
        CommandError("connection refused"),
        False,
        True,
        CommandError("not found"),
    ]

    def look() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, CommandError):
            raise answer
        return answer

    until(look)
    with pytest.raises(CommandError, match="not found"):
        until(look)
    with pytest.raises(AssertionError, match="not within 0 s: what there is"):
        until(lambda: False, 0, seen=lambda: "what there is")


def test_a_line_of_the_audit_log_that_is_being_written_is_not_read_yet() -> None:
    lines = [json.dumps({"user": {"username": user}}) + "\n" for user in "aba"]
    assert len(read_audit("".join(lines))) == 3
    assert len(read_audit("".join(lines)[:-1])) == 2
    assert len(read_audit("".join(lines)[:-1], "a")) == 1
