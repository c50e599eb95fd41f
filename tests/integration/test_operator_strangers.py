"""Test that strangers who can reach the operator's ports can neither end it nor keep pods from reporting."""

import asyncio
import json
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from aiohttp import web

from stepkeeper.companion.endpoint import ReportTarget, post_report
from stepkeeper.contract import Report, ReportPhase
from stepkeeper_operator.endpoint.certificates import make_tls
from stepkeeper_operator.endpoint.connections import Limits
from stepkeeper_operator.endpoint.serving import Servers, load_certificate, server_tls

PROGRAMS = Path(__file__).parent / "operator_strangers"
N_STRANGERS = 10_000
MOST_MEMORY_KIB = 200 * 1024
MOST_S = 1.0
REPORT = Report(phase=ReportPhase.TRAINING, step=42).to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An operator's servers, in a process of their own."""

    pid: int
    ports: dict[str, int]
    folder: Path

    def report(self) -> None:
        """Report as a companion does."""
        url = f"https://127.0.0.1:{self.ports['https']}/v1/namespaces/default/jobs/lm/report"
        files = {"ca_file": str(self.folder / "ca.crt"), "token_file": str(self.folder / "token")}
        post_report(ReportTarget(url=url, **files), REPORT)

    def probe(self) -> None:
        """Probe as a kubelet does."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['http']}/healthz", timeout=5) as answer:
            assert answer.status == 200

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def most_memory_kib(self) -> int:
        """Return the most that the process has ever had."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with (
        (tmp_path / "log").open("w") as log,
        running("serve.py", str(tmp_path), stderr=log) as process,
    ):
        ports = tmp_path / "ports.json"
        while not ports.exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield Served(pid=process.pid, ports=json.loads(ports.read_text()), folder=tmp_path)
        assert process.poll() is None, "the server has ended"


@contextmanager
def running(program: str, *args: str, stderr: IO[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(PROGRAMS / program), *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def anybody() -> ssl.SSLContext:
    """Trust any server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def seconds_for(ask: Callable[[], None]) -> float:
    began = time.monotonic()
    ask()
    return time.monotonic() - began


def test_ten_thousand_connections_of_strangers_cost_little_memory_and_no_report(served: Served) -> None:
    served.report()
    sources = [f"127.0.0.{n}" for n in range(2, 6)]
    args = (str(served.ports["https"]), str(N_STRANGERS // len(sources)))
    taken_s: list[float] = []
    with ThreadPoolExecutor(len(sources)) as readers, ExitStack() as crowds:
        processes = [crowds.enter_context(running("strangers.py", source, *args)) for source in sources]
        lines = [readers.submit(process.stdout.readline) for process in processes if process.stdout]
        n_left = 20
        while n_left:
            n_left -= all(line.done() for line in lines)
            taken_s += [seconds_for(served.report), seconds_for(served.probe)]
            assert served.most_memory_kib() < MOST_MEMORY_KIB
            time.sleep(0.05)
        assert [line.result() for line in lines] == ["all were opened\n"] * len(sources)
    assert max(taken_s) < MOST_S
    assert served.log() == "", "no traceback of a broken report"


async def answer(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))


def make_app() -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/", answer)
    return app


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait until the server closes a connection on which it says nothing."""
    async with asyncio.timeout(30):
        try:
            return await reader.read() == b""
        except ConnectionResetError:
            return True


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("tls", "said"),
    [
        (False, b""),
        (False, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        (True, b""),
        (True, b"POST / HTTP/1.1\r\nHost: x\r\n"),
        (True, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n12345"),
    ],
    ids=["nothing", "half a handshake", "a handshake", "half of the headers", "half of a body"],
)
async def test_a_connection_that_gets_nowhere_is_closed_in_time(*, tls: bool, said: bytes) -> None:
    context = server_tls()
    load_certificate(context, make_tls(("127.0.0.1",)).serving)
    servers = Servers(Limits(patience_s=0.2))
    port = await servers.start(make_app(), host="127.0.0.1", port=0, tls=context)
    client = anybody() if tls else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
    writer.write(said)
    assert await is_closed(reader)
    writer.close()
    await servers.close()


class Client:
    """Open connections to a server of `make_app`, each from an address of its own choice."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def come_from(self, n: int, says: bytes = b"") -> asyncio.StreamReader:
        """Come from the address 127.0.0.n."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._port, local_addr=(f"127.0.0.{n}", 0)
        )
        self._writers.append(writer)
        writer.write(says)
        return reader

    def leave_all(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def full(limits: Limits) -> AsyncIterator[Client]:
    servers = Servers(limits)
    client = Client(await servers.start(make_app(), host="127.0.0.1", port=0))
    async with asyncio.timeout(60):
        yield client
    client.leave_all()
    await servers.close()


ASKS = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWERED = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.smoke
async def test_a_connection_that_sends_too_much_is_closed() -> None:
    async with full(Limits(patience_s=600, received_bytes=2000)) as client:
        assert await (await client.come_from(2, ASKS)).readline() == ANSWERED
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
        assert await is_closed(await client.come_from(2, head + b" " * 3000))


@pytest.mark.smoke
async def test_a_full_server_closes_the_oldest_connection_of_the_address_that_has_most() -> None:
    async with full(Limits(connections=4, patience_s=600, fair_s=600)) as client:
        crowd = [await client.come_from(2, ASKS) for _ in range(4)]
        for reader in crowd:
            await reader.readuntil(b"\r\n\r\n0")
        other = await client.come_from(1, ASKS)
        assert await other.readline() == ANSWERED
        assert await is_closed(crowd[0]), "though it had asked"
        assert await is_closed(await client.come_from(2)), "one more of them displaces nobody"
