"""Build the parts of the operator and run them until the first one ends."""

import asyncio
import logging
import signal
from collections.abc import Collection, Coroutine, Mapping

from aiohttp import web

from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.kinds import list_watched_kinds
from stepkeeper_operator.cache.reports import ReportCache
from stepkeeper_operator.cloud_tpu.cloud import CloudTPU
from stepkeeper_operator.cloud_tpu.connection import connect_cloud
from stepkeeper_operator.cluster.client import connect
from stepkeeper_operator.cluster.protocol import Cluster, guard_writes
from stepkeeper_operator.cluster.resources import QUEUED_RESOURCES, TRAINING_JOBS
from stepkeeper_operator.endpoint.app import ReportEndpoint
from stepkeeper_operator.endpoint.authentication import ReportAuthenticator
from stepkeeper_operator.endpoint.health import make_health_app
from stepkeeper_operator.endpoint.serving import Servers
from stepkeeper_operator.endpoint.tls import ServingCertificate
from stepkeeper_operator.endpoint.tokens import KubernetesTokens
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.handlers.resync import Resync, wait_until_listed
from stepkeeper_operator.handlers.watch import make_kopf_settings, make_registry, run_watches
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.kinds.work_queue import KindQueues, Reconcile
from stepkeeper_operator.lease import LeaseGuard
from stepkeeper_operator.metrics import Metrics
from stepkeeper_operator.queued_resources.controller import QueuedResourceController
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.readiness import Readiness, find_readable, is_kueue_installed
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.training_jobs.controller import JobController

__all__ = ["Operator", "run_operator"]

_log = logging.getLogger(__name__)


async def run_operator(settings: OperatorSettings) -> None:
    """Run the operator until SIGTERM or SIGINT. Raises LeaseLostError if another operator took over."""
    cluster = await connect(settings.kubeconfig, settings.watch_namespaces)
    try:
        await Operator(settings, cluster).run()
    finally:
        await cluster.close()


class Operator:
    """Own and run all parts of one operator process."""

    def __init__(self, settings: OperatorSettings, cluster: Cluster) -> None:
        self._settings = settings
        self._api = cluster
        self._cluster = guard_writes(cluster, acting=lambda: self._lease.held)
        self._metrics = Metrics()
        self._cache = Cache()
        self._kinds = list_watched_kinds(cloud_tpu=settings.cloud_tpu_enabled)
        self._kueue_found = False
        self._watched = settings.watch_namespaces
        self._cloud_settings = CloudSettings.from_settings(settings)
        n_workers = {
            TRAINING_JOBS.kind: settings.workers,
            QUEUED_RESOURCES.kind: self._cloud_settings.n_workers,
        }
        names = [kind.resource.kind for kind in self._kinds if kind.reconciled]
        self._queues = KindQueues({name: n_workers[name] for name in names})
        self._reports = ReportCache(
            report_interval_s=settings.report_interval_s,
            silence_s=settings.silence_s,
            progress_interval_s=settings.progress_interval_s,
        )
        self._synced = asyncio.Event()
        """Set once every kind is in the cache."""
        self._relisted = asyncio.Event()
        """Set by the watches whenever a kind is listed again: they may have missed deletions."""
        self._stop = asyncio.Event()
        self._servers = Servers()
        self._certificate = ServingCertificate(
            self._cluster,
            namespace=settings.namespace,
            secret_name=settings.tls_secret_name,
            names=settings.certificate_names(),
        )
        self._lease = LeaseGuard(
            cluster,
            namespace=settings.namespace,
            name=settings.lease_name,
            identity=settings.identity,
            duration_s=settings.lease_duration_s,
            watched=settings.watch_namespaces,
        )
        self._readiness = Readiness(
            cluster=self._cluster, kinds=self._kinds, lease=self._lease, certificate=self._certificate
        )

    async def run(self) -> None:
        """Wait for the Lease, then watch, reconcile and serve."""
        self._handle_signals()
        await self._serve_health()
        try:
            if not await self._run_unless_stopped(self._get_ready()):
                return
            await self._serve_endpoint()
            async with connect_cloud(self._settings) as cloud:
                await self._run_parts(self._make_controllers(cloud))
        finally:
            await self._servers.close()
            await self._readiness.give_up()

    async def _get_ready(self) -> None:
        await self._readiness.get_ready()
        await self._look_around()

    async def _look_around(self) -> bool:
        """Find what can be watched: namespaces, Kueue's Workloads. Return True if some is new since the last call."""
        before, wanted = self._watched, self._settings.watch_namespaces
        try:
            self._watched = await find_readable(self._cluster, wanted) or wanted
        except ApiError as error:
            _log.warning("cannot look for namespaces", extra={"error": str(error)})
        return await self._look_for_kueue() or not set(self._watched) <= set(before)

    async def _look_for_kueue(self) -> bool:
        """Watch Workloads if the API server knows them. Return True if they are new since the last call."""
        if self._kueue_found or not self._settings.kueue_enabled:
            return False
        self._kueue_found = await is_kueue_installed(self._cluster)
        if self._kueue_found:
            self._kinds = list_watched_kinds(cloud_tpu=self._settings.cloud_tpu_enabled, kueue=True)
        return self._kueue_found

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    async def _run_parts(self, work: Mapping[str, Reconcile]) -> None:
        end_watches = asyncio.Event()
        registry = make_registry(self._cache, self._kinds, self._queues.add, relisted=self._relisted)
        settings = make_kopf_settings(self._kinds)
        # kopf installs its own signal handlers when it starts: replace them then.
        watching = run_watches(
            registry,
            settings,
            namespaces=self._watched,
            stop=end_watches,
            started=self._handle_signals,
        )
        watches = asyncio.create_task(watching)
        parts = (
            self._stop.wait(),
            self._readiness.wait_until_lost(),
            self._reconcile_objects(work),
            self._resync_objects(work.keys()),
            self._certificate.keep_renewing(),
        )
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait([watches, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises its error
        finally:
            # Stop the watches last: kopf waits for every task that is younger than they are.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._servers.close()
            end_watches.set()
            await asyncio.gather(watches, return_exceptions=True)

    def _make_controllers(self, cloud: CloudTPU | None) -> dict[str, Reconcile]:
        """Make the controllers, and return their work by kind. Add the controller of a new kind here."""
        shared = Shared(
            cluster=self._cluster,
            cache=self._cache,
            metrics=self._metrics,
            identity=self._settings.identity,
            acting=lambda: self._lease.held,
        )
        settings, ca_pem = self._settings, lambda: self._certificate.ca_pem
        jobs = JobController(shared, reports=self._reports, settings=settings, ca_pem=ca_pem)
        work: dict[str, Reconcile] = {TRAINING_JOBS.kind: jobs.reconcile}
        if cloud is not None:
            resources = QueuedResourceController(shared, cloud=cloud, settings=self._cloud_settings)
            work[QUEUED_RESOURCES.kind] = resources.reconcile
        return work

    async def _reconcile_objects(self, work: Mapping[str, Reconcile]) -> None:
        await wait_until_listed(self._cluster, self._cache, self._kinds, self._watched)
        self._synced.set()
        counts = {kind: len(self._cache.list_keys(kind)) for kind in work}
        _log.info("all kinds are listed", extra=counts)
        await self._queues.run(work)

    async def _resync_objects(self, kinds: Collection[str]) -> None:
        """Reconcile every object periodically. Run until cancelled, or until there is one more kind to watch."""
        await self._make_resync().run(kinds, until=self._look_around)
        # kopf can't add a watch while it runs: the next start has it.
        _log.info(
            "there is more to watch, a namespace or Kueue's Workloads: stopping, so that the next start does"
        )
        self._stop.set()

    def _make_resync(self) -> Resync:
        return Resync(
            cluster=self._cluster,
            cache=self._cache,
            kinds=self._kinds,
            enqueue=self._queues.add,
            relisted=self._relisted,
            period_s=self._settings.resync_s,
        )

    async def _serve_health(self) -> None:
        host, port = self._settings.endpoint_host, self._settings.health_port
        await self._servers.start(self._make_health_app(), host=host, port=port)

    def _make_health_app(self) -> web.Application:
        return make_health_app(
            cache=self._cache,
            metrics=self._metrics,
            # An operator that waits for its certificate, or for another installation to go, holds its Lease too.
            acting=lambda: self._lease.held and not self._readiness.waits_for,
            queue_lengths=self._queues.count_due,
            waits_for=lambda: self._readiness.waits_for,
        )

    async def _serve_endpoint(self) -> None:
        authenticator = ReportAuthenticator(self._cache, KubernetesTokens(self._api))
        endpoint = ReportEndpoint(
            authenticator=authenticator,
            reports=self._reports,
            enqueue=self._queues.add,
            acting=lambda: self._lease.held and self._synced.is_set(),
            metrics=self._metrics,
        )
        host, port = self._settings.endpoint_host, self._settings.endpoint_port
        tls = self._certificate.context
        port = await self._servers.start(endpoint.make_app(), host=host, port=port, tls=tls)
        _log.info("serving reports", extra={"port": port})

    async def _run_unless_stopped(self, work: Coroutine[None, None, None]) -> bool:
        """Run `work`. Return False if the operator was stopped before it ended."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()  # raises its error
            return True
        task.cancel()
        return False
