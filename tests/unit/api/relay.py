"""Runs a proxy that adds nothing: `python relay.py PORT` prints the proxy's own port, and passes
bytes to and from PORT of this machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
    writer.close()


async def main(port: int) -> None:
    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, back), _copy(there, writer), return_exceptions=True)

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def relayed(url: str) -> Iterator[str]:
    """Runs the proxy before a server; yields its URL."""
    port = url.rpartition(":")[2]
    with subprocess.Popen([sys.executable, __file__, port], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
