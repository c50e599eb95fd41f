"""Simulate Kueue's effects on JobSets: its webhook, and the controller that admits and evicts them."""

from typing import Any

from fake_cluster.cluster import FakeCluster
from fake_cluster.owned_objects import OwnedObjects
from stepkeeper_operator.facts.raw import condition_of

Raw = dict[str, Any]

_QUEUE = "kueue.x-k8s.io/queue-name"


class FakeKueue:
    """Admit the JobSets that have a queue while there is `quota`. Not installed before `install`."""

    def __init__(self, cluster: FakeCluster, objects: OwnedObjects) -> None:
        self._cluster = cluster
        self._objects = objects
        self.installed = False
        self.default_queue: str | None = None
        self.quota = True
        self.undone: list[str] = []
        """Changes by others to JobSets that Kueue manages, which Kueue reverted."""

    def install(self, *, default_queue: str | None, quota: bool = True) -> None:
        """Install Kueue; with a default LocalQueue it takes every JobSet."""
        self.installed, self.default_queue, self.quota = True, default_queue, quota
        self._cluster.admission = self._admit_creation

    def evict(self, reason: str, message: str) -> None:
        """Evict the Workloads that have quota, as for a more important one."""
        self.quota = False
        for workload in self._cluster.list_objects("workloads"):
            if condition_of(workload, "QuotaReserved").get("status") == "True":
                self._objects.set_condition("workloads", workload, "Evicted", reason, message=message)

    def sync(self) -> None:
        """Reconcile each JobSet once."""
        if not self.installed:
            return
        jobsets = [raw for raw in self._cluster.list_objects("jobsets") if _queue_of(raw)]
        uids = {jobset["metadata"]["uid"] for jobset in jobsets}
        for workload in self._cluster.list_objects("workloads"):
            if workload["metadata"]["ownerReferences"][0]["uid"] not in uids:
                self._objects.remove("workloads", workload)
        for jobset in jobsets:
            owned = self._objects.list_owned("workloads", jobset)
            if "deletionTimestamp" in jobset["metadata"]:
                continue
            if owned:
                self._sync_workload(jobset, owned[0])
            else:
                name = f"jobset-{jobset['metadata']['name']}-{jobset['metadata']['uid'][-5:]}"
                spec = {"queueName": _queue_of(jobset)}
                self._objects.make("workloads", name, jobset, {}, spec)

    def _sync_workload(self, jobset: Raw, workload: Raw) -> None:
        reserved = condition_of(workload, "QuotaReserved").get("status") == "True"
        if condition_of(workload, "Evicted").get("status") == "True":
            self._finish_eviction(jobset, workload, reserved=reserved)
        elif not reserved:
            self._reserve_quota(jobset, workload)
        elif jobset["spec"]["suspend"]:
            if condition_of(workload, "Admitted"):
                self.undone.append("suspended with quota")
            self._objects.set_condition("workloads", workload, "Admitted", "Admitted")
            self._objects.change("jobsets", jobset, "spec", suspend=False)

    def _finish_eviction(self, jobset: Raw, workload: Raw, *, reserved: bool) -> None:
        """Suspend the JobSet, take its quota once its pods have ended, and let it wait for quota again."""
        if not jobset["spec"]["suspend"]:
            self._objects.change("jobsets", jobset, "spec", suspend=True)
        elif reserved and not self._runs(jobset):
            text = condition_of(workload, "Evicted")["message"]
            self._set_quota(workload, "False", "Pending", text)
        elif self.quota and not reserved:
            self._objects.set_condition("workloads", workload, "Evicted", "QuotaReserved", status="False")

    def _reserve_quota(self, jobset: Raw, workload: Raw) -> None:
        if not jobset["spec"]["suspend"]:
            self.undone.append("resumed without quota")
            self._objects.change("jobsets", jobset, "spec", suspend=True)
        if self.quota:
            self._set_quota(workload, "True", "QuotaReserved", "Quota reserved in ClusterQueue all")
        elif not condition_of(workload, "QuotaReserved"):
            text = "couldn't assign flavors to pod set w: insufficient unused quota"
            self._set_quota(workload, "False", "Pending", text)

    def _set_quota(self, workload: Raw, status: str, reason: str, message: str) -> None:
        """Set condition QuotaReserved, also to False where it is not there yet. Without quota nothing is admitted."""
        present = self._objects.read("workloads", workload) or workload
        dropped = {"QuotaReserved"} if status == "True" else {"QuotaReserved", "Admitted"}
        kept = [c for c in present["status"].get("conditions", ()) if c["type"] not in dropped]
        new = {"type": "QuotaReserved", "status": status, "reason": reason, "message": message}
        self._objects.change("workloads", present, "status", conditions=[*kept, new])

    def _runs(self, jobset: Raw) -> bool:
        jobs = self._objects.list_owned("jobs", jobset)
        pods = [pod for job in jobs for pod in self._objects.list_owned("pods", job)]
        return any(pod["status"]["phase"] not in {"Failed", "Succeeded"} for pod in pods)

    def _admit_creation(self, plural: str, body: Raw) -> Raw:
        """Mutate as the webhook does: a JobSet of a queue begins suspended."""
        if plural != "jobsets":
            return body
        if self.default_queue is not None:
            body["metadata"].setdefault("labels", {}).setdefault(_QUEUE, self.default_queue)
        if _queue_of(body):
            body["spec"]["suspend"] = True
        return body


def _queue_of(jobset: Raw) -> str | None:
    name: str | None = (jobset["metadata"].get("labels") or {}).get(_QUEUE)
    return name
