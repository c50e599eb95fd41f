"""Jobs on the machines of a QueuedResource are asked to save ahead of announced maintenance."""

import re
from dataclasses import replace

import pytest

from fake_cluster.job_machines import change, running
from fake_cluster.kubelets import training_report
from fake_cluster.stories import play
from fake_cluster.world import World
from stepkeeper.contract import Directive
from stepkeeper_operator.api.v1alpha1.trainingjob_status import SaveRequest
from stepkeeper_operator.facts.raw import render_time

SAVE_S = 100
"""A save takes so long. The request comes three times that before the maintenance."""


def directive(world: World) -> Directive:
    """Return what the training's next report is answered with."""
    return world.reports.get_directive(world.job.metadata.uid)


def last_request(world: World) -> SaveRequest:
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.last_request is not None
    return world.status.checkpoint.last_request


class Training:
    """A training that reports every 2 s, and the request that it got."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.announced_at = world.now
        self.requests: list[str] = []

    async def tell(self, story: str) -> None:
        await play(
            self.world,
            story,
            train=self.train,
            windows=self.announce,
            at=lambda world, seconds: setattr(world, "now", self.announced_at + float(seconds)),
            asked=self.check_request,
            unasked=lambda world: self.check_request(world, "no"),
        )

    async def train(self, world: World, sequence: str, step: str, at_step: str) -> None:
        """Let the training report a commit and its present step."""
        world.now += 2
        report = training_report(int(sequence), int(step))
        (commit,) = report.commits
        commit = replace(commit, duration_millis=1000 * SAVE_S, time_unix_s=int(world.now))
        world.receive_report(replace(report, claim=1, step=int(at_step), commits=(commit,)))
        await world.reconcile()

    async def announce(self, world: World, *begin_in_s: str) -> None:
        self.announced_at = world.now
        await change(world, maintenance_at=tuple(world.now + float(each) for each in begin_in_s))

    def check_request(self, world: World, which: str = "new") -> None:
        """Check that it is asked nothing, the same again, or something new."""
        found = directive(world).checkpoint_now
        assert (found is None) is (which == "no"), found
        if found is not None:
            assert (found in self.requests) is (which == "same"), found
            self.requests.append(found)


async def training(story: str) -> Training:
    made = Training(await running())
    await made.tell(story)
    return made


async def test_a_training_is_asked_once_to_save_before_maintenance_with_the_time_that_saves_take() -> None:
    made = await training("train 5 100 170, windows 1000, unasked")
    world, begins_at = made.world, made.announced_at + 1000
    assert await world.reconcile() is not None, "it looks again by itself"
    await made.tell("at 705, train 5 100 170, asked")
    assert directive(world).save_reason == last_request(world).reason
    assert re.search(r"has maintenance from .*, in 2\d\d s$", last_request(world).reason)
    for left_s in (60, 0):
        world.now = int(begins_at) - left_s
        assert directive(world).save_within_s == left_s
    await made.tell("look, restart, look, asked same, train 6 180 180, unasked")
    assert (last_request(world).sequence, last_request(world).step) == (6, 180)
    await made.tell("events SaveRequested 1, events SaveRequestAnswered 1")


async def test_a_training_whose_latest_step_is_committed_is_not_asked() -> None:
    await training("train 5 100 100, windows 60, unasked, train 5 100 101, asked")


@pytest.mark.parametrize(
    "since", ["train 5 100 100, unasked, train 5 100 105", "train 6 160 160, unasked, train 6 160 165"]
)
async def test_a_new_attempt_is_asked_again_for_what_it_did_since_the_last_commit(since: str) -> None:
    """Nothing is lost if one ends that has just committed."""
    before = "train 5 100 150, windows 100, asked"
    answered = ", train 6 160 160" if "160" in since else ""
    made = await training(f"{before}{answered}, fail, run, {since}, asked, restart, look, asked same")
    await made.tell("train 7 166 170, unasked, events SaveRequested 2")


async def test_a_later_or_moved_window_is_a_reason_to_save_again_and_one_that_begins_soon_after_is_none() -> (
    None
):
    made = await training("train 5 100 150, windows 100 110 200 3600, asked, train 6 160 170, unasked")
    await made.tell("at 3200, train 6 160 300, unasked, at 3310, train 6 160 310, asked")
    later = render_time(made.announced_at + 3600)
    assert f"maintenance from {later}" in last_request(made.world).reason
    await made.tell("train 7 320 330, windows 4000, unasked, at 3900, train 7 320 400, asked")
