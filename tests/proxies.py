"""An HTTP proxy for tests of clients."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Proxy:
    """An HTTP proxy that forwards requests for any host to this machine, and records them.

    Args:
        status: The status with which it rejects all requests.
    """

    def __init__(self, status: int | None = None) -> None:
        self.status = status
        self.targets: list[str] = []
        self.logins: list[str] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.partition("\r\n")[0].split(" ")
        self.targets.append(f"{method} {target}")
        for line in head.splitlines():
            if line.lower().startswith("proxy-authorization:"):
                self.logins.append(line.partition(":")[2].strip())
        if self.status is not None:
            writer.write(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % self.status)
            writer.close()
            return
        authority = target if method == "CONNECT" else target.split("/")[2]
        port = int(authority.rpartition(":")[2])
        inward, outward = await asyncio.open_connection("127.0.0.1", port)
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            path = "/" + target.split("/", 3)[3]
            rest = head.partition("\r\n")[2].replace("keep-alive", "close")
            outward.write(f"{method} {path} HTTP/1.1\r\nConnection: close\r\n{rest}".encode())
        await asyncio.gather(_pipe(reader, outward), _pipe(inward, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def running_proxy(status: int | None = None) -> AsyncGenerator[Proxy]:
    """Run a proxy; with `status` it rejects all requests."""
    found = Proxy(status)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield found
    server.close()
