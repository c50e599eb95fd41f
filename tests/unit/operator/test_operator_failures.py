"""Test which ends are failures of the application, and what is said of each."""

from typing import Any, Final

import pytest

from fake_cluster.cause_rows import (
    EARLIER,
    FAILURE,
    FILE,
    KUBELET,
    PEER,
    SIGTERM,
    TOLD,
    case,
    check_cause,
    find,
    killed,
    side,
    word,
)
from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_pod as pod
from stepkeeper.contract import AttemptKind, Cause, ExitCode, Verdict
from stepkeeper_operator.cache.evidence import EvidenceCache
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.facts.pod import read_pod
from stepkeeper_operator.training_jobs.attempts.machines import MachinesLoss
from stepkeeper_operator.training_jobs.attempts.verdict import attribute_to_loss

BAD: Final = word(1, error="ValueError: bad")
OWNED: Final = word(ExitCode.FENCED, error="Traceback\nFencedError: owned by default/other")
TOLD_BY_PEER: Final = ended(75, at=399.0, **PEER)
NO_FATAL: Final[dict[str, Any]] = {"fatal_codes": frozenset()}
FAILURES: Final = (
    case("an exit code", FAILURE, ended(1), killed(1), said="pod p0 exited with code 1"),
    case("an exit code and a peer that lost it", FAILURE, ended(1), ended(78, 1, at=399.0)),
    case(
        "out of memory",
        FAILURE,
        ended(137, exit_reason="OOMKilled", **EARLIER),
        said="OOMKilled",
        over_limits=True,
        **NO_FATAL,
    ),
    case("a liveness probe, a deletion later", FAILURE, ended(137, deadline=410.0, grace_s=0), **NO_FATAL),
    case("its own limits", FAILURE, ended(137, reason="Evicted"), said="was evicted", over_limits=True),
    case("its own limits and no end yet", "Requested", pod(reason="Evicted"), guess=True),
    case(
        "two failures, the second first", FAILURE, ended(3, at=402.0), ended(4, 1, at=401.0), said="p1 exited"
    ),
    case("two failures, one without a time", FAILURE, ended(3, at=None), ended(4, 1), said="p1 exited"),
    case("a sibling that was stopped", FAILURE, ended(1), ended(75, 1, at=402.0, **TOLD)),
    case("a sibling that saved by itself", "Requested", ended(1), ended(75, 1, at=390.0, **FILE)),
    case(
        "lost peers, a sibling saves",
        "NodeFailure",
        ended(78),
        ended(75, 1, at=402.0, **TOLD),
        has_committed=True,
        guess=True,
    ),
    case(
        "a launcher that stops another host's workers",
        FAILURE,
        ended(75, 2, at=399.0, **PEER),
        ended(1, 1, **BAD),
        ended(1, at=401.0),
        said="ValueError: bad",
    ),
    case("a failure after a peer saved", FAILURE, TOLD_BY_PEER, ended(1, 1)),
    case("a failure after a peer saved, a peer reported", FAILURE, TOLD_BY_PEER, ended(1, 1), notice="peer"),
    case(
        "a failure after a peer saved, a notice reported",
        "Requested",
        TOLD_BY_PEER,
        ended(1, 1),
        notice="file",
    ),
    case("a notice and no save", "Requested", TOLD_BY_PEER, ended(1, 1, **word(1, notice="sigterm"))),
    case("a signal that the others heard of", "Requested", TOLD_BY_PEER, ended(143, 1)),
    case("a fatal code", FAILURE, ended(1, at=300.0), ended(42, 1), fatal=True, said="p1 exited"),
    case("a fatal code while it is stopped", FAILURE, ended(42, at=401.0, **TOLD), fatal=True),
    case("a signal before its deletion", FAILURE, ended(143, at=398.0, **TOLD)),
    case("a signal by a clock that is behind", "Requested", ended(143, at=399.0, **TOLD)),
    case("a signal at a time that is not known", "Requested", ended(143, at=None, **TOLD)),
    case("a failure behind a shell", FAILURE, ended(0, **BAD), said="and its container exited 0"),
    case("a program's code before its deletion", FAILURE, ended(1, at=399.5, **TOLD)),
    case("the kubelet's own reason", FAILURE, ended(1, at=401.0, exit_reason="ContainerCannotRun", **TOLD)),
    case(
        "out of memory while it is stopped",
        FAILURE,
        ended(137, at=401.0, exit_reason="OOMKilled", **TOLD),
        over_limits=True,
        **NO_FATAL,
    ),
    case("a signal's code while it is stopped", "Requested", ended(137, at=401.0, **TOLD)),
    case(
        "a program's code while it is stopped", "Requested", ended(1, at=401.0, **TOLD), said="p0 was deleted"
    ),
    case("a fatal code with a disruption", "Maintenance", ended(42, disruption=KUBELET)),
    case("another claim", "Fenced", ended(77), ended(1, 1, at=390.0)),
    case("another claim, said behind a shell", "Fenced", ended(1, **OWNED), said="default/other"),
    case("another claim with a disruption", "Maintenance", ended(77, disruption=KUBELET)),
    case(
        "storage that gives no answer",
        "StorageUnavailable",
        ended(1, at=390.0),
        ended(1, 1, **word(1, cause="StorageUnavailable")),
    ),
    case(
        "an init container",
        FAILURE,
        pod(**side(3, said="no such file")),
        pod(1),
        said="pod p0 exited with code 3: no such file",
    ),
    case(
        "another container, the trainer was done",
        FAILURE,
        ended(0, **side(3, "StartError")),
        said="code 3 (StartError)",
    ),
    case(
        "another container in a pod that runs", "Requested", pod(**side(3) | {"phase": "Running"}), guess=True
    ),
    case("another container beside a failure", FAILURE, ended(5, **side(3)), said="exited with code 5"),
    case(
        "another container beside lost peers",
        "NodeFailure",
        ended(78, **side(3)),
        has_committed=True,
        guess=True,
    ),
    case("another container beside a save", "Requested", ended(75, **SIGTERM, **side(1))),
    case("an init container that is stopped", "Requested", pod(**side(143), **TOLD)),
    case("another container that is stopped", "Requested", ended(0, **side(143), **TOLD)),
    case(
        "a pod not admitted",
        "NodeFailure",
        pod(phase="Failed", reason="UnexpectedAdmissionError"),
        said="UnexpectedAdmissionError",
        guess=True,
    ),
    case("one pod that runs and one that is done", "Requested", pod(), ended(0, 1), guess=True),
    case("lost peers", FAILURE, ended(78), ended(78, 1), said="lost its peers", guess=True),
    case(
        "lost peers after a commit",
        "NodeFailure",
        ended(78, last_words="rank 3 left"),
        said=": rank 3 left",
        has_committed=True,
        guess=True,
    ),
    case(
        "lost peers in an error",
        FAILURE,
        ended(78, **word(78, error="rank 3 is gone")),
        said=": rank 3 is",
        guess=True,
    ),
)


@pytest.mark.parametrize(("pods", "known", "judged", "said"), FAILURES)
def test_a_failure_is_found_and_blamed_for(
    pods: tuple[Pod, ...], known: dict[str, Any], judged: tuple[str | None, bool, str], said: str
) -> None:
    check_cause(pods, known, judged, said)


def test_the_first_failure_is_blamed_with_its_node_and_its_last_words() -> None:
    first = ended(3, 1, at=390.0, node="n2", **word(3, error="Traceback\nValueError: bad\n"))
    finding = find(ended(1), first)
    assert (finding.node, finding.message) == ("n2", "pod p1 exited with code 3: ValueError: bad")


LOSS: Final = MachinesLoss(cause=Cause.SPOT_PREEMPTION, message="the machines are gone")


def ended_by(cause: str, **more: Any) -> Verdict:
    return Verdict(**({"kind": AttemptKind.of(cause), "cause": cause, "message": "it ended"} | more))


@pytest.mark.parametrize(
    ("known", "by_loss"),
    [
        *(
            (ended_by(cause), True)
            for cause in ("NodeFailure", "Eviction", "Requested", FAILURE, "Disruption")
        ),
        *((ended_by(cause), False) for cause in ("Maintenance", "Hang", "Fenced")),
        (ended_by("Hang", inferred=True), True),
        (ended_by(FAILURE, kind=AttemptKind.UNRECOVERABLE), False),
        (ended_by(FAILURE, kind=AttemptKind.OVER_LIMITS), False),
    ],
)
def test_lost_machines_explain_what_comes_of_them(known: Verdict, *, by_loss: bool) -> None:
    judged = attribute_to_loss(known, LOSS)
    found = (judged.cause, judged.kind, judged.inferred)
    assert found == (LOSS.cause, AttemptKind.MACHINES_UNAVAILABLE, False) if by_loss else judged == known
    assert attribute_to_loss(known, None) is known


@pytest.mark.parametrize("own", [ended(137, exit_reason="OOMKilled"), ended(137, reason="Evicted")])
def test_lost_machines_explain_no_end_by_the_pods_own_limits(own: Pod) -> None:
    assert find(own, loss=LOSS, **NO_FATAL).cause == FAILURE


def status(name: str, code: int) -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, "reason": "Error"}}}


def test_a_pod_says_which_of_its_other_containers_failed() -> None:
    raw = {
        "metadata": {"namespace": "a", "name": "b", "uid": "c"},
        "spec": {"initContainers": [{"name": "proxy", "restartPolicy": "Always"}, {"name": "fetch"}]},
        "status": {
            "phase": "Failed",
            "initContainerStatuses": [status("proxy", 143), status("fetch", 3)],
            "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
        },
    }
    assert find(read_pod(raw)).message == "container 'fetch' of pod b exited with code 3"


def test_evidence_outlives_the_pods_and_keeps_the_most_that_was_seen() -> None:
    book = EvidenceCache()
    for seen in (
        pod(disruption="EvictionByEvictionAPI", deadline=9.0),
        ended(75, deadline=9.0),
        ended(1, 1),
        pod(1),
        pod(2, disruption="PreemptionByScheduler"),
        pod(2),
        ended(137, 3),
        ended(137, 3, deadline=400.0, grace_s=0),
    ):
        book.add(seen)
    (evidence,) = book.list_attempts("j")
    first, second, third, fourth = evidence.pods
    assert (first.disruption, second.exit_code) == ("EvictionByEvictionAPI", 1)
    assert third.disruption is None, "it came to nothing"
    assert find(fourth).cause == FAILURE, "it was dead before its deletion was asked for"
    for number in range(1, 9):
        book.add(pod(ordinal=(0, number)))
    assert [each.ordinal for each in book.list_attempts("j")] == [(0, 5), (0, 6), (0, 7), (0, 8)]
    book.forget_job("j")
    assert book.list_attempts("j") == ()
