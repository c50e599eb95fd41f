"""Jobs on the machines of a QueuedResource are asked to save ahead of announced maintenance."""

import re

import pytest

from fake_cluster.job_machines import change, running
from fake_cluster.world import World
from stepkeeper.contract import Head, Report, ReportedCommit, ReportPhase
from stepkeeper_operator.api.v1alpha1.trainingjob_status import CheckpointStatus
from stepkeeper_operator.facts.raw import render_time

SAVE_S = 100
"""A save takes so long. The request comes three times that before the maintenance."""


async def tell(world: World, sequence: int, step: int, at_step: int) -> None:
    """Let the training report a commit and its present step, a while after the last report."""
    world.now += 2
    uri = f"gs://bucket/runs/lm/{step}"
    commit = ReportedCommit(
        sequence=sequence,
        step=step,
        uri=uri,
        size_bytes=1,
        duration_millis=1000 * SAVE_S,
        time_unix_s=int(world.now),
    )
    head = Head(sequence=sequence, step=step, uri=uri, size_bytes=1)
    report = Report(
        phase=ReportPhase.TRAINING,
        root="r",
        claim=1,
        tail=sequence,
        head=head,
        step=at_step,
        commits=(commit,),
    )
    world.receive_report(report)
    await world.reconcile()


async def training(*, at_step: int = 150) -> World:
    """Make a training that has committed step 100."""
    world = await running()
    await tell(world, 5, 100, at_step=at_step)
    return world


def asked(world: World) -> str | None:
    """Return the request that the training's next report is answered with."""
    return world.reports.get_directive(world.job.metadata.uid).checkpoint_now


def checkpoint_of(world: World) -> CheckpointStatus:
    checkpoint = world.status.checkpoint
    assert checkpoint is not None
    return checkpoint


async def test_a_training_is_asked_once_to_save_before_maintenance_with_the_time_that_saves_take() -> None:
    world = await training(at_step=170)
    begins_at = int(world.now) + 1000
    await change(world, maintenance_at=(begins_at,))
    assert asked(world) is None
    assert await world.reconcile() is not None
    world.now = begins_at - 3 * SAVE_S + 5
    await tell(world, 5, 100, at_step=170)
    request = asked(world)
    assert request is not None
    told = world.reports.get_directive(world.job.metadata.uid)
    last = checkpoint_of(world).last_request
    assert last is not None
    assert told.save_reason == last.reason
    assert re.search(r"has maintenance from .*, in 2\d\d s$", last.reason)
    for left_s in (60, 0):
        world.now = begins_at - left_s
        assert world.reports.get_directive(world.job.metadata.uid).save_within_s == left_s
    await world.reconcile()
    world.restart_operator()
    await world.reconcile()
    assert asked(world) == request
    await tell(world, 6, 180, at_step=180)
    assert asked(world) is None
    last = checkpoint_of(world).last_request
    assert last is not None
    assert (last.sequence, last.step) == (6, 180)
    assert (world.events.count("SaveRequested"), world.events.count("SaveRequestAnswered")) == (1, 1)


async def test_a_training_whose_latest_step_is_committed_is_not_asked() -> None:
    world = await training(at_step=100)
    await change(world, maintenance_at=(world.now + 60,))
    assert asked(world) is None
    await tell(world, 5, 100, at_step=101)
    assert asked(world) is not None


@pytest.mark.parametrize("answered", [True, False])
async def test_a_new_attempt_is_asked_again_for_what_it_did_since_the_last_commit(*, answered: bool) -> None:
    world = await training()
    await change(world, maintenance_at=(world.now + 100,))
    first = asked(world)
    assert first is not None
    if answered:
        await tell(world, 6, 160, at_step=160)
    committed = (6, 160) if answered else (5, 100)
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    await tell(world, *committed, at_step=committed[1])
    assert asked(world) is None, "nothing is lost if it ends now"
    await tell(world, *committed, at_step=committed[1] + 5)
    second = asked(world)
    assert second not in {None, first}
    world.restart_operator()
    await world.reconcile()
    assert asked(world) == second
    await tell(world, 7, 166, at_step=170)
    assert asked(world) is None
    assert world.events.count("SaveRequested") == 2


async def test_a_later_or_moved_window_is_a_reason_to_save_again_and_one_that_begins_soon_after_is_none() -> (
    None
):
    world = await training()
    later = world.now + 3600
    await change(world, maintenance_at=(world.now + 100, world.now + 110, world.now + 200, later))
    first = asked(world)
    await tell(world, 6, 160, at_step=170)
    assert asked(world) is None
    world.now = later - 3 * SAVE_S - 100
    await tell(world, 6, 160, at_step=300)
    assert asked(world) is None
    world.now = later - 3 * SAVE_S + 10
    await tell(world, 6, 160, at_step=310)
    assert asked(world) not in {None, first}
    last = checkpoint_of(world).last_request
    assert last is not None
    assert f"maintenance from {render_time(later)}" in last.reason
    await tell(world, 7, 320, at_step=330)
    moved = world.now + 4000
    await change(world, maintenance_at=(moved,))
    assert asked(world) is None
    world.now = moved - 100
    await tell(world, 7, 320, at_step=400)
    assert asked(world) is not None
