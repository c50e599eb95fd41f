"""Make rows of tables of causes: how pods and Jobs ended, and what is judged of that."""

from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod
from stepkeeper.contract import Termination
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts import BatchJob, Node, Pod
from stepkeeper_operator.facts.pod import ContainerEnd
from stepkeeper_operator.policy.causes.find_cause import find_cause
from stepkeeper_operator.policy.circumstances import Circumstances
from stepkeeper_operator.policy.history import Finding, Verdict

__all__ = [
    "EARLIER",
    "EVICTION",
    "FAILURE",
    "FILE",
    "KNOWS",
    "KUBELET",
    "PEER",
    "SIGTERM",
    "TOLD",
    "case",
    "check_cause",
    "find",
    "killed",
    "side",
    "word",
]

FAILURE: Final = "ApplicationError"
KUBELET: Final = "TerminationByKubelet"
EVICTION: Final = "EvictionByEvictionAPI"
TOLD: Final[dict[str, Any]] = {"deadline": 430.0}
"""A pod whose deletion was asked for at 400, when the others end."""

EARLIER: Final[dict[str, Any]] = {"deadline": 399.0}
NODES: Final = {
    "n1": Node(name="n1", uid="1", spot=False, unknown_since=None),
    "spot": Node(name="spot", uid="2", spot=True, unknown_since=None),
    "silent": Node(name="silent", uid="3", spot=False, unknown_since=50.0),
    "gone": Node(name="gone", uid="4", spot=False, unknown_since=None, gone_since=60.0),
}


def find(*pods: Pod, jobs: tuple[BatchJob, ...] = (), **known: Any) -> Finding:
    """Find the cause of an end. `known` replaces any of its circumstances."""
    base: dict[str, Any] = {
        "nodes": NODES,
        "spot": False,
        "committed": False,
        "notice": None,
        "fatal_codes": frozenset({42, 137}),
        "counted": None,
        "rule": None,
        "n_hosts": 1,
    }
    evidence = AttemptEvidence(ordinal=(0, 0), pods=pods, failed_batch_jobs=jobs)
    return find_cause(evidence, Circumstances(**(base | known)))


def word(code: int, **more: Any) -> dict[str, Any]:
    """Make the field of a pod with the last words of its training."""
    return {"termination": Termination(code=code, **more)}


def side(code: int, reason: str = "Error", said: str = "") -> dict[str, Any]:
    """Make the fields of a pod of which another container than the trainer failed."""
    end = ContainerEnd(name="side", code=code, reason=reason, finished_at=401.0, last_words=said)
    return {"phase": "Failed", "other_failure": end}


def killed(rank: int, at: float = 401.0) -> Pod:
    """Make a pod that its Job stopped after another pod had failed."""
    return make_ended_pod(143, rank, at=at, **TOLD)


def case(name: str, cause: str, *pods: Pod, said: str = "", **more: Any) -> Any:
    """Make a row. `guess` is for an end that later evidence may explain better."""
    verdict = Verdict.FATAL if more.pop("fatal", False) else Verdict.RESTART
    verdict = Verdict.FENCED if cause == "Fenced" else verdict
    judged = cause, not more.pop("guess", False), verdict
    return pytest.param(pods, more, judged, said, id=name)


def check_cause(
    pods: tuple[Pod, ...], known: dict[str, Any], judged: tuple[str, bool, Verdict], said: str
) -> None:
    """Check a row, with its pods in both orders."""
    for order in (pods, pods[::-1]):
        finding = find(*order, **known)
        assert (finding.cause, finding.explained, finding.verdict) == judged
        assert said in finding.message


PEER: Final = word(75, notice="peer")
SIGTERM: Final = word(75, notice="sigterm")
FILE: Final = word(75, notice="file")
KNOWS: Final = word(75, notice="metadata", cause="Maintenance")
