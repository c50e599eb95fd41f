"""Test that the last words of a program that dies reach the message of its attempt."""

from typing import Any

import pytest

from fake_cluster.kubelets import termination_message
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import Phase
from stepkeeper_operator.facts.pod import pick_last_words

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


@pytest.mark.parametrize(
    ("log", "begins"),
    [
        (TRACEBACK, "ValueError: the data set is empty"),
        (TORCHRUN, "torch.OutOfMemoryError: tried to allocate 20 GiB"),
        ("no such file: train.py\n\n", "no such file: train.py"),
        ("Segmentation fault", "Segmentation fault"),
        ("Traceback (most recent call last):\n  cut off", "cut off"),
        (
            "a\nTraceback (most recent call last):\n  File\nKeyError: 'x'\nbye\n",
            "KeyError: 'x' (its log ends with:",
        ),
    ],
)
def test_the_line_that_says_most_comes_first(log: str, begins: str) -> None:
    assert pick_last_words(log).startswith(begins)


def test_what_is_kept_is_bounded_and_nothing_is_kept_of_nothing() -> None:
    assert len(pick_last_words("x" * 5000 + "\n" + "y" * 5000)) == 500
    assert pick_last_words("") == pick_last_words("\n \n") == ""


async def test_the_end_of_the_log_is_in_the_attempts_message() -> None:
    world = World(restarts={"maxFailures": 0})
    await world.run_until_settled(rounds=4)
    world.controllers.end_pod(world.pods[0], 1, message=TRACEBACK)
    await world.run_until_settled()
    assert world.phase() is Phase.FAILED
    message = world.status.attempts[-1].message or ""
    assert "exited with code 1: ValueError: the data set is empty" in message


async def test_the_runtimes_own_last_word_is_believed_before_any_log() -> None:
    world = World(restarts={"maxFailures": 0})
    await world.run_until_settled(rounds=4)
    said = termination_message(1, error="Traceback\nRuntimeError: loss is nan")
    world.controllers.end_pod(world.pods[0], 1, message=said)
    await world.run_until_settled()
    message = world.status.attempts[-1].message or ""
    assert message.endswith("exited with code 1: RuntimeError: loss is nan")


async def test_what_fails_behind_a_training_that_is_done_is_charged_to_the_program() -> None:
    world = World(restarts={"maxFailures": 0})
    await world.run_until_settled(rounds=4)
    world.controllers.end_pod(world.pods[0], 1, message=termination_message(0))
    await world.run_until_settled()
    assert world.phase() is Phase.FAILED
    assert world.status.attempts[-1].cause == "ApplicationError"
    assert "exited with code 1" in (world.status.attempts[-1].message or "")


DECISION = "at step 120, 6.9 s are left: only the one in flight is finished"


async def stopping_slowly() -> World:
    """Run a job whose trainers save for 20 s once they are told to stop, and say what they chose to save."""
    world = World()
    await world.run_until_settled(rounds=4)
    kubelets = world.controllers.kubelets
    kubelets.stop_s, kubelets.stop_code = 20, 75
    kubelets.stop_message = termination_message(75, notice="sigterm", step=120, decision=DECISION)
    return world


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            {"template": {"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}}},
            "spec.template or spec.placement was changed; ",
        ),
        ({"suspend": True}, "suspended: "),
        ({}, "its JobSet was deleted; "),
    ],
)
async def test_what_was_chosen_to_be_saved_at_a_stop_that_was_asked_for_is_in_the_message(
    edit: dict[str, Any], message: str
) -> None:
    world = await stopping_slowly()
    if edit:
        world.edit(**edit)
    else:
        world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    await world.run_until_settled(rounds=4)
    assert world.pods, "they still save"
    await world.run_until_settled(rounds=30)
    assert world.status.attempts[0].message == f"{message}{DECISION}"
    assert world.status.attempts[0].cause == "Requested"
    assert await world.record_writes(rounds=3) == []
    world.edit(suspend=False)
    world.restart_operator()
    await world.run_until_settled(rounds=20)
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]
    assert world.status.attempts[0].message == f"{message}{DECISION}"


async def test_what_was_chosen_to_be_saved_is_in_the_message_behind_a_shell_that_exits_0() -> None:
    world = await stopping_slowly()
    for pod in world.pods:
        message = termination_message(0, notice="sigterm", step=120, decision=DECISION)
        world.controllers.end_pod(pod, 0, message=message)
    await world.run_until_settled(rounds=10)
    assert world.status.attempts[0].message == f"every pod exited 0 after notice 'sigterm'; {DECISION}"


async def test_what_a_pod_that_ends_later_says_was_chosen_is_in_the_message_too() -> None:
    world = await stopping_slowly()
    first, second = world.pods
    world.controllers.disrupt(first, "TerminationByKubelet")
    world.controllers.end_pod(first, 137)
    await world.run_until_settled(rounds=2)
    ended = "pod lm-w-0-0-x1 was ended by TerminationByKubelet on node n1"
    assert [attempt.message for attempt in world.status.attempts] == [ended]
    assert second["metadata"]["name"] in {pod["metadata"]["name"] for pod in world.pods}, "it still saves"
    await world.run_until_settled(rounds=30)
    assert world.phase() is Phase.RUNNING
    assert world.status.attempts[0].message == f"{ended}; {DECISION}"
