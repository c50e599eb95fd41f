"""Test pods that aren't made, don't end, or are lost with their nodes: when each is reported, and given up."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod, make_job, make_pod, make_view
from fake_cluster.kubelets import training_report
from fake_cluster.stories import play, run_job, table
from fake_cluster.world import World
from stepkeeper.contract import Report, ReportPhase
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport, ReportCache
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.training_jobs.decide.terminating_pods import find_lost_pods
from stepkeeper_operator.training_jobs.observed import Leftover, Observed, View

STUCK: Final = "condition PodStuck True"
NOT_STUCK: Final = "condition PodStuck False/AsExpected"


def make_pods(world: World, most: str) -> None:
    """Let Jobs make so many pods at most."""
    world.controllers.jobs.most_pods = None if most == "all" else int(most)


@pytest.mark.parametrize(
    ("n_made", "said"),
    [
        (0, "0 of 2 pods are running, and none was created in the last 30 s"),
        (1, "1 of 2 pods are running, 1 of 2 exist, and no other"),
    ],
)
async def test_a_gang_of_which_only_some_pods_are_made_says_where_to_look_after_half_a_minute(
    n_made: int, said: str
) -> None:
    world = await play(World(), f"make {n_made}, run 3, condition Running False/Starting", make=make_pods)
    again_s = await world.reconcile()
    await play(world, f"wait {again_s}, look, condition Running False/NoPods")
    assert world.message("Running").startswith(said)
    describe = "kubectl -n default describe"
    assert f"{describe} jobset lm; {describe} jobs -l stepkeeper.dev/job-name=lm" in world.message("Running")
    await play(world, "rests, make all, run 3, phase Running, events NoPods 1", make=make_pods)


async def test_pods_that_are_made_one_after_the_other_are_no_obstacle() -> None:
    """Those of a thousand hosts take minutes: only a pause counts."""
    world = World(placement={"hosts": {"count": 4}})
    for n_made in range(1, 4):
        await play(
            world, f"make {n_made}, run 10, condition Running False/Starting, events NoPods 0", make=make_pods
        )
        assert world.message("Running") == f"{n_made} of 4 pods are running"


async def test_what_a_pod_waits_for_is_said_before_the_pods_that_are_not_made() -> None:
    """JobSet makes the others of a slice only once the first has its node."""
    world = World()
    world.controllers.gone.add("n1")
    await play(world, "make 1, run 2", make=make_pods)
    (pod,) = world.pods
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
    world.cluster.put("pods", pod | {"status": pod["status"] | {"conditions": [unscheduled]}})
    await play(world, "wait 60, look, condition Running False/PodWaiting")
    said = f"0 of 2 pods are running; {pod['metadata']['name']} is waiting: Unschedulable: no node"
    assert world.message("Running") == said
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}}}
    world.cluster.put("pods", pod | {"status": pod["status"] | {"containerStatuses": [waiting]}})
    await play(world, "wait 2, look, message Running ImagePullBackOff, events NoPods 0")


@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_pods_that_are_done_are_counted_once_whether_they_still_exist_or_not(kept: int) -> None:
    world = await run_job(placement={"hosts": {"count": 4}})
    *done, missing, _running = list(world.pods)
    for pod in done:
        world.controllers.end_pod(pod, 0)
    await play(world, "act, wait 3600")
    for pod in [*done[kept:], missing]:
        world.cluster.remove("pods", "default", pod["metadata"]["name"])
    await play(
        world,
        "look, condition Running False/Starting, wait 29, look, message Running 1 of 4 pods are running",
    )
    await play(world, "condition Running False/Starting, wait 1, look, condition Running False/NoPods")
    said = f"1 of 4 pods are running, {1 + kept} of 4 exist, and no other was created in the last 30 s"
    assert world.message("Running").startswith(said)


async def test_a_pod_that_does_not_end_on_a_ready_node_is_named_once_with_what_to_do() -> None:
    world = await play(await run_job(), "stick n2, fail, run 2")
    pod = world.pods[1]["metadata"]["name"]
    assert world.condition("PodStuck") is None
    assert (await world.reconcile() or 100) < 100
    await play(world, f"wait 100, look, {STUCK}/StillTerminating")
    where, what = f"pod {pod} on node n2", f"describe pod {pod}"
    for words in (where, "2027-01-15T09:00:", "n2 is Ready", what, "--force"):
        assert words in world.message("PodStuck")
    assert b'stepkeeper_pod_stuck{job="lm",namespace="default"} 1.0' in world.metrics.render()
    await play(world, f"rests, unstick, run, phase Running, {NOT_STUCK}, events PodStuck 1")
    assert b'stepkeeper_pod_stuck{job="lm",namespace="default"} 0.0' in world.metrics.render()


def lose_ready(world: World) -> None:
    node = world.cluster.objects["nodes", None, "n2"]
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": render_time(world.now)}
    world.cluster.put("nodes", node | {"status": {"conditions": [ready]}})


@table(
    "story, reason, said",
    {
        "on a node that is not ready": ("fail, run 2, lose-ready", "NodeNotReady", "n2 is not Ready"),
        # Half of all, so that the operator can't give it up.
        "on a node that is silent": ("fail, run 2, lose n2, lose n3", "NodeSilent", "2 of 4 nodes"),
        "at a suspension": ("suspend, run 4", "StillTerminating", ""),
        "at an edit": ("edit image new, run 4", "StillTerminating", ""),
        "at the job's end": ("fail 3, run 4, phase Failed", "StillTerminating", ""),
    },
)
async def test_a_pod_is_stuck(story: str, reason: str, said: str) -> None:
    world = await run_job(restarts={"maxFailures": 0, "fatalExitCodes": [3]} if "Failed" in story else {})
    steps = {"lose-ready": lose_ready}
    await play(world, f"stick n2, {story}, wait 100, run 2, {STUCK}/{reason}, events PodStuck 1", **steps)
    assert said in world.message("PodStuck")
    if reason == "StillTerminating":
        await play(world, f"unstick, run, {NOT_STUCK}")


NOW: Final = 10_000.0
DYING: Final = make_pod(deadline=NOW - 10)
SILENT: Final = Node(name="n1", uid="1", spot=False, unknown_since=NOW - 200)
HEARD: Final = LastReport(
    report=training_report(7, 70), ordinal=(0, 0), received_at=NOW, pod_uid="p0", reported_at={"p0": NOW - 10}
)
MOVED: Final = replace(HEARD, pod_uid="p1", reported_at={"p1": NOW - 10}, moved_at=NOW - 10)
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
    "an earlier attempt left it": {"pods": (), "leftover": Leftover(name="pod p0", terminating=(DYING,))},
    "the report is of another attempt": {"report": replace(MOVED, ordinal=(0, 1))},
    "the other pods stand still": {"report": STOOD},
    "it is not known whether the others move": {"report": replace(MOVED, moved_at=None)},
    "the others' steps are its successor's": {"report": MOVED, "evidence": beside(0)},
    "it made a step long ago": {"report": replace(HEARD, reported_at={"p0": NOW - 310}, moved_at=NOW - 310)}
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
    "it made a step lately": {"report": replace(HEARD, reported_at={"p0": NOW - 290}, moved_at=NOW - 290)}
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
    assert receive(None, 50).reported_at == {"p0": 50, "p1": 40}
    assert receive(6, 60, attempt=2).reported_at == {"p0": 60}
    assert receive(6, 70, attempt=2).moved_at is None


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"operator": "Exists"}, "NodeFailure"),
        ({"operator": "Exists", "effect": "NoExecute"}, "NodeFailure"),
        ({"key": "node.kubernetes.io/unreachable", "operator": "Exists"}, None),
    ],
)
async def test_a_pod_stays_on_a_lost_node_only_where_its_template_names_the_taint(
    given: dict[str, Any], cause: str | None
) -> None:
    containers = [{"name": "trainer", "image": "trainer:1"}]
    world = await run_job(template={"spec": {"containers": containers, "tolerations": [given]}})
    await play(world, "lose n1, run 120")
    assert world.causes[0] == cause


@pytest.mark.parametrize("applied_again", [False, True])
async def test_a_deleted_job_goes_though_a_node_is_lost_and_may_be_applied_again(
    *, applied_again: bool
) -> None:
    world = await play(await run_job(), "wait 60, lose n2")
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    if applied_again:
        await play(
            world, "delete jobsets, act, remove checkpointedtrainingjobs, remove configmaps lm-stepkeeper"
        )
        meta = {key: raw["metadata"][key] for key in ("name", "namespace", "generation")}
        fresh = {key: raw[key] for key in ("apiVersion", "kind", "spec")}
        world.cluster.put("checkpointedtrainingjobs", fresh | {"metadata": meta})
    else:
        await play(world, "delete checkpointedtrainingjobs, delete jobsets")
    await play(world, "run 150, phase Running, causes -" if applied_again else "run 150, pods 0, gone")
