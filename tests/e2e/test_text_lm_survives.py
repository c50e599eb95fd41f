"""examples/text_lm on the cluster: preempted, its node's power cut, without an operator; and exact all the same."""

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.director import Act, Director, midway
from demo.kubectl import Kubectl
from demo.story import Story, broken_claims, lost_steps
from demo.watch import Watch
from demo_tpu.undisturbed import UndisturbedRun
from stepcluster.api import Cluster
from stepcluster.overlay import for_test_cluster
from stepkeeper.log import Log, LogState
from stepkeeper.storage import open_store

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
JOB_FILE = ROOT / "examples" / "text_lm" / "job.yaml"
SAVE_INTERVAL = 20
STEPS_PER_EPOCH = 130
SPOT, POWER = "Spot preemption", "Power cut"
TOLD = "for the test"


@pytest.fixture
def site(operator: Cluster, trainer_image: str, object_storage: None) -> Cluster:
    """The cluster, with the operator, the trainer's image and the way to the object storage."""
    assert trainer_image == manifest("any", 1)["spec"]["template"]["spec"]["containers"][0]["image"]
    return operator


def manifest(name: str, n_steps: int, pause_s: float = 0.1) -> dict[str, Any]:
    """The example's own manifest, under another name and with fewer steps.

    They take a while each: what is to happen at one of them happens before the last, on a busy machine too.
    """
    job = for_test_cluster(yaml.safe_load(JOB_FILE.read_text()))
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["totalSteps"] = n_steps
    spec["checkpoint"]["uri"] = f"gs://checkpoints/{name}-{time.time_ns()}"
    assert spec["checkpoint"]["interval"] == {"steps": SAVE_INTERVAL}
    spec["template"]["spec"]["containers"][0]["args"] += [
        *("--steps", str(n_steps)),
        *("--pause-seconds", str(pause_s)),
    ]
    return job


@dataclass
class Run:
    """One job on the cluster, and what its status said at each fault."""

    cluster: Cluster
    job: dict[str, Any]
    at_fault: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def uri(self) -> str:
        return str(self.job["spec"]["checkpoint"]["uri"])

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.cluster.kubectl("get", "ctj", self.name, "-o", "json"))[
            "status"
        ]
        return status

    def log(self) -> LogState:
        store = open_store(self.uri)
        try:
            return Log(store).open()
        finally:
            store.close()

    def follow(self, *acts: Act) -> Story:
        """The job was applied, the acts have come to pass, the job is Complete."""
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(self.job))
        total_steps = self.job["spec"]["totalSteps"]
        director = Director(acts=acts, total_steps=total_steps, started_unix_s=time.time())
        kubectl = Kubectl(environment=self.cluster.environment)
        with Watch(kubectl, job=self.name, uri=self.uri) as watch:
            return director.follow(watch.events, quiet_s=240)

    def act(self, name: str, at_step: int, cause: Callable[[str], None]) -> Act:
        def noted(node: str) -> None:
            self.at_fault.append(self.status())
            cause(node)

        return Act(name=name, told=TOLD, cause=noted, at_step=at_step, uncommitted_steps=SAVE_INTERVAL // 2)


def train_undisturbed(folder: Path, n_steps: int) -> dict[int, str]:
    with UndisturbedRun(folder, n_steps) as run:
        return run.losses()


@pytest.mark.long  # test_demo.py has both disruptions, and compares the steps that are done again
def test_a_job_survives_a_preemption_and_a_power_cut_exactly(site: Cluster, tmp_path: Path) -> None:
    n_steps = 220
    run = Run(site, manifest("survivor", n_steps))
    undisturbed: list[Future[dict[int, str]]] = []

    def preempt(node: str) -> None:
        site.faults.spot_preemption(node, back_after_s=2)

    def cut_power(node: str) -> None:
        site.faults.power_cut(node)
        # Its loss is noticed in half a minute, in which this machine has nothing else to do.
        undisturbed.append(executor.submit(train_undisturbed, tmp_path, n_steps))

    # Midway between two saves: one that is under way when the power is cut may yet commit.
    preempted, cut = midway(60, SAVE_INTERVAL), midway(STEPS_PER_EPOCH + 30, SAVE_INTERVAL)
    with ThreadPoolExecutor() as executor:
        story = run.follow(run.act(SPOT, preempted, preempt), run.act(POWER, cut, cut_power))
    site.faults.power_on(story.attempts[1].node)

    assert broken_claims(story, disruptions=[SPOT, POWER]) == []
    assert len(story.attempts) == 3
    for attempt, status in zip(story.attempts[1:], run.at_fault, strict=True):
        assert attempt.resume is not None
        assert attempt.resume.restored.sequence >= status["checkpoint"]["latest"]["sequence"]
        assert status["phase"] == "Running"
    assert not lost_steps(story, 0), "a notice leaves time to save the step it is at"
    redone = {step.step for step in lost_steps(story, 1)}
    assert redone
    assert min(redone) > STEPS_PER_EPOCH

    losses = {step.step: step.exact for attempt in story.attempts for step in attempt.steps}
    assert losses == undisturbed[0].result()
    assert {step.epoch for attempt in story.attempts for step in attempt.steps} == {0, 1}

    status, log = run.status(), run.log()
    assert log.latest is not None
    assert status["checkpoint"]["latest"]["sequence"] == log.head
    assert status["checkpoint"]["latest"]["step"] == log.latest.step == n_steps
    assert [attempt.get("cause") for attempt in status["attempts"]] == ["SpotPreemption", "NodeFailure", None]
    assert [attempt.get("fromStep") for attempt in status["attempts"]] == [
        None,
        *(attempt.resume.restored.step for attempt in story.attempts if attempt.resume),
    ]
    assert status["restarts"]["total"] == 2


def test_without_an_operator_a_preempted_job_resumes_and_status_is_right_again_later(site: Cluster) -> None:
    run = Run(site, manifest("alone", 120, 0.2))
    seen: dict[str, LogState] = {}

    def preempt_without_operator(node: str) -> None:
        site.faults.stop_operator()
        try:
            before = run.log()
            site.faults.spot_preemption(node, back_after_s=2)
            seen["resumed"] = wait_for_commit_of_next_claim(run, before)
            assert operator_pods(site) == [], "it was away for the whole of it"
        finally:
            site.faults.start_operator()

    story = run.follow(run.act(SPOT, 30, preempt_without_operator))

    assert broken_claims(story, disruptions=[SPOT]) == []
    assert len(story.attempts) == 2
    resume = story.attempts[1].resume
    assert resume is not None
    begun = seen["resumed"].claim
    assert begun is not None
    assert resume.restored.sequence < begun, "what the status says now is what the job resumed then"
    status = run.status()
    assert status["phase"] == "Complete"
    assert status["checkpoint"]["latest"]["sequence"] == run.log().head
    assert status["checkpoint"]["restored"] == {"sequence": resume.named.sequence, "step": resume.named.step}
    assert len(status["attempts"]) == 2
    assert status["attempts"][0]["cause"] != "ApplicationError"
    assert status["restarts"]["total"] == 1


@pytest.mark.long  # test_launching.py goes on with fewer workers; this is the same for a mesh of torch_xla
def test_a_job_goes_on_with_half_of_its_devices(site: Cluster, tmp_path: Path) -> None:
    """Its tensors lie on a mesh of other sizes then: the losses are the same, up to the order of sums."""
    n_steps = 60
    run = Run(site, manifest("halved", n_steps))

    def halve(_: str) -> None:
        spec = run.job["spec"]["template"]["spec"]
        (devices,) = (each for each in spec["containers"][0]["env"] if each["name"] == "CPU_NUM_DEVICES")
        assert devices["value"] == "4"
        devices["value"] = "2"
        site.kubectl("apply", "-f", "-", stdin=json.dumps(run.job))

    edit = "Half of the devices"
    with UndisturbedRun(tmp_path, n_steps) as undisturbed:
        story = run.follow(run.act(edit, midway(25, SAVE_INTERVAL), halve))
        exact = undisturbed.losses()

    assert broken_claims(story, disruptions=[edit]) == []
    assert len(story.attempts) == 2
    assert not lost_steps(story, 0), "an edit asks for a save first"
    for step in story.attempts[1].steps:
        assert math.isclose(float.fromhex(step.exact), float.fromhex(exact[step.step]), rel_tol=1e-3)
    assert {step.step: step.exact for step in story.attempts[0].steps}.items() <= exact.items()


def wait_for_commit_of_next_claim(run: Run, before: LogState) -> LogState:
    """The log once a later start than that of `before` has committed a step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        state = run.log()
        if state.claim != before.claim and state.latest and state.latest.claim == state.claim:
            return state
        time.sleep(1)
    raise AssertionError("no later start has committed anything")


def operator_pods(cluster: Cluster) -> list[str]:
    return cluster.kubectl("-n", "stepkeeper", "get", "pods", "-o", "name").split()
