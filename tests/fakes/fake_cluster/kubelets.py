"""Simulate kubelets, the controllers that delete pods from silent nodes, and the reports of trainers."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from fake_cluster.cluster import FakeCluster
from fake_cluster.owned_objects import OwnedObjects
from stepkeeper.contract import CommitPoint, ExitCode, Head, Report, ReportedCommit, ReportPhase, Termination
from stepkeeper_operator.facts.raw import condition_of, parse_time, render_time

_UNREACHABLE: Final = "node.kubernetes.io/unreachable"

Raw = dict[str, Any]


class FakeKubelets:
    """Start pods, and end them on request."""

    def __init__(self, cluster: FakeCluster, objects: OwnedObjects, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._objects = objects
        self._clock = clock
        self.stuck: set[str] = set()
        """Nodes whose kubelet has stopped."""
        self.gone: set[str] = set()
        """Nodes that do not exist: pods for them wait."""
        self.stop_s = 0.0
        """Seconds that trainers take to end after a request to stop."""
        self.stop_code = 143
        """The exit code of trainers after a request to stop."""
        self.stop_message = ""
        """Their termination message."""

    def sync(self) -> None:
        """Let every kubelet do its work."""
        for pod in self._cluster.list_objects("pods"):
            node = pod["spec"].get("nodeName")
            if "deletionTimestamp" in pod["metadata"]:
                self._end_deleted(pod, silent=node in self.stuck)
            elif pod["status"]["phase"] == "Pending" and node not in self.gone | self.stuck:
                running = [{"name": "trainer", "state": {"running": {}}}]
                self._set_status(pod, phase="Running", containerStatuses=running)
            elif node in self.stuck:
                self._evict_unreachable(pod)

    def end_pod(
        self, pod: Raw, code: int, *, reason: str = "", message: str = "", finished_at: float | None = None
    ) -> None:
        ended = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "finishedAt": render_time(self._clock() if finished_at is None else finished_at),
            "message": message,
        }
        status = pod["status"] | {
            "phase": "Succeeded" if code == 0 else "Failed",
            "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}],
        }
        self._set_status(pod, **status)

    def disrupt(self, pod: Raw, reason: str) -> None:
        """Give the pod a DisruptionTarget and delete it. A kubelet that shuts down deletes no pod."""
        when = render_time(self._clock())
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": reason,
            "lastTransitionTime": when,
        }
        self._set_status(pod, conditions=[condition])
        if reason != "TerminationByKubelet":
            self._objects.delete("pods", pod, grace_s=30)

    def _set_status(self, pod: Raw, **status: Any) -> None:
        self._objects.change("pods", pod, "status", **status)

    def _end_deleted(self, pod: Raw, *, silent: bool) -> None:
        """End a pod whose deletion was requested, and remove its object once its Job has counted it."""
        meta, phase = pod["metadata"], pod["status"]["phase"]
        over = phase in {"Failed", "Succeeded"}
        if silent and meta["deletionGracePeriodSeconds"] > 0:
            return
        if over or silent:
            if not meta.get("finalizers"):
                self._objects.remove("pods", pod)
        elif phase == "Pending":  # only the garbage collector of pods ends a pod without a kubelet
            self._set_status(pod, phase="Failed")
        else:
            asked_at = (parse_time(meta["deletionTimestamp"]) or 0.0) - meta["deletionGracePeriodSeconds"]
            if self._clock() >= asked_at + min(self.stop_s, meta["deletionGracePeriodSeconds"]):
                self.end_pod(pod, self.stop_code, message=self.stop_message)

    def _evict_unreachable(self, pod: Raw) -> None:
        """Evict a pod from a node that has been silent for longer than the pod tolerates."""
        node = self._cluster.objects.get(("nodes", None, pod["spec"]["nodeName"]))
        ready = {} if node is None else condition_of(node, "Ready")
        since = parse_time(ready.get("lastTransitionTime"))
        if ready.get("status") != "Unknown" or since is None:
            return
        stays_s = _compute_stay_s(pod["spec"].get("tolerations", ()))
        if stays_s is not None and self._clock() >= since + stays_s:
            self.disrupt(pod, "DeletionByTaintManager")


def _compute_stay_s(tolerations: Iterable[Raw]) -> float | None:
    """Compute how long the first toleration that fits lets a pod stay on an unreachable node; None for ever."""
    for each in tolerations:
        if each.get("key") in {_UNREACHABLE, None, ""} and each.get("effect") in {"NoExecute", None, ""}:
            limit_s: float | None = each.get("tolerationSeconds")
            return limit_s
    return 0.0


def termination_message(code: int, **more: Any) -> str:
    return Termination(code=code, **more).to_json().decode()


def saved_message(sequence: int, step: int) -> str:
    """Make the termination message of a trainer that has committed `step` as `sequence` after SIGTERM."""
    committed = CommitPoint(sequence=sequence, step=step)
    return termination_message(ExitCode.SAVED, notice="sigterm", step=step, root="r", committed=committed)


def training_report(sequence: int, step: int, **more: Any) -> Report:
    """Make the report of a trainer that has just committed `step` as `sequence`. `more` replaces any of its fields."""
    uri = f"gs://bucket/runs/lm/{step}/1-abc"
    commit = ReportedCommit(
        sequence=sequence, step=step, uri=uri, size_bytes=10, duration_millis=5, time_unix_s=1
    )
    base: dict[str, Any] = {
        "phase": ReportPhase.TRAINING,
        "root": "r",
        "tail": sequence,
        "head": Head(sequence=sequence, step=step, uri=uri, size_bytes=10),
        "step": step,
        "commits": (commit,),
    }
    return Report(**(base | more))
