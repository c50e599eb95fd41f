"""Put the parts of the operator together and run them until the first of them ends."""

import asyncio
import logging
import random
import signal
from collections.abc import Coroutine

from stepkeeper_operator.cache.cache import Cache, JobKey
from stepkeeper_operator.cache.reports import ReportCache
from stepkeeper_operator.cache.sweep import forget_deleted_objects
from stepkeeper_operator.cluster import JOBSETS, TRAINING_JOBS, Cluster, connect
from stepkeeper_operator.endpoint import KubernetesTokens, ReportAuthenticator, ReportEndpoint
from stepkeeper_operator.endpoint.health import make_health_app
from stepkeeper_operator.endpoint.serving import Servers
from stepkeeper_operator.endpoint.tls import ServingCertificate
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.handlers.watch import make_kopf_settings, make_registry, run_watches
from stepkeeper_operator.labels import JOB_UID_LABEL
from stepkeeper_operator.lease import LeaseGuard
from stepkeeper_operator.metrics import Metrics
from stepkeeper_operator.reconcile import Reconciler, make_reconciler
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.work_queue import WorkQueue

__all__ = ["Operator", "run_operator"]

_log = logging.getLogger(__name__)

_KIND_CHECK_S = 5.0
_RELIST_BURST_S = 2.0
"""Listed objects arrive one by one, and one kind after the other."""


async def run_operator(settings: OperatorSettings) -> None:
    """Run the operator until SIGTERM or SIGINT. Raises LeaseLostError if another operator took over."""
    cluster = await connect(settings.kubeconfig)
    try:
        await Operator(settings, cluster).run()
    finally:
        await cluster.close()


class Operator:
    """Own and run all parts of one operator process."""

    def __init__(self, settings: OperatorSettings, cluster: Cluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._metrics = Metrics()
        self._queue: WorkQueue[JobKey] = WorkQueue()
        self._cache = Cache()
        self._reports = ReportCache()
        self._synced = asyncio.Event()
        self._relisted = asyncio.Event()
        self._stop = asyncio.Event()
        self._servers = Servers()
        self._certificate = ServingCertificate(
            cluster,
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
        )

    async def run(self) -> None:
        """Wait for the Lease, then watch, reconcile and serve."""
        self._handle_signals()
        await self._serve_health()
        try:
            if not await self._run_unless_stopped(self._get_ready()):
                return
            await self._serve_endpoint()
            await self._run_parts()
        finally:
            await self._servers.close()
            await self._lease.release()

    async def _get_ready(self) -> None:
        await self._lease.acquire()
        await self._wait_for_crds()
        await self._certificate.renew()

    async def _wait_for_crds(self) -> None:
        """Wait until the API server knows the kinds: kopf doesn't watch a kind that is installed later."""
        for resource in (TRAINING_JOBS, JOBSETS):
            while True:
                try:
                    await self._cluster.list_uids(resource, JOB_UID_LABEL)
                    break
                except ApiError as error:
                    extra = {"kind": resource.kind, "error": str(error)}
                    _log.warning("cannot list kind; is its CRD installed?", extra=extra)
                    await asyncio.sleep(_KIND_CHECK_S)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    async def _run_parts(self) -> None:
        end_watches = asyncio.Event()
        registry = make_registry(self._cache, self._enqueue, synced=self._synced, relisted=self._relisted)
        watches = asyncio.create_task(
            run_watches(registry, make_kopf_settings(), stop=end_watches, started=self._handle_signals)
        )
        parts = (
            self._stop.wait(),
            self._lease.keep_renewing(),
            self._reconcile_jobs(self._make_reconciler()),
            self._resync_jobs(),
            self._certificate.keep_renewing(),
        )
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait([watches, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            # Stop the watches last: kopf waits for every task that is younger than they are.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._servers.close()
            end_watches.set()
            await asyncio.gather(watches, return_exceptions=True)

    def _make_reconciler(self) -> Reconciler:
        return make_reconciler(
            cluster=self._cluster,
            cache=self._cache,
            reports=self._reports,
            settings=self._settings,
            metrics=self._metrics,
            ca_pem=lambda: self._certificate.ca_pem,
            acting=lambda: self._lease.held,
        )

    async def _reconcile_jobs(self, reconciler: Reconciler) -> None:
        await self._synced.wait()
        _log.info("all kinds are listed", extra={"jobs": len(list(self._cache.list_training_job_keys()))})
        await self._queue.run(self._settings.workers, reconciler.reconcile)

    async def _resync_jobs(self) -> None:
        """Forget objects that are gone unnoticed, then queue every job, spread over the period. Run until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._settings.resync_s):
                    await self._sweep_after_relists()
            except TimeoutError:
                _log.debug("resync")
            await self._sweep()
            for key in self._cache.list_training_job_keys():
                self._queue.add_after(key, random.uniform(0, self._settings.resync_s / 2))  # noqa: S311  # no secret

    async def _sweep_after_relists(self) -> None:
        while True:
            await self._relisted.wait()
            await asyncio.sleep(_RELIST_BURST_S)
            self._relisted.clear()
            if not await self._sweep():
                self._relisted.set()

    async def _sweep(self) -> bool:
        try:
            concerned = await forget_deleted_objects(self._cluster, self._cache)
        except ApiError as error:
            _log.warning("cannot look for objects that are gone", extra={"error": str(error)})
            return False
        for key in concerned:
            self._queue.add(key)
        return True

    def _enqueue(self, key: JobKey, delay_s: float) -> None:
        if delay_s > 0:
            self._queue.add_after(key, delay_s)
        else:
            self._queue.add(key)

    async def _serve_health(self) -> None:
        app = make_health_app(
            cache=self._cache,
            metrics=self._metrics,
            acting=lambda: self._lease.held,
            queue_length=lambda: len(self._queue),
        )
        await self._servers.start(app, host=self._settings.endpoint_host, port=self._settings.health_port)

    async def _serve_endpoint(self) -> None:
        authenticator = ReportAuthenticator(self._cache, self._cluster, KubernetesTokens(self._cluster))
        endpoint = ReportEndpoint(
            authenticator=authenticator,
            reports=self._reports,
            enqueue=self._queue.add,
            acting=lambda: self._lease.held and self._synced.is_set(),
            report_interval_s=self._settings.report_interval_s,
            metrics=self._metrics,
        )
        host, port = self._settings.endpoint_host, self._settings.endpoint_port
        port = await self._servers.start(
            endpoint.make_app(), host=host, port=port, tls=self._certificate.context
        )
        _log.info("serving reports", extra={"port": port})

    async def _run_unless_stopped(self, waiting: Coroutine[None, None, None]) -> bool:
        """Run `waiting`. Return False if the operator was stopped before it ended."""
        work, stop = asyncio.create_task(waiting), asyncio.create_task(self._stop.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            work.result()
            return True
        work.cancel()
        return False
