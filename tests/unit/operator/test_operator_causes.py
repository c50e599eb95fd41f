"""Test why an attempt ended: one row for each state that its pods and Jobs can be in."""

from typing import Any, Final

import pytest

from fake_cluster.cause_rows import (
    EARLIER,
    EVICTION,
    FAILURE,
    FILE,
    KNOWS,
    KUBELET,
    PEER,
    SIGTERM,
    TOLD,
    case,
    check_cause,
    failure,
    find,
    killed,
    lost,
    side,
    stop,
    word,
)
from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_pod as pod
from stepkeeper.contract import AttemptKind, Cause, CommitPoint, ExitCode, Verdict
from stepkeeper_operator.cache.evidence import EvidenceCache
from stepkeeper_operator.facts.jobset import BatchJob
from stepkeeper_operator.facts.pod import Pod, read_pod
from stepkeeper_operator.training_jobs.attempts.machines import MachinesLoss
from stepkeeper_operator.training_jobs.attempts.verdict import attribute_to_loss

COMMIT: Final = CommitPoint(sequence=4, step=40)
MAINTAINED: Final = MachinesLoss(cause=Cause.MAINTENANCE, message="maintenance")
TAKEN_BACK: Final = MachinesLoss(cause=Cause.SPOT_PREEMPTION, message="the machines are gone")
COMMITTED: Final[dict[str, Any]] = {"has_committed": True, "guess": True}
PROBE: Final[dict[str, Any]] = {"failed_probe": "Container trainer failed liveness probe"}
SIDE_PROBE: Final[dict[str, Any]] = {"failed_probe": "Container side failed liveness probe"}
DEADLINE: Final[dict[str, Any]] = {"reason": "DeadlineExceeded", "message": "Pod was active for too long"}
OWN_LIMITS: Final[dict[str, Any]] = {"over_limits": True, "fatal_codes": frozenset()}
MADE_UP: Final = "ContainerStatusUnknown"
SCHEDULER: Final = "PreemptionByScheduler"
TAINT: Final = "DeletionByTaintManager"
BAD: Final = word(1, error="ValueError: bad")
NOT_KNOWN: Final = ended(75, disruption=KUBELET, node="n7")
SPOT: Final = "SpotPreemption"
REQUESTED: Final = word(75, cause="Requested")
DISRUPTIONS: Final = (
    case("a spot machine taken back", SPOT, ended(75, disruption=KUBELET, node="spot")),
    case("a spot machine, a signal", SPOT, ended(143, disruption=KUBELET, node="spot"), killed(1)),
    case("a machine shut down that isn't spot", "Maintenance", ended(75, disruption=KUBELET)),
    case("a machine that is not known", "Maintenance", NOT_KNOWN),
    case("the machine of a spot job", SPOT, NOT_KNOWN, on_spot=True),
    case("want of memory on the node", "Eviction", ended(137, disruption=KUBELET, reason="Evicted")),
    case("a drain", "Eviction", ended(143, disruption=EVICTION, **EARLIER), said=f"{EVICTION} on node n1"),
    case("a pod of higher priority", "SchedulerPreemption", ended(75, disruption=SCHEDULER, **EARLIER)),
    lost("the taint of a lost node", pod(disruption=TAINT, **EARLIER)),
    lost("a node that was removed", ended(137, disruption="DeletionByPodGC")),
    lost("a pod given up with its node", pod(disruption="NodeLost", phase="Failed")),
    case("an unknown disruption", "Disruption", ended(143, disruption="NewInKubernetes2", **EARLIER)),
    failure("a disruption of a pod that runs", pod(disruption=EVICTION), ended(3, 1)),
    *(case(f"reason {why}", "Maintenance", ended(75, reason=why)) for why in ("NodeShutdown", "Shutdown")),
    case("reason Terminated", "Maintenance", ended(75, reason="Terminated")),
    case("a condition and a reason", "Eviction", ended(75, disruption=EVICTION, reason="Terminated")),
    *(
        case(
            f"{cause} announced before {why}",
            cause,
            ended(75, disruption=why, node=node, **word(75, notice="sigterm", cause=cause)),
        )
        for cause, node in ((SPOT, "n1"), ("Maintenance", "spot"))
        for why in (KUBELET, EVICTION, TAINT, "DeletionByPodGC", "NewInKubernetes2")
    ),
    case("a notice without a cause", "Maintenance", ended(143, disruption=KUBELET, **REQUESTED)),
    case(
        "pressure, maintenance announced",
        "Eviction",
        ended(75, disruption=KUBELET, reason="Evicted", **KNOWS),
    ),
    case("priority, maintenance announced", "SchedulerPreemption", ended(143, disruption=SCHEDULER, **KNOWS)),
    case(
        "a hang that ends in an eviction",
        "Hang",
        ended(137, hang="rank 1 is stopped", disruption=EVICTION, **EARLIER),
    ),
    lost("a silent node", pod(node="silent"), said="node silent was lost"),
    lost("a survivor of a silent node", ended(1, at=360.0), pod(1, node="silent")),
    lost("a survivor of a node that is gone", ended(1, at=360.0), pod(1, node="gone")),
    stop("a silent node, its pod was done", ended(0, node="silent"), guess=True),
    failure("a silent node, its trainer had failed", pod(exit_code=3, node="silent")),
    lost("a silent node, its pod had failed", pod(phase="Failed", node="silent"), guess=True),
    lost(
        "a node that restarts", ended(255, at=460.0, exit_reason="Unknown"), ended(1, 1), said="n1 restarted"
    ),
    lost("a container lost by its kubelet", ended(137, exit_reason=MADE_UP), killed(1)),
    failure("a made-up end after an error", ended(1, exit_reason=MADE_UP, **BAD)),
    stop("a made-up end without a code", pod(exit_reason="Unknown"), guess=True),
    failure("a pod deleted before it began", ended(1), ended(137, 1, exit_reason=MADE_UP, **TOLD)),
)
BY_SPOT: Final = ended(75, **word(75, notice="sigterm", cause=SPOT))
AT_300, BY_PEER = ended(75, at=300.0), ended(75, 1, **PEER)
LAST_KNOWS: Final = ended(75, 3, at=410.0, **KNOWS)
BY_SIGTERM: Final = ended(75, **SIGTERM)
ANNOUNCED: Final[dict[str, Any]] = {"maintenance": MAINTAINED}
STOPS: Final = (
    stop("a save after a notice", ended(75, **FILE), said="'file'"),
    case("a save for a known cause", "Maintenance", ended(75, **KNOWS)),
    stop("a save behind a shell that exits 1", ended(1, **SIGTERM)),
    stop("a save without a notice", ended(75), killed(1), guess=True),
    stop("a save after a reported notice", ended(75), notice="sigterm", said="'sigterm'"),
    stop("a save after a commit", ended(75), has_committed=True),
    stop("a save that names a commit", ended(75, **word(75, committed=COMMIT))),
    stop("a save after a restored commit", ended(75, **word(75, restored=COMMIT)), killed(1), guess=True),
    case(
        "saves, one knows the cause",
        "Maintenance",
        AT_300,
        BY_PEER,
        ended(75, 2, **FILE),
        LAST_KNOWS,
    ),
    stop("saves, one knows a notice", AT_300, BY_PEER, ended(75, 2, at=410.0, **FILE), said="'file'"),
    stop("saves, one heard of a peer", AT_300, BY_PEER, said="'peer'"),
    stop("deletions", killed(0, 400.0), killed(1)),
    case("maintenance and SIGTERM", "Maintenance", BY_SIGTERM, by_machines=True, **ANNOUNCED),
    stop("maintenance and a notice by file", ended(75, **FILE), **ANNOUNCED),
    case("maintenance and a better cause", SPOT, BY_SPOT, **ANNOUNCED),
    stop("maintenance and a deletion", ended(75, at=401.0, **SIGTERM, **TOLD), **ANNOUNCED),
    case(
        "a failed probe and a save", "Hang", AT_300, ended(75, 1, **FILE, **PROBE), said=PROBE["failed_probe"]
    ),
    case("a failed probe and SIGTERM, maintenance", "Hang", ended(75, **SIGTERM, **PROBE), **ANNOUNCED),
    stop("a failed probe of a sidecar and a save", ended(75, **FILE, **SIDE_PROBE)),
    failure("its own limits and a save", ended(75, **SIGTERM, reason="Evicted"), over_limits=True),
    stop("its deadline and a save", ended(75, **SIGTERM, **DEADLINE), said="active for too long"),
    stop("a kill before it had saved", ended(137, **SIGTERM), said="'sigterm' (SIGKILL)"),
    stop("too much memory as it saved", ended(137, **SIGTERM, exit_reason="OOMKilled"), said="(OOMKilled: "),
    case("lost machines", SPOT, ended(1), loss=TAKEN_BACK, by_machines=True, said="the machines are gone"),
)


def job_says(code: int) -> tuple[BatchJob, ...]:
    message = f"Container trainer for pod a/b failed with exit code {code} matching FailJob rule at index 3"
    return (failed_job(message=message),)


RULED: Final[dict[str, Any]] = {"counted": False, "guess": True}
UNSEEN: Final = (
    stop("nothing", guess=True),
    failure("a Job that names a fatal code", jobs=job_says(42), fatal=True),
    stop("a Job that names a longer code", jobs=job_says(421), guess=True),
    case("a Job that names another claim", "Fenced", jobs=job_says(77)),
    failure("a failure that JobSet counted", counted=True, guess=True),
    case("JobSet's rule for a hang", "Hang", rule="hang", on_spot=True, **RULED),
    stop("JobSet's rule for a save", rule="saved", on_spot=True, **RULED),
    case("JobSet's rule for a disruption", "Disruption", rule="disruption", **RULED),
    case("JobSet's rule for spot", SPOT, rule="disruption", on_spot=True, **RULED),
    case("JobSet's rule for all else", "Disruption", rule="default", **RULED),
)
DONE: Final = word(0, step=40)
ALL_DONE: Final = "every trainer exited 0 and reported that the training is done"
BOTH_DONE: Final = (ended(0, **DONE), ended(0, 1, **DONE))
BESIDE_SIDECAR: Final = ended(0, **DONE, **side(3))
REPLACED: Final = ended(0, 2, "p3", created_at=200.0, **DONE)
EVICTED: Final = ended(0, **DONE, phase="Failed", disruption=EVICTION)
AFTERWARDS: Final = ended(1, 2, "p4", created_at=300.0)
COMPLETIONS: Final = (
    case("a training that is done, a sidecar failed", "", BESIDE_SIDECAR, said="container 'side'"),
    case("one on two hosts", "", ended(0, 1, **DONE), BESIDE_SIDECAR, said="of pod p0", n_hosts=2),
    case("a training that is done and evicted", "", EVICTED, said=ALL_DONE),
    failure("another host that isn't done", BESIDE_SIDECAR, n_hosts=2),
    failure("a trainer that exits 0 without a word", ended(0, **side(3))),
    failure("a trainer that is done after a notice", ended(0, **word(0, notice="sigterm"), **side(3))),
    failure("a trainer that fails after it was done", ended(1, **DONE, **side(3))),
    failure("a host too many that failed", *BOTH_DONE, ended(1, 2), n_hosts=2),
    stop("a host too many that runs", *BOTH_DONE, pod(2), n_hosts=2, guess=True),
    case("a host whose newest pod is done", "", *BOTH_DONE, REPLACED, ended(1, 2), n_hosts=2),
    failure("a host whose newest pod failed", *BOTH_DONE, REPLACED, AFTERWARDS, n_hosts=3),
)
OWNED: Final = word(ExitCode.FENCED, error="Traceback\nFencedError: owned by default/other")
BY_PEERS: Final = ended(75, at=399.0, **PEER)
STOPPED_SIBLING: Final = ended(75, 1, at=402.0, **TOLD)
NO_STORAGE: Final = ended(1, 1, **word(1, cause="StorageUnavailable"))
OOM: Final[dict[str, Any]] = {"exit_reason": "OOMKilled"}
LIMITED: Final = ended(137, reason="Evicted")
INIT: Final = pod(**side(3, said="no such file"))
NOT_ADMITTED: Final = "UnexpectedAdmissionError"
FAILURES: Final = (
    failure("an exit code", ended(1), killed(1), said="pod p0 exited with code 1"),
    failure("an exit code and a peer that lost it", ended(1), ended(78, 1, at=399.0)),
    failure("out of memory", ended(137, **OOM, **EARLIER), said="OOMKilled", **OWN_LIMITS),
    failure(
        "a liveness probe, a deletion later", ended(137, deadline=410.0, grace_s=0), fatal_codes=frozenset()
    ),
    failure("its own limits", LIMITED, said="was evicted", over_limits=True),
    stop("its own limits and no end yet", pod(reason="Evicted"), guess=True),
    failure("out of memory, machines lost", ended(137, **OOM), loss=TAKEN_BACK, **OWN_LIMITS),
    failure("evicted for its own limits, machines lost", LIMITED, loss=TAKEN_BACK, **OWN_LIMITS),
    failure(
        "a failed probe",
        ended(137, **PROBE),
        fatal_codes=frozenset(),
        said="137 (Container trainer failed live",
    ),
    failure(
        "a failed probe of a sidecar", ended(0, **side(137), **SIDE_PROBE), said="137 (Container side failed"
    ),
    failure(
        "a failed probe of a sidecar beside a failure", ended(1, **SIDE_PROBE), said="exited with code 1"
    ),
    failure("its deadline", ended(143, **DEADLINE), said="was active for too long", **OWN_LIMITS),
    failure(
        "its deadline before it began", pod(phase="Failed", **DEADLINE), said="too long", over_limits=True
    ),
    failure(
        "a failure before a sidecar's deadline",
        ended(3, **DEADLINE),
        said="code 3 (DeadlineExceeded: Pod was",
    ),
    failure("its deadline, machines lost", ended(137, **DEADLINE), loss=TAKEN_BACK, **OWN_LIMITS),
    stop("its deadline and no end yet", pod(**DEADLINE), guess=True),
    *(
        failure(f"signal {name}", ended(128 + number), said=f"exited with code {128 + number} ({name})")
        for number, name in ((6, "SIGABRT"), (7, "SIGBUS"), (11, "SIGSEGV"), (15, "SIGTERM"))
    ),
    failure("a code that is no signal's", ended(255), said="exited with code 255"),
    failure("a sidecar's signal", ended(0, **side(139)), said="code 139 (SIGSEGV)"),
    failure("two failures, the second first", ended(3, at=402.0), ended(4, 1, at=401.0), said="p1 exited"),
    failure("two failures, one without a time", ended(3, at=None), ended(4, 1), said="p1 exited"),
    failure("a sibling that was stopped", ended(1), STOPPED_SIBLING),
    stop("a sibling that saved by itself", ended(1), ended(75, 1, at=390.0, **FILE)),
    lost("lost peers, a sibling saves", ended(78), STOPPED_SIBLING, **COMMITTED),
    failure(
        "a launcher that stops another host's workers",
        *(ended(75, 2, at=399.0, **PEER), ended(1, 1, **BAD), ended(1, at=401.0)),
        said="ValueError: bad",
    ),
    failure("a failure after a peer saved", BY_PEERS, ended(1, 1)),
    failure("a failure after a peer saved, a peer reported", BY_PEERS, ended(1, 1), notice="peer"),
    stop("a failure after a peer saved, a notice reported", BY_PEERS, ended(1, 1), notice="file"),
    stop("a notice and no save", BY_PEERS, ended(1, 1, **word(1, notice="sigterm"))),
    stop("a signal that the others heard of", BY_PEERS, ended(143, 1)),
    failure("a fatal code", ended(1, at=300.0), ended(42, 1), fatal=True, said="p1 exited"),
    failure("a fatal code while it is stopped", ended(42, at=401.0, **TOLD), fatal=True),
    failure("a signal before its deletion", ended(143, at=398.0, **TOLD)),
    stop("a signal by a clock that is behind", ended(143, at=399.0, **TOLD)),
    stop("a signal at a time that is not known", ended(143, at=None, **TOLD)),
    failure("a failure behind a shell", ended(0, **BAD), said="but its container exited 0"),
    failure("a program's code before its deletion", ended(1, at=399.5, **TOLD)),
    failure("the kubelet's own reason", ended(1, at=401.0, exit_reason="ContainerCannotRun", **TOLD)),
    failure("out of memory while it is stopped", ended(137, at=401.0, **OOM, **TOLD), **OWN_LIMITS),
    stop("a signal's code while it is stopped", ended(137, at=401.0, **TOLD)),
    stop("a program's code while it is stopped", ended(1, at=401.0, **TOLD), said="p0 was deleted"),
    case("a fatal code with a disruption", "Maintenance", ended(42, disruption=KUBELET)),
    case("another claim", "Fenced", ended(77), ended(1, 1, at=390.0)),
    case("another claim, said behind a shell", "Fenced", ended(1, **OWNED), said="default/other"),
    case("another claim with a disruption", "Maintenance", ended(77, disruption=KUBELET)),
    case("storage that gives no answer", "StorageUnavailable", ended(1, at=390.0), NO_STORAGE),
    failure("an init container", INIT, pod(1), said="pod p0 exited with code 3: no such file"),
    failure(
        "another container, the trainer was done",
        ended(0, **side(3, "StartError")),
        said="code 3 (StartError)",
    ),
    stop("another container in a pod that runs", pod(**side(3) | {"phase": "Running"}), guess=True),
    failure("another container beside a failure", ended(5, **side(3)), said="exited with code 5"),
    lost("another container beside lost peers", ended(78, **side(3)), **COMMITTED),
    stop("another container beside a save", ended(75, **SIGTERM, **side(1))),
    stop("an init container that is stopped", pod(**side(143), **TOLD)),
    stop("another container that is stopped", ended(0, **side(143), **TOLD)),
    lost("a pod not admitted", pod(phase="Failed", reason=NOT_ADMITTED), said=NOT_ADMITTED, guess=True),
    stop("one pod that runs and one that is done", pod(), ended(0, 1), guess=True),
    failure("lost peers", ended(78), ended(78, 1), said="lost its peers", guess=True),
    lost("lost peers after a commit", ended(78, log_tail="rank 3 left"), said=": rank 3 left", **COMMITTED),
    failure(
        "lost peers in an error",
        ended(78, **word(78, error="rank 3 is gone")),
        said=": rank 3 is",
        guess=True,
    ),
)
ROWS: Final = [*DISRUPTIONS, *STOPS, *UNSEEN, *COMPLETIONS, *FAILURES]


@pytest.mark.parametrize(("pods", "known", "judged", "said"), ROWS)
def test_the_cause_of(
    pods: tuple[Pod, ...], known: dict[str, Any], judged: tuple[str | None, bool, str], said: str
) -> None:
    check_cause(pods, known, judged, said)


def test_the_first_failure_is_blamed_with_its_node_and_its_last_words() -> None:
    first = ended(3, 1, at=390.0, node="n2", **word(3, error="Traceback\nValueError: bad\n"))
    finding = find(ended(1), first)
    assert (finding.node, finding.message) == ("n2", "pod p1 exited with code 3: ValueError: bad")
    longer = word(
        3, error="Traceback\nValueError: bad\nTry good.\n", first_failure="rank 4: ValueError: bad", rank=4
    )
    assert find(ended(3, **longer)).message == "pod p0 exited with code 3: ValueError: bad"


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
    judged = attribute_to_loss(known, TAKEN_BACK)
    found = (judged.cause, judged.kind, judged.inferred)
    assert (
        found == (TAKEN_BACK.cause, AttemptKind.MACHINES_UNAVAILABLE, False) if by_loss else judged == known
    )
    assert attribute_to_loss(known, None) is known


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
