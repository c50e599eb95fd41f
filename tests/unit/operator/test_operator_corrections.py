"""Test how the causes of ended attempts are corrected while better evidence can come."""

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
from stepkeeper_operator.policy.history import JobHistory

NOW: Final = 1000.0
OPEN_S: Final = 120
RUNNING: Final = Attempt(number=9, start=990)
JOB: Final = make_job()
TPU: Final = {"tpu": {"accelerator": "v5p", "topology": "2x2x2", "queuedResourceName": "tpu"}}
TPU_JOB: Final = make_job(placement=TPU)
LOST: Final = make_machines(active=False)
EVICTED: Final[dict[str, Any]] = {"disruption": "EvictionByEvictionAPI", "node": "n7"}
FAILURE: Final = "ApplicationError"
GUESS: Final = "it ended unseen; JobSet took it for no failure of the application"


def closed(end: int = 990, cause: str | None = FAILURE, message: str | None = "exit 1") -> Attempt:
    return Attempt(number=1, start=100, end=end, cause=cause, message=message)


def unseen(end: int = 990) -> Attempt:
    return closed(end, "Eviction", GUESS)


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


def failure(n: int) -> AttemptEvidence:
    """A failure of the application in that restart."""
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
    """One attempt that has ended."""
    return history(closed(end, cause))


def before(**more: Any) -> JobHistory:
    """One attempt that has ended, and one that runs."""
    return history(closed(), RUNNING, **more)


STOPPED: Final = closed(500, "Requested", SUSPENDED)
THREE: Final = history(unseen(900), unseen(950), unseen(), RUNNING, restarts_seen=3)
SEEN: Final = closed(950, "Eviction", "pod p0 was evicted")
BEFORE_SEEN: Final = history(unseen(900), SEEN, unseen(), RUNNING, restarts_seen=3)
NEWEST_SEEN: Final = history(unseen(900), SEEN, RUNNING, restarts_seen=2)
TWO_STOPPED: Final = history(STOPPED, unseen(900), unseen(), RUNNING, restarts_seen=2)
STALE: Final = ended(1, uid="a", at=480.0, hang=True)
OTHER: Final = evidence(1, ended(1, uid="b", created_at=500.0, at=600.0))
LATER: Final = ended(1, 1, uid="b", created_at=510.0, at=880.0)
REPLACED: Final = evidence(0, ended(1, uid="a", **EVICTED), ended(1, uid="b", created_at=700.0))
HUNG: Final = history(closed(900, "Hang", GUESS), unseen(), RUNNING, restarts_seen=2)
ON_TPU: Final[dict[str, Any]] = {"job": TPU_JOB, "machines": make_machines()}
GUESSES: Final = [
    case("the first of two", two(), "failure eviction runs", failure(0)),
    case("the second of two", two(), "eviction failure runs", failure(1)),
    case("not what runs", two(), "eviction eviction runs", failure(2)),
    case(
        "of two that ended", history(unseen(900), unseen(), restarts_seen=1), "failure eviction", failure(0)
    ),
    case("the first within two minutes", two(881), "failure eviction runs", failure(0)),
    case("not after two minutes", two(880), "eviction eviction runs", failure(0)),
    case("all in a row", THREE, "failure failure failure runs", *map(failure, range(4))),
    case("not by another guess", THREE, "eviction eviction eviction runs"),
    case("with pods of the newest", two(), "failure failure runs", failure(0), OTHER),
    case(
        "not before one that was seen", BEFORE_SEEN, "eviction eviction eviction runs", failure(0), failure(1)
    ),
    case("before the newest that was seen", NEWEST_SEEN, "failure eviction runs", failure(0)),
    case("not before a suspension", two(resumed_at=990), "eviction eviction runs", failure(0)),
    case("not on machines", two(), "eviction eviction runs", failure(0), **ON_TPU),
    case("not by older pods", TWO_STOPPED, "stop eviction eviction runs", evidence(0, STALE)),
    case("beside older pods", TWO_STOPPED, "stop failure eviction runs", evidence(0, STALE, LATER)),
    case("without pods that others replaced", HUNG, "failure eviction runs", REPLACED),
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
    case("no pods that were replaced", before(restarts_seen=1), "failure runs", REPLACED),
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
    case("while a pod of it stops", one(880), "eviction", STILL, pods=(STOPPING,)),
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
    assert (first.cause, first.node) == ("Eviction", "n7")
    assert first.message == "pod p0 was ended by EvictionByEvictionAPI on node n7"
    assert (counts(found), found.finding is None) == ({"Eviction": 1}, False)
    assert correct(replace(found, finding=None), gone(0)).finding is None, "it is judged"
    before = correct(history(closed(), failures=1), gone(0))
    assert (causes(before), counts(before)) == (["Eviction"], {FAILURE: 1}), "no restart yet"
    first_of_two = correct(replace(two(), restarts=history(evictions=2).restarts), failure(0))
    assert counts(first_of_two) == {FAILURE: 1, "Eviction": 1}


def test_a_guess_that_was_right_gets_the_words_of_the_evidence_and_costs_no_more() -> None:
    known = history(
        closed(message="it ended unseen; JobSet counted it"), RUNNING, restarts_seen=1, failures=1
    )
    found = correct(known, evidence(0, ended(3, last_words="x" * 2000)))
    message = found.attempts[0].message or ""
    assert message.startswith("pod p0 exited with code 3: xxx")
    assert len(message) == MESSAGE_LIMIT
    assert (causes(found), counts(found)) == ([FAILURE, None], {FAILURE: 1})
    assert found.finding is not None
    silent = correct(known)
    assert (silent.attempts, silent.finding) == (known.attempts, None), "nothing is known yet"


SAVED: Final = ended(75, termination=Termination(code=75, decision="at step 8, both are saved"))
UNCHANGED: Final = {
    "no end": (history(), (failure(0),)),
    "what runs": (history(RUNNING), (failure(0),)),
    "a deletion": (history(closed(cause="Requested", message=DELETED)), (broken(0), gone(0))),
    "a suspension": (history(closed(cause="Requested", message=SUSPENDED)), (gone(0),)),
    "completion": (history(closed(cause=None, message="every pod exited 0")), (gone(0),)),
    "the message of a cause that stays": (history(closed()), (evidence(0, ended(3)),)),
}


@pytest.mark.parametrize(("known", "seen"), UNCHANGED.values(), ids=UNCHANGED)
def test_evidence_does_not_change(known: JobHistory, seen: tuple[AttemptEvidence, ...]) -> None:
    assert correct(known, *seen).attempts == known.attempts


def test_maintenance_that_was_told_of_stays() -> None:
    known = history(closed(cause="Maintenance", message="QueuedResource tpu has maintenance"))
    assert correct(known, evidence(0, ended(1)), job=TPU_JOB) == known


@pytest.mark.parametrize("asked_for", [DELETED, EDITED])
def test_what_pods_say_of_their_last_save_is_added_to_an_end_that_was_asked_for(asked_for: str) -> None:
    seen = evidence(0, ended(1, 1), SAVED)
    said = correct(history(closed(500, "Requested", asked_for)), seen)
    assert said.attempts[0].message == f"{asked_for}; at step 8, both are saved"
    assert correct(said, seen) == said, "once"
    for end, added in ((880, False), (881, True)):
        known = history(closed(end, "Requested", asked_for), RUNNING, job_sets=2)
        found = correct(known, evidence(0, SAVED), evidence(0, pod(uid="next"), number=1))
        assert (found.attempts[0].message != asked_for) is added, "not to one long ago once the next one runs"
        assert found.attempts[1] == known.attempts[1]


def test_an_end_whose_cause_is_kept_stays_on_its_node() -> None:
    known = closed().model_copy(update={"node": "n5"})
    lost = correct(history(known), evidence(0, ended(78)), **ON_LOST)
    assert (lost.attempts[0].cause, lost.attempts[0].node) == ("NodeFailure", "n5")
    settled = correct(history(known.model_copy(update={"end": 880})), gone(0)).finding
    assert settled is not None
    assert settled.node == "n5"
