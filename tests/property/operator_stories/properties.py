"""What is true of every job at rest, whatever happened to it. Each property returns what is wrong, or nothing."""

from collections.abc import Callable
from typing import Final

from operator_stories.happenings import Teller

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.testing import training_report

__all__ = ["PROPERTIES", "check_next_failure", "check_next_report"]


def a_job_that_can_progress_does(teller: Teller) -> str | None:
    status, alive = teller.world.status, len(teller.alive())
    n_hosts = teller.world.job.spec.placement.n_hosts
    if status.phase is Phase.RUNNING:
        return None if alive == n_hosts else f"Running, with {alive} of {n_hosts} pods"
    if status.phase is Phase.SUSPENDED:
        reason = (teller.world.condition("Suspended") or ("", "none"))[1]
        if alive or reason != "NoNewCheckpoint":
            return f"Suspended for {reason} with {alive} pods"
        return None
    return f"at rest it is {status.phase} with {alive} of {n_hosts} pods"


def while_pods_run_an_attempt_is_open(teller: Teller) -> str | None:
    attempts = teller.world.status.attempts
    is_open = bool(attempts) and attempts[-1].end is None
    return None if is_open is bool(teller.alive()) else f"open: {is_open}, pods: {len(teller.alive())}"


def each_attempt_but_the_first_is_one_restart(teller: Teller) -> str | None:
    status = teller.world.status
    last = status.attempts[-1].number
    counted = sum(entry.count for entry in status.restarts.by_cause)
    restarts = last - 1 if status.attempts[-1].end is None or status.phase is Phase.SUSPENDED else last
    if status.restarts.total != counted or status.restarts.total not in {restarts, last - 1}:
        return f"{status.restarts.total} restarts, {counted} by cause, for attempt {last}"
    return None


def attempts_follow_one_another(teller: Teller) -> str | None:
    attempts = teller.world.status.attempts
    numbers = [attempt.number for attempt in attempts]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return f"numbers {numbers}"
    if any(attempt.end is None or not attempt.cause for attempt in attempts[:-1]):
        return "an attempt before the last has no end or no cause"
    times = [time for attempt in attempts for time in (attempt.start, attempt.end) if time is not None]
    return None if times == sorted(times) else f"times {times}"


def no_failure_is_charged_that_the_application_did_not_have(teller: Teller) -> str | None:
    by_cause = {entry.cause: entry.count for entry in teller.world.status.restarts.by_cause}
    charged = by_cause.get(Cause.APPLICATION_ERROR, 0)
    # JobSet takes a deleted pod for a failure, and is believed where nobody saw the end.
    had = teller.failures + (teller.deletions if teller.unseen else 0)
    return None if charged <= had else f"{charged} charged for {had} failures"


def starts_that_commit_nothing_are_bounded(teller: Teller) -> str | None:
    limit = teller.world.job.spec.restarts.max_starts_without_checkpoint
    n_starts = teller.world.status.bookkeeping.starts_without_checkpoint
    # JobSet restarts in place at once: one restart can come before the operator's suspension, more without it.
    slipped = 2 if teller.unseen else 1
    return None if n_starts <= limit + slipped else f"{n_starts} starts without a checkpoint, {limit} allowed"


PROPERTIES: Final[tuple[Callable[[Teller], str | None], ...]] = (
    a_job_that_can_progress_does,
    while_pods_run_an_attempt_is_open,
    each_attempt_but_the_first_is_one_restart,
    attempts_follow_one_another,
    no_failure_is_charged_that_the_application_did_not_have,
    starts_that_commit_nothing_are_bounded,
)


async def check_next_report(teller: Teller) -> str | None:
    """Check that a report of the open attempt is believed."""
    world = teller.world
    checkpoint = world.status.checkpoint
    known = 0 if checkpoint is None or checkpoint.latest is None else checkpoint.latest.sequence
    world.receive_report(training_report(sequence=known + 1, step=1000 + known))
    world.now += 61
    world.receive_report(training_report(sequence=known + 1, step=1000 + known))
    await world.run_until_settled(rounds=2)
    checkpoint = world.status.checkpoint
    if checkpoint is None or checkpoint.latest is None or checkpoint.latest.sequence != known + 1:
        return "a reported commit is not shown"
    if world.status.attempts[-1].to_step != 1000 + known:
        return f"the attempt is at step {world.status.attempts[-1].to_step}"
    reporting = world.condition("Reporting")
    return None if reporting == (ConditionStatus.TRUE, "ReportsArrive") else f"Reporting is {reporting}"


async def check_next_failure(teller: Teller) -> str | None:
    """Check that the next failure ends the open attempt, for its own cause, and that a next one follows."""
    number = teller.world.status.attempts[-1].number
    teller.world.controllers.kubelets.stop_code = 143
    teller.world.controllers.end_pod(teller.alive()[0], 1)
    for _ in range(4):
        await teller.world.run_until_settled(rounds=4)
        teller.world.now += 30
    ends = [attempt for attempt in teller.world.status.attempts if attempt.number >= number]
    found = [(attempt.number, attempt.cause) for attempt in ends]
    expected = [(number, Cause.APPLICATION_ERROR.value), (number + 1, None)]
    return None if found == expected else f"after a failure of attempt {number}: {found}"
