"""Test how the time of a job is accounted for: each second once, whatever interrupts job and operator."""

from dataclasses import replace

import pytest

from fake_cluster.kubelets import training_report
from fake_cluster.stories import play, run_job
from fake_cluster.world import World
from stepkeeper.contract import Hang, TimeSpent

Spent = dict[str, int]


def spend(world: World, sequence: int, step: int, **seconds: int) -> None:
    """Report a step and a commit, and the seconds that the trainer has spent on each activity."""
    spent = TimeSpent(**{f"{name}_millis": 1000 * n for name, n in seconds.items()})
    world.receive_report(training_report(sequence, step, spent=spent, restored=None))


def goodput(world: World) -> Spent:
    status = world.status.goodput
    raw = {} if status is None else status.model_dump(exclude_none=True)
    return {name.removesuffix("_seconds"): n for name, n in raw.items()}


async def steps(world: World, until: int, **more: int) -> None:
    """Let a minute pass in which the training makes its steps, one in a second."""
    world.now += 60
    spend(world, 1, until, init=20, compile=10, train=until, **more)
    await world.reconcile()
    world.now += 61
    await world.reconcile()


async def test_each_second_is_in_one_category() -> None:
    world = await run_job()
    start = world.status.attempts[-1].start
    await steps(world, 30)
    found = goodput(world)

    assert found.pop("percent") == 100 * found["productive"] // sum(found.values())
    assert found == {"productive": 30, "init": 20, "compile": 10, "infrastructure": found["infrastructure"]}
    assert sum(found.values()) == world.now - 61 - start


async def lose_a_node(*, restarts_operator: bool) -> World:
    """Run 100 steps of which 60 are committed, lose the machines, and resume from step 60."""

    def look(world: World) -> None:
        if restarts_operator:
            world.restart_operator()

    world = await run_job()
    world.now += 100
    spent = TimeSpent(init_millis=20_000, compile_millis=10_000, train_millis=50_000)
    world.receive_report(training_report(1, 60, spent=spent))
    await world.reconcile()
    world.now += 70
    spent = TimeSpent(init_millis=20_000, compile_millis=10_000, train_millis=120_000)
    world.receive_report(replace(training_report(1, 60, spent=spent), step=100))
    await world.reconcile()
    world.now += 61
    await world.reconcile()
    look(world)
    await play(world, "evict, look")
    look(world)
    await world.run_until_settled()
    look(world)
    world.now += 100
    spent = TimeSpent(init_millis=20_000, restore_millis=5_000, compile_millis=10_000, train_millis=30_000)
    world.receive_report(training_report(2, 80, spent=spent))
    await world.reconcile()
    world.now += 61
    await world.reconcile()
    return world


@pytest.mark.parametrize("restarts_operator", [False, True])
async def test_steps_that_are_made_again_are_wasted(restarts_operator: bool) -> None:
    world = await lose_a_node(restarts_operator=restarts_operator)
    first, second = world.status.attempts
    found = goodput(world)
    del found["percent"]
    # 40 of 100 steps, of 120 s
    assert (found["lost_steps"], found["wasted"]) == (40, 48)
    assert found["productive"] == 120 - 48 + 30
    assert (found["init"], found["compile"], found["restore"]) == (40, 20, 5)
    total = sum(found.values()) - found["lost_steps"]
    assert total == int(world.now - 61) - first.start, "each second once"
    assert second.start - (first.end or 0) <= found["infrastructure"]


async def test_nothing_changes_while_nothing_happens() -> None:
    world = await lose_a_node(restarts_operator=False)
    assert await world.record_writes(rounds=3) == []
    world.restart_operator()
    before = goodput(world)
    await world.reconcile()
    assert goodput(world) == before


async def test_a_suspension_is_no_time_of_the_job() -> None:
    world = await run_job()
    await steps(world, 30)
    start = world.status.attempts[0].start
    await play(world, "suspend, run")
    world.now += 100_000
    await play(world, "resume, run")
    first, second = world.status.attempts
    await steps(world, 40)
    found = goodput(world)
    del found["percent"]
    lost = found.pop("lost_steps", 0)
    assert lost == 0, "the last reported step was committed"
    assert sum(found.values()) == (first.end or 0) - start + int(world.now - 61) - second.start


async def test_an_image_that_reports_no_times_has_none() -> None:
    world = await run_job()
    world.now += 60
    world.receive_report(training_report(1, 60))
    await world.reconcile()
    await play(world, "evict, run")
    assert goodput(world).get("productive") is None
    first, second = world.status.attempts
    assert goodput(world).get("infrastructure", 0) <= second.start - first.start


async def test_what_was_done_at_the_end_is_not_lost() -> None:
    world = await run_job()
    await steps(world, 30)
    spent = TimeSpent(init_millis=20_000, compile_millis=10_000, train_millis=90_000)
    world.receive_report(replace(training_report(1, 30, spent=spent), step=90))
    await play(world, "end 0, run, phase Complete")
    assert goodput(world)["productive"] == 90
    assert "wasted" not in goodput(world)


async def test_a_hang_is_infrastructure_and_its_restart_wastes_the_steps_after_the_commit() -> None:
    world = await run_job(hang={"action": "Restart"})
    world.controllers.kubelets.stop_code = 137
    spent = TimeSpent(init_millis=20_000, compile_millis=10_000, train_millis=120_000)
    stands = replace(training_report(1, 60, spent=spent), step=100)
    world.now += 150
    world.receive_report(stands)
    await world.reconcile()
    world.now += 900
    hang = Hang(kind="Stopped", since_unix_s=1, text="rank 1 is stopped", stacks="rank 1:")
    world.receive_report(replace(stands, hang=hang))
    await play(world, "look, run, phase Running, causes Hang -")
    found = goodput(world)
    assert (found["lost_steps"], found["wasted"], found["productive"]) == (40, 48, 72)
    assert found["infrastructure"] >= 900
