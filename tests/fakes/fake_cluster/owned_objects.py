"""Make, find and change objects that controllers own."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator.facts.raw import condition_of, render_time

_TRACKING_FINALIZER: Final = "batch.kubernetes.io/job-tracking"
"""The Job controller removes it from a pod once it has counted the pod's end, or will not count it."""

_OWNERS: Final = {"jobs": "JobSet", "pods": "Job", "workloads": "JobSet"}

Raw = dict[str, Any]


class OwnedObjects:
    """The objects of a cluster as controllers use them: by their owners, with conditions and finalizers."""

    def __init__(self, cluster: FakeCluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock

    def make(
        self, plural: str, name: str, owner: Raw, labels: Mapping[str, str], spec: Mapping[str, Any]
    ) -> Raw:
        reference = {
            "kind": _OWNERS[plural],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }
        meta: Raw = {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": dict(labels),
            "ownerReferences": [reference],
        }
        if plural == "pods":
            meta["finalizers"] = [_TRACKING_FINALIZER]
        status = {"phase": "Pending"} if plural == "pods" else {}
        return dict(self._cluster.put(plural, {"metadata": meta, "spec": spec, "status": status}))

    def list_owned(self, plural: str, owner: Raw) -> list[Raw]:
        uid = owner["metadata"]["uid"]
        return [
            raw
            for raw in self._cluster.list_objects(plural)
            if any(reference["uid"] == uid for reference in raw["metadata"].get("ownerReferences", ()))
        ]

    def read(self, plural: str, raw: Raw) -> Raw | None:
        """Return the object as it is now; None if it is gone."""
        meta = raw["metadata"]
        present = self._cluster.objects.get((plural, meta["namespace"], meta["name"]))
        return present if present is not None and present["metadata"]["uid"] == meta["uid"] else None

    def change(self, plural: str, raw: Raw, part: str, **fields: Any) -> None:
        """Set fields of the object's `spec` or `status`."""
        present = self.read(plural, raw)
        if present is not None:
            self._cluster.put(plural, present | {part: present.get(part, {}) | fields})

    def set_condition(self, plural: str, raw: Raw, kind: str, reason: str, **more: str) -> None:
        """Set a condition to True, or to `status`. A False one that is not there is not added."""
        status, message = more.get("status", "True"), more.get("message", "")
        present = self.read(plural, raw)
        known = {} if present is None else condition_of(present, kind)
        same = (known.get("status"), known.get("reason")) == (status, reason)
        if present is None or same or (not known and status == "False"):
            return
        when = render_time(self._clock())
        if known.get("status") == status:
            when = known["lastTransitionTime"]
        conditions = [c for c in present.get("status", {}).get("conditions", ()) if c["type"] != kind]
        conditions.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": when,
            }
        )
        self.change(plural, raw, "status", conditions=conditions)

    def delete(self, plural: str, raw: Raw, *, grace_s: int = 0) -> None:
        if self.read(plural, raw) is not None:
            meta = raw["metadata"]
            self._cluster.mark_deleted(plural, meta["namespace"], meta["name"], grace_s=grace_s)

    def delete_pod(self, pod: Raw) -> None:
        """Request the pod's deletion with a grace period."""
        self.delete("pods", pod, grace_s=pod["spec"].get("terminationGracePeriodSeconds", 30))

    def stop_tracking(self, pod: Raw) -> None:
        """Remove the Job's finalizer from the pod."""
        present = self.read("pods", pod)
        if present is not None and present["metadata"].get("finalizers"):
            self._cluster.put("pods", present | {"metadata": present["metadata"] | {"finalizers": []}})

    def remove(self, plural: str, raw: Raw) -> None:
        self._cluster.remove(plural, raw["metadata"]["namespace"], raw["metadata"]["name"])
