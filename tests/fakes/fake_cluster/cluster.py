"""Keep objects with names, uids and versions: `Cluster` without a server."""

import copy
import marshal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from typing_extensions import override

from stepkeeper_operator.cluster.protocol import Cluster
from stepkeeper_operator.cluster.resources import CONFIG_MAPS, NODES, PODS, Resource
from stepkeeper_operator.errors import AlreadyExistsError, ApiError, ConflictError
from stepkeeper_operator.facts.raw import RawObject, render_time

_T = TypeVar("_T")


def _copy(raw: _T) -> _T:
    """Copy an object. Plain data is copied ten times faster."""
    try:
        # Other data raises ValueError.
        copied: _T = marshal.loads(marshal.dumps(raw))  # type: ignore[arg-type]  # our own bytes
    except ValueError:
        return copy.deepcopy(raw)
    return copied


Place = tuple[str, str | None, str]


@dataclass(frozen=True, slots=True)
class Write:
    verb: str
    plural: str
    name: str


class FakeCluster(Cluster):
    """Keep objects and call `on_change` for every change, as a watch would. `writes` lists what clients requested."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.version = 100
        """Counts all changes."""
        self._uids = 0
        self.objects: dict[Place, dict[str, Any]] = {}
        self.writes: list[Write] = []
        self.lists_of_events = 0
        self.reads: Counter[tuple[str, str]] = Counter()
        """Numbers of get, list (in one namespace) and LIST (in all), by plural."""

        self.refusals: dict[tuple[str, str], ApiError] = {}
        """The errors of writes by verb and plural, until they are removed here."""
        self.admission: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda _plural, body: body
        """The mutating webhook that every new object passes."""
        self.on_change: Callable[[str, RawObject, bool], None] = lambda _plural, _raw, _deleted: None

    @override
    async def get(self, resource: Resource, namespace: str | None, name: str) -> RawObject | None:
        self.reads["get", resource.plural] += 1
        return _copy(self.objects.get((resource.plural, namespace, name)))

    @override
    async def list_uids(
        self, resource: Resource, label_selector: str, *, namespace: str | None = None
    ) -> frozenset[str]:
        self.reads["LIST" if namespace is None else "list", resource.plural] += 1
        return frozenset(
            raw["metadata"]["uid"]
            for raw in self.list_objects(resource.plural)
            if namespace is None or raw["metadata"].get("namespace") == namespace
        )

    @override
    async def list_all(self, resource: Resource, label_selector: str = "") -> tuple[RawObject, ...]:
        if ("list", resource.plural) in self.refusals:
            raise self.refusals["list", resource.plural]
        key, _, value = label_selector.partition("=")
        objects = self.list_objects(resource.plural)
        if key:
            objects = [raw for raw in objects if raw["metadata"].get("labels", {}).get(key) == value]
        return tuple(_copy(raw) for raw in objects)

    @override
    async def list_pods_on(self, node_name: str) -> tuple[RawObject, ...]:
        pods = self.list_objects("pods")
        return tuple(_copy(pod) for pod in pods if pod["spec"].get("nodeName") == node_name)

    @override
    async def list_events(self, namespace: str, *, reason: str) -> tuple[RawObject, ...]:
        self.lists_of_events += 1
        if ("list", "events") in self.refusals:
            raise self.refusals["list", "events"]
        events = (raw for raw in self.list_objects("events") if raw["metadata"]["namespace"] == namespace)
        return tuple(_copy(raw) for raw in events if raw["reason"] == reason)

    @override
    async def create(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        self._record_request("create", resource, body["metadata"].get("name", ""))
        if (resource.plural, namespace, body["metadata"].get("name")) in self.objects:
            raise AlreadyExistsError(409, f"{resource.plural} {body['metadata']['name']} exists")
        return self.put(resource.plural, self.admission(resource.plural, copy.deepcopy(dict(body))))

    @override
    async def replace(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        self._record_request("replace", resource, body["metadata"]["name"])
        self._check_versions(self.objects[(resource.plural, namespace, body["metadata"]["name"])], body)
        return self.put(resource.plural, body)

    @override
    async def apply(
        self, resource: Resource, namespace: str, body: RawObject, *, subresource: str | None = None
    ) -> RawObject:
        name = body["metadata"]["name"]
        self._record_request("apply", resource, name)
        known = self.objects.get((resource.plural, namespace, name))
        if known is None:
            if "uid" in body["metadata"]:
                raise ConflictError(409, f"{resource.plural} {name} with that uid is gone")
            return self.put(resource.plural, body)
        self._check_versions(known, body)
        changed = _copy(known)
        if subresource == "status":
            changed["status"] = body["status"]
        elif resource is CONFIG_MAPS:
            changed["data"] = body["data"]
        else:
            changed["spec"] |= body["spec"]
        return self.put(resource.plural, changed)

    @override
    async def patch_pod_status(self, namespace: str, name: str, body: RawObject) -> None:
        self._record_request("patch", PODS, name)
        if ("pods", namespace, name) not in self.objects:
            raise ApiError(404, f"there is no pod {namespace}/{name}")
        pod = _copy(self.objects[("pods", namespace, name)])
        self._check_versions(pod, body)
        conditions = {c["type"]: c for c in pod["status"].get("conditions", ())}
        conditions |= {c["type"]: c for c in body["status"].get("conditions", ())}
        pod["status"] |= {**body["status"], "conditions": list(conditions.values())}
        self.put("pods", pod)

    @override
    async def set_finalizers(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        finalizers: Sequence[str],
        *,
        uid: str,
        resource_version: str,
    ) -> RawObject | None:
        self._record_request("patch", resource, name)
        known = self.objects.get((resource.plural, namespace, name))
        if known is None:
            return None
        self._check_versions(known, {"metadata": {"uid": uid, "resourceVersion": resource_version}})
        changed = {**known, "metadata": known["metadata"] | {"finalizers": list(finalizers)}}
        if finalizers or "deletionTimestamp" not in known["metadata"]:
            return self.put(resource.plural, changed)
        self.remove(resource.plural, namespace, name)
        return _copy(changed)

    @override
    async def change_node(
        self,
        node_name: str,
        *,
        uid: str,
        unschedulable: bool | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str | None] | None = None,
    ) -> RawObject | None:
        self._record_request("patch", NODES, node_name)
        known = self.objects.get(("nodes", None, node_name))
        if known is None:
            return None
        self._check_versions(known, {"metadata": {"uid": uid}})
        meta, spec = dict(known["metadata"]), dict(known.get("spec", {}))
        meta["labels"] = {**meta.get("labels", {}), **(labels or {})}
        merged = {**meta.get("annotations", {}), **(annotations or {})}
        meta["annotations"] = {key: value for key, value in merged.items() if value is not None}
        if unschedulable is not None:
            spec["unschedulable"] = unschedulable
        return self.put("nodes", {**known, "metadata": meta, "spec": spec})

    @override
    async def evict_pod(self, namespace: str, name: str, *, uid: str) -> None:
        self._record_request("evict", PODS, name)
        known = self.objects.get(("pods", namespace, name))
        if known is not None:
            self._check_versions(known, {"metadata": {"uid": uid}})
            self.mark_deleted("pods", namespace, name, grace_s=30)

    @override
    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str,
        foreground: bool = False,
        at_once: bool = False,
    ) -> None:
        self._record_request("delete", resource, name)
        known = self.objects.get((resource.plural, namespace, name))
        if known is None:
            return
        self._check_versions(known, {"metadata": {"uid": uid}})
        if at_once:
            assert namespace is not None  # only pods are deleted at once
            self.release_pod(namespace, name)
        elif not foreground and not known["metadata"].get("finalizers"):
            self.remove(resource.plural, namespace, name)
        elif "deletionTimestamp" not in known["metadata"]:
            self.mark_deleted(resource.plural, namespace, name, grace_s=0)

    def put(self, plural: str, raw: RawObject) -> RawObject:
        """Store the object under its name with a new version, and notify its watchers."""
        body = _copy(dict(raw))
        meta = body["metadata"]
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        if "uid" not in meta:
            self._uids += 1
            meta["uid"] = f"{plural}-{self._uids}"
            meta["creationTimestamp"] = render_time(self._clock())
        if plural == "jobsets":
            self._count_generation(body)
        self.objects[(plural, meta.get("namespace"), meta.get("name", ""))] = body
        self.on_change(plural, _copy(body), False)  # a plain callable
        return _copy(body)

    def _count_generation(self, jobset: dict[str, Any]) -> None:
        """Count the changes of the JobSet's spec, as an API server does."""
        meta = jobset["metadata"]
        known = self.objects.get(("jobsets", meta.get("namespace"), meta.get("name", "")))
        if known is None or known["metadata"]["uid"] != meta["uid"]:
            meta["generation"] = 1
        else:
            meta["generation"] = known["metadata"]["generation"] + (known["spec"] != jobset["spec"])

    def mark_deleted(self, plural: str, namespace: str | None, name: str, *, grace_s: int) -> None:
        raw = self.objects[(plural, namespace, name)]
        if "deletionTimestamp" not in raw["metadata"]:
            when = {
                "deletionTimestamp": render_time(self._clock() + grace_s),
                "deletionGracePeriodSeconds": grace_s,
            }
            self.put(plural, {**raw, "metadata": raw["metadata"] | when})

    def release_pod(self, namespace: str, name: str) -> None:
        """Release the pod from its kubelet: only its Job's finalizer still keeps it."""
        raw = self.objects[("pods", namespace, name)]
        self.put("pods", {**raw, "metadata": raw["metadata"] | {"deletionGracePeriodSeconds": 0}})

    def remove(self, plural: str, namespace: str | None, name: str) -> None:
        """Remove the object, and notify its watchers."""
        raw = self.objects.pop((plural, namespace, name), None)
        if raw is not None:
            self.version += 1
            self.on_change(plural, raw, True)  # a plain callable

    def list_objects(self, plural: str) -> list[dict[str, Any]]:
        """List the objects of a kind, sorted by name."""
        found = [(place, raw) for place, raw in self.objects.items() if place[0] == plural]
        return [raw for _, raw in sorted(found, key=lambda item: (item[0][1] or "", item[0][2]))]

    def _record_request(self, verb: str, resource: Resource, name: str) -> None:
        if resource.plural != "tokenreviews":
            self.writes.append(Write(verb, resource.plural, name))
        if (verb, resource.plural) in self.refusals:
            raise self.refusals[verb, resource.plural]

    def _check_versions(self, known: RawObject, body: RawObject) -> None:
        for key in ("uid", "resourceVersion"):
            if key in body["metadata"] and body["metadata"][key] != known["metadata"][key]:
                raise ConflictError(409, f"{known['metadata']['name']} has another {key}")
