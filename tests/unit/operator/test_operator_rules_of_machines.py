"""Test the rules about a job's machines, what is lost with them and what is saved before, each by itself."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import (
    ON_MACHINES,
    make_ended_pod,
    make_job,
    make_jobset,
    make_machines,
    make_pod,
)
from fake_cluster.kubelets import training_report
from stepkeeper.contract import CommitPoint, Termination
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Attempt,
    Bookkeeping,
    CheckpointStatus,
    CommitStatus,
    RestartsStatus,
    SaveRequest,
)
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts import ConfigMap, MaintenanceWindow, Node, Pod
from stepkeeper_operator.observed import Leftover, Observed
from stepkeeper_operator.policy import machines as rules
from stepkeeper_operator.policy.acceptance import NAME_TAKEN, check_acceptance
from stepkeeper_operator.policy.circumstances import Circumstances, gather_circumstances
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.lost_pods import find_lost_pods
from stepkeeper_operator.policy.save_requests import compute_lead_s, find_open_request, update_request

NOW: Final = 10_000.0
RUNNING: Final = Attempt(number=3, start=9000, to_step=70)


def template(*containers: dict[str, Any], labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {"template": {"metadata": {"labels": labels or {}}, "spec": {"containers": list(containers)}}}


TRAINER: Final[dict[str, Any]] = {"name": "trainer", "image": "trainer:1"}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({}, "SpecAccepted"),
        ({"livelyness": {}}, "UnknownFields"),
        (template(TRAINER, labels={"batch.kubernetes.io/x": "1"}), "ReservedLabel"),
        (template(TRAINER, labels={"job-name": "1"}), "ReservedLabel"),
        (template(TRAINER, labels={"controller-uid": "1"}), "ReservedLabel"),
        (template(TRAINER, labels={"mine": "1"}), "SpecAccepted"),
        (template({"name": "other", "image": "i"}), "NoTrainer"),
        (template(TRAINER, TRAINER), "NoTrainer"),
        (template(TRAINER | {"env": [{"name": "STEPKEEPER_JOB_UID", "value": "1"}]}), "ReservedVariable"),
        (template(TRAINER | {"env": [{"name": "MINE", "value": "1"}]}), "SpecAccepted"),
    ],
)
def test_a_spec_is_accepted_or_its_problem_is_named(spec: dict[str, Any], reason: str) -> None:
    assert check_acceptance(make_job(**spec), Observed()).reason == reason


def test_what_has_the_jobs_name_and_is_another_ones_is_in_its_way() -> None:
    jobset = Observed(jobset=make_jobset(owner_uid="another"))
    config_map = Observed(config_map=ConfigMap(owner_uid="another", owner_job=None, data={}))
    for observed in (jobset, config_map):
        found = check_acceptance(make_job(), observed)
        assert not found.status
        assert found.reason in NAME_TAKEN
    own = Observed(jobset=make_jobset(), config_map=ConfigMap(owner_uid="j", owner_job="lm", data={}))
    assert check_acceptance(make_job(), own).status
    assert check_acceptance(make_job(), Observed(unreadable=("spec.x: no",))).reason == "UnreadableSpec"


JOB: Final = make_job(**ON_MACHINES)
STARTED: Final = make_job(
    status={"attempts": [RUNNING.model_dump(mode="json", by_alias=True)]}, **ON_MACHINES
)


@pytest.mark.parametrize(
    ("change", "reason", "stop"),
    [
        ({"deleting": True}, "QueuedResourceDeleting", True),
        ({"active": False}, "WaitingForQueuedResource", True),
        ({"joined": False}, "WaitingForNodes", False),
        ({"joined": False, "join_timed_out": True}, "NodesJoinTimeout", False),
    ],
)
def test_a_job_waits_for_its_machines(change: dict[str, Any], reason: str, *, stop: bool) -> None:
    wait = rules.find_wait(JOB, Observed(machines=make_machines(**change)))
    assert wait is not None
    assert (wait.reason, wait.stop) == (reason, stop)


def test_a_job_waits_for_machines_that_nobody_has_or_manages() -> None:
    missing, unmanaged = (
        rules.find_wait(JOB, Observed()),
        rules.find_wait(JOB, Observed(queued_resources_managed=False)),
    )
    lost = rules.find_wait(STARTED, Observed(machines=make_machines(active=False)))
    assert missing is not None
    assert unmanaged is not None
    assert lost is not None
    assert (missing.reason, missing.stop) == ("QueuedResourceNotFound", True)
    assert (unmanaged.reason, unmanaged.stop) == ("QueuedResourcesDisabled", False)
    assert lost.reason == "QueuedResourceLost"
    assert rules.find_wait(JOB, Observed(machines=make_machines())) is None
    assert rules.find_wait(make_job(), Observed()) is None


def window(begins_at: float, ends_at: float | None = None) -> MaintenanceWindow:
    return MaintenanceWindow(begins_at=begins_at, ends_at=ends_at)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({}, None),
        ({"active": False}, "NodeFailure"),
        ({"active": False, "spot": True}, "SpotPreemption"),
        ({"active": False, "best_effort": True}, "QueuePreemption"),
        ({"active": False, "windows": (window(NOW + 30),)}, "Maintenance"),
        ({"active": False, "windows": (window(NOW + 90),)}, "NodeFailure"),
        ({"active": False, "replaced": True}, "Requested"),
        ({"deleting": True}, "Requested"),
    ],
    ids=["all there", "gone", "spot", "best effort", "maintained", "maintained later", "replaced", "deleted"],
)
def test_the_loss_of_machines_that_are(change: dict[str, Any], cause: str | None) -> None:
    loss = rules.explain_loss(JOB, Observed(machines=make_machines(**change)), now=NOW)
    assert (None if loss is None else loss.cause) == cause
    if loss is not None:
        assert rules.is_explained_by_machines(JOB, f"pod p0 failed; {loss.message}")


def test_machines_that_nobody_sees_are_deleted_or_not_lost_at_all() -> None:
    loss = rules.explain_loss(JOB, Observed(), now=NOW)
    assert loss is not None
    assert loss.cause == "Requested"
    assert rules.explain_loss(JOB, Observed(queued_resources_managed=False), now=NOW) is None
    assert rules.explain_loss(make_job(), Observed(), now=NOW) is None
    assert not rules.is_explained_by_machines(JOB, "pod p0 failed")
    assert not rules.is_explained_by_machines(JOB, None)
    assert not rules.is_explained_by_machines(make_job(), "QueuedResource tpu was deleted")


@pytest.mark.parametrize(
    ("announced", "goes_on"),
    [
        (window(NOW + 50), True),
        (window(NOW + 70), False),
        (window(NOW - 100, NOW - 50), True),
        (window(NOW - 5000, NOW - 340), True),
        (window(NOW - 5000, NOW - 400), False),
        (window(NOW - 5000, NOW + 100), True),
        (window(NOW - 3500), True),
        (window(NOW - 4000), False),
    ],
    ids=[
        "about to begin",
        "later",
        "just over",
        "over while processes have their time",
        "long over",
        "long",
        "without an end",
        "without an end and long ago",
    ],
)
def test_maintenance_goes_on_in_a_window_that_is(announced: MaintenanceWindow, *, goes_on: bool) -> None:
    observed = Observed(machines=make_machines(windows=(announced,)))
    assert (rules.find_maintenance(JOB, observed, now=NOW) is not None) is goes_on
    assert rules.find_maintenance(make_job(), observed, now=NOW) is None


TOLD: Final = make_pod(deadline=NOW - 10)
SILENT: Final = Node(name="n1", uid="1", spot=False, unknown_since=NOW - 200)


def lost(pod: Pod = TOLD, node: Node | None = SILENT, **more: Any) -> bool:
    base: dict[str, Any] = {
        "pods": (pod,),
        "nodes": {} if node is None else {"n1": node},
        "n_nodes": 9,
        "n_unknown_nodes": 1,
    }
    actions, again_s = find_lost_pods(Observed(**(base | more)), now=NOW, uptime_s=60)
    waits = pod.deadline is not None and pod.node is not None and not (pod.terminal and pod.grace_s == 0)
    assert (again_s is not None) is (waits and not actions)
    return bool(actions)


def heard(ordinal: tuple[int, int] = (0, 0), **more: Any) -> LastReport:
    return LastReport(report=training_report(7, 70), ordinal=ordinal, received_at=NOW, pod_uid="p0", **more)


def beside(pod: Pod) -> tuple[AttemptEvidence, ...]:
    return (AttemptEvidence(ordinal=(0, 0), pods=(TOLD, pod)),)


def test_a_pod_is_lost_with_its_node() -> None:
    assert lost()
    assert lost(node=None)
    assert lost(node=replace(SILENT, unknown_since=None, gone_since=NOW - 5))
    assert lost(make_ended_pod(1, deadline=NOW - 10)), "its kubelet has to let it go"
    told = Observed(
        leftover=Leftover(name="pod p0", told=(TOLD,)), nodes={"n1": SILENT}, n_nodes=9, n_unknown_nodes=1
    )
    assert find_lost_pods(told, now=NOW, uptime_s=60)[0]
    assert lost(report=heard((0, 1), heard_at={"p0": NOW})), "the report is of another attempt"
    assert lost(
        report=heard(heard_at={"p0": NOW - 400}, moved_at=NOW - 400),
        node=replace(SILENT, unknown_since=NOW - 900),
    )


def test_a_pod_is_not_lost_that_may_live_or_end() -> None:
    assert not lost(make_pod()), "nobody told it to end"
    assert not lost(make_pod(deadline=NOW + 1)), "its time is not over"
    assert not lost(make_pod(deadline=NOW - 10, node=None)), "it was never on a node"
    assert not lost(make_ended_pod(1, deadline=NOW - 10, grace_s=0)), "it has ended"
    assert not lost(node=replace(SILENT, unknown_since=None)), "its node is heard"
    assert not lost(node=replace(SILENT, unknown_since=NOW - 20)), "its node was heard just now"
    assert not lost(n_unknown_nodes=5), "half of all nodes are silent"
    assert not lost(operator_started_at=NOW - 50), "the operator has just started"
    assert not lost(report=heard(heard_at={"p0": NOW - 10})), "it has reported since"
    assert not lost(report=heard(moved_at=NOW - 10)), "its attempt goes on"
    other = make_pod(1, created_at=5000.0)
    assert not lost(report=heard(moved_at=NOW - 10), evidence=beside(other)), "another host's pod is newer"
    successor = make_pod(uid="new", created_at=5000.0)
    assert lost(report=heard(moved_at=NOW - 10), evidence=beside(successor)), "the attempt is its successor's"


def commit(sequence: int = 7, step: int = 60, **more: Any) -> CommitStatus:
    return CommitStatus(sequence=sequence, step=step, uri="gs://bucket/runs/lm/60/1-abc", **more)


def asked(**more: Any) -> SaveRequest:
    base: dict[str, Any] = {
        "id": "maintenance-10060-3",
        "attempt": 3,
        "before": 10_060,
        "time": 9990,
        "after": 7,
    }
    return SaveRequest(**(base | more))


SOON: Final = window(NOW + 60, NOW + 600)


def request(
    *announced: MaintenanceWindow, attempt: Attempt = RUNNING, **known: Any
) -> tuple[SaveRequest | None, float | None]:
    base: dict[str, Any] = {"latest": commit()}
    checkpoint = CheckpointStatus(**(base | known))
    history = JobHistory(attempts=(attempt,), restarts=RestartsStatus(), bookkeeping=Bookkeeping())
    observed = Observed(machines=make_machines(windows=announced or (SOON,)))
    status, wait_s = update_request(observed, checkpoint, history, now=NOW)
    return None if status is None else status.last_request, wait_s


def test_a_training_is_asked_to_save_before_each_maintenance() -> None:
    made, _ = request()
    assert made is not None
    assert (made.attempt, made.before, made.after) == (3, 10_060, 7)
    assert made.reason.endswith(", in 60 s")
    begun, _ = request(window(NOW - 5, NOW + 600))
    assert begun is not None
    assert begun.reason.endswith(", which may begin at any moment")
    assert request(latest=None)[0] is not None, "it has committed nothing yet"
    assert request(window(NOW + 1000), last_request=None) == (None, 880.0)
    assert request(window(NOW - 600, NOW - 1)) == (None, None), "it is over"


def test_a_training_is_not_asked_that_has_nothing_to_save_or_was_asked() -> None:
    assert request(attempt=RUNNING.model_copy(update={"to_step": None}))[0] is None
    assert request(latest=commit(step=70))[0] is None
    assert request(attempt=RUNNING.model_copy(update={"end": 9999}))[0] is None
    assert request(last_request=asked())[0] == asked()
    assert request(window(NOW + 100), last_request=asked())[0] == asked(), "both windows are one reason"
    again, _ = request(last_request=asked(attempt=2))
    assert again is not None
    assert again.attempt == 3


def test_a_commit_after_a_request_answers_it_once() -> None:
    for sequence, answer in ((7, None), (8, 8)):
        kept, _ = request(latest=commit(sequence), last_request=asked())
        assert kept is not None
        assert kept.sequence == answer
    kept, _ = request(latest=commit(9), last_request=asked(sequence=8, step=61))
    assert kept is not None
    assert (kept.sequence, kept.step) == (8, 61)


def test_the_time_before_maintenance_follows_the_last_save() -> None:
    for millis, lead_s in ((None, 120), (1000, 120), (100_000, 300), (9_000_000, 3600)):
        assert compute_lead_s(CheckpointStatus(latest=commit(duration_millis=millis))) == lead_s
    assert compute_lead_s(CheckpointStatus()) == 120


def test_a_request_is_open_until_it_is_answered_or_its_attempt_has_ended() -> None:
    def find(attempt: Attempt = RUNNING, **more: Any) -> SaveRequest | None:
        history = JobHistory(attempts=(attempt,), restarts=RestartsStatus(), bookkeeping=Bookkeeping())
        return find_open_request(CheckpointStatus(last_request=asked(**more)), history)

    assert find() == asked()
    assert find(sequence=8) is None
    assert find(RUNNING.model_copy(update={"end": 9999})) is None
    assert find(attempt=RUNNING.model_copy(update={"number": 4})) is None


def test_nothing_is_kept_of_a_checkpoint_that_says_nothing() -> None:
    history = JobHistory(attempts=(), restarts=RestartsStatus(), bookkeeping=Bookkeeping())
    assert update_request(Observed(), None, history, now=NOW) == (None, None)


def gather(
    job: CheckpointedTrainingJob = JOB, *pods: Pod, attempt: Attempt = RUNNING, **observed: Any
) -> Circumstances:
    evidence = AttemptEvidence(ordinal=(0, 0), pods=pods)
    return gather_circumstances(
        job, Observed(**observed), attempt, evidence, counted=None, rule=None, now=NOW
    )


def with_latest(**more: Any) -> CheckpointedTrainingJob:
    latest = commit(**more).model_dump(mode="json", by_alias=True)
    return make_job(status={"checkpoint": {"latest": latest}})


def test_an_attempt_has_committed_if_anybody_says_so() -> None:
    plain = make_job()
    assert not gather(plain).committed
    assert gather(
        plain, make_ended_pod(75, termination=Termination(code=75, committed=CommitPoint(sequence=7, step=1)))
    ).committed
    assert gather(plain, report=heard()).committed
    assert not gather(plain, report=heard((0, 9))).committed
    assert gather(with_latest(time=9001)).committed
    assert not gather(with_latest(time=8999)).committed
    resumed = RUNNING.model_copy(update={"from_step": 50})
    assert gather(with_latest(time=8999), attempt=resumed).committed
    assert not gather(with_latest(time=8999, step=50), attempt=resumed).committed


def test_a_notice_is_of_the_attempts_own_reports() -> None:
    told = training_report(7, 70, notice="sigterm")
    assert gather(report=replace(heard(), report=told)).notice == "sigterm"
    assert gather(report=replace(heard((0, 9)), report=told)).notice is None


def test_what_was_asked_for_and_what_the_machines_are_is_known() -> None:
    spot = make_job(placement={"tpu": {"accelerator": "v5p", "topology": "2x2x1", "provisioning": "Spot"}})
    assert gather(spot).spot
    on_spot = gather(machines=make_machines(spot=True), nodes={"n1": SILENT})
    assert (on_spot.spot, on_spot.nodes["n1"].spot) == (True, True)
    assert not gather(machines=make_machines()).spot
    assert gather(machines=make_machines(active=False)).loss is not None
    assert gather(machines=make_machines(windows=(window(NOW),))).maintenance is not None
    assert gather(make_job(restarts={"fatalExitCodes": [42]})).fatal_codes == {42}
