"""Simulate the controllers around an operator: JobSet, the Job controller, kubelets and the garbage collector.

Every rule is read from the manifest that the operator made; none is assumed.
"""

from collections.abc import Callable
from typing import Any

from fake_cluster.batch_job_controller import FakeBatchJobController
from fake_cluster.cluster import FakeCluster
from fake_cluster.jobset_controller import FakeJobSetController
from fake_cluster.kubelets import FakeKubelets
from fake_cluster.kueue import FakeKueue
from fake_cluster.owned_objects import OwnedObjects

Raw = dict[str, Any]


class FakeControllers:
    """Run the controllers.

    `sync` runs them until nothing changes, `step` lets each do one thing. Pods end by `end_pod`, or
    `kubelets.stop_s` seconds after a request to stop, with `kubelets.stop_code`.
    """

    def __init__(
        self, cluster: FakeCluster, clock: Callable[[], float], *, node_names: tuple[str, ...]
    ) -> None:
        self._cluster = cluster
        self._node_names = node_names
        self._objects = OwnedObjects(cluster, clock)
        self._jobsets = FakeJobSetController(self._objects)
        self.jobs = FakeBatchJobController(self._objects, choose_node=self._choose_node)
        self.kubelets = FakeKubelets(cluster, self._objects, clock)
        self.kueue = FakeKueue(cluster, self._objects)
        self.stuck = self.kubelets.stuck
        self.gone = self.kubelets.gone
        self.end_pod = self.kubelets.end_pod
        self.disrupt = self.kubelets.disrupt

    def sync(self) -> None:
        """Run all controllers until nothing is left to do at this time."""
        for _ in range(40):
            before = self._cluster.version
            self.step()
            if self._cluster.version == before:
                return
        raise AssertionError("the controllers don't come to rest")

    def step(self) -> None:
        """Let each controller reconcile each of its objects once."""
        self.kueue.sync()
        for jobset in self._cluster.list_objects("jobsets"):
            self._jobsets.sync(jobset)
        for job in self._cluster.list_objects("jobs"):
            self.jobs.sync(job)
        self.kubelets.sync()
        self._collect_garbage()

    def notice_failures(self) -> None:
        """Let Jobs note which of their pods have failed, without acting on it."""
        for job in self._cluster.list_objects("jobs"):
            self.jobs.note_failure(job)

    def delete_job(self, name: str) -> None:
        """Delete a Job as `kubectl delete job` does: it is gone at once, and its pods end later."""
        self._cluster.remove("jobs", "default", name)

    def _choose_node(self, index: int) -> str:
        """Choose the node of the pod with that index, over all slices: no pod is placed on a node that is silent."""
        names = [name for name in self._node_names if name not in self.stuck] or self._node_names
        return names[index % len(names)]

    def _collect_garbage(self) -> None:
        """Delete the objects that have lost their owner. Pods get the time that they need to end."""
        uids = {raw["metadata"]["uid"] for raw in self._cluster.objects.values()}
        for plural in ("jobs", "pods"):
            for raw in self._cluster.list_objects(plural):
                owners = raw["metadata"].get("ownerReferences", ())
                if not owners or any(owner["uid"] in uids for owner in owners):
                    continue
                if plural == "jobs":
                    self._objects.remove(plural, raw)
                else:
                    self._objects.stop_tracking(raw)
                    self._objects.delete_pod(raw)
