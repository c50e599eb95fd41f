"""Ask the API server as its administrator, and write into its etcd what would take it minutes to accept."""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

_N_REQUESTS: Final = 24
"""Requests in flight at once: the API server is kept busy, and its queue short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """A client with the administrator's certificate, which has all rights."""

    url: str
    session: aiohttp.ClientSession
    slots: asyncio.Semaphore

    async def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request, and return its answer. Raises RuntimeError unless it succeeds."""
        async with self.slots, self.session.request(method, self.url + path, json=body) as answer:
            text = await answer.text()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status}: {text[:500]}")
        found: dict[str, Any] = json.loads(text)
        return found

    async def watch(self, path: str, version: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of the objects at `path` after `version`, until cancelled."""
        while True:
            query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
            async with self.session.get(self.url + path, params=query) as answer:
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"watch {path}: {event['object']}")
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield event


@dataclass(frozen=True, slots=True, kw_only=True)
class Etcd:
    """Write objects as the API server would store them. It reads JSON too, and its watches have them at once."""

    api: Api

    async def write(self, raws: Iterable[dict[str, Any]]) -> None:
        """Write these Jobs, pods and nodes, each in a revision of its own: watches continue after a revision."""
        bodies = [{"key": _base64(_key(raw)), "value": _base64(json.dumps(raw))} for raw in raws]
        await asyncio.gather(*(self.api.ask("POST", "/v3/kv/put", body) for body in bodies))


def _key(raw: dict[str, Any]) -> str:
    folder = {"Job": "jobs", "Pod": "pods", "Node": "minions"}[raw["kind"]]
    meta = raw["metadata"]
    return "/".join(
        ["/registry", folder, *([meta["namespace"]] if "namespace" in meta else []), meta["name"]]
    )


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@asynccontextmanager
async def connect(url: str, certificates: Path) -> AsyncIterator[Api]:
    trust = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    trust.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")
    connector = aiohttp.TCPConnector(ssl=trust, limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**22) as session:
        yield Api(url=url, session=session, slots=asyncio.Semaphore(_N_REQUESTS))
