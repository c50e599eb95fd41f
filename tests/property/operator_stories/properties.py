"""What is true of every job at rest, whatever happened to it. Each property returns what is wrong, or nothing."""

from collections.abc import Callable
from typing import Final

from operator_stories.happenings import HANG
from operator_stories.story import Teller

from fake_cluster.kubelets import training_report
from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.api.v1alpha1.trainingjob import HangAction, HangSpec
from stepkeeper_operator.training_jobs.attempts.ends import RESTARTED

_DONE_S: Final = 3600


def a_job_that_can_progress_does(teller: Teller) -> str | None:
    status, alive, done = teller.world.status, len(teller.alive()), teller.count_finished()
    n_hosts = teller.world.job.spec.placement.n_hosts
    if status.phase is Phase.RUNNING:
        return (
            None
            if alive and alive + done == n_hosts
            else f"Running, with {alive} of {n_hosts} pods, {done} done"
        )
    if status.phase is Phase.COMPLETE:
        # JobSet is believed where nobody saw that pods had been told to stop.
        least = 0 if teller.unseen else n_hosts
        return None if len(teller.done) >= least else f"Complete, with {done} of {n_hosts} pods done"
    if status.phase is Phase.FAILED:
        reason = (teller.world.condition("Failed") or ("", "none"))[1]
        expected = {"MaxFailuresReached"} | ({"RootOwnedByAnother"} if teller.fenced else set())
        return None if reason in expected and not alive else f"Failed for {reason} with {alive} pods"
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


def a_job_fails_only_when_its_failures_are_used_up(teller: Teller) -> str | None:
    allowed = teller.world.job.spec.restarts.max_failures
    had = teller.failures + (teller.deletions if teller.unseen else 0)
    failed = teller.world.phase() is Phase.FAILED and not teller.fenced
    return f"Failed after {had} failures, {allowed} are allowed" if failed and had <= allowed else None


def nothing_is_undone_by_kueue(teller: Teller) -> str | None:
    undone = teller.world.controllers.kueue.undone
    return f"Kueue had to undo: {undone}" if undone and not teller.unseen else None


def starts_that_commit_nothing_are_bounded(teller: Teller) -> str | None:
    limit = teller.world.job.spec.restarts.max_starts_without_checkpoint
    n_starts = teller.world.status.operator.starts_without_checkpoint
    # JobSet restarts in place at once: one restart can come before the operator's suspension, more without it.
    slipped = 2 if teller.unseen else 1
    return None if n_starts <= limit + slipped else f"{n_starts} starts without a checkpoint, {limit} allowed"


def a_restart_is_made_once_for_what_was_asked(teller: Teller) -> str | None:
    made = [each.message for each in teller.world.status.attempts].count(RESTARTED)
    return None if made <= teller.asked else f"{made} restarts for {teller.asked} values of the annotation"


PROPERTIES: Final[tuple[Callable[[Teller], str | None], ...]] = (
    a_job_that_can_progress_does,
    while_pods_run_an_attempt_is_open,
    each_attempt_but_the_first_is_one_restart,
    attempts_follow_one_another,
    no_failure_is_charged_that_the_application_did_not_have,
    starts_that_commit_nothing_are_bounded,
    a_job_fails_only_when_its_failures_are_used_up,
    nothing_is_undone_by_kueue,
    a_restart_is_made_once_for_what_was_asked,
)


def find_contradiction(teller: Teller) -> str | None:
    """Find what may never be: attempts that don't follow one another, opposite conditions, a false standstill."""
    status = teller.world.status
    numbers = [attempt.number for attempt in status.attempts]
    if numbers != sorted(set(numbers)) or any(attempt.end is None for attempt in status.attempts[:-1]):
        return f"attempts {numbers}, of which more than the last one can run"
    true = {each.type for each in status.conditions if each.status is ConditionStatus.TRUE}
    over = {"Complete", "Failed"} & true
    if len(over) > 1 or {"Running", "Failed"} <= true or ("Finished" in true) is not bool(over):
        return f"it is {sorted(true)}"
    if {"PendingChanges"} & true and (over or "Suspended" in true):
        return f"pods have yet to read an edit, and none runs: {sorted(true)}"
    reasons = {each.reason for each in status.conditions}
    if "StartDeadlineExceeded" in reasons and "startDeadlineSeconds" not in teller.world.spec:
        return "a deadline was exceeded, and there is none"
    return _find_false_standstill(teller)


def _find_false_standstill(teller: Teller) -> str | None:
    """Find out whether the training is said to stand still, and doesn't. A status is written once a second at most."""
    world, kind = teller.world, teller.world.condition("Progressing")
    moved_s = world.now - teller.moved_at
    if kind == (ConditionStatus.FALSE, "Stalled") and moved_s >= 1 and not teller.hangs:
        return "Stalled, though the last report named no hang"
    if kind == (ConditionStatus.FALSE, "PartiallyFinished"):
        known = [
            teller.done[pod["metadata"]["uid"]] for pod in world.pods if pod["metadata"]["uid"] in teller.done
        ]
        done_s = world.now - max(known, default=0.0)
        if 1 <= min(moved_s, done_s) < _DONE_S:
            step = f"{moved_s} s after a step" if teller.moved_at else "no step was reported"
            return f"PartiallyFinished {done_s} s after a pod was done, and {step}"
    return None


async def check_next_report(teller: Teller) -> str | None:
    world, known = teller.world, teller.known_sequence()
    world.receive_report(training_report(sequence=known + 1, step=1000 + known))
    world.now += 61
    world.receive_report(training_report(sequence=known + 1, step=1000 + known))
    await world.run_until_settled(rounds=2)
    if teller.known_sequence() != known + 1:
        return "a reported commit is not shown"
    if world.status.attempts[-1].to_step != 1000 + known:
        return f"the attempt is at step {world.status.attempts[-1].to_step}"
    reporting = world.condition("Reporting")
    return None if reporting == (ConditionStatus.TRUE, "ReportsReceived") else f"Reporting is {reporting}"


async def check_standstill(teller: Teller) -> str | None:
    """Check that a training that makes no steps is said to stand still, until its next step."""
    world = teller.world
    for _ in range(3):
        teller.report(steps=1, after_s=10)
        await world.reconcile()
    done = bool(teller.count_finished())
    reason = "PartiallyFinished" if done else "Stalled"
    if not done and world.job.spec.hang == HangSpec(action=HangAction.RESTART, max_restarts=2):
        return None  # it would end the attempt
    hang = None if done else HANG
    teller.report(after_s=_DONE_S, hang=hang)
    await world.run_until_settled(rounds=1)
    if world.condition("Progressing") != (ConditionStatus.FALSE, reason):
        return f"it stands still, and Progressing is {world.condition('Progressing')}"
    teller.report(steps=1)
    await world.run_until_settled(rounds=1)
    progressing = world.condition("Progressing")
    return (
        None if progressing == (ConditionStatus.TRUE, "StepsAdvance") else f"after a step it is {progressing}"
    )


async def check_next_failure(teller: Teller) -> str | None:
    """Check that the next failure ends the open attempt, for its own cause, and that a next one follows."""
    number = teller.world.status.attempts[-1].number
    by_itself = {pod["metadata"]["uid"] for pod in teller.world.pods} & set(teller.done)
    broken = teller.count_finished() > len(
        by_itself
    )  # a host was told to stop and exited 0: that explains what follows
    teller.world.controllers.kubelets.stop_code = 143
    teller.world.controllers.end_pod(teller.alive()[0], 1)
    for _ in range(4):
        await teller.world.run_until_settled(rounds=4)
        teller.world.now += 30
    ends = [attempt for attempt in teller.world.status.attempts if attempt.number >= number]
    found = [(attempt.number, attempt.cause) for attempt in ends]
    if teller.world.phase() is Phase.FAILED:
        found.append((number + 1, None))  # it would have been the next one
    cause = found[0][1] if broken and found[0][1] is not None else Cause.APPLICATION_ERROR.value
    expected = [(number, cause), (number + 1, None)]
    return None if found == expected else f"after a failure of attempt {number}: {found}"
