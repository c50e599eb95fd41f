"""Ask the API server as its administrator, with many requests at once."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
_N_REQUESTS: Final = 24
"""Requests in flight at once: the API server is kept busy, and its queue short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """A client with the administrator's certificate, which has all rights."""

    url: str
    session: aiohttp.ClientSession
    slots: asyncio.Semaphore

    async def ask(
        self, method: str, path: str, body: Any = None, *, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """Send a request, and return its answer. Raises RuntimeError unless it succeeds."""
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type}
        async with (
            self.slots,
            self.session.request(method, self.url + path, data=data, headers=headers) as answer,
        ):
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


@asynccontextmanager
async def connect(url: str, certificates: Path) -> AsyncIterator[Api]:
    trust = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    trust.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")
    connector = aiohttp.TCPConnector(ssl=trust, limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**22) as session:
        yield Api(url=url, session=session, slots=asyncio.Semaphore(_N_REQUESTS))
