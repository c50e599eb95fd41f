"""Test what /metrics shows of jobs, and that each alert of the chart asks for what is there."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fake_cluster.kubelets import training_report
from fake_cluster.stories import mark_deleted, play, run_job
from fake_cluster.world import World
from stepkeeper.contract import Hang, TimeSpent

ALERTS: Final = Path(__file__).parents[3] / "charts/stepkeeper/files/alerts.yaml"
RULES: Final[list[dict[str, Any]]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]
WORDS: Final = {"absent", "and", "by", "delta", "increase", "job", "max", "namespace", "on", "sum"}


def samples(world: World) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples of the job by metric, each by its labels' values except namespace and job."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(world.metrics.render().decode()):
        for sample in family.samples:
            if sample.labels.get("job") == "lm":
                labels = tuple(
                    value for key, value in sample.labels.items() if key not in {"namespace", "job"}
                )
                found.setdefault(sample.name.removeprefix("stepkeeper_"), {})[labels] = sample.value
    return found


def work(world: World, sequence: int, step: int, train: int) -> None:
    spent = TimeSpent(init_millis=20_000, compile_millis=10_000, train_millis=train * 1000)
    world.receive_report(training_report(sequence, step, spent=spent))


async def interrupted_job() -> World:
    world = await run_job()
    world.metrics.jobs._clock = lambda: world.now
    world.now += 100
    work(world, 1, 60, 50)
    await world.reconcile()
    await play(world, "evict, run")
    world.now += 100
    work(world, 2, 80, 30)
    await world.reconcile()
    world.now += 61
    await world.reconcile()
    return world


async def test_a_job_shows_what_it_does_and_what_it_cost() -> None:
    found = samples(await interrupted_job())
    assert found["job_phase"] == {("Running",): 1}
    assert found["job_condition"]["Running", "AllPodsRun", "True"] == 1
    assert found["job_restarts"] == {("Eviction",): 1}
    assert found["job_step_age_seconds"] == {(): 61}
    assert found["job_save_seconds"] == {(): 0.005}
    assert found["job_recovery_seconds"][()] > 100
    assert found["job_goodput_seconds"] == {(): 80}
    assert found["job_badput_seconds"]["init",] == 40
    assert found["job_badput_seconds"]["wasted",] == 0
    assert found["job_lost_steps"] == {(): 0}


async def test_a_job_is_in_one_phase_and_is_gone_with_its_object() -> None:
    world = await interrupted_job()
    await play(world, "end 0, run")
    found = samples(world)
    assert found["job_phase"] == {("Complete",): 1}
    assert "job_step_age_seconds" not in found, "a job that has ended makes no more steps"
    world.cluster.remove("checkpointedtrainingjobs", "default", "lm")
    await world.reconcile()
    assert not {name for name in samples(world) if name.startswith("job_")}


def selectors(expr: str) -> list[tuple[str, list[str]]]:
    """List the metrics of an expression, with the labels that it selects by."""
    found = re.findall(r"(stepkeeper_\w+)(?:\{([^}]*)\})?", expr)
    return [(name, re.findall(r'(\w+)\s*(?:=~|!=|!~|=)\s*"', labels)) for name, labels in found]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
async def test_each_alert_asks_for_what_metrics_show(rule: dict[str, Any]) -> None:
    world = await interrupted_job()
    world.metrics.acting.set(1)
    world.metrics.reconciles.labels("CheckpointedTrainingJob", "error").inc()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(world.metrics.render().decode()):
        for sample in family.samples:
            labels[sample.name] = set(sample.labels)
    asked = selectors(rule["expr"])
    assert asked
    for name, wanted in asked:
        assert name in labels
        assert set(wanted) <= labels[name]
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    of_all = set.union(*(labels[name] for name, _ in asked))
    assert shown <= of_all
    known = of_all | WORDS | {name for name, _ in asked}
    bare = re.sub(r'"[^"]*"|\[\w+\]|[\d.]+', "", rule["expr"])
    assert set(re.findall(r"[a-z_]\w*", bare)) <= known


def rings(rule: dict[str, Any], world: World) -> bool:
    """Evaluate an expression that compares the samples of one selector with a number, at one instant."""
    asked = re.fullmatch(
        r"(?:max by \(namespace, job\) )?\(?(stepkeeper_\w+)(?:\{(.*)\})?\)? (==|>) (\d+)(?: and on .*)?",
        rule["expr"],
    )
    assert asked is not None
    name, selector, compare, number = asked.groups()
    rows = re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selector or "")
    for family in text_string_to_metric_families(world.metrics.render().decode()):
        for sample in family.samples:
            fits = sample.name == name and all(
                (re.fullmatch(text, sample.labels[label]) is not None) is (how != "!=")
                for label, how, text in rows
            )
            if fits and (sample.value == float(number) if compare == "==" else sample.value > float(number)):
                return True
    return False


JUDGED: Final = {
    rule["alert"].removeprefix("Stepkeeper"): rule
    for rule in RULES
    if "stepkeeper_reconciles" not in rule["expr"]
}
STORIES: Final = {
    "": "",
    "JobFailed": "limit maxFailures 0, fail, run",
    "JobNotAccepted": "label, look",
    "JobSuspendedForCause": "limit maxStartsWithoutCheckpoint 1, evict, run, evict, run, wait 700, run",
    "JobNotStarting": "lose-capacity, evict, run 10, wait 301, look",
    "JobStalled": "pace, hang, look",
    "JobSilent": "wait 200, look",
    "JobNoCommit": "wait 20000, report 1 70, look",
    "PodStuck": "stuck, wait 200, look",
    "GraceTooShort": "slow, look",
}


@pytest.mark.parametrize("alert", STORIES)
async def test_a_trouble_has_its_alert_and_a_sound_job_none(alert: str) -> None:
    world = await run_job()
    world.metrics.jobs._clock = lambda: world.now
    commit = training_report(1, 60).commits[0]
    world.receive_report(
        replace(training_report(1, 60), commits=(replace(commit, time_unix_s=int(world.now)),))
    )
    await world.reconcile()
    label = {"metadata": {"labels": {"jobset.sigs.k8s.io/jobset-name": "x"}}}

    def pace(world: World) -> None:
        for step in (61, 62, 70):
            world.now += 10
            world.receive_report(training_report(1, step))

    def hang(world: World) -> None:
        found = Hang(kind="Stopped", since_unix_s=1, text="rank 1 is stopped", stacks="rank 1:")
        world.receive_report(training_report(1, 70, hang=found))

    def slow(world: World) -> None:
        slow = replace(commit, sequence=2, duration_millis=60_000)
        world.receive_report(replace(training_report(2, 70), commits=(slow,)))

    def stuck(world: World) -> None:
        world.controllers.kubelets.stop_s = 10_000
        mark_deleted(world, "pods", world.pods[0]["metadata"]["name"], 30)

    own = {
        "label": lambda w: w.edit(template=w.job.spec.template | label),
        "lose-capacity": lambda w: w.controllers.gone.update({"n1", "n2"}),
        "pace": pace,
        "hang": hang,
        "slow": slow,
        "stuck": stuck,
    }
    if alert:
        await play(world, STORIES[alert], **own)
    found = {name for name, rule in JUDGED.items() if name in STORIES and rings(rule, world)}
    # Others may follow from the trouble, as no starting follows from a failure.
    assert found == set() if not alert else alert in found, world.status.conditions
