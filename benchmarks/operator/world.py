"""Play the user, the controllers of JobSets and Jobs, and the kubelets: make jobs, and let all their pods run."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from benchmarks.operator import objects
from benchmarks.operator.api import Api, Etcd
from benchmarks.operator.objects import N_HOSTS, NAMESPACE, Raw

from stepkeeper.contract import token_audience
from stepkeeper_operator.cluster.resources import JOBSETS, TRAINING_JOBS

_TOKEN_LIFE_S: Final = 6 * 3600
_HEARTBEAT_S: Final = 300.0
"""Seconds between two status reports of a kubelet where nothing has changed."""

_BEAT_S: Final = 0.25
"""Seconds between two writes of the status of nodes that are due."""


@dataclass(slots=True, kw_only=True)
class World:
    """All jobs with their pods and nodes."""

    api: Api
    etcd: Etcd
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
                path = TRAINING_JOBS.path(NAMESPACE)
                group.create_task(self.api.ask("POST", path, objects.training_job(name)))
            waited = set(new)
            async for event in self.api.watch(JOBSETS.path(), version):
                name = event["object"]["metadata"]["name"]
                if name in waited:
                    waited.discard(name)
                    group.create_task(self._run(event["object"]))
                if not waited:
                    break

    async def count_running(self) -> int:
        """Count the jobs that are shown as running."""
        jobs = (await self.api.ask("GET", TRAINING_JOBS.path()))["items"]
        return sum((job.get("status") or {}).get("phase") == "Running" for job in jobs)

    async def keep_beating(self) -> None:
        """Report the status of each node once per five minutes, evenly, until cancelled."""
        loop = asyncio.get_running_loop()
        begun, n_done = loop.time(), 0
        while True:
            await asyncio.sleep(_BEAT_S)
            n_due = int((loop.time() - begun) * len(self.nodes) / _HEARTBEAT_S)
            names = [self.nodes[number % len(self.nodes)] for number in range(n_done, n_due)]
            await self.etcd.write([objects.node(name) for name in names])
            n_done = n_due

    async def _run(self, jobset: Raw) -> None:
        job = objects.batch_job(jobset)
        nodes = [objects.node(objects.node_name(job, index)) for index in range(N_HOSTS)]
        pods = [objects.pod(job, index) for index in range(N_HOSTS)]
        await self.etcd.write([job, *nodes, *pods])
        self.nodes += [node["metadata"]["name"] for node in nodes]
        name, uid = jobset["metadata"]["name"], jobset["metadata"]["ownerReferences"][0]["uid"]
        token = await self._make_token(pods[0], token_audience(uid))
        self.reporters.append({"name": name, "uid": uid, "token": token})

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
