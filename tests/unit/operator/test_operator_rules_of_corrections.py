"""Test the rules that correct the causes of ended attempts, each by itself."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_history as history
from fake_cluster.facts import make_job, make_machines
from fake_cluster.facts import make_pod as pod
from stepkeeper.contract import Termination
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempts import DELETED, EDITED, MESSAGE_LIMIT, SUSPENDED
from stepkeeper_operator.policy.corrections import correct_cause
from stepkeeper_operator.policy.history import JobHistory, Verdict

NOW: Final = 1000.0
OPEN_S: Final = 120
RUNNING: Final = Attempt(number=9, start=990)
UNSEEN: Final = "it ended unseen; JobSet took it for no failure of the application"
ON_MACHINES: Final[dict[str, Any]] = {
    "placement": {"tpu": {"accelerator": "v5p", "topology": "2x2x2", "queuedResourceName": "tpu"}}
}
JOB: Final = make_job()
TPU_JOB: Final = make_job(**ON_MACHINES)
LOST: Final = make_machines(active=False)
EVICTED: Final[dict[str, Any]] = {"disruption": "EvictionByEvictionAPI", "node": "n7"}


def closed(end: int = 990, cause: str | None = "ApplicationError", message: str | None = "exit 1") -> Attempt:
    return Attempt(number=1, start=100, end=end, cause=cause, message=message)


def unseen(end: int = 990) -> Attempt:
    return closed(end, "Eviction", UNSEEN)


def evidence(restarts: int, *pods: Pod, number: int = 0, **more: Any) -> AttemptEvidence:
    return AttemptEvidence(ordinal=(number, restarts), pods=pods, **more)


def correct(
    known: JobHistory, *seen: AttemptEvidence, job: CheckpointedTrainingJob = JOB, **more: Any
) -> JobHistory:
    return correct_cause(known, job, Observed(evidence=seen, **more), now=NOW, reattribution_s=OPEN_S)


def causes(known: JobHistory) -> list[str | None]:
    return [attempt.cause for attempt in known.attempts]


def counts(known: JobHistory) -> dict[str, int]:
    return {entry.cause: entry.count for entry in known.restarts.by_cause}


FAILURES: Final = tuple(
    evidence(n, ended(1, uid=f"f{n}", created_at=960.0 if n else 100.0)) for n in range(4)
)
"""A failure of the application in each restart."""


@pytest.mark.parametrize("end", [900, 881])
def test_an_end_that_only_jobset_told_of_gets_its_cause_from_its_own_restart(end: int) -> None:
    known = history(unseen(end), unseen(), RUNNING, restarts_seen=2, evictions=2)
    found = correct(known, FAILURES[0])
    assert causes(found) == ["ApplicationError", "Eviction", None]
    assert counts(found) == {"ApplicationError": 1, "Eviction": 1}
    assert causes(correct(known, FAILURES[1])) == ["Eviction", "ApplicationError", None]
    assert causes(correct(known, FAILURES[2])) == ["Eviction", "Eviction", None], "it is of what runs"
    ended_too = history(unseen(end), unseen(), restarts_seen=1, evictions=1)
    assert causes(correct(ended_too, FAILURES[0])) == ["ApplicationError", "Eviction"]


def test_all_ends_in_a_row_that_nobody_saw_are_corrected() -> None:
    known = history(unseen(900), unseen(950), unseen(), RUNNING, restarts_seen=3)
    assert causes(correct(known, *FAILURES)) == ["ApplicationError"] * 3 + [None]
    assert causes(correct(known)) == ["Eviction"] * 3 + [None], "a guess corrects no guess"


@pytest.mark.parametrize("resumed_at", [None, 995])
def test_the_guessed_end_before_leaves_out_no_pods_of_the_newest(resumed_at: int | None) -> None:
    restarts = 1 if resumed_at else 2
    known = history(unseen(), unseen(), RUNNING, restarts_seen=restarts, resumed_at=resumed_at)
    seen = (FAILURES[0], evidence(1, ended(1, uid="b", created_at=500.0, at=600.0)))
    assert causes(correct(known, *seen))[1] == "ApplicationError"


@pytest.mark.parametrize("end", [880, 500])
def test_an_end_that_nobody_saw_keeps_its_cause_after_a_while(end: int) -> None:
    known = history(unseen(end), unseen(), RUNNING, restarts_seen=2)
    assert causes(correct(known, FAILURES[0])) == ["Eviction", "Eviction", None]


def test_no_end_is_corrected_before_one_that_was_seen_but_for_the_newest() -> None:
    seen = closed(950, "Eviction", "pod p0 was evicted")
    known = history(unseen(900), seen, unseen(), RUNNING, restarts_seen=3)
    assert causes(correct(known, *FAILURES[:2])) == ["Eviction"] * 3 + [None]
    newest = history(unseen(900), seen, RUNNING, restarts_seen=2)
    assert causes(correct(newest, FAILURES[0])) == ["ApplicationError", "Eviction", None]


def test_earlier_ends_are_not_corrected_where_restarts_are_not_counted_one_by_one() -> None:
    attempts = (unseen(900), unseen(), RUNNING)
    resumed = history(*attempts, restarts_seen=2, resumed_at=990)
    assert causes(correct(resumed, FAILURES[0])) == ["Eviction", "Eviction", None]
    known, machines = history(*attempts, restarts_seen=2), make_machines()
    on_machines = correct(known, FAILURES[0], job=TPU_JOB, machines=machines)
    assert causes(on_machines) == ["Eviction", "Eviction", None]


SUSPENDED_BEFORE: Final = closed(500, "Requested", SUSPENDED)


def test_pods_before_a_suspension_explain_no_later_end_that_nobody_saw() -> None:
    known = history(SUSPENDED_BEFORE, unseen(900), unseen(), RUNNING, restarts_seen=2)
    before = ended(1, uid="a", at=480.0, hang=True)
    for rank in (0, 1):
        seen = evidence(0, before, ended(1, rank, "b", created_at=510.0, at=880.0))
        assert causes(correct(known, seen))[1] == "ApplicationError"
    assert causes(correct(known, evidence(0, before)))[1] == "Eviction", "nothing is known of its own"
    late = history(closed(950, "Hang", "it stood still"), unseen(970), unseen(), RUNNING, restarts_seen=3)
    assert causes(correct(late, evidence(1, ended(1))))[1] == "ApplicationError", "the end is a guess too"


def test_the_newest_end_is_corrected_with_all_that_is_known_of_it() -> None:
    known = history(closed(), RUNNING, restarts_seen=1, failures=1)
    found = correct(known, evidence(0, ended(1, **EVICTED)))
    first = found.attempts[0]
    assert (first.cause, first.node) == ("Eviction", "n7")
    assert first.message == "pod p0 was ended by EvictionByEvictionAPI on node n7"
    assert (counts(found), found.finding is None) == ({"Eviction": 1}, False)
    assert correct(replace(found, finding=None), evidence(0, ended(1, **EVICTED))).finding is None, (
        "it is judged"
    )
    before = correct(history(closed(), failures=1), evidence(0, ended(1, **EVICTED)))
    assert (causes(before), counts(before)) == (["Eviction"], {"ApplicationError": 1}), "no restart yet"
    assert before.finding is not None
    assert before.finding.cause == "Eviction"


def test_a_corrected_message_is_cut() -> None:
    known = history(closed(cause="Eviction"))
    found = correct(known, evidence(0, ended(1, last_words="x" * 2000)))
    assert len(found.attempts[0].message or "") == MESSAGE_LIMIT


def test_a_cause_that_stays_keeps_its_message() -> None:
    assert correct(history(closed()), evidence(0, ended(3))).attempts == (closed(),)


def test_a_guess_that_was_right_gets_the_words_of_the_evidence_and_costs_no_more() -> None:
    guess = closed(message="it ended unseen; JobSet counted a failure of the application")
    words = ended(3, last_words="ValueError: bad")
    found = correct(history(guess, RUNNING, restarts_seen=1, failures=1), evidence(0, words))
    assert found.attempts[0].message == "pod p0 exited with code 3: ValueError: bad"
    assert (causes(found), counts(found)) == (["ApplicationError", None], {"ApplicationError": 1})
    assert found.finding is not None
    silent = correct(history(guess, RUNNING, restarts_seen=1))
    assert (silent.attempts[0], silent.finding) == (guess, None), "nothing is known yet"


@pytest.mark.parametrize(
    "attempt",
    [
        closed(cause="Requested", message=DELETED),
        closed(cause="Requested", message=SUSPENDED),
        closed(cause=None, message="every pod exited 0"),
    ],
    ids=["deleted", "suspended", "complete"],
)
def test_an_end_needs_no_evidence_that_was(attempt: Attempt) -> None:
    seen = evidence(0, ended(1), ended(1, 1, **EVICTED))
    assert correct(history(attempt), seen).attempts == (attempt,)


SAVED: Final = ended(75, termination=Termination(code=75, decision="at step 8, both are saved"))


@pytest.mark.parametrize("asked_for", [DELETED, EDITED])
def test_what_pods_say_of_their_last_save_is_added_to_an_end_that_was_asked_for(asked_for: str) -> None:
    known = history(closed(500, "Requested", asked_for))
    told = correct(known, evidence(0, ended(1, 1), SAVED))
    assert told.attempts[0].message == f"{asked_for}; at step 8, both are saved"
    assert correct(told, evidence(0, ended(1, 1), SAVED)) == told, "once"


@pytest.mark.parametrize(("end", "added"), [(880, False), (881, True)])
def test_nothing_is_added_to_an_end_long_ago_once_the_next_attempt_runs(end: int, *, added: bool) -> None:
    known = history(closed(end, "Requested", EDITED), RUNNING, job_sets=2)
    told = correct(known, evidence(0, SAVED), evidence(0, pod(uid="next"), number=1))
    assert (told.attempts[0].message != EDITED) is added
    assert told.attempts[1] == known.attempts[1]


def test_a_job_without_ends_has_nothing_to_correct() -> None:
    assert correct(history(), FAILURES[0]) == history()
    assert correct(history(RUNNING), FAILURES[0]) == history(RUNNING)


STOPPING: Final = pod(1, "late", started=True, deadline=1010.0)
"""A pod of an attempt that has ended, that hasn't ended itself."""


def test_a_cause_is_final_after_a_while_unless_pods_of_it_still_stop() -> None:
    seen = evidence(0, ended(1, **EVICTED), STOPPING)
    settled = correct(history(closed(880)), seen)
    assert causes(settled) == ["ApplicationError"]
    assert settled.finding is not None
    assert (settled.finding.cause, settled.finding.message) == ("ApplicationError", "exit 1")
    assert not settled.finding.explained
    assert causes(correct(history(closed(881)), seen)) == ["Eviction"]
    assert causes(correct(history(closed(880)), seen, pods=(STOPPING,))) == ["Eviction"]
    over = ended(143, 1, "late")
    assert causes(correct(history(closed(880)), seen, pods=(over,))) == ["ApplicationError"]
    other = pod(1, "next")
    assert causes(correct(history(closed(880)), seen, pods=(other,))) == ["ApplicationError"]
    assert causes(correct(history(closed(880)), pods=(other,))) == ["ApplicationError"]


def test_a_cause_is_final_after_a_while_once_the_next_attempt_runs() -> None:
    known = history(closed(880), RUNNING, restarts_seen=1, failures=1)
    seen = evidence(0, ended(1, **EVICTED), STOPPING)
    assert correct(known, seen, pods=(STOPPING,)) == known


def test_a_final_cause_is_described_by_the_evidence_that_agrees() -> None:
    found = correct(
        history(closed(880)), evidence(0, ended(42)), job=make_job(restarts={"fatalExitCodes": [42]})
    )
    assert found.finding is not None
    assert (found.finding.verdict, found.finding.message) == (Verdict.FATAL, "pod p0 exited with code 42")
    silent = correct(history(closed(880, "Hang", None)), evidence(0, ended(1)))
    assert silent.finding is not None
    assert (silent.finding.cause, silent.finding.message) == ("Hang", "")


def test_a_cause_is_kept_when_its_evidence_is_gone() -> None:
    found = correct(history(closed()))
    assert found.attempts == (closed(),)
    assert found.finding is not None
    assert (found.finding.cause, found.finding.message) == ("ApplicationError", "exit 1")
    assert not found.finding.explained
    silent = correct(history(closed(message=None)))
    assert silent.attempts == (closed(message=None),)
    assert silent.finding is not None
    assert silent.finding.message == ""


BOTH: Final = (ended(1), ended(1, 1))


@pytest.mark.parametrize("seen", [(), (evidence(0, *BOTH),)], ids=["gone", "failed"])
def test_machines_that_are_seen_to_be_gone_explain_the_end_before(seen: tuple[AttemptEvidence, ...]) -> None:
    found = correct(history(closed()), *seen, job=TPU_JOB, machines=LOST)
    assert causes(found) == ["NodeFailure"]
    assert found.finding is not None
    assert found.finding.explained


def test_machines_that_go_long_after_an_end_explain_nothing() -> None:
    seen = evidence(0, ended(1), STOPPING)
    for end, cause in ((880, "ApplicationError"), (881, "NodeFailure")):
        found = correct(history(closed(end)), seen, pods=(STOPPING,), job=TPU_JOB, machines=LOST)
        assert causes(found) == [cause]


@pytest.mark.parametrize(
    ("pods", "cause"),
    [
        ((pod(0), pod(1)), "ApplicationError"),
        ((pod(0), pod(1, started=False)), "NodeFailure"),
        ((pod(0),), "NodeFailure"),
        ((ended(143, 0, "old"), pod(0)), "NodeFailure"),
        ((), "NodeFailure"),
    ],
    ids=["all hosts", "one that hasn't started", "one host", "one host twice", "none"],
)
def test_machines_on_which_the_next_attempt_has_run_explain_no_end(pods: tuple[Pod, ...], cause: str) -> None:
    known = history(closed(), RUNNING, restarts_seen=1)
    seen = (evidence(0, ended(1, uid="f")), evidence(1, *pods))
    assert causes(correct(known, *seen, job=TPU_JOB, machines=LOST)) == [cause, None]


def test_lost_machines_change_no_cause_that_they_do_not_give() -> None:
    hang = correct(history(closed(cause="Hang")), job=TPU_JOB, machines=LOST)
    same = correct(history(closed(cause="NodeFailure", message="n1 is gone")), job=TPU_JOB, machines=LOST)
    assert (causes(hang), causes(same)) == (["Hang"], ["NodeFailure"])
    assert hang.finding is not None
    assert same.finding is not None
    assert (hang.finding.explained, same.finding.message) == (False, "n1 is gone")
    told = closed(cause="Maintenance", message="QueuedResource tpu has maintenance")
    assert correct(history(told), evidence(0, ended(1)), job=TPU_JOB) == history(told)


def gone(restarts: int, *, number: int = 0) -> AttemptEvidence:
    return evidence(restarts, ended(1, uid=f"e{number}{restarts}", **EVICTED), number=number)


def broken(restarts: int, *, number: int = 0) -> AttemptEvidence:
    return evidence(restarts, ended(1, uid=f"b{number}{restarts}"), number=number)


@pytest.mark.parametrize(
    ("known", "seen"),
    [
        (history(closed(), job_sets=2, started=False), (broken(0), gone(1))),
        (history(closed(), job_sets=2, started=False), (gone(1), broken(0, number=1))),
        (history(closed(), RUNNING, job_sets=2), (broken(0), gone(1), broken(0, number=1))),
        (history(closed(), RUNNING, job_sets=2, restarts_seen=1), (broken(0), gone(0, number=1))),
        (history(closed(), job_sets=2), (broken(0), gone(0, number=1))),
        (history(closed(), RUNNING, job_sets=2, resumed_at=995), (broken(0), gone(0, number=1))),
        (history(closed(), RUNNING, restarts_seen=2), (broken(0), gone(1), broken(2))),
        (history(closed(), RUNNING, restarts_seen=1, resumed_at=995), (broken(0), gone(1))),
    ],
    ids=[
        "that was the last before a JobSet that hasn't started",
        "before a JobSet whose start nobody has noted",
        "before the first of a JobSet",
        "of this JobSet",
        "of this JobSet that has ended",
        "of this JobSet that was suspended",
        "before the restart",
        "after the restart that was suspended",
    ],
)
def test_an_end_is_explained_by_the_attempt(known: JobHistory, seen: tuple[AttemptEvidence, ...]) -> None:
    assert causes(correct(known, *seen))[0] == "Eviction"
    assert causes(correct(known))[0] == "ApplicationError", "there is no evidence"


@pytest.mark.parametrize(
    ("made", "cause"), [(990.0, "Eviction"), (991.0, "ApplicationError")], ids=["at once", "later"]
)
def test_pods_that_were_made_after_the_end_explain_nothing(made: float, cause: str) -> None:
    assert causes(correct(history(closed()), evidence(0, ended(1, created_at=made, **EVICTED)))) == [cause]


def test_pods_of_the_attempts_before_and_after_explain_nothing() -> None:
    early, late = (
        ended(1, uid="a", at=480.0, **EVICTED),
        ended(1, uid="c", created_at=996.0, at=999.0, **EVICTED),
    )
    own = ended(1, 1, created_at=600.0, at=985.0)
    for others in ((early,), (late,), (early, late)):
        known = history(SUSPENDED_BEFORE, closed(), RUNNING, resumed_at=995)
        assert causes(correct(known, evidence(0, *others, own)))[1] == "ApplicationError"
        stopped = history(SUSPENDED_BEFORE, closed(cause="Hang"), RUNNING, resumed_at=995)
        fatal = failed_job(message="Container failed with exit code 77 matching FailJob")
        seen = evidence(0, *others, failed_batch_jobs=(fatal,))
        assert causes(correct(stopped, seen))[1] == "Hang", "its Job may be another attempt's"


def test_pods_whose_places_the_next_attempt_took_explain_their_own() -> None:
    seen = evidence(0, ended(1, uid="a", at=985.0, **EVICTED), pod(0, "b", created_at=996.0))
    assert causes(correct(history(closed(), RUNNING, resumed_at=995), seen)) == ["Eviction", None]


def test_pods_whose_places_others_took_explain_no_end() -> None:
    replaced = ended(1, uid="a", **EVICTED)
    seen = evidence(0, replaced, ended(1, uid="b", created_at=700.0))
    assert causes(correct(history(closed(), RUNNING, restarts_seen=1), seen)) == ["ApplicationError", None]
    known = history(closed(900, "Hang", UNSEEN), unseen(), RUNNING, restarts_seen=2)
    assert causes(correct(known, seen))[0] == "ApplicationError"


def test_a_failed_job_explains_an_end_of_which_no_pod_is_known() -> None:
    fenced = failed_job(message="Container trainer for pod a/b failed with exit code 77 matching FailJob")
    seen = evidence(0, failed_batch_jobs=(fenced,))
    assert causes(correct(history(closed(), RUNNING, restarts_seen=1), seen)) == ["Fenced", None]


def test_an_end_whose_cause_is_kept_stays_on_its_node() -> None:
    known = closed().model_copy(update={"node": "n5"})
    lost = correct(history(known), evidence(0, ended(78)), job=TPU_JOB, machines=LOST)
    assert (lost.attempts[0].cause, lost.attempts[0].node) == ("NodeFailure", "n5")
    settled = correct(
        history(known.model_copy(update={"end": 880})), evidence(0, ended(1, **EVICTED))
    ).finding
    assert settled is not None
    assert settled.node == "n5"
