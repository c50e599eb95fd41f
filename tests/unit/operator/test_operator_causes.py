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
    killed,
    side,
    word,
)
from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_pod as pod
from stepkeeper.contract import Cause, CommitPoint
from stepkeeper_operator.facts import BatchJob, Pod
from stepkeeper_operator.training_jobs.attempts.machines import MachinesLoss

COMMIT: Final = CommitPoint(sequence=4, step=40)
MAINTAINED: Final = MachinesLoss(cause=Cause.MAINTENANCE, message="maintenance")
TAKEN_BACK: Final = MachinesLoss(cause=Cause.SPOT_PREEMPTION, message="the machines are gone")


MADE_UP: Final = "ContainerStatusUnknown"
SCHEDULER: Final = "PreemptionByScheduler"
BAD: Final = word(1, error="ValueError: bad")
DISRUPTIONS: Final = (
    case("a spot machine taken back", "SpotPreemption", ended(75, disruption=KUBELET, node="spot")),
    case(
        "a spot machine, a signal", "SpotPreemption", ended(143, disruption=KUBELET, node="spot"), killed(1)
    ),
    case("a machine shut down that isn't spot", "Maintenance", ended(75, disruption=KUBELET)),
    case("a machine that is not known", "Maintenance", ended(75, disruption=KUBELET, node="n7")),
    case(
        "the machine of a spot job", "SpotPreemption", ended(75, disruption=KUBELET, node="n7"), on_spot=True
    ),
    case("want of memory on the node", "Eviction", ended(137, disruption=KUBELET, reason="Evicted")),
    case("a drain", "Eviction", ended(143, disruption=EVICTION, **EARLIER), said=f"{EVICTION} on node n1"),
    case("a pod of higher priority", "SchedulerPreemption", ended(75, disruption=SCHEDULER, **EARLIER)),
    case("the taint of a lost node", "NodeFailure", pod(disruption="DeletionByTaintManager", **EARLIER)),
    case("a node that was removed", "NodeFailure", ended(137, disruption="DeletionByPodGC")),
    case("a pod given up with its node", "NodeFailure", pod(disruption="NodeLost", phase="Failed")),
    case("an unknown disruption", "Disruption", ended(143, disruption="NewInKubernetes2", **EARLIER)),
    case("a disruption of a pod that runs", FAILURE, pod(disruption=EVICTION), ended(3, 1)),
    *(case(f"reason {why}", "Maintenance", ended(75, reason=why)) for why in ("NodeShutdown", "Shutdown")),
    case("reason Terminated", "Maintenance", ended(75, reason="Terminated")),
    case("a condition and a reason", "Eviction", ended(75, disruption=EVICTION, reason="Terminated")),
    *(
        case(
            f"{cause} announced before {why}",
            cause,
            ended(75, disruption=why, node=node, **word(75, notice="sigterm", cause=cause)),
        )
        for cause, node in (("SpotPreemption", "n1"), ("Maintenance", "spot"))
        for why in (KUBELET, EVICTION, "DeletionByTaintManager", "DeletionByPodGC", "NewInKubernetes2")
    ),
    case(
        "a notice without a cause",
        "Maintenance",
        ended(143, disruption=KUBELET, **word(75, cause="Requested")),
    ),
    case(
        "pressure, maintenance announced",
        "Eviction",
        ended(75, disruption=KUBELET, reason="Evicted", **KNOWS),
    ),
    case("priority, maintenance announced", "SchedulerPreemption", ended(143, disruption=SCHEDULER, **KNOWS)),
    case("a hang that ends in an eviction", "Hang", ended(137, hang=True, disruption=EVICTION, **EARLIER)),
    case("a silent node", "NodeFailure", pod(node="silent"), said="node silent was lost"),
    case("a survivor of a silent node", "NodeFailure", ended(1, at=360.0), pod(1, node="silent")),
    case("a survivor of a node that is gone", "NodeFailure", ended(1, at=360.0), pod(1, node="gone")),
    case("a silent node, its pod was done", "Requested", ended(0, node="silent"), guess=True),
    case("a silent node, its trainer had failed", FAILURE, pod(exit_code=3, node="silent")),
    case("a silent node, its pod had failed", "NodeFailure", pod(phase="Failed", node="silent"), guess=True),
    case(
        "a node that restarts",
        "NodeFailure",
        ended(255, at=460.0, exit_reason="Unknown"),
        ended(1, 1),
        said="n1 restarted",
    ),
    case("a container lost by its kubelet", "NodeFailure", ended(137, exit_reason=MADE_UP), killed(1)),
    case("a made-up end after an error", FAILURE, ended(1, exit_reason=MADE_UP, **BAD)),
    case("a made-up end without a code", "Requested", pod(exit_reason="Unknown"), guess=True),
    case("a pod deleted before it began", FAILURE, ended(1), ended(137, 1, exit_reason=MADE_UP, **TOLD)),
)
SPOT: Final = word(75, notice="sigterm", cause="SpotPreemption")
STOPS: Final = (
    case("a save after a notice", "Requested", ended(75, **FILE), said="'file'"),
    case("a save for a known cause", "Maintenance", ended(75, **KNOWS)),
    case("a save behind a shell that exits 1", "Requested", ended(1, **SIGTERM)),
    case("a save without a notice", "Requested", ended(75), killed(1), guess=True),
    case("a save after a reported notice", "Requested", ended(75), notice="sigterm", said="'sigterm'"),
    case("a save after a commit", "Requested", ended(75), has_committed=True),
    case("a save that names a commit", "Requested", ended(75, **word(75, committed=COMMIT))),
    case(
        "a save after a restored commit",
        "Requested",
        ended(75, **word(75, restored=COMMIT)),
        killed(1),
        guess=True,
    ),
    case(
        "saves, one knows the cause",
        "Maintenance",
        ended(75, at=300.0),
        ended(75, 1, **PEER),
        ended(75, 2, **FILE),
        ended(75, 3, at=410.0, **KNOWS),
    ),
    case(
        "saves, one knows a notice",
        "Requested",
        ended(75, at=300.0),
        ended(75, 1, **PEER),
        ended(75, 2, at=410.0, **FILE),
        said="'file'",
    ),
    case("saves, one heard of a peer", "Requested", ended(75, at=300.0), ended(75, 1, **PEER), said="'peer'"),
    case("deletions", "Requested", killed(0, 400.0), killed(1)),
    case(
        "maintenance and SIGTERM",
        "Maintenance",
        ended(75, **SIGTERM),
        maintenance=MAINTAINED,
        by_machines=True,
    ),
    case("maintenance and a notice by file", "Requested", ended(75, **FILE), maintenance=MAINTAINED),
    case("maintenance and a better cause", "SpotPreemption", ended(75, **SPOT), maintenance=MAINTAINED),
    case(
        "maintenance and a deletion",
        "Requested",
        ended(75, at=401.0, **SIGTERM, **TOLD),
        maintenance=MAINTAINED,
    ),
    case(
        "lost machines",
        "SpotPreemption",
        ended(1),
        loss=TAKEN_BACK,
        by_machines=True,
        said="the machines are gone",
    ),
)


def job_says(code: int) -> tuple[BatchJob, ...]:
    message = f"Container trainer for pod a/b failed with exit code {code} matching FailJob rule at index 3"
    return (failed_job(message=message),)


UNSEEN: Final = (
    case("nothing", "Requested", guess=True),
    case("a Job that names a fatal code", FAILURE, jobs=job_says(42), fatal=True),
    case("a Job that names a longer code", "Requested", jobs=job_says(421), guess=True),
    case("a Job that names another claim", "Fenced", jobs=job_says(77)),
    case("a failure that JobSet counted", FAILURE, counted=True, guess=True),
    case("JobSet's rule for a hang", "Hang", counted=False, rule="hang", on_spot=True, guess=True),
    case("JobSet's rule for a save", "Requested", counted=False, rule="saved", on_spot=True, guess=True),
    case("JobSet's rule for a disruption", "Disruption", counted=False, rule="disruption", guess=True),
    case(
        "JobSet's rule for spot", "SpotPreemption", counted=False, rule="disruption", on_spot=True, guess=True
    ),
    case("JobSet's rule for all else", "Disruption", counted=False, rule="default", guess=True),
)
DONE: Final = word(0, step=40)
ALL_DONE: Final = "every trainer exited 0 and reported that the training is done"
BOTH_DONE: Final = (ended(0, **DONE), ended(0, 1, **DONE))
REPLACED: Final = ended(0, 2, "p3", created_at=200.0, **DONE)
COMPLETIONS: Final = (
    case(
        "a training that is done, a sidecar failed", "", ended(0, **DONE, **side(3)), said="container 'side'"
    ),
    case(
        "a training that is done on two hosts",
        "",
        ended(0, 1, **DONE),
        ended(0, **DONE, **side(3)),
        said="of pod p0",
        n_hosts=2,
    ),
    case(
        "a training that is done and evicted",
        "",
        ended(0, **DONE, phase="Failed", disruption=EVICTION),
        said=ALL_DONE,
    ),
    case("another host that isn't done", FAILURE, ended(0, **DONE, **side(3)), n_hosts=2),
    case("a trainer that exits 0 without a word", FAILURE, ended(0, **side(3))),
    case("a trainer that is done after a notice", FAILURE, ended(0, **word(0, notice="sigterm"), **side(3))),
    case("a trainer that fails after it was done", FAILURE, ended(1, **DONE, **side(3))),
    case("a host too many that failed", FAILURE, *BOTH_DONE, ended(1, 2), n_hosts=2),
    case("a host too many that runs", "Requested", *BOTH_DONE, pod(2), n_hosts=2, guess=True),
    case("a host whose newest pod is done", "", *BOTH_DONE, REPLACED, ended(1, 2), n_hosts=2),
    case(
        "a host whose newest pod failed",
        FAILURE,
        *BOTH_DONE,
        REPLACED,
        ended(1, 2, "p4", created_at=300.0),
        n_hosts=3,
    ),
)


@pytest.mark.parametrize(("pods", "known", "judged", "said"), [*DISRUPTIONS, *STOPS, *UNSEEN, *COMPLETIONS])
def test_the_cause_of(
    pods: tuple[Pod, ...], known: dict[str, Any], judged: tuple[str | None, bool, str], said: str
) -> None:
    check_cause(pods, known, judged, said)
