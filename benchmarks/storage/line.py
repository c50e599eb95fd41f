"""A long line in front of a server: each connection has so many bytes a second, and each answer comes later."""

import asyncio
import sys
import time
from typing import Final

__all__ = ["serve"]

_PIECE_BYTES: Final = 64 * 1024


async def serve(target_port: int, rate_bytes_s: float, delay_s: float) -> None:
    """Prints the port where it listens, and goes on until it is killed. No rate means none to keep."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target_port)
            await asyncio.gather(_carry(reader, far_writer, 0.0), _carry(far_reader, writer, delay_s))
        except ConnectionError:
            writer.close()

    async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        free_at_s = 0.0
        while data := await reader.read(_PIECE_BYTES):
            now_s = time.monotonic()
            if delay_s and now_s > free_at_s + delay_s:
                await asyncio.sleep(delay_s)
            if rate_bytes_s:
                free_at_s = max(free_at_s, time.monotonic()) + len(data) / rate_bytes_s
                await asyncio.sleep(max(0.0, free_at_s - time.monotonic()))
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=4 * _PIECE_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
