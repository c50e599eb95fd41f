"""Trainings that hang on a real cluster: each is found, named and restarted. One that moves on is left alone."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest
from stories import Story, applied

from stepcluster.api import Cluster
from stepcluster.overlay import for_test_cluster
from stepcluster.shelljobs import causes, condition

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

APP: Final = Path(__file__).parent / "hanging"
IMAGE: Final = "my-registry/hanging:1"
AFTER_S: Final = 20
PATIENCE_S: Final = 400
KINDS: Final[Mapping[str, tuple[int, str, str]]] = {
    "code": (2, "NotInCollective", "rank 1 is running Python code at"),
    "stop": (2, "Stopped", "rank 1 is stopped by a signal (SIGSTOP) or a debugger"),
    "lock": (1, "GilHeld", "rank 0 is in C code that holds Python's lock at"),
    "data": (1, "DataLoader", "rank 0 is waiting for data at"),
    "store": (1, "Store", "rank 0 is waiting for a key in the store of the process group at"),
}
"""By fault: how many hosts the job has, the kind of its hang, and how its text begins."""


def story(cluster: Cluster, fault: str, n_hosts: int, action: str = "Restart") -> Story:
    job: dict[str, Any] = {
        "apiVersion": "stepkeeper.dev/v1alpha1",
        "kind": "CheckpointedTrainingJob",
        "metadata": {"name": f"hang-{fault}"},
        "spec": {
            "placement": {"hosts": {"count": n_hosts}},
            "hang": {"afterSeconds": AFTER_S, "action": action},
            "checkpoint": {
                "uri": f"gs://checkpoints/hang-{fault}",
                "interval": {"every": {"steps": 5}},
            },
            "template": {
                "spec": {
                    # A trainer that hangs would use all of it.
                    "terminationGracePeriodSeconds": 300,
                    "containers": [
                        {
                            "name": "trainer",
                            "image": IMAGE,
                            # Nothing inside a container can stop its first process.
                            "command": ["python", "-m", "stepkeeper.launch"],
                            "args": ["python", "-m", "hanging", fault],
                        }
                    ],
                }
            },
        },
    }
    nodes = cluster.tpu_nodes[:n_hosts]
    return Story(
        cluster=cluster, name=f"hang-{fault}", job=for_test_cluster(job, nodes=nodes, torch_xla=False)
    )


@pytest.fixture(scope="module")
def jobs(operator: Cluster) -> Iterator[dict[str, Story]]:
    """All jobs, by fault. They run side by side."""
    operator.load_trainer_image(APP, name=IMAGE)
    faults = {fault: n_hosts for fault, (n_hosts, _, _) in KINDS.items()} | {"compile": 1}
    stories = {fault: story(operator, fault, n_hosts) for fault, n_hosts in faults.items()}
    with ExitStack() as stack:
        stack.enter_context(applied(operator, list(stories.values())))
        yield stories


@pytest.mark.parametrize("fault", KINDS)
def test_a_hang_is_found_named_and_restarted_and_the_training_is_done(
    jobs: dict[str, Story], fault: str
) -> None:
    job, (_, kind, text) = jobs[fault], KINDS[fault]
    status = job.until(lambda status: len(status.get("attempts", ())) > 1, timeout_s=PATIENCE_S)
    first, second = status["attempts"][:2]
    assert first["cause"] == "Hang"
    assert text in first["message"]
    # Without a hung trainer's grace period, which is 300 s.
    assert seconds_between(first["end"], second["start"]) < 120
    stacks = job.get("configmap", first["stacks"])
    assert stacks["data"]["kind"] == kind
    assert "in main" in stacks["data"]["stacks"]
    assert stacks["metadata"]["ownerReferences"][0]["name"] == job.name
    (found,) = warnings(job, "Stalled")
    assert found.startswith(f"{kind}, nothing has moved since ")
    status = job.until_phase("Complete")
    assert causes(status) == ["Hang", None]
    assert status["attempts"][1]["fromStep"] >= 5
    # A later commit has reset the count towards hang.maxRestarts.
    assert status["restarts"]["byCause"] == [{"cause": "Hang", "count": 1, "countedTowardsLimit": 0}]


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def warnings(job: Story, reason: str) -> list[str]:
    options = ("--field-selector", f"type=Warning,reason={reason}")
    return [item["message"] for item in job.get("events", *options)["items"]]


def test_a_first_compilation_that_takes_longer_than_a_step_may_is_no_hang(jobs: dict[str, Story]) -> None:
    status = jobs["compile"].until_phase("Complete")
    assert causes(status) == [None]
    assert warnings(jobs["compile"], "Stalled") == []


@pytest.mark.usefixtures("jobs", "object_storage")
def test_a_training_that_moves_while_no_report_arrives_does_not_hang(operator: Cluster) -> None:
    job = story(operator, "cut", 1)
    job.job["spec"]["template"]["spec"]["containers"][0]["args"][-1] = "endless"
    with applied(operator, [job]):
        job.until_trains(attempt=1)
        operator.faults.stop_operator()
        try:
            time.sleep(3 * AFTER_S)
            saved = job.read_log().latest
        finally:
            operator.faults.start_operator()
        assert saved is not None
        status = job.until(
            lambda status: (status.get("progress") or {}).get("step", 0) > saved.step, timeout_s=PATIENCE_S
        )
        assert causes(status) == [None]
        assert warnings(job, "Stalled") == []
        assert condition(status, "Progressing")["status"] != "False"
        assert "stacks" not in status["attempts"][0]
        job.end()
