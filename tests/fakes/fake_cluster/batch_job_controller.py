"""Simulate the Job controller for Indexed Jobs without retries, with the behavior of a real control plane."""

from collections.abc import Callable, Sequence
from typing import Any

from fake_cluster.owned_objects import OwnedObjects
from stepkeeper_operator.facts.raw import condition_of
from stepkeeper_operator.labels import COMPLETION_INDEX_LABEL, JOB_INDEX_LABEL

Raw = dict[str, Any]


class FakeBatchJobController:
    """Make and delete the pods of Jobs, and count their ends.

    A Job removes its finalizer from a pod when it deletes the pod, and then ignores how the pod ends. A failure that
    it has not noticed yet is not forgotten when it is suspended.
    """

    def __init__(self, objects: OwnedObjects, *, choose_node: Callable[[int], str]) -> None:
        self._objects = objects
        self._choose_node = choose_node
        self._made = 0
        self.most_pods: int | None = None
        """The most pods at a time, as by a quota; None for any number."""

    def sync(self, job: Raw) -> None:
        pods = self._objects.list_owned("pods", job)
        if "deletionTimestamp" in job["metadata"]:
            self._delete(job, pods)
        elif condition_of(job, "Failed") or condition_of(job, "Complete"):
            return
        elif self.note_failure(job):
            self._fail(job, pods)
        else:
            self._run(job, pods)

    def note_failure(self, job: Raw) -> bool:
        """Note which pods have failed, without acting on it. Return True if the Job has failed."""
        tracked = [pod for pod in self._objects.list_owned("pods", job) if pod["metadata"].get("finalizers")]
        failed = [pod for pod in tracked if pod["status"]["phase"] == "Failed"]
        if condition_of(job, "FailureTarget"):
            return True
        if not failed:
            return False
        reason, message = _explain_failure(job, failed)
        self._objects.set_condition("jobs", job, "FailureTarget", reason, message=message)
        return True

    def _fail(self, job: Raw, pods: list[Raw]) -> None:
        """Stop the other pods. The Job has failed once the last one has ended."""
        for pod in pods:
            self._objects.stop_tracking(pod)
            if not _is_over(pod):
                self._objects.delete_pod(pod)
        target = condition_of(self._objects.read("jobs", job) or job, "FailureTarget")
        if target and all(_is_over(pod) for pod in self._objects.list_owned("pods", job)):
            self._objects.set_condition(
                "jobs", job, "Failed", target["reason"], message=target.get("message", "")
            )

    def _delete(self, job: Raw, pods: list[Raw]) -> None:
        for pod in pods:
            self._objects.stop_tracking(pod)
            self._objects.delete_pod(pod)
        if not pods:
            self._objects.remove("jobs", job)

    def _run(self, job: Raw, pods: list[Raw]) -> None:
        done = set(job["status"].get("completedIndexes", ()))
        done |= {_index_of(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
        if done != set(job["status"].get("completedIndexes", ())):
            self._objects.change("jobs", job, "status", completedIndexes=sorted(done), succeeded=len(done))
        for pod in pods:
            if pod["status"]["phase"] == "Succeeded":
                self._objects.stop_tracking(pod)
        if len(done) == job["spec"]["completions"]:
            self._objects.set_condition("jobs", job, "Complete", "CompletionsReached")
        elif job["spec"].get("suspend"):
            for pod in pods:
                if not _is_over(pod) and "deletionTimestamp" not in pod["metadata"]:
                    self._objects.stop_tracking(pod)
                    self._objects.delete_pod(pod)
        else:
            self._make_missing(job, done | {_index_of(pod) for pod in pods})

    def _make_missing(self, job: Raw, present: set[int]) -> None:
        template, labels = job["spec"]["template"], job["metadata"]["labels"]
        for index in set(range(job["spec"]["completions"])) - present:
            if self.most_pods is not None and len(self._objects.list_owned("pods", job)) >= self.most_pods:
                return
            self._made += 1
            node = self._choose_node(int(labels[JOB_INDEX_LABEL]) * job["spec"]["completions"] + index)
            own = template["metadata"]["labels"] | labels | {COMPLETION_INDEX_LABEL: str(index)}
            name = f"{job['metadata']['name']}-{index}-x{self._made}"
            self._objects.make("pods", name, job, own, template["spec"] | {"nodeName": node})


def _is_over(pod: Raw) -> bool:
    return pod["status"]["phase"] in {"Failed", "Succeeded"}


def _index_of(pod: Raw) -> int:
    return int(pod["metadata"]["labels"][COMPLETION_INDEX_LABEL])


def _explain_failure(job: Raw, failed: Sequence[Raw]) -> tuple[str, str]:
    for index, rule in enumerate(job["spec"]["podFailurePolicy"]["rules"]):
        for pod in failed:
            name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            for pattern in rule.get("onPodConditions", ()):
                if condition_of(pod, pattern["type"]).get("status") == pattern["status"]:
                    text = (
                        f"Pod {name} has condition {pattern['type']} matching FailJob rule at index {index}"
                    )
                    return "PodFailurePolicy", text
            code = _exit_code(pod)
            if code in rule.get("onExitCodes", {}).get("values", ()):
                text = f"Container trainer for pod {name} failed with exit code {code}"
                return "PodFailurePolicy", f"{text} matching FailJob rule at index {index}"
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def _exit_code(pod: Raw) -> int | None:
    statuses = pod["status"].get("containerStatuses") or [{}]
    code: int | None = statuses[0].get("state", {}).get("terminated", {}).get("exitCode")
    return code
