"""Run one job in a cluster in memory, reconciled by the shipped code."""

from abc import ABC, abstractmethod
from typing import Any

from typing_extensions import override

from fake_cluster.cluster import FakeCluster
from fake_cluster.controllers import FakeControllers
from fake_cluster.kubelets import saved_message
from stepkeeper.contract import ExitCode, Report
from stepkeeper_operator.api.v1alpha1.conditions import Phase
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import TrainingJobStatus
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey, job_key
from stepkeeper_operator.cache.kinds import list_watched_kinds
from stepkeeper_operator.cache.reports import LastReport, ReportCache
from stepkeeper_operator.facts.raw import RawObject, render_time
from stepkeeper_operator.handlers.resync import forget_deleted_objects
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.labels import SPOT_LABEL
from stepkeeper_operator.metrics import Metrics
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.training_jobs.controller import JobController

_KEY = job_key("default", "lm")
_PLACE = (_KEY.namespace, _KEY.name)
_NODES = ("n1", "n2", "n3", "n4")


def training_job(**spec: Any) -> dict[str, Any]:
    """Make a manifest of job default/lm on two hosts. `spec` overrides or adds fields of the spec."""
    container = {"name": "trainer", "image": "trainer:1", "command": ["python", "train.py"]}
    base = {
        "placement": {"hosts": {"count": 2}},
        "template": {"spec": {"containers": [container]}},
        "checkpoint": {"uri": "gs://bucket/runs/lm", "interval": {"every": {"steps": 100}}},
        "totalSteps": 1000,
    }
    return {
        "apiVersion": "stepkeeper.dev/v1alpha1",
        "kind": "CheckpointedTrainingJob",
        "metadata": {"name": _KEY.name, "namespace": _KEY.namespace, "generation": 1},
        "spec": base | spec,
    }


class Reconciled(ABC):
    """What is seen of an object and of the operator that reconciles it."""

    cluster: FakeCluster

    @property
    @abstractmethod
    def status(self) -> Any: ...

    @abstractmethod
    async def reconcile(self) -> float | None: ...

    async def record_writes(self, *, rounds: int = 1) -> list[str]:
        """Reconcile that many times and return the writes. There are none in a cluster at rest."""
        self.cluster.writes.clear()
        for _ in range(rounds):
            await self.reconcile()
        return [f"{write.verb} {write.plural}" for write in self.cluster.writes]

    def condition(self, kind: str) -> tuple[str, str] | None:
        return next(((c.status.value, c.reason) for c in self.status.conditions if c.type == kind), None)

    def message(self, kind: str) -> str:
        return str(next(c.message for c in self.status.conditions if c.type == kind))

    @property
    def events(self) -> list[str]:
        raws = self.cluster.list_objects("events")
        return [
            raw["reason"] for raw in sorted(raws, key=lambda raw: int(raw["metadata"]["resourceVersion"]))
        ]


class World(Reconciled):
    """A cluster, its controllers and one operator.

    Time stands still unless it is moved; watches bring every change at once.
    """

    def __init__(self, *, now: float = 1_800_000_000.0, spot: bool = False, **spec: Any) -> None:
        self.now = now
        self._late: set[str] = set()
        self._delayed: list[tuple[str, RawObject, bool]] = []
        self.cluster = FakeCluster(lambda: self.now)
        self.controllers = FakeControllers(self.cluster, lambda: self.now, node_names=_NODES)
        self._start_operator()
        for name in _NODES:
            labels = {SPOT_LABEL: "true"} if spot else {}
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": render_time(now - 3600)}
            self.cluster.put(
                "nodes", {"metadata": {"name": name, "labels": labels}, "status": {"conditions": [ready]}}
            )
        self.cluster.put("checkpointedtrainingjobs", training_job(**spec))
        self.now += 3600

    def _start_operator(self, *, queued_resources: bool = True) -> None:
        self.settings = OperatorSettings(identity="operator-1", cloud_tpu_enabled=queued_resources)
        kinds = list_watched_kinds(cloud_tpu=queued_resources, kueue=True)
        self._kinds = {kind.resource.plural: kind for kind in kinds}
        self.cache = Cache(lambda: self.now)
        self.reports = ReportCache(report_interval_s=self.settings.report_interval_s, clock=lambda: self.now)
        self.cluster.on_change = self._record_change
        self._delayed.clear()
        self._late.clear()
        self.metrics = Metrics()
        shared = Shared(
            cluster=self.cluster,
            cache=self.cache,
            metrics=self.metrics,
            identity="operator-1",
            acting=lambda: True,
            clock=lambda: self.now,
        )
        self.controller = JobController(
            shared, reports=self.reports, settings=self.settings, ca_pem=lambda: "the CA"
        )

    def restart_operator(self, *, queued_resources: bool = True) -> None:
        """Start a new operator process, with QueuedResources switched on or off. It knows only what it lists."""
        self._start_operator(queued_resources=queued_resources)
        for plural in self._kinds:
            for raw in self.cluster.list_objects(plural):
                self._record_change(plural, raw, deleted=False)

    def delay_watches(self, *plurals: str) -> None:
        """Hold back the watches of these kinds too."""
        self._late.update(plurals)

        def late(plural: str, raw: RawObject, deleted: bool) -> None:  # a plain callable
            if plural in self._late:
                self._delayed.append((plural, raw, deleted))
            else:
                self._record_change(plural, raw, deleted)

        self.cluster.on_change = late

    def deliver_watches(self) -> None:
        """Deliver the watch events that were held back."""
        self.cluster.on_change = self._record_change
        self._late.clear()
        while self._delayed:
            self._record_change(*self._delayed.pop(0))

    def stop_operator(self) -> None:
        self.cluster.on_change = lambda _plural, _raw, _deleted: None

    @override
    async def reconcile(self) -> float | None:
        """Reconcile once. Return the seconds after which the operator reconciles again."""
        return await self.controller.reconcile(_KEY)

    async def sweep(self) -> frozenset[ObjectKey]:
        """Look for objects that disappeared unnoticed. Return the keys of the affected objects."""
        found = [
            await forget_deleted_objects(self.cluster, self.cache, kind) for kind in self._kinds.values()
        ]
        return frozenset(key for keys in found for key in keys)

    async def run_until_settled(self, *, rounds: int = 12) -> None:
        """Run operator and controllers in turn, a few seconds apart, until neither has more to do."""
        for _ in range(rounds):
            await self.reconcile()
            self.controllers.sync()
            self.now += 2
        await self.reconcile()

    def receive_report(self, report: Report, *, rank: int = 0) -> None:
        """Receive a report from the pod of that rank in the present attempt, which is not terminating."""
        jobset = self.cache.get_jobset(_KEY)
        present = [pod for pod in self.pods if "deletionTimestamp" not in pod["metadata"]]
        pods = [pod["metadata"]["uid"] for pod in present]
        last = LastReport(
            report=report,
            ordinal=(0, 0) if jobset is None else jobset.ordinal,
            received_at=self.now,
            pod_uid=pods[rank] if rank < len(pods) else "",
        )
        self.reports.add_report(self._raw_job["metadata"]["uid"], last)

    def preempt(self, index: int = 0) -> None:
        """Let the kubelet of a Spot machine end a pod. The trainer saves on all hosts and stops."""
        self.controllers.disrupt(self.pods[index], "TerminationByKubelet")
        for pod in self.pods:
            message = saved_message(sequence=7, step=120)
            self.controllers.end_pod(pod, ExitCode.SAVED, message=message)

    def lose_node(self, name: str) -> None:
        self.controllers.stuck.add(name)
        node = self.cluster.objects["nodes", None, name]
        unknown = {"type": "Ready", "status": "Unknown", "lastTransitionTime": render_time(self.now)}
        self.cluster.put("nodes", node | {"status": {"conditions": [unknown]}})

    def edit(self, **spec: Any) -> None:
        """Change the spec as a user would."""
        raw = self._raw_job
        meta = raw["metadata"] | {"generation": raw["metadata"]["generation"] + 1}
        self.cluster.put("checkpointedtrainingjobs", raw | {"metadata": meta, "spec": raw["spec"] | spec})

    def annotate(self, name: str, value: str | None) -> None:
        """Set an annotation of the job, or remove it: its generation stays."""
        meta = self._raw_job["metadata"]
        annotations = meta.get("annotations", {}) | {name: value}
        kept = {key: text for key, text in annotations.items() if text is not None}
        self.cluster.put(
            "checkpointedtrainingjobs", self._raw_job | {"metadata": meta | {"annotations": kept}}
        )

    @property
    def job(self) -> CheckpointedTrainingJob:
        return CheckpointedTrainingJob.model_validate(self._raw_job)

    @property
    def spec(self) -> dict[str, Any]:
        """The job's spec as it is stored, also if it can't be read."""
        return dict(self._raw_job["spec"])

    @property
    @override
    def status(self) -> TrainingJobStatus:
        """The status, also of a job whose spec can't be read."""
        return TrainingJobStatus.model_validate(self._raw_job.get("status", {}))

    @property
    def _raw_job(self) -> dict[str, Any]:
        return self.cluster.objects["checkpointedtrainingjobs", *_PLACE]

    def phase(self) -> Phase | None:
        """Return the present phase. A method, because type checkers take a property's value for unchanged."""
        return self.status.phase

    @property
    def causes(self) -> list[str | None]:
        """The causes of the attempts; None for one that runs."""
        return [attempt.cause for attempt in self.status.attempts]

    @property
    def latest(self) -> tuple[int, int] | None:
        """Sequence and step of the latest commit that the status shows."""
        shown = self.status.checkpoint.latest if self.status.checkpoint is not None else None
        return None if shown is None else (shown.sequence, shown.step)

    @property
    def jobset(self) -> dict[str, Any] | None:
        return self.cluster.objects.get(("jobsets", *_PLACE))

    @property
    def pods(self) -> list[dict[str, Any]]:
        return self.cluster.list_objects("pods")

    def _record_change(self, plural: str, raw: RawObject, deleted: bool) -> None:  # a plain callable
        if plural in self._kinds:
            self.cache.record(self._kinds[plural].resource, raw, deleted=deleted)
