"""Play the user, the controllers of JobSets and Jobs, and the kubelets: make jobs, and let all their pods run."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.operator import objects
from benchmarks.operator.api import MERGE, STRATEGIC, Api
from benchmarks.operator.objects import N_HOSTS, NAMESPACE, Raw

from stepkeeper.contract import token_audience
from stepkeeper_operator.cluster.resources import BATCH_JOBS, JOBSETS, NODES, PODS, TRAINING_JOBS

_TOKEN_LIFE_S: Final = 6 * 3600
_HEARTBEAT_S: Final = 300.0
"""Seconds between two status reports of a kubelet where nothing has changed."""


@dataclass(slots=True, kw_only=True)
class World:
    """All jobs with their pods and nodes."""

    api: Api
    reporters: list[Raw] = field(default_factory=list)
    """Name, uid and token of the first pod of each running job."""

    nodes: list[str] = field(default_factory=list)

    async def prepare(self) -> None:
        """Make the namespace and its service account, which a controller would make."""
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        await self.api.ask("POST", "/api/v1/namespaces", namespace)
        await self.api.ask("POST", "/api/v1/namespaces", {**namespace, "metadata": {"name": "stepkeeper"}})
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        await self.api.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", account)

    async def grow(self, n_jobs: int) -> None:
        """Make jobs until there are `n_jobs`, and run the pods of each once the operator has made its JobSet."""
        version = (await self.api.ask("GET", f"{JOBSETS.path()}?limit=1"))["metadata"]["resourceVersion"]
        new = [f"job-{number:05}" for number in range(len(self.reporters), n_jobs)]
        async with asyncio.TaskGroup() as group:
            for name in new:
                group.create_task(self._make(TRAINING_JOBS, objects.training_job(name)))
            waited = set(new)
            async for event in self.api.watch(JOBSETS.path(), version):
                name = event["object"]["metadata"]["name"]
                if name in waited:
                    waited.discard(name)
                    group.create_task(self._run(event["object"]))
                if not waited:
                    break

    async def keep_beating(self) -> None:
        """Report the status of each node once per five minutes, evenly, until cancelled."""
        loop = asyncio.get_running_loop()
        due, number = loop.time(), 0
        while True:
            due += _HEARTBEAT_S / len(self.nodes)
            await asyncio.sleep(due - loop.time())
            path = NODES.path(None, self.nodes[number % len(self.nodes)], "status")
            body = {"status": {"conditions": objects.node_conditions()}}
            await self.api.ask("PATCH", path, body, content_type=STRATEGIC)
            number += 1

    async def _make(self, resource: Any, body: Raw) -> Raw:
        namespace = None if resource.cluster_wide else NAMESPACE
        return await self.api.ask("POST", resource.path(namespace), body)

    async def _run(self, jobset: Raw) -> None:
        job = await self._make(BATCH_JOBS, objects.batch_job(jobset))
        async with asyncio.TaskGroup() as group:
            pods = [group.create_task(self._run_pod(job, index)) for index in range(N_HOSTS)]
        active = {"status": {"active": N_HOSTS, "ready": N_HOSTS}}
        path = BATCH_JOBS.path(NAMESPACE, job["metadata"]["name"], "status")
        await self.api.ask("PATCH", path, active, content_type=MERGE)
        name, uid = jobset["metadata"]["name"], jobset["metadata"]["ownerReferences"][0]["uid"]
        token = await self._make_token(pods[0].result(), token_audience(uid))
        self.reporters.append({"name": name, "uid": uid, "token": token})

    async def _run_pod(self, job: Raw, index: int) -> Raw:
        node = objects.node_name(job, index)
        await self._make(NODES, objects.node(node))
        self.nodes.append(node)
        pod = await self._make(PODS, objects.pod(job, index))
        path = PODS.path(NAMESPACE, pod["metadata"]["name"], "status")
        status = {"status": objects.running_status(pod["spec"]["containers"][0]["image"])}
        return await self.api.ask("PATCH", path, status, content_type=STRATEGIC)

    async def _make_token(self, pod: Raw, audience: str) -> str:
        meta = pod["metadata"]
        bound = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": _TOKEN_LIFE_S, "boundObjectRef": bound},
        }
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default/token"
        answer = await self.api.ask("POST", path, body)
        return str(answer["status"]["token"])


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
