"""Serve the endpoint of one running job as the operator does. Usage: serve.py FOLDER

FOLDER gets the CA (`ca.crt`), the token of a pod of the job (`token`), and then the two ports (`ports.json`).
"""

import asyncio
import base64
import json
import sys
from pathlib import Path

from typing_extensions import override

import stepkeeper_operator.startup  # noqa: F401  # all that an operator has in memory
from fake_cluster.cluster import FakeCluster
from fake_cluster.world import World
from stepkeeper.contract import token_audience
from stepkeeper_operator.cluster import TOKEN_REVIEWS, Resource
from stepkeeper_operator.endpoint import KubernetesTokens, ReportAuthenticator, ReportEndpoint
from stepkeeper_operator.endpoint.certificates import make_tls
from stepkeeper_operator.endpoint.health import make_health_app
from stepkeeper_operator.endpoint.serving import Servers, load_certificate, server_tls
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.metrics import Metrics

HOST = "127.0.0.1"


class Reviewer(FakeCluster):
    """Review every token as one of this pod."""

    def __init__(self, pod: RawObject) -> None:
        super().__init__(lambda: 0.0)
        self._meta = pod["metadata"]

    @override
    async def create(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        assert resource is TOKEN_REVIEWS
        extra = {
            "authentication.kubernetes.io/pod-name": [self._meta["name"]],
            "authentication.kubernetes.io/pod-uid": [self._meta["uid"]],
        }
        user = {"username": f"system:serviceaccount:{self._meta['namespace']}:default", "extra": extra}
        return {"status": {"authenticated": True, "audiences": body["spec"]["audiences"], "user": user}}


async def main(folder: Path) -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    metrics = Metrics()
    endpoint = ReportEndpoint(
        authenticator=ReportAuthenticator(
            world.cache, world.cluster, KubernetesTokens(Reviewer(world.pods[0]))
        ),
        reports=world.reports,
        enqueue=lambda _: None,
        acting=lambda: True,
        directives=world.directives,
        metrics=metrics,
    )
    health = make_health_app(
        cache=world.cache, metrics=metrics, acting=lambda: False, queue_lengths=dict, waits_for=lambda: ""
    )
    tls = make_tls((HOST,))
    context = server_tls()
    load_certificate(context, tls.serving)
    servers = Servers()
    ports = {
        "https": await servers.start(endpoint.make_app(), host=HOST, port=0, tls=context),
        "http": await servers.start(health, host=HOST, port=0),
    }
    claims = json.dumps({"aud": [token_audience(world.job.metadata.uid)]}).encode()
    token = f"e30.{base64.urlsafe_b64encode(claims).rstrip(b'=').decode()}.c2ln"
    (folder / "ca.crt").write_bytes(tls.ca.certificate_pem)
    (folder / "token").write_text(token)
    (folder / "ports.part").write_text(json.dumps(ports))
    (folder / "ports.part").rename(folder / "ports.json")
    await asyncio.Event().wait()


asyncio.run(main(Path(sys.argv[1])))
