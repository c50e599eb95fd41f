"""Test the rule that tells whether the training of an attempt is done, however its pods ended."""

from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_pod as pod
from stepkeeper.contract import Termination
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.facts.pod import ContainerEnd
from stepkeeper_operator.policy.causes.find_cause import find_cause
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.history import Finding


def find(*pods: Pod, n_hosts: int = 1) -> Finding:
    circumstances = Circumstances(
        nodes={},
        spot=False,
        committed=False,
        notice=None,
        fatal_codes=frozenset(),
        counted=None,
        rule=None,
        n_hosts=n_hosts,
    )
    return find_cause(AttemptEvidence(ordinal=(0, 0), pods=pods, failed_batch_jobs=()), circumstances)


def word(code: int, **more: Any) -> Termination:
    return Termination(code=code, **more)


SIDE_FAILED: Final[dict[str, Any]] = {
    "phase": "Failed",
    "other_failure": ContainerEnd(name="side", code=3, reason="Error", finished_at=300.0, last_words="full"),
}


def test_a_training_that_all_trainers_call_done_is_done_whatever_ends_their_pods() -> None:
    done = word(0, step=40)
    said = "every trainer exited 0 and said that the training is done"
    side = "; container 'side' of pod p0 exited with code 3: full"
    alone = find(ended(0, termination=done, **SIDE_FAILED))
    assert (alone.cause, alone.message) == ("", said + side)
    both = find(ended(0, 1, termination=done), ended(0, termination=done, **SIDE_FAILED), n_hosts=2)
    assert (both.cause, both.message) == ("", said + side)
    evicted = find(ended(0, termination=done, phase="Failed", disruption="EvictionByEvictionAPI"))
    assert (evicted.cause, evicted.message) == ("", said)


@pytest.mark.parametrize(
    ("one", "n_hosts"),
    [
        (ended(0, termination=word(0), **SIDE_FAILED), 2),
        (ended(0, **SIDE_FAILED), 1),
        (ended(0, termination=word(0, notice="sigterm"), **SIDE_FAILED), 1),
        (ended(1, termination=word(0), **SIDE_FAILED), 1),
    ],
    ids=["another host isn't", "it said nothing", "it was told to stop", "it failed later"],
)
def test_a_training_is_not_done_where(one: Pod, n_hosts: int) -> None:
    assert find(one, n_hosts=n_hosts).cause == "ApplicationError"


def test_a_training_is_done_only_if_the_newest_pod_of_each_rank_is_however_few_hosts_are_left() -> None:
    said = word(0)
    left = [ended(0, rank, termination=said) for rank in (0, 1)]
    failed = ended(1, 2)
    assert find(*left, failed, n_hosts=2).cause == "ApplicationError"
    assert find(*left, pod(2), n_hosts=2).cause != ""
    later = ended(0, 2, "p3", created_at=200.0, termination=said)
    assert find(*left, later, failed, n_hosts=2).cause == ""
    anew = ended(1, 2, "p4", created_at=300.0)
    assert find(*left, later, anew, n_hosts=3).cause == "ApplicationError"
