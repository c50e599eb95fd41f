"""Observe the cloud and the cluster around one QueuedResource. A reconcile reads nowhere else."""

import asyncio
import base64
import binascii
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState, QueuedResourceStatus
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudOperationState,
    CloudTPU,
    CloudTPUError,
    Place,
)
from stepkeeper_operator.cloud_tpu.polling import Poller
from stepkeeper_operator.cluster import NAMESPACES, QUEUED_RESOURCES, SECRETS, Cluster
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts import Node
from stepkeeper_operator.facts.raw import RawObject, controller_of
from stepkeeper_operator.labels import ADOPT_ANNOTATION
from stepkeeper_operator.metrics import QueuedResourceMetrics
from stepkeeper_operator.queued_resources.absence import OrphanWatch, complete_listing
from stepkeeper_operator.queued_resources.memory import Memory, ResourceMemory
from stepkeeper_operator.queued_resources.naming import FINALIZER, parse_cloud_name
from stepkeeper_operator.queued_resources.observed import Member, MemberPod, Observed
from stepkeeper_operator.queued_resources.pacing import compute_poll_s
from stepkeeper_operator.queued_resources.request import choose_api_version, place_of
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.queued_resources.subject import Subject, has_nothing

__all__ = ["Observer"]

_FRESH_SHARE: Final = 0.9
"""Share of the time between two looks for which a listing is shared by all who come."""

_UNSEEN: Final = {None, QueuedResourceState.PENDING, QueuedResourceState.GONE}
_MIRROR: Final = "kubernetes.io/config.mirror"
"""Annotation on a pod that a kubelet runs from a file: nobody can evict it."""


class Observer:
    """Gather the `Observed` of a QueuedResource."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        cache: Cache,
        cloud: CloudTPU,
        memory: Memory,
        settings: CloudSettings,
        metrics: QueuedResourceMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._cloud = cloud
        self._poller = Poller(cloud, clock=clock)
        self._orphans = OrphanWatch(cache, metrics)
        self._memory = memory
        self._metrics = metrics
        self._settings = settings
        self._clock = clock

    async def observe(self, subject: Subject) -> Observed:
        """Gather everything around it. Errors of the cloud are a part of it. Raises ApiError for the cluster's."""
        memory = self._memory.get(subject.meta.uid)
        members = self._cache.list_nodes_of(subject.meta.uid)
        observed = Observed(
            cluster_id=await self._find_cluster_id(),
            members=tuple(_read_member(node, subject.meta.uid, memory) for node in members),
            cordon_refused_at=memory.cordon_refused_at,
            outcome=memory.outcome,
            listed_at=memory.listed_at,
        )
        if _needs_nothing(subject):
            return observed
        if subject.status.bookkeeping.removing or subject.meta.deletion_timestamp is not None:
            observed = replace(observed, pods=await self._find_pods(members))
        observed = await self._observe_script(subject, observed)
        return await self._observe_cloud(subject, memory, observed)

    def forget(self, uid: str) -> None:
        """Forget an object that is gone, and its place if it was the last one there."""
        place = self._memory.forget(uid)
        if place is not None:
            self._poller.forget_place(place)
            self._orphans.forget_place(place)
            self._metrics.forget_place(place.project, place.zone)

    async def _observe_cloud(self, subject: Subject, memory: ResourceMemory, observed: Observed) -> Observed:
        found = _find_place(subject)
        if found is None:
            return observed
        memory.place, version = found
        now = self._clock()
        operation = await self._read_operation(subject.status, memory, version)
        fresh_s = _FRESH_SHARE * compute_poll_s(subject.status, self._settings)
        # What an operation did is judged by a list from after its end.
        ended = operation is not None and operation.done
        after = max(memory.last_cloud_write_at, now if ended else 0.0)
        try:
            listing = await self._poller.list_place(memory.place, newer_than=max(now - fresh_s, after))
            complete = await complete_listing(self._cloud, listing, subject, observed.members, memory.place)
        except CloudTPUError as error:
            self._metrics.record_list(memory.place.project, memory.place.zone, memory.listed_at)
            return replace(observed, error=error, operation=operation)
        self._orphans.look(memory.place, listing, cluster_id=observed.cluster_id)
        memory.listed_at = listing.asked_at
        self._metrics.record_list(memory.place.project, memory.place.zone, listing.asked_at)
        return replace(
            observed,
            listing=complete,
            listed_at=listing.asked_at,
            operation=operation,
            former=self._find_former(subject),
            other_uids=self._find_other_uids(subject),
        )

    def _find_other_uids(self, subject: Subject) -> frozenset[str]:
        if ADOPT_ANNOTATION not in subject.meta.annotations:
            return frozenset()
        return self._cache.list_uids(QUEUED_RESOURCES) - {subject.meta.uid}

    def _find_former(self, subject: Subject) -> tuple[Member, ...]:
        """Find the cluster's nodes of objects that are gone: some may be of machines that this one has adopted."""
        if not subject.status.bookkeeping.adopted:
            return ()
        uids = self._cache.list_uids(QUEUED_RESOURCES)
        nodes = self._cache.list_queued_nodes()
        return tuple(_read_member(n, subject.meta.uid) for n in nodes if n.queued_resource_uid not in uids)

    async def _read_operation(
        self, status: QueuedResourceStatus, memory: ResourceMemory, version: ApiVersion
    ) -> CloudOperationState | None:
        """Look at the operation that the status names. One that the API has forgotten is done."""
        now = self._clock()
        if (
            status.operation is None
            or now - memory.operation_read_at < _FRESH_SHARE * self._settings.poll_fast_s
        ):
            return None
        memory.operation_read_at = now
        try:
            found = await self._cloud.get_operation(status.operation.name, version)
        except CloudTPUError:
            return None  # the listing that is asked for next tells what is wrong with the API
        return found or CloudOperationState(name=status.operation.name, done=True)

    async def _find_pods(self, members: tuple[Node, ...]) -> tuple[MemberPod, ...]:
        """Find the pods that have to end before the machines go. The pods of a silent node don't end."""
        lists = await asyncio.gather(
            *(self._cluster.list_pods_on(node.name) for node in members if node.ready)
        )
        return tuple(_read_pod(raw) for pods in lists for raw in pods if _holds_up(raw))

    async def _observe_script(self, subject: Subject, observed: Observed) -> Observed:
        resource, status = subject.resource, subject.status
        if resource is None or subject.meta.deletion_timestamp is not None:
            return observed
        reference = resource.spec.node.startup_script_secret_ref
        if reference is None or (status.bookkeeping.created and status.state not in _UNSEEN):
            return observed
        what = (
            f"Secret {subject.meta.namespace}/{reference.name}, which spec.node.startupScriptSecretRef names,"
        )
        try:
            raw = await self._cluster.get(SECRETS, subject.meta.namespace, reference.name)
        except ApiError as error:
            advice = "name it in cloudTPU.startupScriptSecrets of the chart's values if access is forbidden"
            return replace(observed, script_error=f"{what} can't be read: {error}; {advice}")
        if raw is None:
            return replace(observed, script_error=f"{what} doesn't exist; create it")
        return _read_script(observed, raw, reference.key, what)

    async def _find_cluster_id(self) -> str:
        """Find the id that no other cluster has."""
        if not self._memory.cluster_id:
            raw = await self._cluster.get(NAMESPACES, None, "kube-system")
            if raw is None:
                raise ApiError(
                    404, "there is no namespace kube-system, whose uid names this cluster in the cloud"
                )
            self._memory.cluster_id = str(raw["metadata"]["uid"])
        return self._memory.cluster_id


def _needs_nothing(subject: Subject) -> bool:
    """Return True where the decision doesn't depend on the cloud, so that it works without it."""
    if subject.meta.deletion_timestamp is None:
        return False
    nothing = has_nothing(subject.status) and subject.status.observed_generation is not None
    return FINALIZER not in subject.meta.finalizers or subject.retain or nothing


def _find_place(subject: Subject) -> tuple[Place, ApiVersion] | None:
    """Find where the resource is, and by which version of the API. What was made tells it, else the spec."""
    named = parse_cloud_name(subject.status.cloud_name)
    if named is not None and (subject.status.bookkeeping.created or subject.resource is None):
        version = ApiVersion.V2ALPHA1 if subject.status.api_version == ApiVersion.V2ALPHA1 else ApiVersion.V2
        return named[0], version
    if subject.resource is None:
        return None
    spec = subject.resource.spec
    return place_of(spec), choose_api_version(spec)


def _read_script(observed: Observed, secret: RawObject, key: str, what: str) -> Observed:
    data = secret.get("data") or {}
    if key not in data:
        return replace(observed, script_error=f"{what} has no key {key}; add it")
    try:
        return replace(observed, script=base64.b64decode(data[key]).decode())
    except (binascii.Error, UnicodeDecodeError):
        return replace(observed, script_error=f"{what} has no text under key {key}")


def _read_member(node: Node, uid: str, memory: ResourceMemory | None = None) -> Member:
    """Read a node as a host of the object with that uid. What was refused before is in its memory."""
    return Member(
        name=node.name,
        uid=node.uid,
        cloud_node=node.cloud_node,
        addresses=node.addresses,
        ready=node.ready,
        cordoned=node.unschedulable,
        cordoned_by_us=node.unschedulable and node.cordoned_by == uid,
        deletion_refusal=None if memory is None else memory.refused_deletions.get(node.uid),
    )


def _holds_up(pod: RawObject) -> bool:
    """Return True for a pod that has to end before its machine goes."""
    owner = controller_of(pod)
    daemon = owner is not None and owner.get("kind") == "DaemonSet"
    mirror = _MIRROR in (pod["metadata"].get("annotations") or {})
    over = (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
    return not (daemon or mirror or over)


def _read_pod(raw: RawObject) -> MemberPod:
    """Read a pod of a host."""
    meta = raw["metadata"]
    return MemberPod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        node=raw["spec"]["nodeName"],
        stopping="deletionTimestamp" in meta,
    )
