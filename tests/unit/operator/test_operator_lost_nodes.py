"""Test when a pod is given up with its node, with each condition removed once."""

from dataclasses import replace

import pytest

from stepkeeper.contract import Report, ReportPhase
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts import Node, Pod, read_pod
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.lost_nodes import find_lost_pods

NOW = 10_000.0


def dying_pod() -> Pod:
    """Make a pod whose deletion was requested 40 s ago and due 10 s ago."""
    labels = {"stepkeeper.dev/jobset-number": "0", "jobset.sigs.k8s.io/restart-attempt": "1"}
    meta = {
        "namespace": "default",
        "name": "p",
        "uid": "u",
        "labels": labels,
        "deletionTimestamp": render_time(NOW - 10),
        "deletionGracePeriodSeconds": 30,
    }
    return read_pod({"metadata": meta, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}})


def scene() -> Observed:
    """Make a cluster in which one node of five is lost, with a pod on it."""
    node = Node(name="n", uid="1", spot=False, unknown_since=NOW - 60)
    report = LastReport(report=Report(phase=ReportPhase.TRAINING), ordinal=(0, 1), received_at=NOW - 100)
    return Observed(
        pods=(dying_pod(),),
        nodes={"n": node},
        n_nodes=5,
        n_unknown_nodes=1,
        report=report,
        operator_started_at=NOW - 1000,
    )


def lost(observed: Observed) -> bool:
    pods, again_s = find_lost_pods(observed, now=NOW, uptime_s=60)
    # Whoever is not given up yet is looked at again.
    assert bool(pods) is (again_s is None)
    return bool(pods)


def with_node(unknown_since: float | None, gone_since: float | None = None) -> dict[str, Node]:
    return {"n": Node(name="n", uid="1", spot=False, unknown_since=unknown_since, gone_since=gone_since)}


def test_a_pod_on_a_node_that_is_silent_beyond_its_grace_is_lost() -> None:
    assert lost(scene())


def test_a_pod_of_a_node_that_is_gone_is_lost() -> None:
    assert lost(replace(scene(), nodes=with_node(None, gone_since=NOW - 1)))
    assert lost(replace(scene(), nodes={}))


_LATE_REPORT = LastReport(report=Report(phase=ReportPhase.TRAINING), ordinal=(0, 1), received_at=NOW - 5)

NOT_LOST = {
    "the grace is not over": replace(scene(), pods=(replace(dying_pod(), deadline=NOW + 1),)),
    "the node is heard of": replace(scene(), nodes=with_node(None)),
    "the node fell silent only just now": replace(scene(), nodes=with_node(NOW - 20)),
    "a report came since the node fell silent": replace(scene(), report=_LATE_REPORT),
    "half of all nodes are silent": replace(scene(), n_nodes=4, n_unknown_nodes=2),
    "the operator has just started": replace(scene(), operator_started_at=NOW - 30),
}


@pytest.mark.parametrize("observed", NOT_LOST.values(), ids=NOT_LOST)
def test_a_pod_is_not_lost_while(observed: Observed) -> None:
    assert not lost(observed)


def test_the_report_of_another_attempt_says_nothing() -> None:
    assert lost(replace(scene(), report=replace(_LATE_REPORT, ordinal=(0, 2))))


def test_a_failed_pod_whose_node_is_lost_is_taken_away_too() -> None:
    assert lost(replace(scene(), pods=(replace(dying_pod(), phase="Failed"),)))


@pytest.mark.parametrize(
    "pod", [replace(dying_pod(), deadline=None), replace(dying_pod(), phase="Failed", grace_s=0)]
)
def test_pods_that_nobody_waits_for_are_not_looked_at(pod: Pod) -> None:
    assert find_lost_pods(replace(scene(), pods=(pod,)), now=NOW, uptime_s=60) == ((), None)
