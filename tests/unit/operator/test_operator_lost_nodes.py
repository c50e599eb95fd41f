"""Test when a pod is given up with its node, with each condition removed once."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod, make_job, make_pod, make_view
from fake_cluster.kubelets import training_report
from fake_cluster.stories import run_job
from fake_cluster.world import World
from stepkeeper.contract import Report, ReportPhase
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport, ReportCache
from stepkeeper_operator.facts import Node
from stepkeeper_operator.training_jobs.decide.lost_pods import find_lost_pods
from stepkeeper_operator.training_jobs.observed import Leftover, Observed, View

NOW: Final = 10_000.0
DYING: Final = make_pod(deadline=NOW - 10)
SILENT: Final = Node(name="n1", uid="1", spot=False, unknown_since=NOW - 200)
HEARD: Final = LastReport(
    report=training_report(7, 70), ordinal=(0, 0), received_at=NOW, pod_uid="p0", heard_at={"p0": NOW - 10}
)
MOVED: Final = replace(HEARD, pod_uid="p1", heard_at={"p1": NOW - 10}, moved_at=NOW - 10)
STOOD: Final = replace(MOVED, moved_at=NOW - 210)


def on_node(**more: Any) -> dict[str, Any]:
    return {"nodes": {"n1": replace(SILENT, **more)}}


def beside(rank: int) -> tuple[AttemptEvidence, ...]:
    return (AttemptEvidence(ordinal=(0, 0), pods=(DYING, make_pod(rank, "new", created_at=5000.0))),)


LOST: Final[dict[str, dict[str, Any]]] = {
    "its node is silent beyond its grace": {},
    "its node is not known": {"nodes": {}},
    "its node is gone": on_node(unknown_since=None, gone_since=NOW - 5),
    "it failed, and its kubelet has to let it go": {"pods": (make_ended_pod(1, deadline=NOW - 10),)},
    "an earlier attempt left it": {"pods": (), "leftover": Leftover(name="pod p0", told=(DYING,))},
    "the report is of another attempt": {"report": replace(MOVED, ordinal=(0, 1))},
    "the other pods stand still": {"report": STOOD},
    "it is not known whether the others move": {"report": replace(MOVED, moved_at=None)},
    "the others' steps are its successor's": {"report": MOVED, "evidence": beside(0)},
    "it made a step long ago": {"report": replace(HEARD, heard_at={"p0": NOW - 310}, moved_at=NOW - 310)}
    | on_node(unknown_since=NOW - 1000),
}
KEPT: Final[dict[str, dict[str, Any]]] = {
    "its grace is not over": {"pods": (replace(DYING, deadline=NOW + 1),)},
    "its node is heard of": on_node(unknown_since=None),
    "its node fell silent only just now": on_node(unknown_since=NOW - 20),
    "it has reported since the node fell silent": {"report": HEARD},
    "it has reported, though it has a successor": {"report": HEARD, "evidence": beside(0)},
    "its training makes steps": {"report": MOVED},
    "its training makes steps with a newer pod of another host": {"report": MOVED, "evidence": beside(1)},
    "half of all nodes are silent": {"n_unknown_nodes": 5},
    "the operator has just started": {"operator_started_at": NOW - 50},
    "it made a step lately": {"report": replace(HEARD, heard_at={"p0": NOW - 290}, moved_at=NOW - 290)}
    | on_node(unknown_since=NOW - 1000),
}


def scene(**more: Any) -> View:
    """One node of nine is lost, with a pod on it that has to end."""
    base: dict[str, Any] = {"pods": (DYING,), "nodes": {"n1": SILENT}, "n_nodes": 9, "n_unknown_nodes": 1}
    return make_view(make_job(), Observed(**(base | more)), now=NOW)


@pytest.mark.parametrize("more", LOST.values(), ids=LOST)
def test_a_pod_is_lost_when(more: dict[str, Any]) -> None:
    pods, again_s = find_lost_pods(scene(**more))
    assert pods
    assert again_s is None


@pytest.mark.parametrize("more", KEPT.values(), ids=KEPT)
def test_a_pod_is_not_lost_while(more: dict[str, Any]) -> None:
    pods, again_s = find_lost_pods(scene(**more))
    assert not pods
    assert again_s is not None, "it is looked at again"


@pytest.mark.parametrize(
    "pod",
    [make_pod(), replace(DYING, node=None), make_ended_pod(1, deadline=NOW - 10, grace_s=0)],
    ids=["runs", "was never on a node", "has ended"],
)
def test_nothing_waits_for_a_pod_that(pod: Any) -> None:
    assert find_lost_pods(scene(pods=(pod,))) == ((), None)


def test_reports_show_which_pods_live_and_whether_the_training_moves() -> None:
    reports = ReportCache(silence_s=90, report_interval_s=10)

    def receive(step: int | None, at: float, pod: str = "p0", attempt: int = 1) -> LastReport:
        report = Report(phase=ReportPhase.TRAINING, step=step)
        reports.add_report(
            "job", LastReport(report=report, ordinal=(0, attempt), received_at=at, pod_uid=pod)
        )
        known = reports.get_report("job")
        assert known is not None
        return known

    assert receive(5, 10).moved_at is None, "an operator that has just started can't know"
    assert receive(5, 20).moved_at is None
    assert receive(6, 30).moved_at == 30
    assert receive(6, 40, pod="p1").moved_at == 30
    assert receive(None, 50).heard_at == {"p0": 50, "p1": 40}
    assert receive(6, 60, attempt=2).heard_at == {"p0": 60}
    assert receive(6, 70, attempt=2).moved_at is None


async def let_pass(world: World) -> None:
    for _ in range(30):
        await world.run_until_settled(rounds=4)


async def test_a_job_goes_on_without_a_lost_node_though_rank_0_reports_where_it_waits() -> None:
    world = await run_job()
    lost_pod = world.pods[1]
    for step, later_s in ((99, 10), (100, 40)):
        world.receive_report(training_report(sequence=3, step=step))
        await world.reconcile()
        world.now += later_s
    world.lose_node(lost_pod["spec"]["nodeName"])
    world.now += 30
    world.controllers.disrupt(lost_pod, "DeletionByTaintManager")
    for _ in range(12):
        if len(world.causes) == 1:
            world.receive_report(training_report(sequence=3, step=100, commits=()))
        await world.reconcile()
        world.controllers.sync()
        world.now += 10
    assert (world.phase(), world.causes) == (Phase.RUNNING, ["NodeFailure", None])


async def test_a_pod_of_a_lost_node_whose_job_is_gone_holds_up_no_next_attempt() -> None:
    world = await run_job()
    world.lose_node("n2")
    world.cluster.remove("jobsets", "default", "lm")
    world.controllers.sync()
    assert [pod["status"]["phase"] for pod in world.pods] == ["Running"]
    world.restart_operator()  # which can't prove any more whose pod it is
    await let_pass(world)
    assert (world.phase(), world.causes) == (Phase.RUNNING, ["Requested", None])


async def test_a_pod_that_ended_with_its_job_is_given_up_with_its_node() -> None:
    world = await run_job()
    world.lose_node("n2")
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.COMPLETE
    world.controllers.delete_job("lm-w-0")
    await let_pass(world)
    assert world.pods == []
    assert world.condition("PodStuck") in {None, (ConditionStatus.FALSE, "AsExpected")}


UNREACHABLE: Final = {"key": "node.kubernetes.io/unreachable", "operator": "Exists"}


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"operator": "Exists"}, "NodeFailure"),
        ({"operator": "Exists", "effect": "NoExecute"}, "NodeFailure"),
        (UNREACHABLE, None),
    ],
)
async def test_a_pod_stays_on_a_lost_node_only_where_its_template_names_the_taint(
    given: dict[str, Any], cause: str | None
) -> None:
    containers = [{"name": "trainer", "image": "trainer:1"}]
    world = await run_job(template={"spec": {"containers": containers, "tolerations": [given]}})
    world.lose_node("n1")
    await let_pass(world)
    assert world.causes[0] == cause


@pytest.mark.parametrize("applied_again", [False, True])
async def test_a_deleted_job_goes_though_a_node_is_lost_and_may_be_applied_again(
    *, applied_again: bool
) -> None:
    world = await run_job()
    world.now += 60
    world.lose_node(world.pods[1]["spec"]["nodeName"])
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    if not applied_again:
        world.cluster.mark_deleted("checkpointedtrainingjobs", "default", "lm", grace_s=0)
    world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    if applied_again:
        world.controllers.sync()
        world.cluster.remove("checkpointedtrainingjobs", "default", "lm")
        world.cluster.remove("configmaps", "default", "lm-stepkeeper")
        meta = {key: raw["metadata"][key] for key in ("name", "namespace", "generation")}
        fresh = {key: raw[key] for key in ("apiVersion", "kind", "spec")}
        world.cluster.put("checkpointedtrainingjobs", fresh | {"metadata": meta})
    for _ in range(30):
        await world.reconcile()
        world.controllers.sync()
        world.now += 10
    if applied_again:
        assert (world.phase(), world.causes) == (Phase.RUNNING, [None])
    else:
        assert (world.pods, world.jobset) == ([], None)
