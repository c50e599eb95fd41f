"""Jobs on the machines of a QueuedResource are asked to save ahead of announced maintenance."""

import re

from fake_cluster.job_machines import change, running
from fake_cluster.world import World
from stepkeeper.contract import Head, Report, ReportedCommit, ReportPhase
from stepkeeper_operator.facts.raw import render_time


def report_of(sequence: int, step: int, *, now: float, at_step: int | None = None) -> Report:
    """Make the report of a training that has committed `step`, and is now at `at_step`."""
    uri = f"gs://bucket/runs/lm/{step}"
    commit = ReportedCommit(
        sequence=sequence, step=step, uri=uri, size_bytes=1, duration_millis=100_000, time_unix_s=int(now)
    )
    head = Head(sequence=sequence, step=step, uri=uri, size_bytes=1)
    return Report(
        phase=ReportPhase.TRAINING,
        root="r",
        claim=1,
        tail=sequence,
        head=head,
        step=step if at_step is None else at_step,
        commits=(commit,),
    )


def asked(world: World) -> str | None:
    """Return the request that the training's next report is answered with."""
    return world.reports.get_directive(world.job.metadata.uid).checkpoint_now


async def tell(world: World, sequence: int, step: int, at_step: int) -> None:
    """Let the training report a commit and its present step, a while after the last report."""
    world.now += 2
    world.receive_report(report_of(sequence, step, now=world.now, at_step=at_step))
    await world.reconcile()


async def test_a_training_is_asked_once_to_save_before_maintenance_with_the_time_that_saves_take() -> None:
    world = await running()
    world.receive_report(report_of(5, 100, now=world.now))
    await change(world, maintenance_at=(world.now + 1000,))
    uid = world.job.metadata.uid
    assert world.reports.get_directive(uid).checkpoint_now is None
    look_s = await world.reconcile()
    assert look_s is not None
    world.now += 700  # a save takes 100 s: three times that is left
    world.receive_report(report_of(5, 100, now=world.now, at_step=170))
    await world.reconcile()
    request = world.reports.get_directive(uid).checkpoint_now
    assert request is not None
    assert world.events.count("SaveRequested") == 1
    await world.reconcile()
    assert world.reports.get_directive(uid).checkpoint_now == request
    world.restart_operator()
    await world.reconcile()
    assert world.reports.get_directive(uid).checkpoint_now == request
    world.receive_report(report_of(6, 180, now=world.now))
    world.now += 2
    await world.reconcile()
    assert world.reports.get_directive(uid).checkpoint_now is None
    checkpoint = world.status.checkpoint
    assert checkpoint is not None
    assert checkpoint.last_request is not None
    assert (checkpoint.last_request.sequence, checkpoint.last_request.step) == (6, 180)
    assert world.events.count("SaveRequested") == 1
    assert world.events.count("SaveRequestAnswered") == 1


async def test_a_training_is_told_for_what_it_saves_and_how_much_time_is_left() -> None:
    world = await running()
    await tell(world, 5, 100, at_step=150)
    begins_at = int(world.now) + 110
    await change(world, maintenance_at=(begins_at,))
    told = world.reports.get_directive(world.job.metadata.uid)
    assert told.save_reason == requested(world)
    assert "has maintenance from" in requested(world)
    assert told.save_within_s == int(begins_at - world.now) > 0
    assert re.search(r", in 1\d\d s$", requested(world))
    for left_s in (60, 0):
        world.now = begins_at - left_s
        assert world.reports.get_directive(world.job.metadata.uid).save_within_s == left_s


async def test_a_training_whose_latest_step_is_committed_is_not_asked() -> None:
    world = await running()
    await tell(world, 5, 100, at_step=100)
    await change(world, maintenance_at=(world.now + 60,))
    assert asked(world) is None
    await tell(world, 5, 100, at_step=101)
    assert asked(world) is not None


async def test_a_new_attempt_is_asked_again_for_what_it_did_since_the_last_commit() -> None:
    world = await running()
    await tell(world, 5, 100, at_step=150)
    await change(world, maintenance_at=(world.now + 100,))
    first = asked(world)
    assert first is not None
    await tell(world, 6, 160, at_step=160)
    assert asked(world) is None
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]
    await tell(world, 6, 160, at_step=160)
    assert asked(world) is None, "nothing is lost if it ends now"
    await tell(world, 6, 160, at_step=165)
    second = asked(world)
    assert second not in {None, first}
    world.restart_operator()
    await world.reconcile()
    assert asked(world) == second
    await tell(world, 7, 166, at_step=170)
    assert asked(world) is None
    assert world.events.count("SaveRequested") == 2


async def test_a_request_that_an_attempt_did_not_answer_is_made_to_the_next() -> None:
    world = await running()
    await tell(world, 5, 100, at_step=150)
    await change(world, maintenance_at=(world.now + 100,))
    first = asked(world)
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert asked(world) is None
    await tell(world, 5, 100, at_step=101)
    assert asked(world) not in {None, first}


async def test_a_window_that_has_begun_hides_no_later_one() -> None:
    world = await running()
    await tell(world, 5, 100, at_step=150)
    begun, later = world.now + 100, world.now + 3600
    await change(world, maintenance_at=(begun, later))
    first = asked(world)
    await tell(world, 6, 160, at_step=160)
    world.now = later - 400  # a save takes 100 s: three times that is left
    await tell(world, 6, 160, at_step=300)
    assert asked(world) is None
    world.now = later - 290
    await tell(world, 6, 160, at_step=310)
    assert asked(world) not in {None, first}
    assert f"maintenance from {render_time(later)}" in requested(world)


async def test_windows_that_begin_together_are_one_reason_to_save() -> None:
    world = await running()
    await tell(world, 5, 100, at_step=150)
    await change(world, maintenance_at=(world.now + 100, world.now + 110, world.now + 200))
    assert asked(world) is not None
    await tell(world, 6, 160, at_step=160)
    await tell(world, 6, 160, at_step=170)
    assert asked(world) is None


async def test_a_window_that_is_moved_is_a_reason_to_save_again() -> None:
    world = await running()
    await tell(world, 5, 100, at_step=150)
    await change(world, maintenance_at=(world.now + 100,))
    await tell(world, 6, 160, at_step=170)
    moved = world.now + 4000
    await change(world, maintenance_at=(moved,))
    assert asked(world) is None
    world.now = moved - 100
    await tell(world, 6, 160, at_step=400)
    assert asked(world) is not None


def requested(world: World) -> str:
    """Return why a save was asked for the last time."""
    checkpoint = world.status.checkpoint
    assert checkpoint is not None
    assert checkpoint.last_request is not None
    return checkpoint.last_request.reason
