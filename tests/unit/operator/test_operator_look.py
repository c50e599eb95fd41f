"""One look at a job: what `kubectl get` and `kubectl describe` show of it."""

from typing import Any

from fake_cluster.describe import describe
from fake_cluster.kubelets import training_report
from fake_cluster.stories import Step, play, run_job, table
from fake_cluster.world import World
from stepkeeper.contract import Hang
from stepkeeper_operator.crds.kinds import TRAINING_JOB
from stepkeeper_operator.facts.raw import parse_time
from stepkeeper_operator.training_jobs.decide.status import _describe_duration


def columns(world: World) -> dict[str, Any]:
    """Return the columns of `kubectl get`, and those of `-o wide` in brackets."""
    found = {}
    for column in TRAINING_JOB.columns:
        value: Any = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
        for key in column.path.strip(".").split("."):
            value = value.get(key) if isinstance(value, dict) else None
        found[f"[{column.name}]" if column.priority else column.name] = value
    return found


async def long_job() -> World:
    """Run a job like those of the trial: preempted, resumed, and with many commits."""
    world = await run_job()
    for number in range(1, 13):
        world.receive_report(training_report(number, number * 10, step_millis=250))
        world.now += 61
        await world.reconcile()
    world.preempt()
    await world.run_until_settled()
    world.receive_report(training_report(14, 200, step_millis=250, metrics={"loss": "2.5", "lr": "0.1"}))
    world.now += 61
    await world.reconcile()
    return world


async def test_describe_shows_what_a_person_uses() -> None:
    world = await long_job()
    lines = describe(world.cluster.objects["checkpointedtrainingjobs", "default", "lm"])
    status = lines[lines.index("Status:") :]
    assert len(status) <= 100, "\n".join(lines)
    for _ in range(8):
        world.preempt()
        await world.run_until_settled()
        world.now += 3600
        await world.run_until_settled()
    lines = describe(world.cluster.objects["checkpointedtrainingjobs", "default", "lm"])
    assert len(lines[lines.index("Status:") :]) <= 125, "\n".join(lines)


async def test_the_columns_show_step_commit_and_what_happened_last() -> None:
    world = await long_job()
    found = columns(world)
    assert list(found) == [
        *("Phase", "Step", "Committed", "Last-Step", "Restarts", "Why", "Age"),
        *("[ETA]", "[Node]", "[Last-Cause]"),
    ]
    del found["Age"], found["Last-Step"]
    assert found == {
        "Phase": "Running",
        "Step": "200/1000",
        "Committed": 200,
        "Restarts": 1,
        "Why": None,
        "[ETA]": "4m",
        "[Node]": "n1",
        "[Last-Cause]": "Maintenance",
    }
    assert parse_time(columns(world)["Last-Step"]) == world.now - 61, "when the report came"


@table(
    "story, why",
    {
        "nothing is wrong": ("", None),
        "a failure": ("fail, look", "ApplicationError"),
        "a suspension": ("suspend, run", "Requested"),
        "an end": ("end 0, run", "AllPodsSucceeded"),
        "a fatal end": ("limit maxFailures 0, fail, run", "MaxFailuresReached"),
        "silence": ("report 1 10, look, wait 200, look", "NoReports"),
        "a hang": ("hang, look", "Stalled"),
        "a spec that can't be run": ("edit label, look", "ReservedLabel"),
    },
)
async def test_one_word_says_why(story: str, why: str | None) -> None:
    world = await run_job()
    label = {"metadata": {"labels": {"jobset.sigs.k8s.io/jobset-name": "x"}}}
    hang = Hang(kind="Stopped", since_unix_s=1, text="rank 1 is stopped", stacks="rank 1:")
    own: dict[str, Step] = {"hang": lambda w: w.receive_report(training_report(1, 10, hang=hang))}
    if "label" in story:
        own["edit"] = lambda w, _: w.edit(template=w.job.spec.template | label)
    if story:
        await play(world, story, **own)
    assert columns(world)["Why"] == why


def test_durations_are_short() -> None:
    found = [_describe_duration(s) for s in (0, 59, 61, 3600, 3 * 3600 + 290, 26 * 3600)]
    assert found == ["0m", "1m", "2m", "1h00m", "3h05m", "1d02h"]
