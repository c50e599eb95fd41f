"""A long line in front of a server: each connection has so many bytes a second, and each answer comes later."""

import asyncio
import sys
import time
from typing import Final, final

__all__ = ["serve"]

_PIECE_BYTES: Final = 64 * 1024


@final
class _Pace:
    """So many bytes a second from the first byte of a message on.

    Time in which this process didn't run is made good within the message; time in which nothing was sent isn't.
    """

    def __init__(self, rate_bytes_s: float) -> None:
        self._rate_bytes_s = rate_bytes_s
        self._free_at_s: float | None = None

    @property
    def begins(self) -> bool:
        """The next bytes are the first of a message."""
        return self._free_at_s is None

    def end(self) -> None:
        """End the message: the next bytes are another one's."""
        self._free_at_s = None

    async def carry(self, size_bytes: int) -> None:
        self._free_at_s = (self._free_at_s or time.monotonic()) + size_bytes / self._rate_bytes_s
        await asyncio.sleep(max(0.0, self._free_at_s - time.monotonic()))


async def serve(target_port: int, rate_bytes_s: float, delay_s: float) -> None:
    """Print the port that it listens on, and run until it is killed."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = _Pace(rate_bytes_s), _Pace(rate_bytes_s)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target_port)
            await asyncio.gather(
                _carry(reader, far_writer, there, back, 0.0), _carry(far_reader, writer, back, there, delay_s)
            )
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=4 * _PIECE_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: _Pace, other: _Pace, delay_s: float
) -> None:
    while data := await reader.read(_PIECE_BYTES):
        other.end()
        if pace.begins:
            await asyncio.sleep(delay_s)
        await pace.carry(len(data))
        writer.write(data)
        await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
