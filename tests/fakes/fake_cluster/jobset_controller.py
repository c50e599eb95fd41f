"""Simulate the JobSet controller 0.12, with the behavior of a real control plane."""

import re
from typing import Any

from fake_cluster.owned_objects import OwnedObjects
from stepkeeper_operator.facts.raw import condition_of
from stepkeeper_operator.labels import JOB_INDEX_LABEL, RESTART_ATTEMPT_LABEL

Raw = dict[str, Any]


class FakeJobSetController:
    """Make, suspend, restart and delete the Jobs of JobSets."""

    def __init__(self, objects: OwnedObjects) -> None:
        self._objects = objects

    def sync(self, jobset: Raw) -> None:
        jobs = self._objects.list_owned("jobs", jobset)
        if "deletionTimestamp" in jobset["metadata"]:
            self._delete(jobset, jobs)
        elif condition_of(jobset, "Failed") or condition_of(jobset, "Completed"):
            for job in (job for job in jobs if not _is_finished(job)):
                self._objects.delete("jobs", job)
        else:
            self._run(jobset, jobs)

    def _delete(self, jobset: Raw, jobs: list[Raw]) -> None:
        for job in jobs:
            self._objects.delete("jobs", job)
        if not jobs:
            self._objects.remove("jobsets", jobset)

    def _run(self, jobset: Raw, jobs: list[Raw]) -> None:
        previous = [job for job in jobs if _attempt_of(job) < _restarts_of(jobset)]
        current = [job for job in jobs if _attempt_of(job) >= _restarts_of(jobset)]
        for job in previous:
            self._objects.delete("jobs", job)
        wanted = sum(replicated["replicas"] for replicated in _list_replicated(jobset))
        failed = next((job for job in current if condition_of(job, "Failed")), None)
        if failed is not None:
            self._fail_or_restart(jobset, failed)
            return
        if current and len(current) == wanted and all(condition_of(job, "Complete") for job in current):
            self._objects.set_condition("jobsets", jobset, "Completed", "AllJobsCompleted")
            return
        if not previous:  # BlockingRecreate
            self._make_missing(jobset, current)
        self._suspend_or_resume(jobset, [job for job in current if not _is_finished(job)])

    def _suspend_or_resume(self, jobset: Raw, active: list[Raw]) -> None:
        """Suspend or resume the Jobs, and report it at once: their pods need time to stop."""
        suspend = jobset["spec"]["suspend"]
        for job in active:
            if job["spec"].get("suspend", False) != suspend:
                self._objects.change("jobs", job, "spec", suspend=suspend)
        if suspend:
            self._objects.set_condition("jobsets", jobset, "Suspended", "SuspendedJobs")
            self._objects.set_condition(
                "jobsets", jobset, "RestartingJobSet", "JobSetSuspended", status="False"
            )
        else:
            self._objects.set_condition("jobsets", jobset, "Suspended", "ResumeJobs", status="False")

    def _make_missing(self, jobset: Raw, current: list[Raw]) -> None:
        present = {job["metadata"]["name"] for job in current}
        attempt = {RESTART_ATTEMPT_LABEL: str(_restarts_of(jobset))}
        for replicated in _list_replicated(jobset):
            template = replicated["template"]
            for index in range(replicated["replicas"]):
                name = f"{jobset['metadata']['name']}-{replicated['name']}-{index}"
                labels = template["metadata"]["labels"] | attempt | {JOB_INDEX_LABEL: str(index)}
                spec = template["spec"] | {"suspend": jobset["spec"]["suspend"]}
                if name not in present:
                    self._objects.make("jobs", name, jobset, labels, spec)

    def _fail_or_restart(self, jobset: Raw, failed: Raw) -> None:
        policy = jobset["spec"]["failurePolicy"]
        condition = condition_of(failed, "Failed")
        name, action = _find_rule(policy, condition["reason"], condition["message"])
        counted = jobset.get("status", {}).get("restartsCountTowardsMax", 0)
        exceeded = action == "RestartJobSet" and counted >= policy["maxRestarts"]
        if action == "FailJobSet" or exceeded:
            reason = "ReachedMaxRestarts" if exceeded else "FailJobSetFailurePolicyAction"
            self._objects.set_condition("jobsets", jobset, "Failed", reason, message="jobset failed")
            return
        self._objects.change(
            "jobsets",
            jobset,
            "status",
            restarts=_restarts_of(jobset) + 1,
            restartsCountTowardsMax=counted + (action == "RestartJobSet"),
        )
        self._objects.set_condition("jobsets", jobset, "RestartingJobSet", f"FailurePolicy_{name}")


def _list_replicated(jobset: Raw) -> list[Raw]:
    return list(jobset["spec"].get("replicatedJobs", ()))


def _restarts_of(jobset: Raw) -> int:
    return int(jobset.get("status", {}).get("restarts", 0))


def _attempt_of(job: Raw) -> int:
    return int(job["metadata"]["labels"][RESTART_ATTEMPT_LABEL])


def _is_finished(job: Raw) -> bool:
    return bool(condition_of(job, "Failed") or condition_of(job, "Complete"))


def _find_rule(policy: Raw, reason: str, message: str) -> tuple[str, str]:
    for rule in policy["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["name"], rule["action"]
    return "default", "RestartJobSet"
