"""Test what the status shows of an attempt and its restart, and when it is written."""

from typing import Final

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.stories import end_pods, play, run_job, table
from fake_cluster.world import World
from stepkeeper.contract import CommitPoint, Head, Report, ReportPhase
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
