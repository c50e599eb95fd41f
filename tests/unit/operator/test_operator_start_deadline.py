"""Test pods that do not start: when the operator warns of it, when it suspends the job, and what starts it again."""

from typing import Any, Final

import pytest

from fake_cluster.kubelets import training_report
from fake_cluster.stories import Step, play, stories, table
from fake_cluster.world import World

HELD: Final = "condition Suspended True/StartDeadlineExceeded"
WAITS: Final = "phase Starting, condition Suspended False/NotSuspended"
DEADLINE_S: Final = 600


def lose_capacity(world: World) -> None:
    """Let the nodes of both hosts be missing: the scheduler says so."""
    world.controllers.gone.update({"n1", "n2"})


def find_capacity(world: World) -> None:
    world.controllers.gone.clear()


def pull(world: World, reason: str) -> None:
    """Let the kubelet say why it can't run the first pod."""
    pod = world.pods[0]
    waiting = {"name": "trainer", "state": {"waiting": {"reason": reason, "message": "no such image"}}}
    world.cluster.put("pods", pod | {"status": pod["status"] | {"containerStatuses": [waiting]}})


OWN: Final[dict[str, Step]] = {"lose-capacity": lose_capacity, "find-capacity": find_capacity, "pull": pull}


async def start(*, deadline_s: int | None = DEADLINE_S, **spec: Any) -> World:
    """Make a job whose pods can't start. Its first attempt began 4 s ago."""
    limit: dict[str, Any] = {} if deadline_s is None else {"startDeadlineSeconds": deadline_s}
    world = World(**spec, **limit)
    return await play(world, f"lose-capacity, look, act, wait 2, look, act, wait 2, look, {WAITS}", **OWN)


async def test_a_job_whose_pods_do_not_start_in_time_is_suspended_with_the_reason() -> None:
    world = await start()
    await play(world, "pull ImagePullBackOff, look", **OWN)
    began = world.status.attempts[-1].start
    world.now = began + DEADLINE_S - 1
    assert await world.reconcile() == 1
    await play(
        world,
        f"{WAITS}, wait 1, look, phase Suspending, run, phase Suspended, {HELD}, pods 0, causes Requested",
    )
    first = "lm-w-0-0"
    for words in (
        "spec.startDeadlineSeconds (600 s)",
        first,
        "ImagePullBackOff: no such image",
        "stepkeeper.dev/restart=",
    ):
        assert words in world.message("Suspended")
    message = world.status.attempts[-1].message
    assert message is not None
    assert message.startswith(
        "suspended: not all pods started within spec.startDeadlineSeconds (600 s): 0 of 2 pods"
    )
    warnings = [event for event in world.cluster.list_objects("events") if event["type"] == "Warning"]
    assert {event["reason"] for event in warnings} >= {"Suspending"}
    await play(world, "rests, wait 3600, rests, restart, rests, costs")


@table(
    "change",
    {
        "an edit of the template": ("edit image new",),
        "another edit": ("edit steps 7",),
        "the annotation": ("ask 1",),
        "a suspension and its end": ("suspend, run, condition Suspended True/Requested, resume",),
        "while no operator runs": ("away, edit steps 7, restart",),
        "the annotation of a spec that can't be read": ("edit ttl soon, run, phase Suspended, ask 1",),
        "once it is accepted": ("edit ttl soon, run, phase Suspended, edit ttl later",),
    },
)
@pytest.mark.parametrize("queued", [False, True])
async def test_a_held_job_starts_again_after(change: str, *, queued: bool) -> None:
    world = World(restarts={"maxFailures": 0, "maxDisruptions": 0}, startDeadlineSeconds=DEADLINE_S)
    if queued:
        world.controllers.kueue.install(default_queue="default")
    await play(world, "quota, lose-capacity, run 4, phase Starting", **OWN)
    await play(world, f"wait 600, run, phase Suspended, {HELD}, rests")
    assert (world.jobset is None) is queued, "Kueue would resume a suspended JobSet"
    await play(world, f"find-capacity, {change}, run, phase Running, costs Requested=1/0, rests", **OWN)
    await play(world, "condition Suspended False/NotSuspended, wait 3600, restart, run, phase Running")


async def test_a_deadline_holds_also_for_a_spec_that_can_not_be_read() -> None:
    world = await start()
    world.edit(placement={"gpu": {"count": 2}})
    await play(world, "run, condition Accepted False/UnreadableSpec, phase Starting")
    await play(
        world,
        f"wait 600, run, phase Suspended, {HELD}, restart, rests, ask 1, find-capacity, run, pods 2",
        **OWN,
    )


@stories(
    {
        "pods that start in time": "wait 500, find-capacity, run, phase Running, wait 600, run, phase Running",
        "pods that started while no operator ran": (
            "away, wait 500, find-capacity, act, wait 600, restart, run, phase Running"
        ),
        "a deadline that is raised": "wait 500, edit deadline 6000, wait 600, run, phase Starting",
        "pods that have run and are done": "find-capacity, run, end 0, run, phase Complete, wait 900, run",
        "one of whose pods is done": (
            "find-capacity, run, end-one, wait 900, run, phase Running, condition Running False/Finishing"
        ),
        "an attempt before": (
            "find-capacity, run, wait 3600, lose-capacity, evict, run 4, phase Restarting, wait 500, run 2, "
            "phase Restarting, find-capacity, run, phase Running"
        ),
    }
)
async def test_a_deadline_does_not_suspend(story: str) -> None:
    def end_one(world: World) -> None:
        world.controllers.end_pod(world.pods[0], 0)

    await play(await start(), story, **OWN, **{"end-one": end_one})


@stories(
    {
        "a restart of the operator": "wait 300, restart, look, wait 296, look, phase Suspending",
        "its absence": "away, wait 700, restart, look, phase Suspending",
        "its absence at the second start": (
            "find-capacity, run, lose-capacity, evict, run 3, away, wait 700, restart, look, phase Suspending"
        ),
        "a pod that is made again": (
            "find-capacity, run, wait 3600, lose-capacity, delete-job, act, run 20, phase Restarting, wait 600, look, "
            "phase Suspending"
        ),
    }
)
async def test_the_deadline_counts_across(story: str) -> None:
    await play(await start(), story, **OWN)


async def test_the_time_in_a_queue_does_not_count() -> None:
    world = World(startDeadlineSeconds=DEADLINE_S)
    world.controllers.kueue.install(default_queue="default")
    world.controllers.kueue.quota = False
    await play(
        world,
        "lose-capacity, run, phase Queued, wait 3600, run, phase Queued, quota, run 4, phase Starting",
        **OWN,
    )
    await play(world, "wait 500, look, phase Starting, wait 200, run, phase Suspended")


OVERDUE: Final = "condition Progressing False/NotStarted"


def overdue(world: World, expected: str) -> None:
    assert (
        f'stepkeeper_start_overdue{{job="lm",namespace="default"}} {expected}.0'
        in world.metrics.render().decode()
    )
    assert b'stepkeeper_stalled{job="lm",namespace="default"} 0.0' in world.metrics.render()


async def test_without_a_deadline_a_job_whose_pods_do_not_start_is_warned_of_once() -> None:
    own: dict[str, Step] = OWN | {"overdue": overdue}
    world = await play(
        await start(deadline_s=None), "overdue 0, condition Progressing Unknown/NotRunning", **own
    )
    world.now = world.status.attempts[-1].start + 299
    assert await world.reconcile() == 1
    await play(world, f"events NotStarted 0, wait 1, look, {OVERDUE}, overdue 1, events NotStarted 1", **own)
    assert world.message("Progressing") == (
        "not all pods have started for 300 s: 0 of 2 pods are running. See their events (kubectl -n default describe "
        "pods -l stepkeeper.dev/job-name=lm). spec.startDeadlineSeconds suspends such a job"
    )
    (event,) = [event for event in world.cluster.list_objects("events") if event["reason"] == "NotStarted"]
    assert event["type"] == "Warning"
    await play(
        world,
        f"rests, restart, rests, wait 36000, run, {OVERDUE}, phase Starting, events NotStarted 1",
        **own,
    )
    await play(world, "find-capacity, run, phase Running, overdue 0, restart, rests", **own)
    progressing = world.condition("Progressing")
    assert progressing is not None
    assert progressing[0] == "Unknown"
    world.receive_report(training_report(sequence=1, step=1))
    await play(world, "wait 61, run 2, condition Progressing True/StepsAdvance, overdue 0", **own)


@stories(
    {
        "that starts": "find-capacity, run, restart, run, condition Progressing Unknown/NoReports",
        "that is suspended": "suspend, run, condition Progressing Unknown/NotRunning",
        "that waits again": f"find-capacity, run, lose-capacity, evict, run 200, {OVERDUE}, events NotStarted 2",
    }
)
async def test_the_warning_ends_for_a_job(story: str) -> None:
    await play(await start(deadline_s=None), f"wait 400, run, {OVERDUE}, {story}", **OWN)
