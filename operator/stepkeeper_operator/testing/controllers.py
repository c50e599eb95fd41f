"""Simulate JobSet, the Job controller and kubelets, as far as an operator can tell the difference.

Every rule is read from the manifest that the operator made; none is assumed.
"""

import re
from collections.abc import Callable
from typing import Any

from stepkeeper_operator.facts.raw import condition_of, render_time
from stepkeeper_operator.labels import COMPLETION_INDEX_LABEL, JOB_INDEX_LABEL, RESTART_ATTEMPT_LABEL
from stepkeeper_operator.testing.cluster import FakeCluster

__all__ = ["FakeControllers"]

Raw = dict[str, Any]


class FakeControllers:
    """Run the controllers. `sync` brings everything to rest; pods end by `end_pod` or when their Job stops them."""

    def __init__(
        self, cluster: FakeCluster, clock: Callable[[], float], *, node_names: tuple[str, ...]
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._node_names = node_names
        self.stuck: set[str] = set()
        """Nodes whose kubelet does nothing any more."""
        self.gone: set[str] = set()
        """Nodes that aren't there: pods that are meant for them wait."""

    def sync(self) -> None:
        """Let JobSets and Jobs do all that there is to do."""
        for _ in range(6):
            for jobset in self._cluster.list_objects("jobsets"):
                self._sync_jobset(jobset)
            self._run_kubelets()
        self._collect_garbage()

    def end_pod(self, pod: Raw, code: int, *, message: str = "", finished_at: float | None = None) -> None:
        """End the trainer of the pod with that exit code."""
        when = render_time(self._clock() if finished_at is None else finished_at)
        ended = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else "Error",
            "finishedAt": when,
            "message": message,
        }
        status = pod["status"] | {
            "phase": "Succeeded" if code == 0 else "Failed",
            "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}],
        }
        self._cluster.put("pods", self._get_pod(pod) | {"status": self._get_pod(pod)["status"] | status})

    def disrupt(self, pod: Raw, reason: str, *, grace_s: int = 30) -> None:
        """Give the pod a DisruptionTarget and delete it. A kubelet that shuts down deletes no pod."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
        present = self._get_pod(pod)
        self._cluster.put("pods", present | {"status": present["status"] | {"conditions": [condition]}})
        if reason != "TerminationByKubelet":
            meta = pod["metadata"]
            self._cluster.mark_deleted("pods", meta["namespace"], meta["name"], grace_s=grace_s)

    def _get_pod(self, pod: Raw) -> Raw:
        meta = pod["metadata"]
        return self._cluster.objects[("pods", meta["namespace"], meta["name"])]

    def _sync_jobset(self, jobset: Raw) -> None:
        meta = jobset["metadata"]
        if (("jobsets", meta["namespace"], meta["name"])) not in self._cluster.objects:
            return
        jobs = self._list_owned("jobs", meta["uid"])
        if "deletionTimestamp" in meta:
            if self._stop_jobs(jobs):
                self._cluster.remove("jobsets", meta["namespace"], meta["name"])
        elif condition_of(jobset, "Failed") or condition_of(jobset, "Completed"):
            return
        elif jobset["spec"]["suspend"]:
            self._suspend(jobset, jobs)
        elif not jobs:
            self._set_condition("jobsets", jobset, "Suspended", "ResumeJobs", status="False")
            self._make_jobs(self._cluster.objects[("jobsets", meta["namespace"], meta["name"])])
        else:
            self._update_jobs(jobset, jobs)

    def _suspend(self, jobset: Raw, jobs: list[Raw]) -> None:
        """Suspend the JobSet. It still acts on a Job that is failing, and makes the next Jobs without pods.

        A pod's failure that its Job has not seen yet is forgotten.
        """
        target = next((job for job in jobs if condition_of(job, "FailureTarget")), None)
        if target is not None:
            if self._stop_job(target, keep=True):
                self._fail_or_restart(jobset, target, jobs)
        elif self._stop_jobs(jobs):
            self._set_condition("jobsets", jobset, "Suspended", "SuspendedJobs")

    def notice_failures(self) -> None:
        """Let Jobs see which of their pods have failed, and do nothing about it yet."""
        for job in self._cluster.list_objects("jobs"):
            self._note_failure(job)

    def _note_failure(self, job: Raw) -> None:
        pods = self._list_owned("pods", job["metadata"]["uid"])
        failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
        if failed and not condition_of(job, "FailureTarget"):
            reason, message = _job_failure(job, failed)
            self._set_condition("jobs", job, "FailureTarget", reason, message=message)

    def _make_jobs(self, jobset: Raw) -> None:
        attempt = {RESTART_ATTEMPT_LABEL: str(jobset.get("status", {}).get("restarts", 0))}
        for replicated in jobset["spec"]["replicatedJobs"]:
            for index in range(replicated["replicas"]):
                labels = attempt | {JOB_INDEX_LABEL: str(index)}
                template = replicated["template"]
                name = f"{jobset['metadata']['name']}-{replicated['name']}-{index}"
                job = self._make_object(
                    "jobs", name, jobset, template["metadata"]["labels"] | labels, template["spec"]
                )
                self._make_pods(job, labels)

    def _make_pods(self, job: Raw, labels: dict[str, str]) -> None:
        template = job["spec"]["template"]
        for index in range(job["spec"]["completions"]):
            node = self._node_names[(int(labels[JOB_INDEX_LABEL]) + index) % len(self._node_names)]
            own = template["metadata"]["labels"] | labels | {COMPLETION_INDEX_LABEL: str(index)}
            name = f"{job['metadata']['name']}-{index}-x{self._cluster._version}"  # noqa: SLF001  # a unique ending
            pod = self._make_object("pods", name, job, own, template["spec"] | {"nodeName": node})
            self._cluster.put("pods", pod | {"status": {"phase": "Pending"}})

    def _run_kubelets(self) -> None:
        """Start the pods whose nodes are there, and end the ones that a kubelet was told to end while it was silent."""
        running = [{"name": "trainer", "state": {"running": {}}}]
        for pod in self._cluster.list_objects("pods"):
            phase, told = pod["status"]["phase"], "deletionTimestamp" in pod["metadata"]
            if phase == "Running" and told and pod["spec"]["nodeName"] not in self.stuck:
                self.end_pod(pod, 143)
            elif phase == "Pending" and not told and pod["spec"]["nodeName"] not in self.gone:
                self._cluster.put(
                    "pods", pod | {"status": {"phase": "Running", "containerStatuses": running}}
                )

    def _make_object(self, plural: str, name: str, owner: Raw, labels: dict[str, str], spec: Raw) -> Raw:
        meta = {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": labels,
            "ownerReferences": [
                {
                    "kind": "JobSet" if plural == "jobs" else "Job",
                    "name": owner["metadata"]["name"],
                    "uid": owner["metadata"]["uid"],
                    "controller": True,
                }
            ],
        }
        return dict(self._cluster.put(plural, {"metadata": meta, "spec": spec, "status": {}}))

    def _update_jobs(self, jobset: Raw, jobs: list[Raw]) -> None:
        for job in jobs:
            self._note_failure(job)
        jobs = self._list_owned("jobs", jobset["metadata"]["uid"])
        targets = [job for job in jobs if condition_of(job, "FailureTarget")]
        if targets and self._stop_job(targets[0], keep=True):
            self._fail_or_restart(jobset, targets[0], jobs)
        elif jobs and all(self._has_succeeded(job) for job in jobs):
            for job in jobs:
                self._set_condition("jobs", job, "Complete", "CompletionsReached")
            self._set_condition("jobsets", jobset, "Completed", "AllJobsCompleted")

    def _fail_or_restart(self, jobset: Raw, failed: Raw, jobs: list[Raw]) -> None:
        policy = jobset["spec"]["failurePolicy"]
        target = condition_of(failed, "FailureTarget")
        name, action = _jobset_rule(policy, target["reason"], target["message"])
        status = jobset.get("status", {})
        counted = status.get("restartsCountTowardsMax", 0)
        exceeded = action == "RestartJobSet" and counted >= policy["maxRestarts"]
        if action == "FailJobSet" or exceeded:
            reason = "ReachedMaxRestarts" if exceeded else "FailJobSetFailurePolicyAction"
            self._set_condition("jobsets", jobset, "Failed", reason, message="jobset failed")
            return
        if not self._stop_jobs(jobs):
            return
        restarts = {
            "restarts": status.get("restarts", 0) + 1,
            "restartsCountTowardsMax": counted + (action == "RestartJobSet"),
        }
        key = ("jobsets", jobset["metadata"]["namespace"], jobset["metadata"]["name"])
        self._cluster.put("jobsets", self._cluster.objects[key] | {"status": status | restarts})
        self._set_condition(
            "jobsets", self._cluster.objects[key], "RestartingJobSet", f"FailurePolicy_{name}"
        )

    def _stop_job(self, job: Raw, *, keep: bool = False) -> bool:
        """End the Job's pods and, unless `keep`, remove them and the Job. Return False if a kubelet is silent."""
        for pod in self._list_owned("pods", job["metadata"]["uid"]):
            meta = pod["metadata"]
            if pod["status"]["phase"] in {"Failed", "Succeeded"}:
                continue
            self._cluster.mark_deleted("pods", meta["namespace"], meta["name"], grace_s=30)
            if pod["status"]["phase"] == "Pending":
                if keep:  # nobody but the garbage collector of pods ends one that no kubelet has
                    self._cluster.put("pods", self._get_pod(pod) | {"status": {"phase": "Failed"}})
                continue
            if pod["spec"]["nodeName"] in self.stuck:
                return False
            self.end_pod(self._get_pod(pod), 143)
        if not keep:
            pods = self._list_owned("pods", job["metadata"]["uid"])
            if any(self._is_held(pod) for pod in pods):
                return False
            for pod in pods:
                self._cluster.remove("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
            self._cluster.remove("jobs", job["metadata"]["namespace"], job["metadata"]["name"])
        return True

    def _is_held(self, pod: Raw) -> bool:
        """Return True for a pod that is deleted with grace on a stuck node.

        Such a pod goes only when its kubelet says that its containers have ended.
        """
        return (
            pod["spec"]["nodeName"] in self.stuck and pod["metadata"].get("deletionGracePeriodSeconds", 0) > 0
        )

    def _stop_jobs(self, jobs: list[Raw]) -> bool:
        stopped = [self._stop_job(job) for job in jobs]
        return all(stopped)

    def _has_succeeded(self, job: Raw) -> bool:
        return all(
            pod["status"]["phase"] == "Succeeded" for pod in self._list_owned("pods", job["metadata"]["uid"])
        )

    def _list_owned(self, plural: str, uid: str) -> list[Raw]:
        return [
            raw
            for raw in self._cluster.list_objects(plural)
            if any(owner["uid"] == uid for owner in raw["metadata"].get("ownerReferences", ()))
        ]

    def _set_condition(self, plural: str, raw: Raw, kind: str, reason: str, **more: str) -> None:
        status, message = more.get("status", "True"), more.get("message", "")
        known = condition_of(raw, kind)
        if (known.get("status"), known.get("reason")) == (status, reason):
            return
        present = self._cluster.objects[(plural, raw["metadata"]["namespace"], raw["metadata"]["name"])]
        others = [c for c in present.get("status", {}).get("conditions", ()) if c["type"] != kind]
        when = render_time(self._clock())
        new = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": when,
        }
        self._cluster.put(
            plural, present | {"status": present.get("status", {}) | {"conditions": [*others, new]}}
        )

    def _collect_garbage(self) -> None:
        """Remove the objects that have lost their owner."""
        uids = {raw["metadata"]["uid"] for raw in self._cluster.objects.values()}
        for plural in ("jobs", "pods"):
            for raw in self._cluster.list_objects(plural):
                if not any(owner["uid"] in uids for owner in raw["metadata"]["ownerReferences"]):
                    self._cluster.remove(plural, raw["metadata"]["namespace"], raw["metadata"]["name"])


def _job_failure(job: Raw, failed: list[Raw]) -> tuple[str, str]:
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


def _jobset_rule(policy: Raw, reason: str, message: str) -> tuple[str, str]:
    for rule in policy["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["name"], rule["action"]
    return "default", "RestartJobSet"
