"""Test when a pod is given up with its node, with each condition removed once."""

from dataclasses import replace
from typing import Any

import pytest

from fake_cluster.kubelets import training_report
from fake_cluster.world import World
from stepkeeper.contract import Report, ReportPhase
from stepkeeper_operator.api.v1alpha1.conditions import Phase
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport, ReportCache
from stepkeeper_operator.facts import Node, Pod, read_pod
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.lost_pods import find_lost_pods

NOW = 10_000.0


async def running() -> World:
    world = World()
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


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
    report = LastReport(
        report=Report(phase=ReportPhase.TRAINING), ordinal=(0, 1), received_at=NOW - 100, pod_uid="u"
    )
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


_LATE_REPORT = LastReport(
    report=Report(phase=ReportPhase.TRAINING),
    ordinal=(0, 1),
    received_at=NOW - 5,
    pod_uid="u",
    heard_at={"u": NOW - 5},
)
_STEP_THAT_MOVED = replace(_LATE_REPORT, pod_uid="other", heard_at={"other": NOW - 5}, moved_at=NOW - 5)

NOT_LOST = {
    "the grace is not over": replace(scene(), pods=(replace(dying_pod(), deadline=NOW + 1),)),
    "the node is heard of": replace(scene(), nodes=with_node(None)),
    "the node fell silent only just now": replace(scene(), nodes=with_node(NOW - 20)),
    "the pod has reported since the node fell silent": replace(scene(), report=_LATE_REPORT),
    "its training goes on, as another pod reports": replace(scene(), report=_STEP_THAT_MOVED),
    "half of all nodes are silent": replace(scene(), n_nodes=4, n_unknown_nodes=2),
    "the operator has just started": replace(scene(), operator_started_at=NOW - 30),
}


@pytest.mark.parametrize("observed", NOT_LOST.values(), ids=NOT_LOST)
def test_a_pod_is_not_lost_while(observed: Observed) -> None:
    assert not lost(observed)


def test_another_pod_that_reports_the_same_step_again_and_again_keeps_no_lost_one() -> None:
    repeated = replace(_LATE_REPORT, pod_uid="other", heard_at={"other": NOW - 5}, moved_at=NOW - 61)
    assert lost(replace(scene(), report=repeated))
    assert lost(replace(scene(), report=replace(repeated, moved_at=None)))


def test_steps_of_the_pod_that_took_its_place_keep_no_lost_one() -> None:
    newer = replace(dying_pod(), uid="v", name="q", created_at=NOW - 50, deadline=None)
    replaced = AttemptEvidence(ordinal=(0, 1), pods=(dying_pod(), newer))
    assert lost(replace(scene(), report=_STEP_THAT_MOVED, evidence=(replaced,)))
    assert not lost(replace(scene(), report=_LATE_REPORT, evidence=(replaced,))), "it has reported itself"


async def test_a_job_goes_on_without_a_lost_node_though_rank_0_reports_where_it_waits() -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    lost_pod = world.pods[1]
    world.receive_report(training_report(sequence=3, step=99))
    await world.reconcile()
    world.now += 10
    world.receive_report(training_report(sequence=3, step=100, commits=()))
    await world.reconcile()
    world.now += 40
    world.lose_node(lost_pod["spec"]["nodeName"])
    world.now += 30
    world.controllers.disrupt(lost_pod, "DeletionByTaintManager")
    for _ in range(12):
        if len(world.causes) == 1:
            world.receive_report(training_report(sequence=3, step=100, commits=()))
        await world.reconcile()
        world.controllers.sync()
        world.now += 10
    assert world.causes == ["NodeFailure", None]
    assert world.phase() is Phase.RUNNING


def test_reports_tell_which_pods_live_and_whether_the_training_moves() -> None:
    reports = ReportCache(silence_s=90, report_interval_s=10)

    def receive(step: int | None, at: float, pod: str = "p0", attempt: int = 1) -> LastReport:
        last = LastReport(
            report=Report(phase=ReportPhase.TRAINING, step=step),
            ordinal=(0, attempt),
            received_at=at,
            pod_uid=pod,
        )
        reports.add_report("job", last)
        known = reports.get_report("job")
        assert known is not None
        return known

    assert receive(5, 10).moved_at is None, "an operator that has just started can't tell"
    assert receive(5, 20).moved_at is None
    assert receive(6, 30).moved_at == 30
    assert receive(6, 40, pod="p1").moved_at == 30
    assert receive(None, 50).heard_at == {"p0": 50, "p1": 40}
    assert receive(6, 60, attempt=2).heard_at == {"p0": 60}
    assert receive(6, 70, attempt=2).moved_at is None


def test_the_report_of_another_attempt_says_nothing() -> None:
    assert lost(replace(scene(), report=replace(_LATE_REPORT, ordinal=(0, 2))))


def test_a_failed_pod_whose_node_is_lost_is_taken_away_too() -> None:
    assert lost(replace(scene(), pods=(replace(dying_pod(), phase="Failed"),)))


@pytest.mark.parametrize(
    "pod", [replace(dying_pod(), deadline=None), replace(dying_pod(), phase="Failed", grace_s=0)]
)
def test_pods_that_nobody_waits_for_are_not_looked_at(pod: Pod) -> None:
    assert find_lost_pods(replace(scene(), pods=(pod,)), now=NOW, uptime_s=60) == ((), None)


def test_a_step_that_was_done_long_after_its_node_went_silent_and_long_ago_is_no_sign_of_life() -> None:
    report = scene().report
    assert report is not None
    for moved_at, is_lost in ((NOW - 290, False), (NOW - 310, True)):
        moved = replace(report, heard_at={"u": moved_at}, moved_at=moved_at)
        observed = replace(scene(), report=moved, nodes=with_node(unknown_since=NOW - 1000))
        assert lost(observed) is is_lost


async def test_a_pod_of_a_lost_node_whose_job_is_gone_holds_up_no_next_attempt() -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    world.lose_node(world.pods[1]["spec"]["nodeName"])
    world.cluster.remove("jobsets", "default", "lm")
    world.controllers.sync()
    assert [pod["status"]["phase"] for pod in world.pods] == ["Running"]
    world.restart_operator()  # which can't prove any more whose pod it is
    for _ in range(5):
        await world.run_until_settled(rounds=4)
        world.now += 30
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]


@pytest.mark.parametrize("given", [{"operator": "Exists"}, {"operator": "Exists", "effect": "NoExecute"}])
async def test_a_template_that_tolerates_everything_keeps_no_pod_on_a_lost_node(
    given: dict[str, Any],
) -> None:
    containers = [{"name": "trainer", "image": "trainer:1"}]
    world = World(template={"spec": {"containers": containers, "tolerations": [given]}})
    await world.run_until_settled()
    world.lose_node("n1")
    for _ in range(30):
        await world.run_until_settled(rounds=4)
    assert world.causes[0] == "NodeFailure"


async def test_a_template_that_names_the_taint_keeps_its_pods_as_long_as_it_says() -> None:
    containers = [{"name": "trainer", "image": "trainer:1"}]
    given = {"key": "node.kubernetes.io/unreachable", "operator": "Exists"}
    world = World(template={"spec": {"containers": containers, "tolerations": [given]}})
    await world.run_until_settled()
    world.lose_node("n1")
    for _ in range(30):
        await world.run_until_settled(rounds=4)
    assert world.causes == [None]


async def test_a_job_that_is_deleted_in_the_foreground_goes_though_a_node_is_lost() -> None:
    world = await running()
    world.now += 60
    world.lose_node(world.pods[1]["spec"]["nodeName"])
    world.cluster.mark_deleted("checkpointedtrainingjobs", "default", "lm", grace_s=0)
    world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    for _ in range(30):
        await world.reconcile()
        world.controllers.sync()
        world.now += 10
    assert world.pods == []
    assert world.jobset is None


async def test_a_job_that_is_applied_anew_starts_though_its_predecessor_has_a_pod_on_a_lost_node() -> None:
    world = await running()
    world.now += 60
    world.lose_node(world.pods[1]["spec"]["nodeName"])
    world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    world.controllers.sync()
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.remove("checkpointedtrainingjobs", "default", "lm")
    world.cluster.remove("configmaps", "default", "lm-stepkeeper")
    meta = {key: raw["metadata"][key] for key in ("name", "namespace", "generation")}
    world.cluster.put(
        "checkpointedtrainingjobs",
        {"apiVersion": raw["apiVersion"], "kind": raw["kind"], "metadata": meta, "spec": raw["spec"]},
    )
    for _ in range(30):
        await world.reconcile()
        world.controllers.sync()
        world.now += 10
    assert world.phase() is Phase.RUNNING
    assert world.causes == [None]
