"""Run one QueuedResource in a cluster and a cloud in memory, reconciled by the shipped code."""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from typing_extensions import override

from fake_cluster.cluster import FakeCluster
from fake_cluster.queued_resources import CLUSTER_ID, make_resource
from fake_cluster.world import Reconciled
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceStatus
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import queued_resource_key
from stepkeeper_operator.cache.kinds import list_watched_kinds
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudTPU
from stepkeeper_operator.cloud_tpu.naming import UID_LABEL
from stepkeeper_operator.facts.raw import RawObject, parse_time, render_time
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.labels import ADOPT_ANNOTATION, QUEUED_RESOURCE_UID_LABEL, SLICE_LABEL
from stepkeeper_operator.metrics import Metrics
from stepkeeper_operator.queued_resources.controller import QueuedResourceController
from stepkeeper_operator.queued_resources.settings import CloudSettings
from tpuapi.cloud import FakeCloud
from tpuapi.nodes import Timings

_KINDS: Final = {kind.resource.plural: kind for kind in list_watched_kinds(cloud_tpu=True)}
_PLURAL: Final = "queuedresources"
_SETTINGS: Final = CloudSettings(poll_fast_s=10, poll_active_s=20, poll_waiting_s=20)
_TIMINGS: Final = Timings(
    creating_s=10, provisioning_s=10, node_skew_s=0, suspending_s=10, deleting_s=10, repairing_s=10
)
_WRITES: Final = ("apply", "create", "delete", "set_finalizers", "change_node", "evict_pod")
_CLOUD_WRITES: Final = ("create_queued_resource", "delete_queued_resource", "set_node_labels")


class Killed(BaseException):
    """The operator's process ends here."""


class ResourceWorld(Reconciled):
    """A cluster, a cloud and one operator.

    Time stands still unless it is moved; watches bring every change at once.
    """

    def __init__(
        self,
        *,
        now: float = 1_800_000_000.0,
        hosts_per_node: int | None = None,
        service: CloudTPU | None = None,
        cluster_id: str = CLUSTER_ID,
        namespace: str = "team",
        name: str = "v5e",
        uid: str = "uid-1",
        settings: CloudSettings = _SETTINGS,
        **spec: Any,
    ) -> None:
        """Make the world. With `service`, the operator asks that one; unless it is in memory, `cloud` stays empty.

        Several worlds with one service are several clusters, if each has a `cluster_id` and a `uid` of its own.
        """
        self._key = queued_resource_key(namespace, name)
        self.now = now
        self.cluster = FakeCluster(lambda: self.now)
        self.cloud = (
            service
            if isinstance(service, FakeCloud)
            else FakeCloud(lambda: self.now, timings=_TIMINGS, hosts_per_node=hosts_per_node)
        )
        self._service: CloudTPU = service or self.cloud
        self._settings = settings
        self.acting: Callable[[], bool] = lambda: True
        """Tells the operator whether it holds the Lease."""

        self.kill_at: int | None = None
        """The write, counted from now, at which the operator is killed; None: it isn't."""

        self.kill_before = False
        """The write at which it is killed isn't carried out."""

        self.uid = uid
        self._count_writes()
        self._start_operator()
        self.cluster.put("namespaces", {"metadata": {"name": "kube-system", "uid": cluster_id}})
        self.make_object(self.uid, **spec)

    def make_object(self, uid: str, **spec: Any) -> None:
        self.uid = uid
        raw = make_resource(finalizers=(), **spec).to_raw()
        place = {"name": self._key.name, "namespace": self._key.namespace}
        raw["metadata"] = {
            **place,
            "uid": uid,
            "generation": 1,
            "annotations": raw["metadata"]["annotations"],
        }
        del raw["status"]
        self.cluster.put(_PLURAL, raw)

    def restart_operator(self) -> None:
        """Start a new operator process. It knows only what it lists."""
        self.kill_at = None
        self._start_operator()
        for plural in _KINDS:
            for raw in self.cluster.list_objects(plural):
                self._record_change(plural, raw, deleted=False)

    @override
    async def reconcile(self) -> float | None:
        """Reconcile once, as the queue would. A killed operator is started again."""
        try:
            return await self.controller.reconcile(self._key)
        except Killed:
            self.restart_operator()
        return 0.0

    def step(self, seconds: float = 10.0) -> None:
        """Let time pass: machines become ready and join, pods that are told to end do."""
        self.now += seconds
        self.cloud.advance()
        self.sync_hosts()

    async def run(self, rounds: int, seconds: float = 10.0) -> None:
        """Reconcile and let time pass, in turn."""
        for _ in range(rounds):
            await self.reconcile()
            await self.reconcile()
            self.step(seconds)

    def sync_hosts(self, nodes: Iterable[CloudNode] | None = None) -> None:
        """Let the hosts of ready cloud nodes join, silence the others, and end the pods that are told to."""
        shown = self.cloud.nodes.values() if nodes is None else nodes
        alive = set()
        for node in shown:
            for index, address in enumerate(node.addresses):
                if node.state == "READY":
                    name = f"{node.id}-w{index}"
                    alive.add(name)
                    uid = node.labels.get(UID_LABEL, self.uid)
                    labels = {QUEUED_RESOURCE_UID_LABEL: uid, SLICE_LABEL: node.id}
                    _join(self.cluster, name, labels, address, self.now)
        for raw in self.cluster.list_objects("nodes"):
            if raw["metadata"]["name"] not in alive and _is_ready(raw):
                self.cluster.put("nodes", {**raw, "status": _status("Unknown", raw, self.now)})
        for pod in self.cluster.list_objects("pods"):
            deadline = parse_time(pod["metadata"].get("deletionTimestamp"))
            if deadline is not None and deadline <= self.now:
                self.cluster.remove("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])

    def add_pod(self, node: str) -> None:
        meta = {"name": "lm-w-0-0", "namespace": "team"}
        self.cluster.put(
            "pods", {"metadata": meta, "spec": {"nodeName": node}, "status": {"phase": "Running"}}
        )

    def add_secret(self, script: str) -> None:
        """Make the Secret `join` with a startup script."""
        data = {"startup-script": base64.b64encode(script.encode()).decode()}
        self.cluster.put("secrets", {"metadata": {"name": "join", "namespace": "team"}, "data": data})

    def edit(self, **spec: Any) -> None:
        """Change fields of the spec, by their names in the API, as a user would."""
        raw = self.raw
        assert raw is not None
        meta = raw["metadata"] | {"generation": raw["metadata"]["generation"] + 1}
        self.cluster.put(_PLURAL, raw | {"metadata": meta, "spec": raw["spec"] | spec})

    def annotate(self, adopt: str | None) -> None:
        """Set the annotation that adopts a cloud resource, or remove it, as a user would."""
        raw = self.raw
        assert raw is not None
        annotations = {} if adopt is None else {ADOPT_ANNOTATION: adopt}
        self.cluster.put(_PLURAL, raw | {"metadata": raw["metadata"] | {"annotations": annotations}})

    def delete(self) -> None:
        """Ask for the object's deletion, as kubectl would."""
        raw = self.raw
        if raw is None:
            return
        if raw["metadata"].get("finalizers"):
            self.cluster.mark_deleted(_PLURAL, self._key.namespace, self._key.name, grace_s=0)
        else:
            self.cluster.remove(_PLURAL, self._key.namespace, self._key.name)

    @property
    def raw(self) -> dict[str, Any] | None:
        """The object; None: it is gone."""
        return self.cluster.objects.get((_PLURAL, self._key.namespace, self._key.name))

    @property
    def resource(self) -> QueuedResource:
        return QueuedResource.model_validate(self.raw)

    @property
    @override
    def status(self) -> QueuedResourceStatus:
        return self.resource.status

    @property
    def hosts(self) -> list[str]:
        return [raw["metadata"]["name"] for raw in self.cluster.list_objects("nodes")]

    @property
    def ours(self) -> list[str]:
        """The ids of the cloud resources that carry the object's labels."""
        found = self.cloud.resources.values()
        return [r.id for r in found if r.node.get("labels", {}).get(UID_LABEL) == self.uid]

    def _start_operator(self) -> None:
        self.cache = Cache(lambda: self.now)
        self.cluster.on_change = self._record_change
        self.metrics = Metrics()
        shared = Shared(
            cluster=self.cluster,
            cache=self.cache,
            metrics=self.metrics,
            identity="operator-1",
            acting=self._look_at_lease,
            clock=lambda: self.now,
        )
        self.controller = QueuedResourceController(shared, cloud=self._service, settings=self._settings)

    def _look_at_lease(self) -> bool:
        return self.acting()

    def _record_change(self, plural: str, raw: RawObject, deleted: bool) -> None:  # a plain callable
        if plural in _KINDS:
            self.cache.record(_KINDS[plural].resource, raw, deleted=deleted)

    def _count_writes(self) -> None:
        """Put a killing place at every write of the operator."""
        for owner, names in ((self.cluster, _WRITES), (self.cloud, _CLOUD_WRITES)):
            for name in names:
                setattr(owner, name, self._killing(getattr(owner, name)))

    def _killing(self, write: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            dies = False
            if self.kill_at is not None:
                self.kill_at -= 1
                dies = self.kill_at < 0
            if dies and self.kill_before:
                raise Killed
            answer = await write(*args, **kwargs)
            if dies:
                raise Killed
            await asyncio.sleep(0)
            return answer

        return wrapped


async def active(**options: Any) -> ResourceWorld:
    world = ResourceWorld(**options)
    await world.run(12)
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
    return world


def _join(cluster: FakeCluster, name: str, labels: dict[str, str], address: str, now: float) -> None:
    known = cluster.objects.get(("nodes", None, name))
    if known is not None:
        if not _is_ready(known):
            cluster.put("nodes", {**known, "status": _status("True", known, now)})
        return
    raw: dict[str, Any] = {"metadata": {"name": name, "labels": labels}, "spec": {}}
    raw["status"] = {"addresses": [{"type": "InternalIP", "address": address}]}
    cluster.put("nodes", {**raw, "status": _status("True", raw, now)})


def _is_ready(raw: RawObject) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in raw["status"].get("conditions", ()))


def _status(ready: str, raw: RawObject, now: float) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": render_time(now)}
    return {**raw["status"], "conditions": [condition]}
