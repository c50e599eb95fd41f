"""Test the causes of ends: one row for each state that pods can be in."""

from typing import Any

import pytest

from fake_cluster.facts import make_pod
from stepkeeper.contract import CommitPoint, ExitCode, Termination
from stepkeeper_operator.cache.evidence import AttemptEvidence, EvidenceCache
from stepkeeper_operator.facts import BatchJob, Node, Pod
from stepkeeper_operator.facts.pod import ContainerEnd, read_pod
from stepkeeper_operator.policy.causes.find_cause import find_cause
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.history import Finding, Verdict


def pod(name: str = "p0", **more: Any) -> Pod:
    own: dict[str, Any] = {"created_at": 0.0, "node": f"n{name[1:]}"}
    return make_pod(int(name[1:]), **(own | more))


def ended(name: str, code: int, at: float = 100.0, **more: Any) -> Pod:
    phase = "Succeeded" if code == 0 else "Failed"
    return pod(name, **({"exit_code": code, "phase": phase, "finished_at": at} | more))


def killed(name: str, at: float = 101.0) -> Pod:
    """Make a pod that its Job stopped after another pod had failed."""
    return ended(name, 143, at, deadline=130.0)


def word(code: int, **more: Any) -> Termination:
    return Termination(code=code, **more)


def other(name: str, code: int) -> ContainerEnd:
    return ContainerEnd(name=name, code=code, reason="Error", finished_at=100.0)


NODES = {
    "n0": Node(name="n0", uid="1", spot=True, unknown_since=None),
    "n1": Node(name="n1", uid="2", spot=False, unknown_since=None),
    "n2": Node(name="n2", uid="3", spot=False, unknown_since=50.0),
    "n3": Node(name="n3", uid="4", spot=False, unknown_since=None, gone_since=60.0),
}


def found(*pods: Pod, **more: Any) -> Finding:
    base: dict[str, Any] = {
        "nodes": NODES,
        "spot": False,
        "committed": False,
        "notice": None,
        "fatal_codes": frozenset({42}),
        "counted": None,
        "rule": None,
        "n_hosts": 1,
    }
    return find_cause(AttemptEvidence(ordinal=(0, 0), pods=pods), Circumstances(**(base | more)))


KUBELET = "TerminationByKubelet"

ROWS: dict[str, tuple[tuple[Pod, ...], str, bool]] = {
    "a spot machine is taken back": (
        (ended("p0", 75, disruption=KUBELET, reason="Terminated"), ended("p1", 75)),
        "SpotPreemption",
        True,
    ),
    "a spot machine is taken back and the trainer dies of the signal": (
        (ended("p0", 143, disruption=KUBELET), killed("p1")),
        "SpotPreemption",
        True,
    ),
    "a machine that is not spot is shut down": ((ended("p1", 75, disruption=KUBELET),), "Maintenance", True),
    "a machine that nobody knows is shut down": ((ended("p7", 75, disruption=KUBELET),), "Maintenance", True),
    "the kubelet evicts for want of memory on the node": (
        (ended("p0", 137, disruption=KUBELET, reason="Evicted"),),
        "Eviction",
        True,
    ),
    "a drain": ((ended("p1", 143, disruption="EvictionByEvictionAPI", deadline=99.0),), "Eviction", True),
    "a pod of higher priority": (
        (ended("p1", 75, disruption="PreemptionByScheduler", deadline=99.0),),
        "SchedulerPreemption",
        True,
    ),
    "the taint of a lost node": (
        (pod("p1", disruption="DeletionByTaintManager", deadline=99.0),),
        "NodeFailure",
        True,
    ),
    "a node that is gone": ((ended("p1", 137, disruption="DeletionByPodGC"),), "NodeFailure", True),
    "a pod that the operator gave up with its node": (
        (pod("p1", disruption="NodeLost", phase="Failed"),),
        "NodeFailure",
        True,
    ),
    "a disruption that this operator does not know": (
        (ended("p1", 143, disruption="NewInKubernetes2", deadline=99.0),),
        "Disruption",
        True,
    ),
    "the survivor of a lost node fails first": ((ended("p0", 1, 60.0), pod("p2")), "NodeFailure", True),
    "the survivor of a node that is gone fails first": (
        (ended("p0", 1, 60.0), pod("p3")),
        "NodeFailure",
        True,
    ),
    "an exit code of the application": ((ended("p0", 1), killed("p1")), "ApplicationError", True),
    "an exit code and a peer that lost it": (
        (ended("p1", 1, 100.0), ended("p0", 78, 99.0)),
        "ApplicationError",
        True,
    ),
    "out of memory": ((ended("p0", 137, exit_reason="OOMKilled", deadline=99.0),), "ApplicationError", True),
    "saved after a notice": ((ended("p0", 75, termination=word(75, notice="file")),), "Requested", True),
    "saved after a notice whose cause the process knew": (
        (ended("p0", 75, termination=word(75, notice="metadata", cause="Maintenance")),),
        "Maintenance",
        True,
    ),
    "saved, said the message, behind a shell that exits 1": (
        (ended("p0", 1, termination=word(75, notice="sigterm")),),
        "Requested",
        True,
    ),
    "one rank heard it from the cloud, the others from it": (
        (
            ended("p0", 75, 99.0, termination=word(75, notice="peer")),
            ended("p1", 75, termination=word(75, notice="preempted", cause="SpotPreemption")),
        ),
        "SpotPreemption",
        True,
    ),
    "a worker fails, its launcher stops those of another host, and a third one hears of that": (
        (
            ended("p2", 75, 99.0, termination=word(75, notice="peer")),
            ended("p1", 1, 100.0, termination=word(1, error="ValueError: bad")),
            ended("p0", 1, 101.0),
        ),
        "ApplicationError",
        True,
    ),
    "one rank had a notice and could not save, the others heard it from it": (
        (
            ended("p0", 75, 99.0, termination=word(75, notice="peer")),
            ended("p1", 1, termination=word(1, notice="sigterm", error="OSError: full")),
        ),
        "Requested",
        True,
    ),
    "one rank died of the signal that the others heard of": (
        (ended("p0", 75, 99.0, termination=word(75, notice="peer")), ended("p1", 143)),
        "Requested",
        True,
    ),
    "75 out of nowhere": ((ended("p0", 75), killed("p1")), "Requested", False),
    "75 with only a restored commit in its last words": (
        (ended("p0", 75, termination=word(75, restored=CommitPoint(sequence=4, step=40))), killed("p1")),
        "Requested",
        False,
    ),
    "75 with a commit in its last words": (
        (ended("p0", 75, termination=word(75, committed=CommitPoint(sequence=4, step=40))),),
        "Requested",
        True,
    ),
    "only lost peers": ((ended("p0", 78), ended("p1", 78)), "ApplicationError", False),
    "somebody deleted a pod": ((killed("p0", 100.0), killed("p1", 101.0)), "Requested", True),
    "a liveness probe that failed, in a pod that was deleted later": (
        (ended("p0", 137, 100.0, deadline=110.0, grace_s=0),),
        "ApplicationError",
        True,
    ),
    "a pod that was never admitted": (
        (pod("p0", phase="Failed", reason="UnexpectedAdmissionError"),),
        "NodeFailure",
        False,
    ),
    "a node that restarts, and the survivor that fails first": (
        (ended("p1", 255, 160.0, exit_reason="Unknown"), ended("p0", 1, 100.0)),
        "NodeFailure",
        True,
    ),
    "a kubelet that lost its container": (
        (ended("p1", 137, exit_reason="ContainerStatusUnknown"), killed("p0")),
        "NodeFailure",
        True,
    ),
    "a pod that is deleted before its container was made, after another pod failed": (
        (ended("p0", 1), ended("p1", 137, deadline=130.0, exit_reason="ContainerStatusUnknown")),
        "ApplicationError",
        True,
    ),
    "an init container that fails": (
        (pod("p0", phase="Failed", other_failure=other("fetch", 3)), pod("p1")),
        "ApplicationError",
        True,
    ),
    "a sidecar that fails after the trainer was done": (
        (ended("p0", 0, phase="Failed", other_failure=other("side", 1)),),
        "ApplicationError",
        True,
    ),
    "a pod that is deleted while its init container runs": (
        (pod("p0", phase="Failed", deadline=130.0, other_failure=other("fetch", 143)),),
        "Requested",
        True,
    ),
    "saved, and its sidecar fails of the signal": (
        (ended("p0", 75, termination=word(75, notice="sigterm"), other_failure=other("side", 1)),),
        "Requested",
        True,
    ),
    "a hang that ends in an eviction": (
        (ended("p0", 137, hang=True, disruption="EvictionByEvictionAPI", deadline=99.0),),
        "Hang",
        True,
    ),
    "nothing": ((), "Requested", False),
}


@pytest.mark.parametrize(("pods", "cause", "explained"), ROWS.values(), ids=ROWS)
def test_the_cause_of(pods: tuple[Pod, ...], cause: str, *, explained: bool) -> None:
    for order in (pods, pods[::-1]):
        finding = found(*order)
        assert (finding.cause, finding.explained, finding.verdict) == (cause, explained, Verdict.RESTART)


def test_a_disruption_target_on_a_pod_that_goes_on_ends_nothing() -> None:
    assert found(pod("p0", disruption="PreemptionByScheduler"), ended("p1", 3)).cause == "ApplicationError"


def test_a_job_on_spot_machines_knows_what_a_node_was_that_is_gone() -> None:
    assert found(ended("p7", 75, disruption=KUBELET), spot=True).cause == "SpotPreemption"


def test_lost_peers_after_a_commit_mean_a_lost_node() -> None:
    assert found(ended("p0", 78), committed=True).cause == "NodeFailure"


def test_the_notice_of_a_report_explains_75() -> None:
    assert found(ended("p0", 75), notice="sigterm").explained


@pytest.mark.parametrize(("notice", "cause"), [("peer", "ApplicationError"), ("file", "Requested")])
def test_a_failure_is_the_cause_unless_a_report_knows_what_the_peers_had_heard(
    notice: str, cause: str
) -> None:
    told = ended("p0", 75, 99.0, termination=word(75, notice="peer"))
    assert found(told, ended("p1", 1), notice=notice).cause == cause


def test_a_fatal_code_is_fatal_and_a_disruption_before_it_is_not() -> None:
    assert found(ended("p0", 42)).verdict is Verdict.FATAL
    assert found(ended("p0", 42, disruption=KUBELET)).verdict is Verdict.RESTART


def test_77_is_fenced_by_code_or_by_message_and_says_who() -> None:
    last = word(ExitCode.FENCED, error="Traceback\nFencedError: owned by default/other")
    for one in (ended("p0", 77, termination=last), ended("p0", 1, termination=last)):
        finding = found(one, ended("p1", 1, 90.0))
        assert finding.verdict is Verdict.FENCED
        assert "owned by default/other" in finding.message


def test_the_first_failure_is_blamed_and_its_last_words_are_quoted() -> None:
    first = ended(
        "p1", 3, 90.0, termination=word(3, error="Traceback (most recent call last):\nValueError: bad\n")
    )
    finding = found(ended("p0", 1, 100.0), first)
    assert finding.node == "n1"
    assert finding.message == "pod p1 exited with code 3: ValueError: bad"


@pytest.mark.parametrize(
    ("counted", "rule", "spot", "cause"),
    [
        (True, None, False, "ApplicationError"),
        (False, "disruption", False, "Disruption"),
        (False, "disruption", True, "SpotPreemption"),
        (False, "saved", False, "Requested"),
        (False, "hang", True, "Hang"),
    ],
)
def test_without_a_witness_jobset_is_believed(
    counted: bool, rule: str | None, spot: bool, cause: str
) -> None:  # a table
    finding = found(counted=counted, rule=rule, spot=spot)
    assert (finding.cause, finding.explained) == (cause, False)


@pytest.mark.parametrize(("code", "verdict"), [(77, Verdict.FENCED), (42, Verdict.FATAL)])
def test_a_job_that_is_left_says_what_its_pods_did(code: int, verdict: Verdict) -> None:
    message = f"Container trainer for pod a/b failed with exit code {code} matching FailJob rule at index 3"
    job = BatchJob(
        namespace="a",
        name="b",
        uid="c",
        job_uid="j",
        owner_uid="s",
        ordinal=(0, 0),
        failure_reason="PodFailurePolicy",
        failure_message=message,
    )
    evidence = AttemptEvidence(ordinal=(0, 0), failed_batch_jobs=(job,))
    known = Circumstances(
        nodes={},
        spot=False,
        committed=False,
        notice=None,
        fatal_codes=frozenset({42}),
        counted=True,
        rule=None,
        n_hosts=1,
    )
    assert find_cause(evidence, known).verdict is verdict


def test_evidence_outlives_the_pods_and_keeps_the_most_that_was_seen() -> None:
    book = EvidenceCache()
    book.add_pod(pod("p0", disruption="EvictionByEvictionAPI", deadline=9.0))
    book.add_pod(ended("p0", 75, deadline=9.0))
    (evidence,) = book.list_attempts("j")
    assert evidence.pods[0].disruption == "EvictionByEvictionAPI"
    book.add_pod(ended("p1", 1))
    book.add_pod(pod("p1"))
    (evidence,) = book.list_attempts("j")
    assert evidence.pods[1].exit_code == 1


def test_a_pod_that_was_dead_before_its_deletion_was_asked_for_was_not_killed() -> None:
    book = EvidenceCache()
    book.add_pod(ended("p0", 137, 100.0))
    book.add_pod(ended("p0", 137, 100.0, deadline=100.0, grace_s=0))
    (evidence,) = book.list_attempts("j")
    assert found(*evidence.pods).cause == "ApplicationError"


def test_a_disruption_that_came_to_nothing_is_forgotten() -> None:
    book = EvidenceCache()
    book.add_pod(pod("p0", disruption="PreemptionByScheduler"))
    book.add_pod(pod("p0"))
    (evidence,) = book.list_attempts("j")
    assert evidence.pods[0].disruption is None


def test_evidence_of_the_newest_attempts_only_is_kept() -> None:
    book = EvidenceCache()
    for number in range(9):
        book.add_pod(pod(f"p{number}", ordinal=(0, number)))
    assert [evidence.ordinal for evidence in book.list_attempts("j")] == [(0, 5), (0, 6), (0, 7), (0, 8)]
    book.forget_job("j")
    assert book.list_attempts("j") == ()


def test_a_pod_says_which_of_its_other_containers_failed() -> None:
    def status(name: str, code: int) -> dict[str, Any]:
        return {"name": name, "state": {"terminated": {"exitCode": code, "reason": "Error"}}}

    raw = {
        "metadata": {"namespace": "a", "name": "b", "uid": "c"},
        "spec": {"initContainers": [{"name": "proxy", "restartPolicy": "Always"}, {"name": "fetch"}]},
        "status": {
            "phase": "Failed",
            "initContainerStatuses": [status("proxy", 143), status("fetch", 3)],
            "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
        },
    }
    assert (failure := read_pod(raw).other_failure) is not None
    assert (failure.name, failure.code) == ("fetch", 3)
    assert found(read_pod(raw)).message == "container 'fetch' of pod b exited with code 3"


@pytest.mark.parametrize("more", [{}, {"disruption": KUBELET, "reason": "Terminated"}])
def test_what_a_training_chose_to_save_is_in_the_message(more: dict[str, Any]) -> None:
    decision = "at step 8, 6.9 s are left: only the one in flight is finished"
    finding = found(ended("p0", 75, termination=word(75, notice="sigterm", decision=decision), **more))
    assert finding.message.endswith(f"; {decision}")
