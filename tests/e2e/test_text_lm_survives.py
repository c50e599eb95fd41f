"""examples/text_lm on the cluster, preempted without an operator."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.director import Act, Director
from demo.kubectl import Kubectl
from demo.story import broken_claims
from demo.watch import Watch
from stepcluster.api import Cluster
from stepcluster.overlay import for_test_cluster
from stepcluster.shelljobs import until
from stepkeeper.log import Log, LogState
from stepkeeper.storage import open_store

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

JOB_FILE = Path(__file__).parents[2] / "examples" / "text_lm" / "job.yaml"
NAME, N_STEPS, SPOT = "alone", 120, "Spot preemption"


def manifest() -> dict[str, Any]:
    """The example's own manifest, with fewer steps, which take a while: what is to happen comes before the last."""
    job = for_test_cluster(yaml.safe_load(JOB_FILE.read_text()))
    job["metadata"]["name"] = NAME
    spec = job["spec"]
    spec["totalSteps"] = N_STEPS
    spec["checkpoint"]["uri"] = f"gs://checkpoints/{NAME}-{time.time_ns()}"
    spec["template"]["spec"]["containers"][0]["args"] += ["--steps", str(N_STEPS), "--pause-seconds", "0.2"]
    return job


@pytest.mark.usefixtures("object_storage")
def test_without_an_operator_a_preempted_job_resumes_and_status_is_right_again_later(
    operator: Cluster, trainer_image: str
) -> None:
    job = manifest()
    uri: str = job["spec"]["checkpoint"]["uri"]
    assert trainer_image == job["spec"]["template"]["spec"]["containers"][0]["image"]
    seen: dict[str, LogState] = {}

    def read_log() -> LogState:
        store = open_store(uri)
        try:
            return Log(store).open()
        finally:
            store.close()

    def next_claim_has_committed() -> bool:
        seen["now"] = state = read_log()
        latest = state.latest
        return state.claim != seen["before"].claim and latest is not None and latest.claim == state.claim

    def preempt_without_operator(node: str) -> None:
        operator.faults.stop_operator()
        try:
            seen["before"] = read_log()
            operator.faults.spot_preemption(node, back_after_s=2)
            until(next_claim_has_committed, 300)
            pods = operator.kubectl("-n", "stepkeeper", "get", "pods", "-o", "name")
            assert not pods, "the operator was away for the whole of it"
        finally:
            operator.faults.start_operator()

    act = Act(
        name=SPOT,
        explanation="for the test",
        cause=preempt_without_operator,
        at_step=30,
        uncommitted_steps=10,
    )
    operator.kubectl("apply", "-f", "-", stdin=json.dumps(job))
    director = Director(acts=[act], total_steps=N_STEPS, started_unix_s=time.time())
    with Watch(Kubectl(environment=operator.environment), job=NAME, uri=uri) as watch:
        story = director.follow(watch.events, quiet_s=240)

    assert broken_claims(story, disruptions=[SPOT]) == []
    assert len(story.attempts) == 2
    resume = story.attempts[1].resume
    assert resume is not None
    begun = seen["now"].claim
    assert begun is not None
    assert resume.restored.sequence < begun, "what the status says now is what the job resumed then"
    status = json.loads(operator.kubectl("get", "ctj", NAME, "-o", "json"))["status"]
    assert status["phase"] == "Complete"
    assert status["checkpoint"]["latest"]["sequence"] == read_log().head
    assert status["checkpoint"]["restored"] == {"sequence": resume.named.sequence, "step": resume.named.step}
    assert len(status["attempts"]) == 2
    assert status["attempts"][0]["cause"] != "ApplicationError"
    assert status["restarts"]["total"] == 1
