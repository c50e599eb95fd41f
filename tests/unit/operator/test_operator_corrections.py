"""Test how the causes of ended attempts are corrected while better evidence can come."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_history as history
from fake_cluster.facts import make_job, make_machines, make_view
from fake_cluster.facts import make_pod as pod
from stepkeeper.contract import AttemptKind, Termination
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.training_jobs.attempts.corrections import correct_verdict
from stepkeeper_operator.training_jobs.attempts.ends import DELETED, EDITED, SUSPENDED
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.observed import Observed

NOW: Final = 1000.0
RUNNING: Final = Attempt(number=9, start=990)
JOB: Final = make_job()
TPU: Final = {"tpu": {"accelerator": "v5p", "topology": "2x2x2", "queuedResourceName": "tpu"}}
TPU_JOB: Final = make_job(placement=TPU)
LOST: Final = make_machines(active=False)
EVICTED: Final[dict[str, Any]] = {"disruption": "EvictionByEvictionAPI", "node": "n7"}
FAILURE: Final = "ApplicationError"


def closed(end: int = 990, cause: str | None = FAILURE, message: str = "exit 1", **more: Any) -> Attempt:
    kind = AttemptKind.COMPLETED if cause is None else AttemptKind.of(cause)
    fields: dict[str, Any] = {"kind": kind.value, "cause": cause, "message": message} | more
    return Attempt(number=1, start=100, end=end, **fields)


def unseen(end: int = 990, cause: str = "Eviction") -> Attempt:
    return closed(end, cause, "nothing was seen of it", inferred=True)


def evidence(restarts: int, *pods: Pod, number: int = 0, **more: Any) -> AttemptEvidence:
    return AttemptEvidence(ordinal=(number, restarts), pods=pods, **more)


def correct(
    known: JobHistory, *seen: AttemptEvidence, job: CheckpointedTrainingJob = JOB, **more: Any
) -> JobHistory:
    return correct_verdict(known, make_view(job, Observed(evidence=seen, **more), now=NOW))


def causes(known: JobHistory) -> list[str | None]:
    return [attempt.cause for attempt in known.attempts]


def counts(known: JobHistory) -> dict[str, int]:
    return {entry.cause: entry.count for entry in known.restarts.by_cause}


def failure(n: int) -> AttemptEvidence:
    return evidence(n, ended(1, uid=f"f{n}", created_at=960.0 if n else 100.0))


def gone(restarts: int, *, number: int = 0) -> AttemptEvidence:
    return evidence(restarts, ended(1, uid=f"e{number}{restarts}", **EVICTED), number=number)


def broken(restarts: int, *, number: int = 0) -> AttemptEvidence:
    return evidence(restarts, ended(1, uid=f"b{number}{restarts}"), number=number)


WORDS: Final = {
    "failure": FAILURE,
    "eviction": "Eviction",
    "stop": "Requested",
    "node": "NodeFailure",
    "hang": "Hang",
    "fenced": "Fenced",
    "runs": None,
}


def case(name: str, known: JobHistory, found: str, *seen: AttemptEvidence, **more: Any) -> Any:
    """Make a row. `found` has a word for the cause of each attempt."""
    return pytest.param(known, seen, more, [WORDS[word] for word in found.split()], id=name)


def two(first: int = 900, **more: Any) -> JobHistory:
    return history(unseen(first), unseen(), RUNNING, **({"restarts_seen": 2} | more))


def one(end: int = 990, cause: str = FAILURE) -> JobHistory:
    return history(closed(end, cause))


def before(**more: Any) -> JobHistory:
    """One attempt that has ended, and one that runs."""
    return history(closed(), RUNNING, **more)


BY_USER: Final[dict[str, Any]] = {"kind": AttemptKind.SUSPENDED}
STOPPED: Final = closed(500, "Requested", SUSPENDED, **BY_USER)
REPLACED: Final = evidence(0, ended(1, uid="a", **EVICTED), ended(1, uid="b", created_at=700.0))
GUESSES: Final = [
    case("the newest of two", two(), "eviction failure runs", failure(1)),
    case("not the one before it", two(), "eviction eviction runs", failure(0)),
    case("not what runs", two(), "eviction eviction runs", failure(2)),
    case(
        "not after two minutes", history(unseen(880), RUNNING, restarts_seen=1), "eviction runs", failure(0)
    ),
    case(
        "the newest that ended",
        history(unseen(900), unseen(), restarts_seen=1),
        "eviction failure",
        failure(1),
    ),
    case("not by another guess", two(), "eviction eviction runs", evidence(1, ended(78))),
]
SUSPENDED_NEXT: Final = before(job_sets=2, resumed_at=995)
SECOND: Final = history(closed(), job_sets=2, started=False)
MADE_LATER: Final = ended(1, created_at=991.0, **EVICTED)
TAKEN: Final = (ended(1, uid="a", at=985.0, **EVICTED), pod(0, "b", created_at=996.0))
FENCED: Final = failed_job(message="failed with exit code 77 matching")
OWN: Final = [
    case("the last before a JobSet that hasn't started", SECOND, "eviction", broken(0), gone(1)),
    case("before a JobSet whose start was not noted", SECOND, "eviction", gone(1), broken(0, number=1)),
    case("before a JobSet", before(job_sets=2), "eviction runs", broken(0), gone(1), broken(0, number=1)),
    case("of it", before(job_sets=2, restarts_seen=1), "eviction runs", broken(0), gone(0, number=1)),
    case("of one that ended", history(closed(), job_sets=2), "eviction", broken(0), gone(0, number=1)),
    case("of one suspended", SUSPENDED_NEXT, "eviction runs", broken(0), gone(0, number=1)),
    case("before the restart", before(restarts_seen=2), "eviction runs", broken(0), gone(1), broken(2)),
    case("after it, suspended", before(restarts_seen=1, resumed_at=995), "eviction runs", broken(0), gone(1)),
    case("pods made at its end", one(), "eviction", evidence(0, replace(MADE_LATER, created_at=990.0))),
    case("no pods made later", one(), "failure", evidence(0, MADE_LATER)),
    case("pods whose places were taken", before(resumed_at=995), "eviction runs", evidence(0, *TAKEN)),
    case("pods that were replaced", before(restarts_seen=1), "eviction runs", REPLACED),
    case("its Job", before(restarts_seen=1), "fenced runs", evidence(0, failed_batch_jobs=(FENCED,))),
]
STOPPING: Final = pod(1, "late", started=True, deadline=1010.0)
"""A pod of an attempt that has ended, that hasn't ended itself."""

STILL: Final = evidence(0, ended(1, **EVICTED), STOPPING)
BESIDE: Final = evidence(0, ended(1), STOPPING)
NEXT: Final = (pod(1, "next"),)
SETTLED: Final = [
    case("not after two minutes", one(880), "failure", STILL),
    case("within two minutes", one(881), "eviction", STILL),
    case("not while a pod of it stops", one(880), "failure", STILL, pods=(STOPPING,)),
    case("not once that has ended", one(880), "failure", STILL, pods=(ended(143, 1, "late"),)),
    case("not while other pods run", one(880), "failure", STILL, pods=NEXT),
    case("not without evidence", one(880), "failure", pods=NEXT),
    case("not once the next runs", history(closed(880), RUNNING), "failure runs", STILL, pods=(STOPPING,)),
]
ON_LOST: Final[dict[str, Any]] = {"job": TPU_JOB, "machines": LOST}
FIRST: Final = evidence(0, ended(1, uid="f"))
LATE: Final = pod(1, started=False)
MACHINES: Final = [
    case("machines alone", one(), "node", **ON_LOST),
    case("not after a hang", one(cause="Hang"), "hang", **ON_LOST),
    case("failures beside them", one(), "node", evidence(0, ended(1), ended(1, 1)), **ON_LOST),
    case("not long after the end", one(880), "failure", BESIDE, pods=(STOPPING,), **ON_LOST),
    case("soon after the end", one(881), "node", BESIDE, pods=(STOPPING,), **ON_LOST),
    *(
        case(what, before(restarts_seen=1), f"{cause} runs", FIRST, evidence(1, *pods), **ON_LOST)
        for pods, cause, what in (
            ((pod(0), pod(1)), "failure", "not once the next attempt has run"),
            ((pod(0), LATE), "node", "a host hasn't started"),
            ((pod(0),), "node", "one host ran"),
            ((ended(143, 0, "old"), pod(0)), "node", "one host ran twice"),
            ((), "node", "nothing ran"),
        )
    ),
]
TABLES: Final = {"a guess": GUESSES, "explained by": OWN, "a change": SETTLED, "lost machines": MACHINES}


@pytest.mark.parametrize(
    ("known", "seen", "more", "found"),
    [pytest.param(*row.values, id=f"{kind}: {row.id}") for kind, rows in TABLES.items() for row in rows],
)
def test_a_cause_is_corrected(
    known: JobHistory, seen: tuple[AttemptEvidence, ...], more: dict[str, Any], found: list[str | None]
) -> None:
    assert causes(correct(known, *seen, **more)) == found


def test_pods_of_the_attempts_before_and_after_explain_nothing() -> None:
    early, late = (
        ended(1, uid="a", at=480.0, **EVICTED),
        ended(1, uid="c", created_at=996.0, at=999.0, **EVICTED),
    )
    own = ended(1, 1, created_at=600.0, at=985.0)
    for others in ((early,), (late,), (early, late)):
        known = history(STOPPED, closed(), RUNNING, resumed_at=995)
        assert causes(correct(known, evidence(0, *others, own)))[1] == FAILURE
        hung = history(STOPPED, closed(cause="Hang"), RUNNING, resumed_at=995)
        seen = evidence(0, *others, failed_batch_jobs=(FENCED,))
        assert causes(correct(hung, seen))[1] == "Hang", "its Job may be another attempt's"


def test_the_newest_end_is_corrected_with_all_that_is_known_of_it() -> None:
    found = correct(history(closed(), RUNNING, restarts_seen=1, failures=1), gone(0))
    first = found.attempts[0]
    assert (first.cause, first.kind, first.node) == ("Eviction", "Disrupted", "n7")
    assert first.message == "pod p0 was ended by EvictionByEvictionAPI on node n7"
    assert counts(found) == {"Eviction": 1}
    before = correct(history(closed(), failures=1), gone(0))
    assert (causes(before), counts(before)) == (["Eviction"], {FAILURE: 1}), "no restart yet"


def test_a_guess_that_was_right_gets_the_words_of_the_evidence_and_costs_no_more() -> None:
    known = history(unseen(cause=FAILURE), RUNNING, restarts_seen=1, failures=1)
    found = correct(known, evidence(0, ended(3, log_tail="x" * 2000)))
    first = found.attempts[0]
    assert (first.message or "").startswith("pod p0 exited with code 3: xxx")
    assert (len(first.message or ""), first.inferred) == (1024, None)
    assert (causes(found), counts(found)) == ([FAILURE, None], {FAILURE: 1})
    assert correct(known) == known, "nothing is known yet"


def test_a_guess_that_was_wrong_is_passed_on_to_an_end_that_nobody_saw() -> None:
    one_failed = history(
        unseen(900), unseen(cause=FAILURE), RUNNING, restarts_seen=2, failures=1, evictions=1
    )
    found = correct(one_failed, gone(1))
    assert causes(found) == [FAILURE, "Eviction", None], "JobSet has counted one failure"
    assert (counts(found), found.attempts[0].inferred) == ({FAILURE: 1, "Eviction": 1}, True)
    assert correct(found, gone(1)) == found
    newest_failed = history(unseen(900, FAILURE), unseen(), RUNNING, restarts_seen=2, failures=1, evictions=1)
    assert causes(correct(newest_failed, failure(1))) == ["Eviction", FAILURE, None]
    seen_before = history(closed(900, "Eviction"), unseen(cause=FAILURE), RUNNING, restarts_seen=2)
    late = evidence(1, ended(1, created_at=960.0, at=970.0, **EVICTED))
    assert causes(correct(seen_before, late)) == ["Eviction", "Eviction", None], "what was seen stays"


def test_a_kind_of_a_newer_operator_stays() -> None:
    newer = history(closed(cause="Requested", kind="Migrated"))
    assert correct(newer, evidence(0, ended(1))) == newer


def test_a_fatal_code_that_is_seen_late_is_final_unless_the_next_attempt_runs() -> None:
    job, seen = make_job(restarts={"fatalExitCodes": [42]}), evidence(0, ended(1), ended(42, 1))
    assert correct(history(closed()), seen, job=job).attempts[0].kind == AttemptKind.UNRECOVERABLE
    known = history(closed(), RUNNING, restarts_seen=1)
    assert correct(known, seen, job=job) == known, "fatal codes may have been edited since"


SAVED: Final = ended(75, termination=Termination(code=75, decision="both are saved"))
UNCHANGED: Final = {
    "no end": (history(), (failure(0),)),
    "what runs": (history(RUNNING), (failure(0),)),
    "a deletion": (
        history(closed(500, "Requested", DELETED, kind=AttemptKind.STOPPED)),
        (broken(0), gone(0)),
    ),
    "a suspension": (history(STOPPED), (gone(0),)),
    "completion": (history(closed(cause=None, message="every pod exited 0")), (gone(0),)),
    "the message of a cause that stays": (history(closed()), (evidence(0, ended(3)),)),
}


@pytest.mark.parametrize(("known", "seen"), UNCHANGED.values(), ids=UNCHANGED)
def test_evidence_does_not_change(known: JobHistory, seen: tuple[AttemptEvidence, ...]) -> None:
    assert correct(known, *seen).attempts == known.attempts


def test_an_end_that_the_machines_explain_stays() -> None:
    known = history(closed(cause="Maintenance", kind=AttemptKind.MACHINES_UNAVAILABLE))
    assert correct(known, evidence(0, ended(1)), job=TPU_JOB) == known


@pytest.mark.parametrize("kind", [AttemptKind.STOPPED, AttemptKind.DISRUPTED])
def test_what_pods_report_of_their_last_save_is_added_while_it_can_come(kind: AttemptKind) -> None:
    seen, stopped = evidence(0, ended(75, 1), SAVED), closed(990, "Requested", EDITED, kind=kind)
    reported = correct(history(stopped), seen)
    assert (reported.attempts[0].message, reported.attempts[0].decision) == (EDITED, "both are saved")
    assert correct(reported, seen) == reported
    for end, added in ((880, False), (881, True)):
        known = history(stopped.model_copy(update={"end": end}), RUNNING, job_sets=2)
        found = correct(known, evidence(0, SAVED), evidence(0, pod(uid="next"), number=1))
        assert (found.attempts[0].decision is not None) is added, "not to one long ago once the next one runs"
        assert found.attempts[1] == known.attempts[1]


def test_an_end_whose_cause_is_kept_stays_on_its_node() -> None:
    known = closed(node="n5")
    lost = correct(history(known), evidence(0, ended(78)), **ON_LOST)
    assert (lost.attempts[0].cause, lost.attempts[0].node) == ("NodeFailure", "n5")
