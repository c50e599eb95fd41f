"""Ways to send bulk data to a bucket, and to read it: each with its seconds for so many bytes."""

import asyncio
import base64
import http.client
import io
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import urllib3
from google.cloud.storage import transfer_manager

from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.gcs import GcsStore

__all__ = ["READS", "UPLOADS", "Bulk", "bare_streams"]

MIB: Final = 1024 * 1024
_PIECE_BYTES: Final = 256 * 1024


class Bulk:
    """Some bytes to send, as one object for each stream, and the bucket where they go."""

    def __init__(self, store: GcsStore, size_bytes: int, streams: int) -> None:
        self.store = store
        self.streams = streams
        self.data = memoryview(secrets.token_bytes(MIB) * (size_bytes // MIB))
        share = len(self.data) // streams
        self.shares = [self.data[n * share : (n + 1) * share] for n in range(streams)]

    def blob(self, name: str) -> Any:
        return self.store._bucket.blob(f"{self.store._prefix}{name}")  # noqa: SLF001  # ways that it doesn't use

    def name(self) -> str:
        return f"bulk/{secrets.token_hex(8)}"

    def at_once(self, send: Callable[[memoryview], object]) -> None:
        with ThreadPoolExecutor(self.streams) as pool:
            list(pool.map(send, self.shares))

    def request(self, share: memoryview) -> tuple[str, dict[str, str], list[memoryview]]:
        """URL, headers and body of an upload in one request, checked by the server."""
        crc = base64.b64encode(crc32c(share).to_bytes(4, "big")).decode()
        resource = json.dumps({"name": self.blob(self.name()).name, "crc32c": crc})
        head = f"--part\r\nContent-Type: application/json\r\n\r\n{resource}\r\n--part\r\n"
        body = [memoryview((head + "Content-Type: application/octet-stream\r\n\r\n").encode())]
        body += [share[first : first + _PIECE_BYTES] for first in range(0, share.nbytes, _PIECE_BYTES)]
        body.append(memoryview(b"\r\n--part--\r\n"))
        headers = {"Content-Type": "multipart/related; boundary=part"}
        headers["Content-Length"] = str(sum(piece.nbytes for piece in body))
        endpoint = f"{self.store._client.api_endpoint}/upload/storage/v1{self.blob('x').bucket.path}/o"  # noqa: SLF001  # as above
        return f"{endpoint}?uploadType=multipart&ifGenerationMatch=0", headers, body


def _by_the_store(bulk: Bulk) -> None:
    bulk.at_once(lambda share: bulk.store.write(bulk.name(), [share]))


def _one_object(bulk: Bulk) -> None:
    bulk.store.write(bulk.name(), [bulk.data])


def _by_the_library(bulk: Bulk) -> None:
    def send(share: memoryview) -> None:
        blob = bulk.blob(bulk.name())
        blob.crc32c = base64.b64encode(crc32c(share).to_bytes(4, "big")).decode()
        blob.upload_from_file(io.BytesIO(share), size=share.nbytes, checksum=None, if_generation_match=0)

    bulk.at_once(send)


def _by_the_transfer_manager(bulk: Bulk) -> None:
    pairs = [(io.BytesIO(share), bulk.blob(bulk.name())) for share in bulk.shares]
    transfer_manager.upload_many(
        pairs,
        skip_if_exists=True,
        worker_type=transfer_manager.THREAD,
        max_workers=bulk.streams,
        raise_exception=True,
        upload_kwargs={"checksum": "crc32c"},
    )


def _by_urllib3(bulk: Bulk) -> None:
    with urllib3.PoolManager(maxsize=bulk.streams) as pool:

        def send(share: memoryview) -> None:
            url, headers, body = bulk.request(share)
            pieces: Iterator[Any] = iter(body)
            answer = pool.request("POST", url, body=pieces, headers=headers, retries=False)
            assert answer.status == 200, answer.data

        bulk.at_once(send)


def _by_http_client(bulk: Bulk) -> None:
    def send(share: memoryview) -> None:
        url, headers, body = bulk.request(share)
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.netloc)
        connection.request("POST", f"{parts.path}?{parts.query}", iter(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        connection.close()

    bulk.at_once(send)


def _by_aiohttp(bulk: Bulk) -> None:
    async def pieces(body: list[memoryview]) -> AsyncIterator[memoryview]:
        for piece in body:
            yield piece

    async def send(session: aiohttp.ClientSession, share: memoryview) -> None:
        url, headers, body = bulk.request(share)
        async with session.post(url, data=pieces(body), headers=headers) as answer:
            assert answer.status == 200, await answer.text()

    async def send_all() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=bulk.streams)) as session:
            await asyncio.gather(*(send(session, share) for share in bulk.shares))

    asyncio.run(send_all())


def _composed(bulk: Bulk) -> None:
    """Parts as objects, sent side by side, then put together by the server."""
    names = [bulk.name() for _ in bulk.shares]
    pairs = zip(names, bulk.shares, strict=True)
    with ThreadPoolExecutor(bulk.streams) as pool:
        list(pool.map(lambda pair: bulk.store.write(pair[0], [pair[1]]), pairs))
        bulk.blob(bulk.name()).compose([bulk.blob(name) for name in names])
        list(pool.map(bulk.store.delete, names))


def bare_streams(bulk: Bulk) -> None:
    """Send the same bytes in as many plain requests at once, to measure what line and server can carry."""

    def send(share: memoryview) -> None:
        parts = urlsplit(bulk.request(share[:0])[0])
        connection = http.client.HTTPConnection(parts.netloc)
        connection.request("POST", f"{parts.path}?uploadType=media&name={bulk.blob(bulk.name()).name}", share)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        connection.close()

    bulk.at_once(send)


UPLOADS: Final[Mapping[str, Callable[[Bulk], None]]] = {
    "GcsStore.write, objects side by side": _by_the_store,
    "GcsStore.write, one object": _one_object,
    "google-cloud-storage, objects side by side": _by_the_library,
    "its transfer_manager, objects side by side": _by_the_transfer_manager,
    "urllib3, objects side by side": _by_urllib3,
    "http.client, objects side by side": _by_http_client,
    "aiohttp, objects side by side": _by_aiohttp,
    "parts side by side, composed": _composed,
}


def _whole(bulk: Bulk, name: str) -> int:
    return len(bulk.store.read(name))


def _ranges(bulk: Bulk, name: str) -> int:
    share = len(bulk.data) // bulk.streams
    with ThreadPoolExecutor(bulk.streams) as pool:
        return sum(map(len, pool.map(lambda n: bulk.store.read(name, n * share, share), range(bulk.streams))))


READS: Final[Mapping[str, Callable[[Bulk, str], int]]] = {
    "one read": _whole,
    "ranges side by side": _ranges,
}
