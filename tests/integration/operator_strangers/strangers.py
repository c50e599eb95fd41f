"""Hold many connections to a server open, and open each again that it closes. Usage: strangers.py FROM PORT NUMBER

They come from address FROM. A fourth of them each: say nothing; begin a TLS handshake; finish it and say nothing;
begin a report with a token that is none. Once all have been opened, the line "all were opened" is printed.
"""

import asyncio
import os
import resource
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

BEGUN = (
    b"POST /v1/namespaces/default/jobs/lm/report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n"
    b"Content-Type: application/json\r\nContent-Length: 65000\r\n\r\n" + b" " * 60_000
)
FIRST_OF_A_HANDSHAKE = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
AGAIN_AFTER_S = 0.5


def anybody() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Stranger:
    def __init__(self, number: int, tls: ssl.SSLContext | None, says: bytes) -> None:
        self.number = number
        self.tls = tls
        self.says = says

    async def hold(self, source: str, port: int, opened: Callable[[], None]) -> None:
        """Open a connection, and read until the server closes it."""
        raw = socket.socket()
        raw.setblocking(False)
        raw.bind((source, 0))
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(raw, ("127.0.0.1", port))
            opened()
            reader, writer = await asyncio.open_connection(
                sock=raw,
                ssl=self.tls,
                server_hostname="x" if self.tls else None,
                ssl_handshake_timeout=600 if self.tls else None,
            )
        except BaseException:
            raw.close()
            raise
        writer.write(self.says)
        try:
            await reader.read()
        finally:
            writer.transport.abort()


async def keep(stranger: Stranger, source: str, port: int, opened: Callable[[int], None]) -> None:
    while True:
        with suppress(OSError):  # the server has closed it
            await stranger.hold(source, port, lambda: opened(stranger.number))
        await asyncio.sleep(AGAIN_AFTER_S)


async def main(source: str, port: int, number: int) -> None:
    context = anybody()
    kinds = ((None, b""), (None, FIRST_OF_A_HANDSHAKE), (context, b""), (context, BEGUN))
    missing = set(range(number))

    def opened(n: int) -> None:
        if n in missing:
            missing.remove(n)
            if not missing:
                print("all were opened", flush=True)

    strangers = (Stranger(n, *kinds[n % len(kinds)]) for n in range(number))
    keeping: list[Awaitable[None]] = [keep(stranger, source, port, opened) for stranger in strangers]
    await asyncio.gather(*keeping)


_, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
# Strangers are on other machines: here they take no time of the server.
os.nice(19)
asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
