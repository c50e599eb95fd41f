"""Make rows of tables of causes: how pods and Jobs ended, and the verdict on that."""

from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod
from stepkeeper.contract import AttemptKind, Termination, Verdict
from stepkeeper_operator.facts.jobset import BatchJob
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.facts.pod import ContainerEnd, Pod
from stepkeeper_operator.training_jobs.attempts.evidence import Evidence
from stepkeeper_operator.training_jobs.attempts.verdict import judge

FAILURE: Final = "ApplicationError"
KUBELET: Final = "TerminationByKubelet"
EVICTION: Final = "EvictionByEvictionAPI"
TOLD: Final[dict[str, Any]] = {"deadline": 430.0}
"""A pod whose deletion was requested at 400, when the others end."""

EARLIER: Final[dict[str, Any]] = {"deadline": 399.0}
NODES: Final = {
    "n1": Node(name="n1", uid="1", spot=False, unknown_since=None),
    "spot": Node(name="spot", uid="2", spot=True, unknown_since=None),
    "silent": Node(name="silent", uid="3", spot=False, unknown_since=50.0),
    "gone": Node(name="gone", uid="4", spot=False, unknown_since=None, gone_since=60.0),
}


def find(*pods: Pod, jobs: tuple[BatchJob, ...] = (), **known: Any) -> Verdict:
    """Judge an end. `known` replaces any other part of the evidence."""
    base: dict[str, Any] = {
        "nodes": NODES,
        "on_spot": False,
        "has_committed": False,
        "notice": None,
        "fatal_codes": frozenset({42, 137}),
        "counted": None,
        "rule": None,
        "n_hosts": 1,
    }
    messages = tuple(each.failure_message for each in jobs)
    return judge(Evidence(pods=pods, job_messages=messages, **(base | known)))


def word(code: int, **more: Any) -> dict[str, Any]:
    """Make the field of a pod with the termination message of its training."""
    return {"termination": Termination(code=code, **more)}


def side(code: int, reason: str = "Error", said: str = "") -> dict[str, Any]:
    """Make the fields of a pod with a failed container other than the trainer."""
    end = ContainerEnd(name="side", code=code, reason=reason, finished_at=401.0, log_tail=said)
    return {"phase": "Failed", "other_failure": end}


def killed(rank: int, at: float = 401.0) -> Pod:
    """Make a pod that its Job stopped after another pod had failed."""
    return make_ended_pod(143, rank, at=at, **TOLD)


def case(name: str, cause: str, *pods: Pod, said: str = "", **more: Any) -> Any:
    """Make a row. `guess` is for an end that later evidence may explain better."""
    kind = AttemptKind.of(cause) if cause else AttemptKind.COMPLETED
    kind = AttemptKind.UNRECOVERABLE if more.pop("fatal", False) else kind
    kind = AttemptKind.MACHINES_UNAVAILABLE if more.pop("by_machines", False) else kind
    kind = AttemptKind.OVER_LIMITS if more.pop("over_limits", False) else kind
    judged = cause or None, more.pop("guess", False), kind
    return pytest.param(pods, more, judged, said, id=name)


def failure(name: str, *pods: Pod, **more: Any) -> Any:
    return case(name, FAILURE, *pods, **more)


def stop(name: str, *pods: Pod, **more: Any) -> Any:
    """Make a row of a requested end."""
    return case(name, "Requested", *pods, **more)


def lost(name: str, *pods: Pod, **more: Any) -> Any:
    """Make a row of a node's failure."""
    return case(name, "NodeFailure", *pods, **more)


def check_cause(
    pods: tuple[Pod, ...], known: dict[str, Any], judged: tuple[str | None, bool, str], said: str
) -> None:
    """Check a row, with its pods in both orders."""
    for order in (pods, pods[::-1]):
        verdict = find(*order, **known)
        assert (verdict.cause, verdict.inferred, verdict.kind) == judged
        assert said in verdict.message


PEER: Final = word(75, notice="peer")
SIGTERM: Final = word(75, notice="sigterm")
FILE: Final = word(75, notice="file")
KNOWS: Final = word(75, notice="metadata", cause="Maintenance")
