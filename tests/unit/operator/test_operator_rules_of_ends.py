"""Test the rules that tell how pods ended and who is to blame, each by itself."""

from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_pod as pod
from stepkeeper.contract import Cause, CommitPoint, Termination
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import BatchJob, Node, Pod
from stepkeeper_operator.facts.pod import ContainerEnd
from stepkeeper_operator.policy import pod_ends
from stepkeeper_operator.policy.causes.find_cause import attribute_to_loss, ended_unseen, find_cause
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.history import Finding, Verdict
from stepkeeper_operator.policy.machines import MachinesLoss

ASKED_AT: Final = 400.0
TOLD: Final[dict[str, Any]] = {"deadline": 430.0}
"""A pod whose deletion was asked for at ASKED_AT."""

KUBELET: Final = "TerminationByKubelet"
LOSS: Final = MachinesLoss(cause=Cause.SPOT_PREEMPTION, message="the machines are gone")


def find(*pods: Pod, jobs: tuple[BatchJob, ...] = (), **more: Any) -> Finding:
    base: dict[str, Any] = {
        "nodes": {},
        "spot": False,
        "committed": False,
        "notice": None,
        "fatal_codes": frozenset({42, 137}),
        "counted": None,
        "rule": None,
        "n_hosts": 1,
    }
    evidence = AttemptEvidence(ordinal=(0, 0), pods=pods, failed_batch_jobs=jobs)
    return find_cause(evidence, Circumstances(**(base | more)))


def word(code: int, **more: Any) -> Termination:
    return Termination(code=code, **more)


@pytest.mark.parametrize(
    ("code", "reason", "at", "by_deletion"),
    [
        (143, "Error", 401.0, True),
        (143, "Error", 399.0, True),
        (143, "Error", 398.0, False),
        (143, "Error", None, True),
        (1, "Error", 400.0, True),
        (1, "Error", 399.5, False),
        (1, None, 401.0, True),
        (1, "ContainerCannotRun", 401.0, False),
        (1, "Error", None, False),
        (137, "OOMKilled", 401.0, False),
    ],
    ids=[
        "a signal",
        "a signal by a clock that is behind",
        "a signal before it",
        "a signal nobody knows when",
        "a code of the program",
        "a code of the program before it",
        "a code without a reason",
        "the kubelet's own reason",
        "a code of the program nobody knows when",
        "too little memory",
    ],
)
def test_a_deletion_ended_a_container_with(
    code: int, reason: str | None, at: float | None, *, by_deletion: bool
) -> None:
    told = ended(code, at=at, exit_reason=reason, **TOLD)
    assert pod_ends.ended_by_deletion(told, code, reason, at) is by_deletion
    assert pod_ends.ended_by_deletion(ended(code, at=at), code, reason, at) is False, "nobody deleted it"
    assert pod_ends.was_killed(told) is by_deletion
    other = ContainerEnd(name="side", code=code, reason=reason, finished_at=at)
    assert pod_ends.was_killed(pod(phase="Failed", other_failure=other, **TOLD)) is by_deletion


@pytest.mark.parametrize(
    ("one", "stopped"),
    [
        (ended(75, at=401.0, **TOLD), True),
        (ended(75, at=None, **TOLD), True),
        (ended(75, at=399.0, **TOLD), True),
        (ended(75, at=398.0, **TOLD), False),
        (ended(75, at=401.0), False),
        (ended(75, at=401.0, disruption="EvictionByEvictionAPI", **TOLD), False),
        (ended(75, at=401.0, hang=True, **TOLD), False),
    ],
    ids=[
        "later",
        "nobody knows when",
        "a second before by its node",
        "before",
        "undeleted",
        "with a disruption",
        "with a hang",
    ],
)
def test_a_pod_was_stopped_by_its_deletion_that_ended(one: Pod, *, stopped: bool) -> None:
    assert pod_ends.was_stopped(one) is stopped


def test_a_pod_died_of_a_signal_unless_it_had_too_little_memory() -> None:
    assert pod_ends.died_of_signal(ended(137))
    assert not pod_ends.died_of_signal(ended(137, exit_reason="OOMKilled"))
    assert not pod_ends.died_of_signal(ended(1))


@pytest.mark.parametrize(
    ("words", "peers"),
    [
        ((word(75, notice="peer"), word(1)), True),
        ((word(75, notice="peer"), word(75, notice="sigterm")), False),
        ((word(75, notice="peer", cause="Maintenance"),), False),
        ((word(75),), False),
        ((), False),
    ],
)
def test_only_peers_told_where_none_knows_more(words: tuple[Termination, ...], *, peers: bool) -> None:
    pods = [ended(75, rank, termination=each) for rank, each in enumerate(words)]
    assert pod_ends.only_peers_told([*pods, ended(1, 9)]) is peers


def test_a_program_stopped_with_0_that_was_told_to_and_said_nothing() -> None:
    assert pod_ends.stopped_with_0(ended(0, at=401.0, **TOLD))
    assert pod_ends.stopped_with_0(ended(0, at=401.0, disruption=KUBELET))
    assert not pod_ends.stopped_with_0(ended(0, at=398.0, **TOLD))
    assert not pod_ends.stopped_with_0(ended(1, at=401.0, **TOLD))
    assert not pod_ends.stopped_with_0(ended(0, at=401.0, termination=word(0), **TOLD))


def test_a_failure_is_described_by_its_error_or_the_end_of_its_log() -> None:
    assert pod_ends.describe_failure(ended(1)) == "pod p0 exited with code 1"
    assert pod_ends.describe_failure(ended(1, last_words="Killed")) == "pod p0 exited with code 1: Killed"
    said = word(1, error="Traceback\nOSError: full")
    both = ended(1, termination=said, last_words="Killed")
    assert pod_ends.describe_failure(both) == "pod p0 exited with code 1: OSError: full"
    out_of_memory = pod_ends.describe_failure(ended(137, exit_reason="OOMKilled"))
    assert pod_ends.tells_own_limits(out_of_memory)
    assert pod_ends.tells_own_limits(pod_ends.describe_eviction(pod()))
    assert not pod_ends.tells_own_limits("pod p0 exited with code 1")


@pytest.mark.parametrize(
    ("one", "cause"),
    [
        (ended(75, disruption=KUBELET), "Maintenance"),
        (ended(75, disruption=KUBELET, reason="Evicted"), "Eviction"),
        (ended(75, reason="NodeShutdown"), "Maintenance"),
        (ended(75, reason="Terminated"), "Maintenance"),
        (ended(75, reason="Shutdown"), "Maintenance"),
        (ended(75, disruption="EvictionByEvictionAPI", reason="Terminated"), "Eviction"),
        (ended(143, disruption=KUBELET, termination=word(75, cause="SpotPreemption")), "SpotPreemption"),
        (ended(143, disruption="DeletionByPodGC", termination=word(75, cause="Maintenance")), "Maintenance"),
        (ended(143, disruption=KUBELET, termination=word(75, cause="Requested")), "Maintenance"),
        (
            ended(143, disruption="PreemptionByScheduler", termination=word(75, cause="Maintenance")),
            "SchedulerPreemption",
        ),
    ],
    ids=[
        "a shutdown",
        "pressure on the node",
        "a shutdown without a condition",
        "a termination without a condition",
        "a shutdown of old",
        "a condition that says more",
        "a cloud that takes the machine back",
        "a cloud that maintains it",
        "a notice that nobody knows more of",
        "a scheduler that knows better",
    ],
)
def test_the_disruption_of(one: Pod, cause: str) -> None:
    assert find(one).cause == cause


def test_a_pod_without_an_end_was_lost_with_its_node() -> None:
    lost = {"n1": Node(name="n1", uid="1", spot=False, unknown_since=50.0)}
    assert find(pod(), nodes=lost).cause == "NodeFailure"
    assert find(ended(0), nodes=lost).cause == "Requested", "it was done"
    assert find(pod(exit_code=3), nodes=lost).cause != "NodeFailure", "its trainer had ended"
    assert not find(pod(phase="Failed"), nodes=lost).explained, "it had failed before"


def test_a_made_up_end_is_none_where_the_training_has_said_its_last_words() -> None:
    assert find(ended(137, exit_reason="ContainerStatusUnknown")).cause == "NodeFailure"
    said = ended(1, exit_reason="ContainerStatusUnknown", termination=word(1, error="ValueError: bad"))
    assert find(said).cause == "ApplicationError"
    assert find(pod(exit_reason="Unknown")).cause == "Requested", "it has no code"


def test_siblings_that_their_job_stopped_hide_no_failure_and_others_do() -> None:
    stopped, by_itself = (
        ended(75, 1, at=402.0, **TOLD),
        ended(75, 2, at=390.0, termination=word(75, notice="file")),
    )
    assert find(ended(1), stopped).cause == "ApplicationError"
    assert find(ended(1), stopped, by_itself).cause == "Requested"
    assert find(ended(78), stopped, committed=True).cause == "NodeFailure"


def test_a_pod_is_over_its_own_limits_once_its_kubelet_has_evicted_it_for_them() -> None:
    assert find(ended(137, reason="Evicted")).cause == "ApplicationError"
    assert "evicted" in find(ended(137, reason="Evicted")).message
    assert find(ended(137, reason="Evicted", disruption=KUBELET)).cause == "Eviction"
    assert find(pod(reason="Evicted")).cause == "Requested", "it hasn't ended yet"


def test_a_fatal_code_is_the_programs_own_also_where_another_failed_first() -> None:
    fatal = find(ended(1, at=300.0), ended(42, 1))
    assert (fatal.verdict, fatal.message) == (Verdict.FATAL, "pod p1 exited with code 42")
    assert find(ended(42, at=401.0, **TOLD)).verdict is Verdict.FATAL, "it says so while it is stopped"
    assert find(ended(137, at=401.0, **TOLD)).cause == "Requested", "a signal's code says nothing"
    assert find(ended(1, at=401.0, **TOLD)).cause == "Requested"


@pytest.mark.parametrize("code", [None, 0])
def test_another_container_fails_the_pod_of_a_trainer_that_is_done_or_never_began(code: int | None) -> None:
    other = ContainerEnd(
        name="side", code=3, reason="StartError", finished_at=401.0, last_words="no such file"
    )
    failed = pod(phase="Failed", exit_code=code, other_failure=other)
    said = "container 'side' of pod p0 exited with code 3 (StartError): no such file"
    assert (find(failed).cause, find(failed).message) == ("ApplicationError", said)
    assert find(pod(exit_code=code, other_failure=other)).cause != "ApplicationError", "its pod goes on"
    by_trainer = find(ended(5, other_failure=other))
    assert "exited with code 5" in by_trainer.message
    by_peers = find(ended(78, other_failure=other), committed=True)
    assert by_peers.cause == "NodeFailure", "its trainer has lost the others"
    told = ContainerEnd(name="side", code=143, reason="Error", finished_at=401.0)
    assert find(pod(phase="Failed", exit_code=code, other_failure=told, **TOLD)).cause != "ApplicationError"


def test_a_pod_that_failed_without_any_code_never_ran() -> None:
    never_ran = find(pod(phase="Failed"))
    assert (never_ran.cause, never_ran.explained) == ("NodeFailure", False)
    assert find(pod(), ended(0, 1)).cause == "Requested", "one goes on, one is done"


def test_lost_peers_are_a_guess_that_a_commit_decides() -> None:
    for committed, cause in ((True, "NodeFailure"), (False, "ApplicationError")):
        assert (find(ended(78), committed=committed).cause, find(ended(78)).explained) == (cause, False)


def test_who_has_lost_its_peers_is_quoted() -> None:
    lost = "pod p0 lost its peers; no pod says why"
    assert find(ended(78)).message == lost
    assert find(ended(78, last_words="rank 3 left")).message == f"{lost}: rank 3 left"
    said = Termination(code=78, error="Traceback\nPeerLostError: rank 3 is gone")
    assert find(ended(78, termination=said)).message == f"{lost}: PeerLostError: rank 3 is gone"


def test_what_ended_first_is_looked_at_first_and_what_has_no_end_last() -> None:
    assert find(ended(3, at=402.0), ended(4, 1, at=401.0)).message == "pod p1 exited with code 4"
    assert find(ended(3, at=None), ended(4, 1, at=401.0)).message == "pod p1 exited with code 4"


def test_a_pod_that_was_disrupted_is_not_fenced() -> None:
    assert find(ended(77)).verdict is Verdict.FENCED
    assert find(ended(77, disruption=KUBELET)).verdict is Verdict.RESTART


def test_codes_in_the_message_of_a_job_are_whole_ones() -> None:
    message = "Container trainer for pod a/b failed with exit code {} matching FailJob rule at index 3"
    assert find(jobs=(failed_job(message=message.format(42)),)).verdict is Verdict.FATAL
    assert find(jobs=(failed_job(message=message.format(421)),)).verdict is Verdict.RESTART
    assert find(jobs=(failed_job(message=message.format(77)),)).verdict is Verdict.FENCED


@pytest.mark.parametrize(
    ("rule", "spot", "cause"),
    [
        ("hang", True, "Hang"),
        ("saved", True, "Requested"),
        ("disruption", False, "Disruption"),
        ("disruption", True, "SpotPreemption"),
        ("default", False, "Disruption"),
    ],
)
def test_an_unseen_end_is_guessed_by_the_rule_that_jobset_applied(
    rule: str, cause: str, *, spot: bool
) -> None:
    guess = find(counted=False, rule=rule, spot=spot)
    assert (guess.cause, guess.explained) == (cause, False)
    assert ended_unseen(guess.message)
    assert ended_unseen(find(counted=True).message)
    assert not ended_unseen(find().message)
    assert not ended_unseen(None)


@pytest.mark.parametrize(
    ("cause", "explained", "by_loss"),
    [
        ("NodeFailure", True, True),
        ("Eviction", True, True),
        ("Requested", True, True),
        ("ApplicationError", True, True),
        ("Disruption", True, True),
        ("Maintenance", True, False),
        ("Hang", True, False),
        ("Hang", False, True),
    ],
)
def test_lost_machines_explain_an_end_by(cause: str, *, explained: bool, by_loss: bool) -> None:
    known = Finding(cause=cause, message="it ended", explained=explained)
    judged = attribute_to_loss(known, LOSS)
    assert judged.cause == (LOSS.cause if by_loss else cause)
    assert judged.explained
    assert attribute_to_loss(known, None) is known


def test_lost_machines_explain_no_end_that_is_final_or_the_applications_own() -> None:
    fatal = Finding(cause="ApplicationError", message="42", verdict=Verdict.FATAL)
    assert attribute_to_loss(fatal, LOSS) is fatal
    own = Finding(cause="ApplicationError", message=pod_ends.describe_eviction(pod()))
    assert attribute_to_loss(own, LOSS) is own
    assert find(ended(1), loss=LOSS).cause == "SpotPreemption"


SIGTERM: Final = word(75, notice="sigterm")
MAINTENANCE: Final = MachinesLoss(cause=Cause.MAINTENANCE, message="maintenance")


@pytest.mark.parametrize(
    ("one", "cause"),
    [
        (ended(75, termination=SIGTERM), "Maintenance"),
        (ended(75, termination=word(75, notice="file")), "Requested"),
        (ended(75, termination=word(75, notice="sigterm", cause="SpotPreemption")), "SpotPreemption"),
        (ended(75, at=401.0, termination=SIGTERM, **TOLD), "Requested"),
    ],
    ids=["hears SIGTERM", "is asked by a file", "knows better", "is deleted"],
)
def test_maintenance_is_the_cause_of_a_save_if_the_training(one: Pod, cause: str) -> None:
    assert find(one, maintenance=MAINTENANCE).cause == cause


def test_a_save_is_explained_by_a_notice_or_a_commit() -> None:
    assert not find(ended(75)).explained
    assert find(ended(75), notice="sigterm").explained
    assert find(ended(75), committed=True).explained
    assert find(ended(75, termination=word(75, committed=CommitPoint(sequence=4, step=40)))).explained


def test_who_knows_most_tells_why_it_saved() -> None:
    knows = {
        "nothing": ended(75, 0, at=300.0),
        "of a peer": ended(75, 1, at=310.0, termination=word(75, notice="peer")),
        "of a notice": ended(75, 2, at=320.0, termination=word(75, notice="file")),
        "the cause": ended(75, 3, at=330.0, termination=word(75, notice="metadata", cause="Maintenance")),
    }
    assert find(*knows.values()).cause == "Maintenance"
    del knows["the cause"]
    assert "after notice 'file'" in find(*knows.values()).message
    del knows["of a notice"]
    assert "after notice 'peer'" in find(*knows.values()).message
