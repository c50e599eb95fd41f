"""Observe the cloud and the cluster for one QueuedResource: all reads of a reconcile."""

import asyncio
import base64
import binascii
from dataclasses import replace
from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceStatus
from stepkeeper_operator.cloud_tpu.cloud import CloudOperationState, CloudTPU, CloudTPUError, Place
from stepkeeper_operator.cloud_tpu.naming import FINALIZER, parse_cloud_name
from stepkeeper_operator.cloud_tpu.polling import Poller
from stepkeeper_operator.cloud_tpu.request import place_of, read_api_version
from stepkeeper_operator.cluster.resources import NAMESPACES, QUEUED_RESOURCES, SECRETS
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.facts.raw import RawObject, controller_of
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.queued_resources.absence import OrphanWatch, complete_listing
from stepkeeper_operator.queued_resources.observed import MemberPod, Memory, Observed, ResourceMemory
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.queued_resources.subject import Subject, has_no_cloud_resource

__all__ = ["Observer"]

_FRESH_SHARE: Final = 0.9
"""Share of the poll interval for which a listing is shared."""

_MIRROR: Final = "kubernetes.io/config.mirror"
"""Annotation of a static pod, which can't be evicted."""


class Observer:
    """Gather the `Observed` of a QueuedResource."""

    def __init__(self, shared: Shared, *, cloud: CloudTPU, memory: Memory, settings: CloudSettings) -> None:
        self._cluster = shared.cluster
        self._cache = shared.cache
        self._clock = shared.clock
        self._metrics = shared.metrics.queued_resources
        self._cloud = cloud
        self._poller = Poller(cloud, clock=shared.clock)
        self._orphans = OrphanWatch(shared.cache, self._metrics, watched=settings.watched)
        self._memory = memory
        self._settings = settings

    async def observe(self, subject: Subject) -> Observed:
        """Gather the input of a decision, including errors of the cloud. Raises ApiError for the cluster's errors."""
        meta, memory = subject.meta, self._memory.get(subject.meta.uid)
        nodes = self._cache.list_nodes_of(meta.uid)
        observed = Observed(
            cluster_id=await self._find_cluster_id(),
            members=nodes,
            refusals=dict(memory.refusals),
            cordon_refused_at=memory.cordon_refused_at,
            outcome=memory.outcome,
            listed_at=memory.listed_at,
        )
        if _needs_no_cloud(subject):
            return observed
        if subject.status.removing or meta.deletion_timestamp is not None:
            observed = replace(observed, pods=await self._find_pods(nodes))
        else:
            observed = await self._read_script(subject, observed)
        return await self._observe_cloud(subject, memory, observed)

    def forget(self, uid: str) -> None:
        """Forget an object that no longer exists, and its place if it was the last one there."""
        place = self._memory.forget(uid)
        if place is not None:
            self._poller.forget_place(place)
            self._metrics.forget_place(place.project, place.zone)

    async def _observe_cloud(self, subject: Subject, memory: ResourceMemory, observed: Observed) -> Observed:
        place = memory.place = _find_place(subject)
        if place is None:
            return observed
        operation, now = await self._read_operation(subject.status, memory), self._clock()
        fresh_s = _FRESH_SHARE * self._settings.compute_poll_s(subject.status)
        # A listing from before our last write to the cloud, or before its operation's end, doesn't show the result.
        ended = operation is not None and operation.done
        newer_than = max(now - fresh_s, memory.last_cloud_write_at, now if ended else 0.0)
        try:
            listing = await self._poller.list_place(place, newer_than=newer_than)
            # A listing may lack an existing object: before that counts as absent, it is read by its name.
            complete = await complete_listing(self._cloud, listing, subject, observed.members, place)
        except CloudTPUError as error:
            self._metrics.record_list(place.project, place.zone, memory.listed_at)
            return replace(observed, error=error, operation=operation)
        memory.listed_at = listing.asked_at
        self._orphans.update(place, listing, cluster_id=observed.cluster_id)
        self._metrics.record_list(place.project, place.zone, listing.asked_at)
        return replace(
            observed,
            listing=complete,
            listed_at=listing.asked_at,
            operation=operation,
            previous=self._find_previous_nodes(subject),
        )

    def _find_previous_nodes(self, subject: Subject) -> tuple[Node, ...]:
        """Find nodes that name a deleted QueuedResource: this one may have adopted (taken over) its machines."""
        if not subject.status.operator.adopted:
            return ()
        uids = self._cache.list_uids(QUEUED_RESOURCES)
        return tuple(n for n in self._cache.list_queued_nodes() if n.queued_resource_uid not in uids)

    async def _read_operation(
        self, status: QueuedResourceStatus, memory: ResourceMemory
    ) -> CloudOperationState | None:
        """Read the operation that the status names, not more often than the cloud is polled. An unknown one is done."""
        now, rest_s = self._clock(), _FRESH_SHARE * self._settings.poll_fast_s
        if status.operation is None or now - memory.operation_read_at < rest_s:
            return None
        memory.operation_read_at = now
        name = status.operation.name
        try:
            found = await self._cloud.get_operation(name, read_api_version(status))
        except CloudTPUError:
            return None  # the next listing shows the error
        return found or CloudOperationState(name=name, done=True)

    async def _find_pods(self, members: tuple[Node, ...]) -> tuple[MemberPod, ...]:
        """Find the pods that have to end before the machines are removed. Pods on a silent node can't end."""
        requests = (self._cluster.list_pods_on(node.name) for node in members if node.ready)
        lists = await asyncio.gather(*requests)
        return tuple(_read_pod(raw) for pods in lists for raw in pods if _blocks_removal(raw))

    async def _read_script(self, subject: Subject, observed: Observed) -> Observed:
        """Read the startup script if the next request needs it."""
        resource, status, namespace = subject.resource, subject.status, subject.meta.namespace
        reference = None if resource is None else resource.spec.slices.startup_script_secret_ref
        if reference is None or (status.operator.created and status.was_seen):
            return observed
        what = f"Secret {namespace}/{reference.name} of spec.slices.startupScriptSecretRef"
        try:
            raw = await self._cluster.get(SECRETS, namespace, reference.name)
        except ApiError as error:
            advice = "if access is forbidden, add it to cloudTPU.startupScriptSecrets in the chart's values"
            return replace(observed, script_error=f"{what} can't be read: {error}; {advice}")
        if raw is None:
            return replace(observed, script_error=f"{what} doesn't exist; create it")
        try:
            return replace(observed, script=base64.b64decode(raw["data"][reference.key]).decode())
        except (KeyError, binascii.Error, UnicodeDecodeError):
            return replace(observed, script_error=f"{what} has no text under key {reference.key}")

    async def _find_cluster_id(self) -> str:
        if not self._memory.cluster_id:
            raw = await self._cluster.get(NAMESPACES, None, "kube-system")
            if raw is None:
                text = "namespace kube-system doesn't exist; its uid identifies this cluster in the cloud"
                raise ApiError(404, text)
            self._memory.cluster_id = str(raw["metadata"]["uid"])
        return self._memory.cluster_id


def _needs_no_cloud(subject: Subject) -> bool:
    """Return True if the decision doesn't need the cloud, so that it is made even if the cloud doesn't answer."""
    if subject.meta.deletion_timestamp is None:
        return False
    # Without a generation, the status may have been emptied: then only the cloud can show that there is nothing.
    nothing = has_no_cloud_resource(subject.status) and subject.status.observed_generation is not None
    return FINALIZER not in subject.meta.finalizers or subject.retain or nothing


def _find_place(subject: Subject) -> Place | None:
    """Find the place of the resource: in the name of a created one, else in the spec."""
    named, resource = parse_cloud_name(subject.status.cloud_name), subject.resource
    if named is not None and (subject.status.operator.created or resource is None):
        return named
    return None if resource is None else place_of(resource.spec)


def _blocks_removal(pod: RawObject) -> bool:
    """Return True for a pod that has to end before its machine is removed."""
    owner = controller_of(pod)
    daemon = owner is not None and owner.get("kind") == "DaemonSet"
    mirror = _MIRROR in (pod["metadata"].get("annotations") or {})
    ended = (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
    return not (daemon or mirror or ended)


def _read_pod(raw: RawObject) -> MemberPod:
    meta = raw["metadata"]
    return MemberPod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        node=raw["spec"]["nodeName"],
        stopping="deletionTimestamp" in meta,
    )
