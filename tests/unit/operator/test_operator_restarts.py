"""Test what the status shows of an attempt and its restart, and when it is written."""

from typing import Final

import pytest

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.stories import end_pods, play, run_job, table
from fake_cluster.world import World
from stepkeeper.contract import CommitPoint, Head, Report, ReportPhase
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts.pod import summarize_log


async def test_an_edit_of_the_checkpoint_settings_restarts_nothing() -> None:
    world = await play(await run_job(), "edit interval 50, run, causes -")
    settings = world.cluster.objects["configmaps", "default", "lm-stepkeeper"]["data"]["settings.json"]
    assert '"steps":50' in settings


WRITE: Final = "apply checkpointedtrainingjobs"


async def test_a_commit_is_written_at_once_and_progress_once_a_minute() -> None:
    world = await play(await run_job(), "report 3 100")
    assert WRITE in await world.record_writes()
    world.now += 10
    world.receive_report(training_report(sequence=3, step=150, commits=()))
    assert await world.record_writes() == []
    await play(world, "wait 10, report 5 200")
    assert WRITE in await world.record_writes()
    world.now += 61
    world.receive_report(training_report(sequence=5, step=260, commits=()))
    assert await world.record_writes() == [WRITE]
    assert world.status.progress is not None
    assert (world.status.progress.step, world.status.progress.percent) == (260, 26)
    await play(world, "report 6 300, look, report 7 310, wait 0.2")
    assert await world.record_writes() == [], "once a second at most"
    assert 0.5 < (await world.reconcile() or 0) < 1
    world.now += 1
    assert await world.record_writes() == [WRITE]


async def test_what_an_attempt_restored_is_shown_and_told_and_is_not_the_next_ones() -> None:
    world = await run_job(spot=True)
    restored = CommitPoint(sequence=2, step=90)
    world.receive_report(training_report(sequence=3, step=100, restored=restored, in_flight_step=110))
    await play(world, "look, events Resumed 1")
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.restored is not None
    assert world.status.checkpoint.restored.sequence == 2
    assert world.status.attempts[-1].from_step == 90
    await play(world, "preempt, run, attempts 2")
    for _ in range(2):
        now = world.status.checkpoint
        assert (now.restored, now.in_flight_step) == (None, None)
        assert now.latest is not None
        # It has claimed the root, and restores.
        head = Head(sequence=7, step=120, uri="gs://b/7", size_bytes=1)
        world.receive_report(Report(phase=ReportPhase.RESTORING, root="r", tail=9, head=head))
        await world.reconcile()


async def test_a_job_that_changed_since_it_was_read_is_read_again_before_anything_is_done() -> None:
    world = await play(World(), "away, suspend")
    assert await world.reconcile() is not None
    assert (world.jobset, world.status.phase) == (None, None)
    await play(world, "restart, run, phase Suspended")


TRACEBACK = """step 100
Traceback (most recent call last):
  File "/app/train.py", line 12, in <module>
    main()
ValueError: the data set is empty
"""
TORCHRUN = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/app/train.py", line 12, in <module>
[rank0]: torch.OutOfMemoryError: tried to allocate 20 GiB
E1122 failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
"""
GOES_ON = "a\nTraceback (most recent call last):\n  File\nKeyError: 'x'\nbye\n"


@table(
    "log, begins",
    {
        "a traceback": (TRACEBACK, "ValueError: the data set is empty"),
        "torchrun's": (TORCHRUN, "torch.OutOfMemoryError: tried to allocate 20 GiB"),
        "no traceback": ("no such file: train.py\n\n", "no such file: train.py"),
        "one that is cut off": ("Traceback (most recent call last):\n  cut off", "cut off"),
        "a log that goes on": (GOES_ON, "KeyError: 'x' (its log ends"),
        "nothing": ("\n \n", ""),
    },
)
def test_of_a_log_the_line_that_says_most_comes_first(log: str, begins: str) -> None:
    found = summarize_log(log)
    assert found.startswith(begins)
    assert begins or not found
    assert len(summarize_log("x" * 5000 + "\n" + "y" * 5000)) == 500


@table(
    "message, said",
    {
        "its log": (TRACEBACK, "exited with code 1: ValueError: the data set is empty"),
        "its own": (termination_message(1, error="Traceback\nKeyError: 1"), "code 1: KeyError: 1"),
        "done, and another failure follows": (termination_message(0), "exited with code 1"),
    },
)
async def test_the_last_words_of_a_program_are_in_the_attempts_message(message: str, said: str) -> None:
    world = await run_job(restarts={"maxFailures": 0})
    world.controllers.end_pod(world.pods[0], 1, message=message)
    await play(world, f"run, phase Failed, message Failed {said}")
    assert said in (world.status.attempts[-1].message or "")


DECISION = "at step 120, 6.9 s are left: only the one in flight is finished"


async def test_what_was_chosen_to_be_saved_is_in_the_status_behind_a_shell_that_exits_0() -> None:
    world = await run_job()
    end_pods(world, 0, notice="sigterm", step=120, decision=DECISION)
    await world.run_until_settled(rounds=10)
    first = world.status.attempts[0]
    assert (first.message, first.decision) == ("every pod exited 0 after notice 'sigterm'", DECISION)
    ended = [raw["note"] for raw in world.cluster.list_objects("events") if raw["reason"] == "Requested"]
    assert ended == [f"attempt 1 ended after step 120 by Requested: {first.message}; {DECISION}"]


PROBED: Final = {
    "name": "trainer",
    "image": "trainer:1",
    "livenessProbe": {"exec": {"command": ["pgrep", "python"]}},
}
NOT_ALIVE: Final = "Container trainer failed liveness probe"


def end_by_probe(world: World, said: str = NOT_ALIVE) -> None:
    """End all pods as a trainer does that its kubelet stops, with the kubelet's events about the first one."""
    pod = world.pods[0]
    for number, note in enumerate(("Stopping container side", said, "Stopping container side")):
        event = {
            "metadata": {"name": f"{pod['metadata']['name']}.{number}", "namespace": "default"},
            "regarding": {"uid": pod["metadata"]["uid"]},
            "reason": "Killing",
            "note": note,
        }
        world.cluster.put("events", event)
    end_pods(world, 75, notice="file", step=120)


async def run_probed(*, may_list: bool = True) -> World:
    world = await run_job(template={"spec": {"containers": [PROBED]}})
    if not may_list:
        world.cluster.refusals["list", "events"] = ApiError(403, "events is forbidden")
    return world


async def test_an_end_by_a_failed_probe_is_named_by_the_kubelets_event() -> None:
    world = await run_probed()
    end_by_probe(world)
    await play(world, "run, causes Hang -, costs Hang=1/0, phase Running, rests")
    assert NOT_ALIVE in (world.status.attempts[0].message or "")
    assert world.cluster.lists_of_events == 2, "and once more for the pod without an event"
    await play(world, "restart, run, causes Hang -")


async def test_an_event_that_comes_later_than_the_end_corrects_the_cause() -> None:
    world = await run_probed()
    end_pods(world, 75, notice="file", step=120)
    ended = world.pods[0]["metadata"]["uid"]
    await play(world, "run 2, causes Requested -")
    again_s = await world.reconcile() or 600
    assert again_s <= 5, "nothing else may happen for minutes"
    event = {"metadata": {"name": "late", "namespace": "default"}, "regarding": {"uid": ended}}
    world.cluster.put("events", event | {"reason": "Killing", "note": NOT_ALIVE})
    world.now += again_s
    await play(world, "look, causes Hang -")
    await play(world, "wait 60, look, look")
    assert world.cluster.lists_of_events == 2


@pytest.mark.parametrize(
    ("stopped", "note", "cause"),
    [
        ("trainer", "Liveness probe failed: no answer", "Hang"),
        ("trainer", "Startup probe failed: no answer", "Hang"),
        ("trainer", "Readiness probe failed: no answer", "Requested"),
        ("side", "Liveness probe failed: no answer", "Requested"),
        (None, "Liveness probe failed: no answer", "Requested"),
    ],
)
async def test_a_failed_probe_is_found_where_the_kubelet_stops_the_only_container(
    stopped: str | None, note: str, cause: str
) -> None:
    """Then its event of the stop names no probe, but an earlier one does; that one alone ends no container."""
    world = await run_probed()
    end_pods(world, 75, notice="file", step=120)
    pod = {"uid": world.pods[0]["metadata"]["uid"]}
    killing = {"reason": "Killing", "note": f"Stopping container {stopped}", "regarding": pod}
    about = pod | {"fieldPath": "spec.containers{trainer}"}
    for event in [{"reason": "Unhealthy", "note": note, "regarding": about}, *([killing] if stopped else [])]:
        world.cluster.put("events", {"metadata": {"name": event["reason"], "namespace": "default"}} | event)
    await play(world, f"run, causes {cause} -")
    if cause == "Hang":
        assert note.split(maxsplit=1)[0].lower() in (world.status.attempts[0].message or "")


async def test_events_are_read_only_where_a_probe_can_have_ended_a_pod() -> None:
    for story in ("preempt, run", "delete-pods 30, act, run", "end 0, run"):
        world = await play(await run_probed(), story)
        assert world.cluster.lists_of_events == 0, story
    world = await run_job()
    end_by_probe(world)
    await play(world, "run, causes Requested -")
    assert world.cluster.lists_of_events == 0


async def test_an_operator_that_may_list_no_events_does_not_name_the_probe() -> None:
    world = await run_probed(may_list=False)
    end_by_probe(world)
    await play(world, "run, causes Requested -, phase Running")
